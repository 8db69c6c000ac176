"""The demo: the same trace with online alone, then together with a batch, on processes of its own.

Each pass has its own pool and its own engine processes, so that both begin alike: an engine of the first pass
would bring warm prefix caches and counters into the second. They cost about a second to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import redis
from rich.live import Live

from hybridsched.batches.layout import BatchFiles
from hybridsched.demo import collect
from hybridsched.demo.batch import DemoBatch
from hybridsched.demo.options import DemoOptions, Plan, make_plan
from hybridsched.demo.progress import Progress, display
from hybridsched.demo.stack import Stack, free_ports, start_stack
from hybridsched.demo.supervisor import ChildError, Supervisor
from hybridsched.report.record import PassRecord, PolicyStats, RunRecord
from hybridsched.report.verify import verify_batch
from hybridsched.store.connection import EmbeddedValkey, async_client, store_errors, sync_client
from hybridsched.store.gates import GateStore
from hybridsched.store.holds import HoldStore
from hybridsched.store.policy import PolicyStore

LEAD_S = 0.3
"""From everything being ready to the first instant of the trace, wall."""
LOOK_EVERY_S = 0.1
SHOW_EVERY_S = 0.5
STOP_S = 20.0
"""What offline workers may take to put down their work when the run ends."""
FINISH_STALL_S = 120.0
"""With --finish: how long the batch may stand still before the run is given up."""


class _Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass has measured."""

    record: PassRecord
    policy: PolicyStats
    files: BatchFiles | None
    recomputed: int


async def run_demo(options: DemoOptions, *, live: bool = True) -> dict[str, Any]:
    """Run it all and write the report folder. Returns the summary.

    Raises:
        DemoUsageError: trace, batch, policy or report folder cannot be used.
        StoreError: Redis cannot be reached or refuses.
        ChildError: a process does not come up, or dies again and again.
    """
    began = time.monotonic()
    plan = make_plan(options)
    folder = options.report.absolute()
    with _redis(options.redis_url, folder) as url:
        await _ping(url)
        name = f"demo-{secrets.token_hex(4)}"
        baseline = None
        if options.baseline:
            alone = msgspec.structs.replace(plan, policy=plan.baseline_policy)
            stack = _stack("baseline", url, f"{name}-alone", plan, folder)
            baseline = (await _Pass(stack, alone, offline=False, live=live).run()).record
        stack = _stack("together", url, name, plan, folder)
        together = await _Pass(stack, plan, offline=True, live=live).run()
    if together.files is None:
        raise ChildError("the batch was not started")
    record = RunRecord(
        speed=options.speed,
        gpus=options.gpus,
        duration_s=options.duration_s,
        trace=plan.trace.name,
        policy=together.policy,
        batch=msgspec.structs.replace(verify_batch(together.files), worker_recomputed=together.recomputed),
        together=together.record,
        baseline=baseline,
        wall_s=time.monotonic() - began,
    )
    return collect.write_report(record, folder)


@contextlib.contextmanager
def _redis(url: str | None, folder: Path) -> Iterator[str]:
    """The given server, or a Valkey of the demo's own that dies with it."""
    if url is not None:
        yield url
        return
    with EmbeddedValkey(folder / "valkey", die_with_starter=True) as server:
        yield server.url


async def _ping(url: str) -> None:
    client = async_client(url)
    try:
        with store_errors(url, "starting the demo"):
            await client.ping()
    finally:
        await client.aclose()


def _stack(label: str, url: str, pool: str, plan: Plan, folder: Path) -> Stack:
    names = [f"r{number}" for number in range(plan.options.gpus)]
    return Stack(
        label=label,
        redis_url=url,
        pool=pool,
        model=plan.model,
        ports=dict(zip(names, free_ports(len(names)), strict=True)),
        speed=plan.options.speed,
        folder=folder,
        max_model_len=plan.max_model_len,
    )


class _Pass:
    """One replay of the trace."""

    def __init__(self, stack: Stack, plan: Plan, *, offline: bool, live: bool) -> None:
        self._stack = stack
        self._plan = plan
        self._offline = offline
        self._live = live
        self._client = async_client(stack.redis_url)
        self._sync: redis.Redis = sync_client(stack.redis_url)
        self._children = Supervisor()
        self._batch: DemoBatch | None = None
        self._progress = Progress(stack, len(plan.rows), plan.options.duration_s)

    async def run(self) -> _Outcome:
        """Start everything, replay, stop everything, read what was measured."""
        try:
            with store_errors(self._stack.redis_url, "running the demo"), self._children:
                return await self._run()
        finally:
            await self._client.aclose()
            self._sync.close()

    async def _run(self) -> _Outcome:
        stack, options = self._stack, self._plan.options
        await PolicyStore(self._client, stack.pool).set(self._plan.policy, by="demo")
        holds = HoldStore(self._client, stack.pool)
        if self._offline:
            await holds.put(by="demo", why="the batch starts with the trace")
            self._batch = DemoBatch(self._sync, stack.pool, self._plan.batch, stack.folder)
            self._batch.submit(stack.model)
        load = stack.load(
            trace=self._plan.trace.absolute(),
            start_s=options.start_s,
            duration_s=options.duration_s,
            timeout_s=self._plan.policy.online.default_timeout_ms / 1000 / options.speed,
        )
        await start_stack(self._children, stack, load, self._client, offline=self._offline)
        start_s = time.monotonic() + LEAD_S
        _write_whole(stack.begin_file(), f"{start_s:.6f}")
        await asyncio.sleep(max(0.0, start_s - time.monotonic()))
        await holds.release()
        screen = display(self._live)
        with screen or contextlib.nullcontext():
            await self._replay(start_s, screen)
            end_s = max(time.monotonic(), start_s + options.duration_s / options.speed)
            await self._watch(lambda: time.monotonic() >= end_s, start_s, screen)
            if self._batch is not None and options.finish:
                await self._finish(start_s, screen)
        return await self._collect(start_s)

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
            if screen is not None and time.monotonic() - shown > SHOW_EVERY_S:
                shown = time.monotonic()
                elapsed = shown - start_s
                self._progress.update(elapsed)
                readings = await gates.read_many(list(self._stack.ports))
                screen.update(self._progress.table(elapsed, readings, self._batch), refresh=True)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _collect(self, start_s: float) -> _Outcome:
        stack, options = self._stack, self._plan.options
        replicas = list(stack.ports)
        policy = await collect.policy_stats(self._client, stack.pool, self._plan)
        restarts = dict(self._children.restarts)
        if self._offline:
            self._children.stop([f"offline-{name}" for name in replicas], timeout_s=STOP_S)
        self._children.stop(["load", "policy", *(f"online-{name}" for name in replicas)])
        self._children.stop()
        record = await collect.read_pass(
            self._client, stack, start_s=start_s, end_s=start_s, restarts=restarts
        )
        last = max((row.end_s for row in record.online), default=0.0)
        end_s = start_s + max(last, options.duration_s / options.speed)
        if self._offline:
            await collect.write_logs(self._client, stack)
        return _Outcome(
            record=msgspec.structs.replace(record, end_s=end_s),
            policy=policy,
            files=self._batch.files if self._batch is not None else None,
            recomputed=collect.recomputed(record),
        )


def _write_whole(path: Path, text: str) -> None:
    """Write a file that another process waits for: it appears whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text, encoding="ascii")
    part.replace(path)
