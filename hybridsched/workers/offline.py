"""The offline worker: runs batches on one lane while its gate is open.

One event loop follows the gate, runs the lines and publishes the lane's telemetry; two threads take chunks
from RQ, and one plans them. `offline_lane` has the pause, `offline_lines` the lines, `offline_rq` the chunks.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import redis
import redis.asyncio
from redis import RedisError

from hybridsched.core.chunking import Throughput, next_chunk_lines, next_chunk_tokens
from hybridsched.core.policy import PolicyKind, PoolPolicy, Rung
from hybridsched.engines.request_log import RequestLog
from hybridsched.log import get_logger
from hybridsched.store.batches import BatchStore
from hybridsched.store.connection import async_client, redact, sync_client
from hybridsched.store.errors import StoreError
from hybridsched.store.events import EventLog
from hybridsched.store.gates import GateStore
from hybridsched.store.keys import Keys
from hybridsched.store.lane_proofs import LaneProofs
from hybridsched.store.policy import PolicyStore
from hybridsched.store.tasks import end_tasks
from hybridsched.store.telemetry import LaneRecord, TelemetryStore, decode_replica
from hybridsched.workers.offline_aside import Aside
from hybridsched.workers.offline_chunks import ChunkInHand
from hybridsched.workers.offline_engine import LaneEngine, lane_engine
from hybridsched.workers.offline_feed import ChunkSize, Feeder
from hybridsched.workers.offline_folders import Folders
from hybridsched.workers.offline_lane import Lane
from hybridsched.workers.offline_link import LaneLink
from hybridsched.workers.offline_own import OwnEngine
from hybridsched.workers.offline_rq import ChunkThread
from hybridsched.workers.offline_takers import Takers, join_all
from hybridsched.workers.policy_checked import PolicyGuard

_log = get_logger("offline")

PIPELINE = 6
"""Most chunks in hand. Another is taken when the lines in hand no longer fill the budget: the last lines of a
chunk can be many times as long as most, and several chunks may be waiting for theirs."""

PUBLISH_S = 0.25
"""Between two telemetry records without a change, seconds."""

_LEAST_PUBLISH_S = 0.02
_KEEP_AFTER_S = 0.5
"""A pause that lasts this long gets the tokens of its lines written down; most are over sooner."""

_STOP_S = 10.0
"""Longest wait at a stop for chunks to be put down."""

_BACK_OFF_S = (0.1, 5.0)

SWITCH_S = 0.0005
"""How long a thread that reads a chunk may keep the event loop from running. A pause must not wait for the
5 ms that Python allows by itself."""


class OfflineWorker:
    """One lane's worker."""

    def __init__(
        self,
        *,
        redis_url: str,
        pool: str,
        lane: str,
        replica: str,
        model: str,
        engine_url: str,
        speed: float = 1.0,
        burst: bool = False,
        only: str | None = None,
        request_log: RequestLog | None = None,
        own_engine: bool = False,
    ) -> None:
        """`only`: run that batch alone, as the Slurm job of its user does. `own_engine`: no other request
        than the lane's goes to the engine, which stands beside the replica's; a pause may stop all of it."""
        self._own_engine = own_engine
        self._own: OwnEngine | None = None
        self._request_log = request_log
        self._url = redis_url
        self._pool = pool
        self._lane_name = lane
        self._replica = replica
        self._model = model
        self._engine_url = engine_url
        self._speed = speed
        self._burst = burst
        self._only = only
        self._closed_since_s: float | None = time.monotonic()
        self._name = f"{lane}@{socket.gethostname()}:{os.getpid()}"
        self._keys = Keys(pool)
        self._policy = PoolPolicy(name="default", kind=PolicyKind.IDLE_WINDOW).at_speed(speed)
        self._guard = PolicyGuard()
        self._throughput = Throughput()
        self._hook: Callable[[], None] = lambda: None
        """What a change in the executor leads to, once the lane is there."""
        self._changed = asyncio.Event()
        self._published = LaneRecord(lane=lane)

    @property
    def closed_for_s(self) -> float:
        """How long the lane has been closed; 0 while it is open."""
        return 0.0 if self._closed_since_s is None else time.monotonic() - self._closed_since_s

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set (or, with `burst`, until no batch is left)."""
        client = async_client(self._url, name=f"offline-{self._lane_name}")
        threads_client = sync_client(self._url, name=f"offline-{self._lane_name}")
        _log.info(
            "The offline worker starts; it runs batches while the gate of its lane is open.",
            key="offline_start",
            lane=self._lane_name,
            engine=self._engine_url,
            redis=redact(self._url),
        )
        try:
            lane = lane_engine(
                self._engine_url,
                self._policy,
                model=self._model,
                on_change=lambda: self._hook(),
                log=self._request_log,
                own=self._own_engine,
            )
            async with lane as engine:
                await self._run(stop, client, threads_client, engine)
        finally:
            await client.aclose()
            threads_client.close()
        _log.info("The offline worker has stopped.", key="offline_stop", lane=self._lane_name)

    async def _run(
        self,
        stop: asyncio.Event,
        client: redis.asyncio.Redis,
        threads_client: redis.Redis,
        engine: LaneEngine,
    ) -> None:
        self._engine = engine
        self._executor = engine.executor
        self._client = client
        self._telemetry = TelemetryStore(client, self._pool)
        events = EventLog(client, self._pool)
        self._link = LaneLink(
            asyncio.get_running_loop(), engine.executor, event=events.append, measured=self._chunk_done
        )
        if self._own_engine:
            self._own = OwnEngine(
                engine.control,
                lane=self._lane_name,
                model=self._model,
                proofs=LaneProofs(client, self._pool),
                losses=lambda: engine.watch.losses,
                held=engine.executor.hold,
                can_sleep=lambda can: self._lane.can_sleep(can),
            )
        self._lane = Lane(
            self._lane_name, engine.executor, event=events.append, on_open=self._lane_is, own=self._own
        )
        self._hook = self._executor_changed
        if self._own_engine:
            # Before the first opening: whether the engine will sleep decides what it is asked there.
            with suppress(StoreError, RedisError, OSError):
                self._policy_is(await PolicyStore(client, self._pool).current())
        store = BatchStore(threads_client, self._pool)
        folders, aside = Folders(), Aside(store.note_wait)
        feeder = Feeder(
            store,
            threads_client,
            self._link,
            folders,
            aside,
            model=self._model,
            size=self._chunk_size,
            name=f"feeder-{self._lane_name}",
            only=self._only,
        )
        self._feeder = feeder
        takers = Takers(
            lambda number: ChunkThread(
                store,
                self._link,
                folders,
                aside,
                model=self._model,
                name=f"{self._name}-{number}",
                relieve=lambda: takers.relieve(),
                only=self._only,
            ),
            PIPELINE,
        )
        watch = GateStore(client, self._pool).watch(self._lane_name, on_change=self._lane.gate_changed)
        async with watch, self._tasks(stop):
            feeder.start()
            takers.start()
            try:
                await stop.wait()
            finally:
                await self._stop(takers, feeder)
        folders.close()
        with suppress(RedisError, OSError):
            await self._telemetry.withdraw_lane(self._lane_name)
        await events.close()

    @asynccontextmanager
    async def _tasks(self, stop: asyncio.Event) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(self._follow_policy(), name="policy"),
            asyncio.create_task(self._publish(stop), name="telemetry"),
            asyncio.create_task(self._keep_partials(), name="keep"),
        ]
        if self._own is not None:
            asking = self._own.run(
                wants_sleep=lambda: Rung.SLEEP in self._policy.pause.ladder,
                found=self._lane.found,
                works=lambda: self._lane.is_open,
            )
            tasks.append(asyncio.create_task(asking, name="own-engine"))
            tasks.append(asyncio.create_task(self._keep_unloaded(), name="keep-unloaded"))
        for task in tasks:
            task.add_done_callback(lambda ended: _task_ended(ended, stop))
        try:
            yield
        finally:
            await end_tasks(*tasks)

    async def _stop(self, takers: Takers, feeder: Feeder) -> None:
        """End what is in flight keeping its tokens, put the chunks down, end the threads."""
        self._lane.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await self._lane.until_quiet()
                if self._own is not None:
                    await self._own.settled()
        self._link.stopping.set()
        self._link.fed.set()
        takers.wake()
        deadline = time.monotonic() + _STOP_S
        await asyncio.to_thread(takers.join, deadline)
        await asyncio.to_thread(join_all, [feeder], deadline)
        if self._own is not None:
            await self._own.close()

    # -- the gate, the policy and the sizes

    def _lane_is(self, is_open: bool) -> None:
        self._closed_since_s = None if is_open else time.monotonic()
        self._link.lane_is(is_open)

    def _executor_changed(self) -> None:
        self._lane.executor_changed()
        inflight, told = self._executor.inflight, self._published
        if inflight > (told.offline_peak or 0) or (inflight == 0) != (told.offline_inflight == 0):
            self._changed.set()

    async def _follow_policy(self) -> None:
        store = PolicyStore(self._client, self._pool)
        back_off = _BACK_OFF_S[0]
        while True:
            try:
                async for policy in store.watch():
                    back_off = _BACK_OFF_S[0]
                    self._policy_is(policy)
            except (StoreError, RedisError, OSError) as error:
                _log.warning(
                    "The policy could not be read; the last one known stays. It is tried again.",
                    key="policy_outage",
                    error=str(error),
                )
            await asyncio.sleep(back_off)
            back_off = min(back_off * 2, _BACK_OFF_S[1])

    def _policy_is(self, policy: PoolPolicy | None) -> None:
        if policy is not None and self._guard.passes(policy):
            self._policy = policy.at_speed(self._speed)
            self._engine.admission.policy = self._policy
            self._lane.policy_changed(self._policy)

    def _chunk_size(self, tokens_per_line: float | None) -> ChunkSize:
        """How large the next chunk may be (called by the feeder's thread; reads only)."""
        policy, rate = self._policy.offline, self._throughput.tokens_per_s
        parallel = self._executor.budget.max_inflight or policy.max_inflight
        return ChunkSize(
            max_tokens=next_chunk_tokens(
                policy,
                rate,
                kv_tokens=self._engine.admission.kv_tokens,
                tokens_per_line=tokens_per_line,
                parallel=parallel,
            ),
            max_lines=next_chunk_lines(policy, rate, tokens_per_line=tokens_per_line, parallel=parallel),
            min_lines=policy.chunk_min_lines,
            ahead=policy.chunks_ahead,
        )

    def _chunk_done(self, chunk: ChunkInHand, took_s: float) -> None:
        _log.debug(
            "A chunk is finished.",
            batch=chunk.batch,
            chunk=chunk.chunk_no,
            lines=chunk.totals.lines,
            took_s=took_s,
        )

    # -- telemetry

    async def _publish(self, stop: asyncio.Event) -> None:
        back_off = _BACK_OFF_S[0]
        before_s, before_tokens, open_s = time.monotonic(), 0, 0.0
        while True:
            self._changed.clear()
            now_s, tokens = time.monotonic(), self._executor.finished_tokens
            if self._lane.is_open:
                open_s += now_s - before_s
            before_s = now_s
            if open_s >= min(1.0, self._policy.offline.chunk_target_ms / 2000.0) and tokens > before_tokens:
                self._throughput = self._throughput.observe(tokens=tokens - before_tokens, seconds=open_s)
                before_tokens, open_s = tokens, 0.0
            try:
                await self._publish_once()
                back_off = _BACK_OFF_S[0]
            except (RedisError, OSError):
                await asyncio.sleep(back_off)  # the record dies by itself; the gate's watch says so
                back_off = min(back_off * 2, _BACK_OFF_S[1])
                continue
            if self._burst and self._nothing_left():
                stop.set()
            await asyncio.sleep(_LEAST_PUBLISH_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(PUBLISH_S - _LEAST_PUBLISH_S):
                    await self._changed.wait()

    async def _publish_once(self) -> None:
        # An engine of another model has no work from here: its gate would be opened for nothing. One that
        # fails has: only a request through an open gate can show that it works again.
        wrong = bool(self._engine.watch.problem)
        work = 0 if wrong else self._executor.lines + self._feeder.backlog
        record = LaneRecord(
            lane=self._lane_name,
            replica=self._replica,
            offline_inflight=self._executor.inflight,
            work=work,
            offline_peak=self._lane.peak(),
            tokens_per_s=self._throughput.tokens_per_s,
            worker=self._name,
            tag=self._executor.wire.tag,
            numbers=self._executor.wire.numbers,
            next_number=self._executor.wire.next_number,
            model=self._model,
            problem=self._engine.problem or self._own_problem(),
            engine=self._engine_url if self._own_engine else "",
            refusal="" if self._own is None else self._own.refusal,
            stands="" if self._own is None else self._own.stands,
        )
        nudge = (work > 0) != ((self._published.work or 0) > 0)
        self._published = record
        await self._telemetry.publish_lane(record, nudge=nudge)
        if self._own is not None:
            return
        raw: Any = await self._client.get(self._keys.telemetry(self._replica))
        replica = decode_replica(raw)
        if replica is not None and replica.online_inflight is not None:
            self._engine.admission.online_inflight = replica.online_inflight

    def _own_problem(self) -> str:
        """Why the lane's own engine gets no work; of a shared one its replica's worker says so."""
        if self._own is None:
            return ""
        if self._engine.watch.down:
            return (
                f"engine_unhealthy: engine {self._engine_url}, which is the lane's own, does not answer its "
                "health check; start it again"
            )
        return self._own.problem

    def _nothing_left(self) -> bool:
        feeder = self._feeder
        return feeder.cycles > 0 and not feeder.batches_left and not self._link.chunks

    # -- long pauses

    async def _keep_partials(self) -> None:
        """Put the tokens of paused lines on the disk once a pause has lasted for a while."""
        while True:
            await self._lane.opened()
            await self._lane.until_quiet()
            await asyncio.sleep(_KEEP_AFTER_S)
            if self._lane.quiet:
                await self._keep()

    async def _keep_unloaded(self) -> None:
        """The same when an engine that stood still has given back what it held."""
        while True:
            await self._lane.unloaded.wait()
            self._lane.unloaded.clear()
            await self._keep()

    async def _keep(self) -> None:
        for chunk in tuple(self._link.chunks):
            chunk.keep()
            await asyncio.sleep(0)


def _task_ended(task: asyncio.Task[None], stop: asyncio.Event) -> None:
    """A task of the worker ends only when it is cancelled; another end must not go unseen."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error(
            "A part of the worker failed; it stops, and goes on where it was when it is started again.",
            key="task_failed",
            task=task.get_name(),
            exc_info=error,
        )
        stop.set()
