"""One online replica as a Slurm job: the engine and the online worker beside it, started and ended together.

An engine that runs and cannot be used (`core.engine_health`) is started again here, worker and job stay in
their places; one that dies ends the job. The exit status says what happened, for whoever looks at Slurm:
0 told to stop, `ENGINE_DIED`, `GPU_LOST` (reported to the policy worker, which may drain the node), or
`NOT_STARTED`. The engine listens on the loopback only: its control endpoints have no password.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from redis.exceptions import RedisError

from hybridsched import notice
from hybridsched.core.engine_health import Fault
from hybridsched.engines.vllm_http import VllmHttpEngine
from hybridsched.log import get_logger
from hybridsched.ports import taken
from hybridsched.process import die_with_parent
from hybridsched.store.connection import async_client
from hybridsched.store.events import EventLog
from hybridsched.store.gpu_reports import GpuReport, GpuReports
from hybridsched.store.online import OnlineQueue
from hybridsched.store.policy import PolicyStore
from hybridsched.store.tasks import end_tasks
from hybridsched.store.telemetry import TelemetryStore
from hybridsched.workers.gpu_probe import job_gpus, probe_gpus
from hybridsched.workers.online import OnlineOptions, OnlineWorker
from hybridsched.workers.slurm_env import JobPlace

if TYPE_CHECKING:
    from redis.asyncio import Redis

ENGINE_DIED = 70
GPU_LOST = 69
NOT_STARTED = 78
"""Exit statuses, of sysexits.h: software, service unavailable, configuration."""

LOOPBACK = "127.0.0.1"
SIMULATED = "simulated"
"""In place of a program: the simulated engine of this package."""

_LOOK_S = 0.1
_log = get_logger("replica")


class ReplicaJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. Seconds where not said."""

    redis_url: str
    pool: str
    model: str
    replica: str
    command: tuple[str, ...]
    """The engine; `{port}` in an argument becomes its port, `{replica}` the replica's name."""
    place: JobPlace | None = None
    """None: outside Slurm."""
    port: int = 0
    """0: a free one."""
    speed: float = 1.0
    gpu_probe: str = "nvidia-smi"
    start_s: float = 1800.0
    """How long the engine may take until it is healthy."""
    hung_s: float = 60.0
    """An engine that runs and has not been healthy for this long is given up."""
    drain_s: float = 30.0
    """After a signal: how long requests in flight may still take."""
    end_s: float = 10.0
    """After that: how long the engine may take to end by itself."""


def replica_name(place: JobPlace, job_name: str) -> str:
    """The name that a replica has by its job: no other has it, and it leads to the job."""
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", job_name).strip("-._") or "replica"
    return f"{base[:40]}-{place.job}"


def engine_command(command: Sequence[str], port: int, replica: str = "") -> list[str]:
    """The engine's argument list."""
    argv = [part.replace("{port}", str(port)).replace("{replica}", replica) for part in command]
    if argv[0] == SIMULATED:
        argv[:1] = [sys.executable, "-m", "hybridsched.engines.simulated"]
    return argv


def free_port() -> int:
    """A port of the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


async def run_replica_job(job: ReplicaJob) -> int:
    """Run the replica until its engine dies or SIGTERM, SIGINT or SIGUSR2 comes; the exit status.

    Raises:
        StoreUrlError: the Redis address cannot be understood.
        ValueError: a name cannot stand in a key.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    if notice.came():
        stop.set()
    client = async_client(job.redis_url, name=f"hybridsched-replica-{job.replica}")
    try:
        return await _Run(job, client, stop).run()
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        await client.aclose()


class _Run:
    def __init__(self, job: ReplicaJob, client: Redis, stop: asyncio.Event) -> None:
        self._job, self._client, self._stop = job, client, stop
        self._port = port = job.port or free_port()
        self._argv = engine_command(job.command, port, job.replica)
        self._engine = VllmHttpEngine(f"http://{LOOPBACK}:{port}")
        self._process: asyncio.subprocess.Process | None = None
        self._died: asyncio.Task[int] | None = None
        self._again = asyncio.Event()
        """The engine has to be started again."""

    async def run(self) -> int:
        try:
            status = await self._start()
            if status is None:
                status = await self._healthy()
            if status is None:
                status = await self._serve()
        finally:
            await self._end_engine()
            await self._engine.close()
        if status in (ENGINE_DIED, NOT_STARTED) and await self._gpu_lost(used=status == ENGINE_DIED):
            return GPU_LOST
        return status

    async def _start(self) -> int | None:
        """Start the engine's process. None: it runs; else the exit status."""
        if taken(self._port):
            # Its answers would pass for our engine's.
            _log.error(
                "Another server listens on the engine's port already; stop it, or give another --port.",
                key="engine_port_taken",
                engine=self._engine.url,
            )
            return NOT_STARTED
        try:
            # A group of its own, so that all of it can be ended; the kernel ends it when this process dies.
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGTERM),
            )
        except OSError as error:
            _log.error(
                "The engine's program cannot be started; check the command after `--`.",
                key="engine_not_started",
                command=self._argv[0],
                error=str(error),
            )
            return NOT_STARTED
        self._process = process
        self._died = asyncio.create_task(process.wait(), name="engine-exit")
        _log.info(
            "The engine was started; requests are taken when it is healthy.",
            key="replica_started",
            replica=self._job.replica,
            engine=self._engine.url,
            pid=process.pid,
        )
        return None

    async def _healthy(self) -> int | None:
        """Wait for the engine. None: it serves; else the exit status."""
        deadline = time.monotonic() + self._job.start_s
        while not self._stop.is_set():
            if self._died is not None and self._died.done():
                _log.error(
                    "The engine ended before it was healthy; its own words stand above.",
                    key="engine_start_failed",
                    status=self._died.result(),
                )
                return NOT_STARTED
            if await self._engine.healthy():
                return None
            if time.monotonic() > deadline:
                _log.error(
                    "The engine is not healthy in time; raise --start-timeout if it needs more.",
                    key="engine_start_timeout",
                    start_s=self._job.start_s,
                )
                return NOT_STARTED
            await asyncio.sleep(_LOOK_S)
        return 0

    async def _serve(self) -> int:
        job = self._job
        async with EventLog(self._client, job.pool) as events:
            worker = OnlineWorker(
                replica=job.replica,
                model=job.model,
                engine=self._engine,
                queue=OnlineQueue(self._client, job.pool),
                telemetry=TelemetryStore(self._client, job.pool),
                policies=PolicyStore(self._client, job.pool),
                events=events,
                speed=job.speed,
                node="" if job.place is None else job.place.node,
                job="" if job.place is None else job.place.job,
                options=OnlineOptions(drain_s=job.drain_s),
                restart=self._again.set,
            )
            leave = asyncio.Event()
            serving = asyncio.create_task(worker.run(leave), name="online-worker")
            try:
                status = await self._until_over(worker, serving)
                leave.set()
                await serving
            finally:
                leave.set()
                await end_tasks(serving)
        _log.info("The replica has left the pool.", key="replica_left", replica=job.replica, status=status)
        return status

    async def _until_over(self, worker: OnlineWorker, serving: asyncio.Task[None]) -> int:
        """Until the replica has to end; the exit status. The engine is started again meanwhile."""
        stopped = asyncio.create_task(self._stop.wait(), name="replica-stop")
        try:
            while True:
                hung = asyncio.create_task(self._hung(worker), name="replica-hung")
                again = asyncio.create_task(self._again.wait(), name="replica-again")
                waited = [serving, stopped, hung, again, *([self._died] if self._died else [])]
                try:
                    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await end_tasks(hung, again)
                if serving.done() or stopped.done():
                    return 0
                if self._died is not None and self._died.done():
                    _log.error(
                        "The engine died; its requests go to other replicas or fail, and the job ends.",
                        key="engine_died",
                        status=self._died.result(),
                    )
                    return ENGINE_DIED
                if self._again.is_set():
                    status = await self._start_again()
                    if status is not None:
                        return status
                    continue
                _log.error(
                    "The engine runs and cannot be used; it is ended, and the job with it.",
                    key="engine_given_up",
                    hung_s=self._job.hung_s,
                    fault=worker.watch.fault,
                )
                await self._end_engine()
                return ENGINE_DIED
        finally:
            await end_tasks(stopped)

    async def _start_again(self) -> int | None:
        """End the engine and start another in its place. None: it is there; else the exit status."""
        self._again.clear()
        _log.warning(
            "The engine is ended and started again; the replica takes no request meanwhile.",
            key="engine_start_again",
            replica=self._job.replica,
        )
        await self._end_engine()
        verdict = await probe_gpus(job_gpus(), probe=self._job.gpu_probe, used=True)
        if verdict.broken is True:
            return ENGINE_DIED  # what follows reports it
        status = await self._start()
        if status is None:
            status = await self._healthy()
        # Its death is one at work, not at the start: it has run before.
        return ENGINE_DIED if status == NOT_STARTED else status

    async def _hung(self, worker: OnlineWorker) -> None:
        """Returns when the engine has not been usable for too long; one that was put to sleep may sleep."""
        well, watch = time.monotonic(), worker.watch
        while time.monotonic() - well < self._job.hung_s:
            await asyncio.sleep(_LOOK_S)
            if watch.healthy or watch.checked_at is None or watch.fault == Fault.ASLEEP:
                well = time.monotonic()

    async def _end_engine(self) -> None:
        """End the engine and everything it started."""
        process = self._process
        if process is None:
            return
        for number, wait_s in ((signal.SIGTERM, self._job.end_s), (signal.SIGKILL, 5.0)):
            if process.returncode is not None and number is signal.SIGTERM:
                continue
            # Also a dead engine may leave workers of its own in the group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await process.wait()
        self._process = None
        if self._died is not None:
            await end_tasks(self._died)
            self._died = None

    async def _gpu_lost(self, *, used: bool) -> bool:
        """After an engine's death: is it the GPU? Then the policy worker is told. `used`: it had run."""
        place = self._job.place
        verdict = await probe_gpus(job_gpus(), probe=self._job.gpu_probe, used=used)
        if verdict.broken is not True:
            return False
        _log.error("The GPU is gone; the policy worker is told.", key="gpu_lost", why=verdict.why)
        number = "" if place is None else place.job.partition("_")[0]
        if place is None or not number.isdigit():
            return True
        report = GpuReport(job=int(number), node=place.node, why=verdict.why)
        try:
            async with asyncio.timeout(5.0):
                await GpuReports(self._client, self._job.pool).report(report)
        except (RedisError, OSError) as error:
            _log.warning(
                "The report could not be made; drain the node by hand.",
                key="gpu_report_lost",
                error=str(error),
            )
        return True
