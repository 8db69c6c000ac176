"""`hybridsched engine launch`: an engine in the foreground, and what was learnt of it as a profile in Redis.

The engine is a child in the same process group: what a terminal, Slurm or `hybridsched worker replica`
sends to the group reaches both, and the kernel ends it when this process dies. Its words go to standard
error.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import psutil
from redis.exceptions import RedisError

from hybridsched.core.engine_values import EnginePlan
from hybridsched.engines.measure import Measured, measure
from hybridsched.engines.protocol import EngineError, EngineInfo
from hybridsched.engines.vllm_command import SIMULATED, EngineCommand
from hybridsched.engines.vllm_http import VllmHttpEngine
from hybridsched.log import get_logger
from hybridsched.ports import taken
from hybridsched.process import adopt_orphans, die_with_parent
from hybridsched.store.connection import async_client
from hybridsched.store.engine_profiles import EngineProfile, EngineProfiles, Throughput
from hybridsched.store.tasks import end_tasks
from hybridsched.store.telemetry import server_ms

if TYPE_CHECKING:
    from redis.asyncio import Redis

NOT_STARTED = 78
"""Exit status, as of `hybridsched worker replica`."""

CAPACITY_TOLERANCE = 0.05
"""Of the planned KV capacity: an engine that differs more is not on the device of its plan."""

_SIZES = frozenset(
    {"--dtype", "--gpu-memory-utilization", "--kv-cache-dtype", "--kv-tokens", "--tensor-parallel-size"}
)
"""Flags by which the KV cache is another than the plan's."""

_LOOK_S = 0.1
_END_S = 15.0
"""Beyond the engine's own drain, until it is killed."""
_PARTS_S = 5.0
"""Until what the engine has started is killed, once it has ended itself."""
_log = get_logger("engine")


class LaunchJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to start. Seconds where not said."""

    plan: EnginePlan
    command: EngineCommand
    model: str
    """The name it serves."""
    port: int
    program: str
    redis_url: str | None
    """None: no profile is kept."""
    pool: str
    measure: bool | None = None
    """None: when the profile has no throughput yet."""
    start_s: float = 1800.0
    drain_s: float = 30.0

    @property
    def url(self) -> str:
        """Where it will be reached."""
        host = self.command.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


async def run_launch(job: LaunchJob) -> int:
    """Run the engine until it ends or SIGTERM or SIGINT comes; the exit status.

    Its own status when it ends, 128 and the signal's number as a shell has it; `NOT_STARTED` when it does not
    become healthy; 0 when it was told to stop.
    """
    adopt_orphans()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        return await _run(job, stop)
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def _run(job: LaunchJob, stop: asyncio.Event) -> int:
    began = time.monotonic()
    if taken(job.port, job.command.host):
        _log.error(
            "Another server listens on the engine's port already; stop it, or give another --port.",
            key="engine_port_taken",
            engine=job.url,
        )
        return NOT_STARTED
    try:
        process = await asyncio.create_subprocess_exec(
            *job.command.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_descriptor() else subprocess.DEVNULL,
            env={**os.environ, **job.command.environment},
            preexec_fn=die_with_parent(signal.SIGTERM),
        )
    except OSError as error:
        _log.error(
            "The engine's program cannot be started; name it with --program.",
            key="engine_not_started",
            command=job.command.argv[0],
            error=str(error),
        )
        return NOT_STARTED
    died = asyncio.create_task(process.wait(), name="engine-exit")
    stopped = asyncio.create_task(stop.wait(), name="launch-stop")
    engine = VllmHttpEngine(job.url)
    learning: asyncio.Task[None] | None = None
    try:
        status = await _healthy(job, engine, died, stop, began)
        if status is None:
            load_s = time.monotonic() - began
            _log.info("The engine is healthy.", key="engine_healthy", engine=job.url, load_s=round(load_s, 1))
            learning = asyncio.create_task(_learn(job, engine, load_s), name="engine-profile")
            await asyncio.wait([died, stopped], return_when=asyncio.FIRST_COMPLETED)
            status = 0 if stop.is_set() else _status(died.result())
            if not stop.is_set():
                _log.error("The engine ended.", key="engine_died", status=died.result())
    finally:
        if learning is not None:
            await end_tasks(learning)
        await engine.close()
        # One that is loading has no requests, and vLLM may miss the signal then.
        await _end(process, died, _END_S + (0.0 if learning is None else job.drain_s))
        await _end_parts()
        await end_tasks(stopped, died)
    return status


def _has_descriptor() -> bool:
    try:
        sys.stderr.fileno()
    except (OSError, ValueError):
        return False
    return True


def _status(code: int) -> int:
    return 128 - code if code < 0 else code or NOT_STARTED


async def _healthy(
    job: LaunchJob,
    engine: VllmHttpEngine,
    died: asyncio.Task[int],
    stop: asyncio.Event,
    began: float,
) -> int | None:
    """Wait for the engine. None: it serves; else the exit status."""
    while not stop.is_set():
        if died.done():
            _log.error(
                "The engine ended before it was healthy; its own words stand above.",
                key="engine_start_failed",
                status=died.result(),
            )
            return NOT_STARTED
        if await engine.healthy():
            return None
        if time.monotonic() - began > job.start_s:
            _log.error(
                "The engine is not healthy in time; raise --start-timeout if it needs more.",
                key="engine_start_timeout",
                start_s=job.start_s,
            )
            return NOT_STARTED
        await asyncio.sleep(_LOOK_S)
    return 0


async def _end(process: asyncio.subprocess.Process, died: asyncio.Task[int], wait_s: float) -> None:
    """End the engine: told to, and killed when it does not."""
    for number, limit_s in ((signal.SIGTERM, wait_s), (signal.SIGKILL, 5.0)):
        if died.done():
            return
        process.send_signal(number)
        await asyncio.wait([died], timeout=limit_s)


async def _end_parts() -> None:
    """End what the engine has started and left behind: vLLM's core, which holds the GPU's memory, does not
    notice when the server before it is killed."""
    deadline = time.monotonic() + _PARTS_S
    while left := _parts():
        if time.monotonic() > deadline:
            _log.warning(
                "The engine has ended and left processes behind; they are killed.",
                key="engine_parts_killed",
                processes=[one.pid for one in left],
            )
            for one in left:
                with suppress(psutil.Error):
                    one.kill()
            psutil.wait_procs(left, timeout=1.0)
            return
        await asyncio.sleep(_LOOK_S)


def _parts() -> list[psutil.Process]:
    """What runs below this process, orphans that it has adopted among them."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


async def _learn(job: LaunchJob, engine: VllmHttpEngine, load_s: float) -> None:
    """Compare the engine with its plan, measure it, keep what was learnt. Nothing here ends the engine."""
    try:
        info = await engine.info()
    except EngineError as error:
        _log.warning(
            "The engine does not say what it has; no profile is kept.", key="no_info", error=str(error)
        )
        return
    _compare(job.plan, info, job.command.yours)
    client = None if job.redis_url is None else async_client(job.redis_url, name="hybridsched-engine")
    try:
        kept = None if client is None else await _kept(job, client)
        wanted = job.measure if job.measure is not None else client is not None and kept is None
        measured = await _measure(job, engine) if wanted else None
        if client is not None:
            await _keep(job, client, info, load_s, measured, kept)
    except (RedisError, OSError) as error:
        _log.warning(
            "The engine's profile could not be kept; the engine runs on.",
            key="profile_lost",
            error=str(error),
        )
    finally:
        if client is not None:
            await client.aclose()


def _compare(plan: EnginePlan, info: EngineInfo, yours: tuple[str, ...] = ()) -> None:
    """Say so when the engine has another KV cache than it was planned with. `yours`: flags that took the
    place of the plan's."""
    if info.kv_tokens is None:
        _log.warning(
            "The engine does not say how large its KV cache is.", key="kv_unknown", planned=plan.kv_tokens
        )
        return
    off = info.kv_tokens / plan.kv_tokens - 1.0 if plan.kv_tokens else 0.0
    words = {"reported": info.kv_tokens, "planned": plan.kv_tokens, "off": f"{off:+.1%}"}
    if abs(off) <= CAPACITY_TOLERANCE:
        _log.info("The engine's KV cache is as planned.", key="kv_as_planned", **words)
    elif sized := [flag for flag in yours if flag in _SIZES]:
        _log.warning(
            f"The engine's KV cache is not as planned, as {', '.join(sized)} stood behind `--`, where the "
            "plan does not see it: give it as an option of `engine launch`.",
            key="kv_not_as_planned",
            **words,
        )
    else:
        _log.warning(
            "The engine's KV cache is not as planned: another device than it should see, or "
            "something else on it?",
            key="kv_not_as_planned",
            **words,
        )


def _device(job: LaunchJob) -> str:
    return SIMULATED if job.program == SIMULATED else job.plan.device


async def _kept(job: LaunchJob, client: Redis) -> Throughput | None:
    """The throughput that was measured before, for the same engine."""
    before = await EngineProfiles(client, job.pool).get(job.model, _device(job), job.plan.tensor_parallel)
    return None if before is None else before.throughput


async def _measure(job: LaunchJob, engine: VllmHttpEngine) -> Measured | None:
    try:
        return await measure(engine, job.model, job.plan)
    except EngineError as error:
        _log.warning("The engine's throughput could not be measured.", key="not_measured", error=str(error))
        return None


async def _keep(
    job: LaunchJob,
    client: Redis,
    info: EngineInfo,
    load_s: float,
    measured: Measured | None,
    kept: Throughput | None,
) -> None:
    at_ms = server_ms(await client.time())
    plan = job.plan
    throughput = kept
    if measured is not None:
        throughput = Throughput(
            requests=measured.requests,
            prompt_tokens=measured.prompt_tokens,
            output_tokens=measured.output_tokens,
            seconds=measured.seconds,
            output_tokens_per_s=measured.output_tokens_per_s,
            at_ms=at_ms,
        )
    profile = EngineProfile(
        model=job.model,
        device=_device(job),
        tensor_parallel=plan.tensor_parallel,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        max_model_len=info.max_model_len or plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        weights_bytes=plan.weights_bytes,
        kv_bytes_per_token=plan.kv_bytes_per_token,
        kv_tokens_planned=plan.kv_tokens,
        kv_tokens=info.kv_tokens,
        block_tokens=info.block_size,
        load_s=load_s,
        at_ms=at_ms,
        throughput=throughput,
    )
    await EngineProfiles(client, job.pool).put(profile)
    _log.info("The engine's profile is kept.", key="profile_kept", profile=profile.name)
