"""One pass of the demo: all is started, the trace replayed, all stopped, and the record read."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import redis
from rich.live import Live

from hybridsched.batches.layout import BatchFiles
from hybridsched.demo import collect
from hybridsched.demo.batch import DemoBatch, RunningBatch
from hybridsched.demo.options import Plan
from hybridsched.demo.progress import Progress, display
from hybridsched.demo.stack import Stack, start_stack
from hybridsched.demo.supervisor import ChildError, ChildSpec, Supervisor
from hybridsched.report.record import PassRecord, PolicyStats, SlurmRecord
from hybridsched.store.connection import async_client, store_errors, sync_client
from hybridsched.store.gates import GateStore
from hybridsched.store.holds import HoldStore
from hybridsched.store.policy import PolicyStore
from hybridsched.store.telemetry import TelemetryStore

LEAD_S = 0.3
"""From everything being ready to the first instant of the trace, wall."""
LOOK_EVERY_S = 0.1
RESTARTS_EVERY_S = 1.0
SHOW_EVERY_S = 0.5
STOP_S = 20.0
"""What offline workers may take to put down their work when the run ends."""
FINISH_STALL_S = 120.0
"""With --finish: how long the batch may stand still before the run is given up."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass has measured."""

    record: PassRecord
    policy: PolicyStats
    files: BatchFiles | None
    recomputed: int
    slurm: SlurmRecord | None = None


class Pass:
    """One replay of the trace. A subclass may start and stop the engines and workers in another way."""

    def __init__(
        self,
        stack: Stack,
        plan: Plan,
        *,
        offline: bool,
        live: bool,
        env: Mapping[str, str] | None = None,
        engines: Supervisor | None = None,
    ) -> None:
        """`engines`: those of real engines, which run already and outlast the pass."""
        self._stack = stack
        self._plan = plan
        self._offline = offline
        self._live = live
        self._client = async_client(stack.redis_url)
        self._sync: redis.Redis = sync_client(stack.redis_url)
        self._children = Supervisor(env)
        self._engines = engines
        telemetry = TelemetryStore(self._client, stack.pool)
        self._restarts = EngineRestarts(telemetry, self._children if engines is None else engines)
        self._batch: RunningBatch | None = None

    async def run(self) -> Outcome:
        """Start everything, replay, stop everything, read what was measured."""
        try:
            with store_errors(self._stack.redis_url, "running the demo"), self._children:
                return await self._run()
        finally:
            await self._client.aclose()
            self._sync.close()

    async def _run(self) -> Outcome:
        stack, options = self._stack, self._plan.options
        await PolicyStore(self._client, stack.pool).set(self._plan.policy, by="demo")
        await self._start(
            stack.load(
                trace=self._plan.trace.absolute(),
                start_s=self._plan.begin_s,
                duration_s=options.duration_s,
                timeout_s=self._plan.policy.online.default_timeout_ms / 1000 / options.speed,
            )
        )
        start_s = time.monotonic() + LEAD_S
        _write_whole(stack.begin_file(), f"{start_s:.6f}")
        await asyncio.sleep(max(0.0, start_s - time.monotonic()))
        await self._begin(start_s)
        self._progress = Progress(self._stack, len(self._plan.rows), options.duration_s)
        screen = display(self._live)
        with screen or contextlib.nullcontext():
            await self._replay(start_s, screen)
            end_s = max(time.monotonic(), start_s + options.duration_s / options.speed)
            await self._watch(lambda: time.monotonic() >= end_s, start_s, screen)
            if self._batch is not None and options.finish:
                await self._finish(start_s, screen)
        return await self._collect(start_s)

    async def _start(self, load: ChildSpec) -> None:
        """Start everything and wait until it is ready."""
        if self._offline:
            holds = HoldStore(self._client, self._stack.pool)
            await holds.put(by="demo", why="the batch starts with the trace")
            batch = DemoBatch(self._sync, self._stack.pool, self._plan.batch, self._stack.folder)
            batch.submit(self._stack.model)
            self._batch = batch
        await start_stack(self._children, self._stack, load, self._client, offline=self._offline)

    async def _begin(self, start_s: float) -> None:
        """The trace begins now, at `start_s`."""
        holds = HoldStore(self._client, self._stack.pool)
        await holds.release(await holds.list())

    async def _stop(self) -> None:
        """Stop everything, offline work first."""
        replicas = list(self._stack.ports)
        if self._offline:
            self._children.stop([f"offline-{name}" for name in replicas], timeout_s=STOP_S)
        self._children.stop(["load", "policy", *(f"online-{name}" for name in replicas)])
        self._children.stop()

    def _slurm(self) -> SlurmRecord | None:
        """What Slurm did; None without it."""
        return None

    async def _replay(self, start_s: float, screen: Live | None) -> None:
        """Until the load's last request has ended."""
        await self._watch(lambda: self._children.status("load") is not None, start_s, screen)
        if self._children.status("load") != 0:
            raise ChildError(
                f"the load generator failed (status {self._children.status('load')}); the end of its log:\n"
                f"{self._children.tail('load')}"
            )

    async def _finish(self, start_s: float, screen: Live | None) -> None:
        batch = self._batch
        if batch is None:
            return
        seen, since = -1, time.monotonic()

        def over() -> bool:
            nonlocal seen, since
            done = batch.progress()
            if done.done + done.failed != seen:
                seen, since = done.done + done.failed, time.monotonic()
            if time.monotonic() - since > FINISH_STALL_S:
                raise ChildError(
                    f"the batch has stood still for {FINISH_STALL_S:g} s at {seen} of {done.batch.lines} "
                    f"lines; see the logs of the offline workers in {self._stack.folder / 'logs'}"
                )
            return done.batch.status.ended

        await self._watch(over, start_s, screen)

    async def _watch(self, over: Callable[[], bool], start_s: float, screen: Live | None) -> None:
        """Keep the children running and the display fresh until `over()`."""
        shown = 0.0
        gates = GateStore(self._client, self._stack.pool)
        while not over():
            self._children.check()
            if self._engines is not None:
                self._engines.check()
            await self._restarts.look()
            if screen is not None and time.monotonic() - shown > SHOW_EVERY_S:
                shown = time.monotonic()
                elapsed = shown - start_s
                self._progress.update(elapsed)
                readings = await gates.read_many(list(self._stack.ports))
                screen.update(self._progress.table(elapsed, readings, self._batch), refresh=True)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _collect(self, start_s: float) -> Outcome:
        options = self._plan.options
        policy = await collect.policy_stats(self._client, self._stack.pool, self._plan)
        restarts = self._children.restarts | ({} if self._engines is None else self._engines.restarts)
        await self._stop()
        stack = self._stack
        record = await collect.read_pass(
            self._client, stack, start_s=start_s, end_s=start_s, restarts=restarts
        )
        last = max((row.end_s for row in record.online), default=0.0)
        end_s = start_s + max(last, options.duration_s / options.speed)
        if self._offline:
            await collect.write_logs(self._client, stack)
        return Outcome(
            record=msgspec.structs.replace(record, end_s=end_s),
            policy=policy,
            files=self._batch.files if self._batch is not None else None,
            recomputed=collect.recomputed(record),
            slurm=self._slurm(),
        )


class EngineRestarts:
    """Starts an engine again that answers its health check and cannot be used, as its online worker asks.

    Where the engines are Slurm's jobs there is no child to restart: the jobs do it.
    """

    def __init__(
        self, telemetry: TelemetryStore, children: Supervisor, *, every_s: float = RESTARTS_EVERY_S
    ) -> None:
        self._telemetry = telemetry
        self._children = children
        self._every_s = every_s
        self._done: dict[str, int] = {}
        self._looked_s = 0.0

    async def look(self) -> None:
        """Take up what the replicas' records say, unless that was done a moment ago."""
        if time.monotonic() - self._looked_s < self._every_s:
            return
        self._looked_s = time.monotonic()
        for name, record in (await self._telemetry.read_all()).replicas.items():
            if record is None:
                continue  # its worker is away, and comes back with its count or with none
            if record.engine.restarts > self._done.get(name, 0) and f"engine-{name}" in self._children:
                self._children.restart(f"engine-{name}")
            self._done[name] = record.engine.restarts


def _write_whole(path: Path, text: str) -> None:
    """Write a file that another process waits for: it appears whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text, encoding="ascii")
    part.replace(path)
