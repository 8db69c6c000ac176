"""A lane for a program that is not ours: taken and kept, shown to the policy worker, its gate followed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from redis import RedisError
from redis.asyncio import Redis

from hybridsched.core.values import NO_BUDGET, Budget, Gate
from hybridsched.store.gate_watch import GateWatch
from hybridsched.store.gates import GateStore
from hybridsched.store.lane_holders import HeldLane, LaneHolders, Place
from hybridsched.store.tasks import end_tasks
from hybridsched.store.telemetry import LaneRecord, TelemetryStore
from hybridsched.workers.lane_claim import Seeker, Tenure

PUBLISH_S = 0.25
"""Between two telemetry records of the lane."""


FOLLOW_S = 0.5
"""Between two looks at who holds a lane that another process keeps."""


class LaneKeeper:
    """Keeps one lane after the other, for as long as `run` runs.

    What it knows may be read from any thread. `changed` is called on its loop whenever that may have changed.
    """

    def __init__(
        self,
        client: Redis,
        pool: str,
        *,
        owner: str,
        seeker: Seeker | None = None,
        lane: str | None = None,
        holder: str = "",
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """With `seeker` lanes are taken; without, `holder` has `lane`, and its gate is followed as long as
        that is so."""
        self._gates = GateStore(client, pool)
        self._holders = LaneHolders(client, pool)
        self._telemetry = TelemetryStore(client, pool)
        self.owner = owner
        self._seeker = seeker
        self._lane = lane
        self._holder = holder
        self._proof_until_s = 0.0
        self._changed = changed
        self._watch: GateWatch | None = None
        self._tenure: Tenure | None = None
        self._budget: Budget = NO_BUDGET
        self._give_back = asyncio.Event()
        self._next: HeldLane | None = None
        self.place: Place | None = None
        """The lane in hand; None while there is none, or when only its gate is followed."""
        self.wants = True
        """Whether there is work to be done; without it the gate need not open."""
        self.closed_since_s: float | None = time.monotonic()
        """`time.monotonic()` since when no open lane has been in hand; None: one is open."""

    @property
    def is_open(self) -> bool:
        """Whether the lane is ours and its gate open, both certainly and at this moment."""
        watch, tenure = self._watch, self._tenure
        if watch is None or watch.lease_left_ms <= 0:
            return False
        if self._seeker is None:
            return time.monotonic() < self._proof_until_s
        return tenure is not None and time.monotonic() < tenure.until_s

    @property
    def max_inflight(self) -> int:
        """Requests that the open gate allows in the lane's engine at once; 0 while it is closed."""
        return self._budget.max_inflight if self.is_open else 0

    async def move_if_better(self) -> bool:
        """Change the lane for a free one that is open now; whether there is one (on the loop)."""
        tenure = self._tenure
        if tenure is None or self._seeker is None or self._next is not None:
            return False
        self._next = await self._seeker.better(tenure.held)
        if self._next is not None:
            self._give_back.set()
        return self._next is not None

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Waits through outages of Redis; the lane counts as closed meanwhile.

        Raises:
            redis.RedisError: see `Seeker.find`.
        """
        if self._seeker is None:
            async with self._following(self._lane or ""):
                await self._follow_holder(self._lane or "", stop)
            return
        while not stop.is_set():
            held, self._next = self._next or await self._seeker.find(stop), None
            if held is not None:
                await self._keep(held, stop)

    async def _follow_holder(self, lane: str, stop: asyncio.Event) -> None:
        """The lane counts as long as the holder's lease in Redis says, at the time of each look."""
        while not stop.is_set():
            asked_s = time.monotonic()
            with suppress(RedisError, OSError):
                found = await self._holders.read_token(lane)
                ours = found is not None and found[1] is not None and found[1].owner == self._holder
                self._proof_until_s = asked_s + found[2] if found is not None and ours else 0.0
                self._note()
            with suppress(TimeoutError):
                async with asyncio.timeout(FOLLOW_S):
                    await stop.wait()

    async def _keep(self, held: HeldLane, stop: asyncio.Event) -> None:
        self._give_back.clear()
        tenure = self._tenure = Tenure(self._holders, held)
        place = self.place = held.place
        async with AsyncExitStack() as ending:
            tasks = [
                asyncio.create_task(tenure.run(), name="tenure"),
                asyncio.create_task(self._publish(place), name="lane-telemetry"),
                asyncio.create_task(stop.wait(), name="stop"),
                asyncio.create_task(tenure.lost.wait(), name="lost"),
                asyncio.create_task(self._give_back.wait(), name="give-back"),
            ]
            ending.push_async_callback(self._leave, tenure)
            ending.push_async_callback(end_tasks, *tasks)
            await ending.enter_async_context(self._following(place.lane))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    async def _leave(self, tenure: Tenure) -> None:
        place, self.place, self._tenure = self.place, None, None
        self._note()
        if place is not None and not tenure.lost.is_set():
            with suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(2.0):
                    await self._telemetry.withdraw_lane(place.lane)
        await tenure.end()

    @asynccontextmanager
    async def _following(self, lane: str) -> AsyncIterator[None]:
        async with self._gates.watch(lane, on_change=self._gate) as watch:
            self._watch = watch
            try:
                yield
            finally:
                self._watch = None
        self._note()

    def _gate(self, gate: Gate) -> None:
        self._budget = gate.budget
        # The watch calls this before its state can be read: look after that.
        asyncio.get_running_loop().call_soon(self._note)

    def _note(self) -> None:
        if self.is_open:
            self.closed_since_s = None
        elif self.closed_since_s is None:
            self.closed_since_s = time.monotonic()
        self._changed()

    async def _publish(self, place: Place) -> None:
        """Say that work stands here. Its requests, if it sends any to the engine, are bounded by the gate's
        budget, which is what a decision takes them for while their number is not told."""
        work: int | None = None
        while True:
            before, work = work, int(self.wants)
            record = LaneRecord(
                lane=place.lane, replica=place.replica, offline_inflight=0, work=work, worker=self.owner
            )
            with suppress(RedisError, OSError):
                await self._telemetry.publish_lane(record, nudge=work != before)
            await asyncio.sleep(PUBLISH_S)
