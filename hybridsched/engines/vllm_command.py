"""The command line and environment that start vLLM, or the simulated one, as a plan says."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hybridsched.core.engine_values import EnginePlan
from hybridsched.core.gpus import GIB, MIB
from hybridsched.core.values import Value
from hybridsched.engines.devices import Choice

SIMULATED = "simulated"
"""In place of a program: the simulated engine of this package."""
LOOPBACK = "127.0.0.1"
_LOOPBACKS = (LOOPBACK, "localhost", "::1")
_OURS = ("--port", "--served-model-name")
"""Options of the command itself: it asks the engine by them."""
SHM = Path("/dev/shm")  # noqa: S108 - it is looked at, nothing is written there
_SHM_BYTES = 256 * MIB
"""For each process of an engine: vLLM's message queues and NCCL's own memory."""


class CommandError(ValueError):
    """The engine must not or cannot be started so; the message says why."""


class EngineCommand(Value, frozen=True, kw_only=True):
    """What to execute."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    """To be set beside what is there."""
    yours: tuple[str, ...] = ()
    """Flags of the plan that the operator's own have replaced."""
    host: str = LOOPBACK
    """Where it listens."""


def engine_command(
    plan: EnginePlan,
    *,
    model: Path,
    served_name: str,
    port: int,
    program: str = "vllm",
    choice: Choice | None = None,
    drain_s: int = 30,
    extra: Sequence[str] = (),
) -> EngineCommand:
    """The command for `plan`.

    The engine listens on the loopback: its control endpoints (VLLM_SERVER_DEV_MODE) have no password.
    `extra` are flags of the operator's; those that the plan has too take its place.

    Raises:
        CommandError: `extra` would have the engine listen elsewhere, or be found by nobody.
    """
    for flag in _OURS:
        if _value(extra, flag) is not None:
            raise CommandError(
                f"{flag} after `--` would have the engine watched and measured as another one; give it "
                f"before `--`, as an option of `engine launch`"
            )
    host = _value(extra, "--host")
    if host is not None and host not in _LOOPBACKS:
        raise CommandError(
            f"--host {host} would open the engine's control endpoints, which have no password, to "
            "the network; "
            f"leave it out (it listens on {LOOPBACK}) and let requests come through the pool"
        )
    flags: dict[str, str] = {
        "--served-model-name": served_name,
        "--host": LOOPBACK,
        "--port": str(port),
        "--max-model-len": str(plan.max_model_len),
        "--max-num-seqs": str(plan.max_num_seqs),
        "--max-num-batched-tokens": str(plan.max_num_batched_tokens),
        "--shutdown-timeout": str(drain_s),
    }
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    if program == SIMULATED:
        start = [sys.executable, "-m", "hybridsched.engines.simulated"]
        flags["--kv-tokens"] = str(plan.kv_tokens)
    else:
        start = [program, "serve", str(model)]
        flags["--dtype"] = plan.dtype
        flags["--tensor-parallel-size"] = str(plan.tensor_parallel)
        if plan.kv_dtype != plan.dtype:
            flags["--kv-cache-dtype"] = plan.kv_dtype
        if plan.gpu_memory_utilization is not None:
            flags["--gpu-memory-utilization"] = f"{plan.gpu_memory_utilization:g}"
        else:
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(plan.kv_bytes // GIB)
    if choice is not None:
        # The plan may need fewer than there are; the others are somebody else's.
        visible = ",".join(choice.visible.split(",")[: plan.tensor_parallel])
        environment |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}
    planned = dict.fromkeys((*flags, "--kv-cache-dtype"))  # left out where it is that of the weights
    yours = [flag for flag in planned if _value(extra, flag) is not None]
    kept = [part for flag, value in flags.items() if flag not in yours for part in (flag, value)]
    return EngineCommand(
        argv=(*start, *kept, *extra), environment=environment, yours=tuple(yours), host=host or LOOPBACK
    )


def _value(extra: Sequence[str], flag: str) -> str | None:
    """What `flag` is set to in the operator's flags; None: it is not among them. vLLM takes _ for - too."""
    for at, part in enumerate(extra):
        name, given, value = part.partition("=")
        if name.replace("_", "-") == flag:
            return value if given else (extra[at + 1] if at + 1 < len(extra) else "")
    return None


def shm_problem(plan: EnginePlan, folder: Path = SHM) -> str | None:
    """Whether `folder` is too small for the engine's processes to talk; None: it is not.

    vLLM's workers exchange messages and tensors over shared memory; containers have 64 MiB of it by
    default, and an engine of several GPUs then hangs or ends at its start.
    """
    if plan.tensor_parallel == 1:
        return None
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return f"{folder} cannot be looked at ({error}), and {plan.tensor_parallel} workers need it"
    free = found.f_bavail * found.f_frsize
    needed = _SHM_BYTES * (plan.tensor_parallel + 1)
    if free >= needed:
        return None
    return (
        f"{folder} has {free // MIB} MiB free, and {plan.tensor_parallel} workers need "
        f"{needed // MIB} MiB: mount it "
        f"larger (mount -o remount,size=..., or --shm-size of a container)"
    )
