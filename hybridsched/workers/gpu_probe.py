"""Whether a job's GPUs can be used. As in slurm/prolog.sh, only proof counts, and it is sought twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

from hybridsched.core.values import Value

BROKEN = frozenset({6, 8, 9, 10, 15, 18})
"""Exit statuses of nvidia-smi, which are NVML's: not found, no power, no driver, no interrupts, lost, a
driver of another version."""

_WORDS = ("requires reset", "GPU is lost", "fallen off the bus")


class Verdict(Value, frozen=True, kw_only=True):
    """`broken` None: nobody can tell."""

    broken: bool | None
    why: str = ""


def job_gpus(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The GPUs that Slurm gave to this process's job."""
    env = os.environ if environ is None else environ
    text = env.get("CUDA_VISIBLE_DEVICES") or env.get("SLURM_JOB_GPUS", "")
    return tuple(part for part in text.split(",") if part)


async def probe_gpus(
    gpus: Sequence[str], *, probe: str = "nvidia-smi", timeout_s: float = 10.0, pause_s: float = 1.0
) -> Verdict:
    """Probe once, and once more where it says broken: one failure may be a driver in the middle of something.

    `probe` other than nvidia-smi is a site's own, called with the GPUs: exit status 0 usable, 1 broken,
    everything else cannot be told.
    """
    if not gpus:
        return Verdict(broken=None, why="the job has no GPU")
    verdict = await _probe(gpus, probe, timeout_s)
    if verdict.broken:
        await asyncio.sleep(pause_s)
        verdict = await _probe(gpus, probe, timeout_s)
    return verdict


async def _probe(gpus: Sequence[str], probe: str, timeout_s: float) -> Verdict:
    if os.path.basename(probe) != "nvidia-smi":  # noqa: PTH119 - a name to be found on PATH
        status, said = await _run([probe, *gpus], timeout_s)
        broken = {0: False, 1: True}.get(-1 if status is None else status)
        return Verdict(broken=broken, why=f"{probe} ended with {status}: {said}")
    for gpu in gpus:
        status, said = await _run([probe, "-i", gpu, "--query-gpu=uuid", "--format=csv,noheader"], timeout_s)
        if gpu.startswith("MIG-"):
            status, said = await _run([probe, "-L"], timeout_s)
            if status == 0 and gpu not in said:
                return Verdict(broken=True, why=f"MIG instance {gpu} is not there")
        why = f"GPU {gpu}: nvidia-smi ended with {status}: {said}"
        if status in BROKEN or any(word in said for word in _WORDS):
            return Verdict(broken=True, why=why)
        if status != 0:
            return Verdict(broken=None, why=why)
    return Verdict(broken=False)


async def _run(argv: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Exit status and first words of a command; None: not there, refused, or not done in time."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return None, str(error)
    try:
        async with asyncio.timeout(timeout_s):
            out, _ = await process.communicate()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # One that hangs in the driver cannot be killed, and is not waited for.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await process.communicate()
        return None, f"no answer within {timeout_s:g} s"
    return process.returncode, " ".join(out[:400].decode("utf-8", "replace").split())
