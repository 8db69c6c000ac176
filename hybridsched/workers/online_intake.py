"""The loops between an online worker and the queue: claims, leases, cancellations, the replica's record."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from redis.exceptions import RedisError

from hybridsched.core.admission import OnlineAdmission
from hybridsched.log import get_logger
from hybridsched.store.events import EventLog
from hybridsched.store.online import OnlineQueue
from hybridsched.store.online_signals import Cancel
from hybridsched.workers.online_engine import EngineWatch, wait_for
from hybridsched.workers.online_jobs import Jobs
from hybridsched.workers.online_policy import PolicyFollower
from hybridsched.workers.online_tasks import run_together
from hybridsched.workers.online_telemetry import OnlineCounts

_log = get_logger("online")


class IntakeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the loops, in seconds. All workers of a model must use the same lease."""

    lease_s: float = 5.0
    """A request whose worker has not renewed it for this long is taken from it."""
    safety_s: float = 0.2
    """A claim is tried this often without a wake: pub/sub delivers at most once."""
    record_s: float = 1.0
    """The replica's record is renewed this often, and after each change of its load."""
    record_pause_s: float = 0.01
    """Shortest time between two of those: loads that change faster are sent together."""
    back_off_s: float = 0.2


class Intake:
    """Claims requests for one replica while its engine is healthy and has room.

    Room is what the policy allows, the engine's sequence slots and its KV cache, whichever is least. Where
    the KV capacity is unknown, slots alone decide: the engine queues what does not fit, and offline leaves
    first.
    """

    def __init__(
        self,
        queue: OnlineQueue,
        *,
        model: str,
        replica: str,
        consumer: str,
        lane: str | None,
        counts: OnlineCounts,
        watch: EngineWatch,
        policy: PolicyFollower,
        events: EventLog,
        options: IntakeOptions,
    ) -> None:
        self._queue = queue
        self._model = model
        self._replica = replica
        self._consumer = consumer
        self._lane = lane
        self._counts = counts
        self._watch = watch
        self._policy = policy
        self._events = events
        self._options = options
        self._jobs: Jobs | None = None
        self._wake = asyncio.Event()
        self._record = asyncio.Event()
        self._stopping = False
        self._claims_over = asyncio.Event()
        self._claims_over.set()
        self._others_live = False
        self._looked_at = 0.0
        self._full = False
        """There was no room at the last look: whatever ends makes it worth another."""
        self._quiet_until = time.monotonic() + options.lease_s
        """No reclaim before this: after an outage every lease looks run out, also those of living workers."""
        self._outages: set[str] = set()

    @property
    def ready(self) -> bool:
        """Whether requests may be claimed."""
        return self._watch.healthy and not self._stopping

    def others(self) -> bool:
        """Whether another replica of the model was live at the last look."""
        return self._others_live

    def room(self) -> int:
        """How many requests may be claimed now."""
        if not self.ready:
            return 0
        policy, counts = self._policy.policy, self._counts
        capacity = self._watch.capacity.or_policy(policy.engine)
        kv = capacity.kv_tokens
        if kv is not None and counts.inflight and counts.tokens >= kv:
            return 0
        admission = OnlineAdmission(policy=policy.online, capacity=capacity)
        return admission.room(online_inflight=counts.sequences)

    def changed(self) -> None:
        """The policy or the engine's health changed."""
        self._record.set()
        self._wake.set()

    def lighter(self) -> None:
        """The load fell or a request ended.

        No claim follows unless the replica was full: what waits was announced to the least loaded replica
        with room, and each claim announces what it leaves.
        """
        self._record.set()
        if self._full:
            self._wake.set()

    async def run(self, jobs: Jobs) -> None:
        """Until cancelled. `stop` first, so that no claim is cut in the middle."""
        self._jobs = jobs
        await run_together(
            claims=self._claim_until_stopped(jobs),
            signals=self._listen(jobs),
            record=self._every("record", self._record_once, self._record_pause),
            leases=self._every("leases", self._heartbeat, self._heartbeat_pause),
            reclaim=self._every("reclaim", self._reclaim, self._reclaim_pause),
        )

    async def stop(self) -> None:
        """Claim nothing more; leases of what is held are still renewed."""
        self._stopping = True
        self.changed()
        await self._claims_over.wait()

    async def leave(self) -> None:
        """Take the replica out of the pool's records."""
        await self._queue.unregister(self._model, self._replica, self._consumer)

    # claims

    async def _claim_until_stopped(self, jobs: Jobs) -> None:
        self._claims_over.clear()
        try:
            await self._claim_all(jobs)
        finally:
            self._claims_over.set()

    async def _claim_all(self, jobs: Jobs) -> None:
        while not self._stopping:
            self._wake.clear()
            room, more = self.room(), False
            self._full = room == 0
            if room > 0:
                async with self._guard("claim"):
                    more = await self._claim(jobs, room)
                if "claim" in self._outages:
                    await asyncio.sleep(self._options.back_off_s)
            if not more:
                await wait_for(self._wake, self._options.safety_s)

    async def _claim(self, jobs: Jobs, room: int) -> bool:
        """One claim; True when it was cut off by its limit, so that there may be more."""
        inflight = self._counts.inflight
        granted = await self._queue.claim(
            self._model,
            self._replica,
            self._consumer,
            load=jobs.load,
            inflight=inflight,
            cap=inflight + room,
            limit=room,
            lane=self._lane if self._policy.closes_gates else None,
        )
        now = time.monotonic()
        for claimed in granted:
            jobs.start(claimed, now)
        if granted and granted[0].closed_gate:
            self._events.append(
                {
                    "t": "signal",
                    "lane": self._lane,
                    "replica": self._replica,
                    "mono_s": now - max(claimed.age_ms for claimed in granted) / 1000.0,
                    "claimed_mono_s": now,
                }
            )
        # Whatever a claim leaves behind is another replica's turn, and the claim has woken that one.
        return len(granted) >= room

    async def _listen(self, jobs: Jobs) -> None:
        while True:
            async with self._guard("signals"):
                async for signal in self._queue.signals(self._replica):
                    if isinstance(signal, Cancel):
                        jobs.cancel(signal.id)
                    else:
                        self._wake.set()
            await asyncio.sleep(self._options.back_off_s)  # claims go on by their timer

    # the replica's record

    async def _record_once(self) -> None:
        jobs = self._jobs
        inflight = self._counts.inflight
        now_ms = await self._queue.register_replica(
            self._model,
            self._replica,
            load=0.0 if jobs is None else jobs.load,
            inflight=inflight,
            cap=inflight + self.room() if self.ready else 0,
        )
        if time.monotonic() - self._looked_at >= self._options.record_s / 2:
            self._looked_at = time.monotonic()
            await self._look_for_others(now_ms)

    async def _look_for_others(self, now_ms: float) -> None:
        client: Any = self._queue.client
        found: dict[bytes, bytes] = await client.hgetall(self._queue.keys.replicas(self._model))
        mine = self._replica.encode()
        self._others_live = any(
            name != mine and live_record(record, now_ms) for name, record in found.items()
        )

    async def _record_pause(self) -> None:
        await asyncio.sleep(self._options.record_pause_s)
        await wait_for(self._record, self._options.record_s)
        self._record.clear()

    # leases

    async def _heartbeat(self) -> None:
        held = [] if self._jobs is None else self._jobs.held()
        if held and self._jobs is not None:
            for claimed in await self._queue.heartbeat(self._consumer, held):
                self._jobs.lost(claimed)

    async def _heartbeat_pause(self) -> None:
        await asyncio.sleep(self._options.lease_s / 3)

    async def _reclaim(self) -> None:
        if time.monotonic() < self._quiet_until:
            return
        outcome = await self._queue.reclaim(self._model, int(self._options.lease_s * 1000))
        if outcome.total() > outcome["lost"]:
            _log.warning(
                "Requests were taken from a worker that no longer renews them; they run again or end.",
                key="requests_reclaimed",
                **{word: count for word, count in outcome.items() if word != "lost"},
            )

    async def _reclaim_pause(self) -> None:
        # Spread by name rather than by chance: the workers of a model look one after another, every time.
        share = zlib.crc32(self._replica.encode()) % 1000 / 1000.0
        await asyncio.sleep(self._options.lease_s * (0.25 + 0.25 * share))

    # outages

    async def _every(
        self, what: str, step: Callable[[], Awaitable[None]], pause: Callable[[], Awaitable[None]]
    ) -> None:
        while True:
            async with self._guard(what):
                await step()
            if what in self._outages:
                await asyncio.sleep(self._options.back_off_s)
            else:
                await pause()

    @asynccontextmanager
    async def _guard(self, what: str) -> AsyncIterator[None]:
        """Note an outage within the block, or whatever else breaks it, once, and go on after it."""
        try:
            yield
        except (RedisError, OSError) as error:
            self._quiet_until = time.monotonic() + self._options.lease_s
            if not self._outages:
                _log.warning(
                    "Redis cannot be reached or refuses; running requests go on, none is taken meanwhile.",
                    key="store_outage",
                    doing=what,
                    error=str(error),
                )
            self._outages.add(what)
        except Exception:  # noqa: BLE001 - the loop's edge: what was claimed meanwhile is reclaimed by others
            if what not in self._outages:
                _log.exception(
                    "A step of the worker failed in a way that nothing here foresees; it is tried again.",
                    key="step_broke",
                    doing=what,
                )
            self._outages.add(what)
        else:
            self._outages.discard(what)


def live_record(record: bytes, now_ms: float) -> bool:
    """Whether a record of the replicas hash is live at `now_ms` and its replica takes requests."""
    try:
        expires, _, _, cap = record.split()[:4]
        return float(expires) > now_ms and int(cap) > 0
    except ValueError:
        return False  # not written by a worker of ours
