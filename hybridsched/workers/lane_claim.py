"""How a Slurm job gets a lane of its node, and keeps it."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from uuid import uuid4

from redis import RedisError

from hybridsched.log import get_logger
from hybridsched.store.lane_holders import LEASE_MS, HeldLane, LaneHolders, Place

BEAT_S = 2.0
"""Between two renewals."""

MARGIN_S = 2.0
"""A lane that could not be renewed is left this long before its lease ends."""

SETTLE_S = 1.0
"""For so long a job waits for a lane whose gate is open; then it takes a closed one, which opens only when
somebody with work stands there."""

_POLL_S = 0.2
_LOOK_S = 2.0
_SAY_S = 60.0
_BACK_OFF_S = (0.2, 5.0)

_log = get_logger("lane")


def owner_name() -> str:
    """A name that no other process has."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"


class Seeker:
    """Looks for a free lane: of a node, or the one with a name; of a model, or of any."""

    def __init__(
        self,
        holders: LaneHolders,
        *,
        owner: str,
        job: str = "",
        node: str | None = None,
        lane: str | None = None,
        model: str | None = None,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._holders = holders
        self._owner = owner
        self._job = job
        self._node = node
        self._lane = lane
        self._settle_s = settle_s
        self.model = model

    async def find(self, stop: asyncio.Event, *, within_s: float | None = None) -> HeldLane | None:
        """Take a lane as soon as there is one. None: `stop` was set, or none came within `within_s`.

        Waits through outages of Redis.
        """
        began_s = said_s = time.monotonic()
        looked_s, back_off = float("-inf"), _BACK_OFF_S[0]
        places: list[Place] = []
        while not stop.is_set():
            now_s, wait_s = time.monotonic(), _POLL_S
            if within_s is not None and now_s - began_s >= within_s:
                return None
            try:
                if now_s - looked_s >= _LOOK_S or (not places and now_s - began_s < _LOOK_S):
                    looked_s, places = now_s, await self._places()
                held = await self._claim(places, open_only=now_s - began_s < self._settle_s)
                if held is not None:
                    return held
                back_off = _BACK_OFF_S[0]
            except (RedisError, OSError) as error:
                if back_off >= 1.0:
                    self._say(f"Redis cannot be reached ({error})")
                wait_s, back_off = back_off, min(back_off * 2, _BACK_OFF_S[1])
            if now_s - said_s >= _SAY_S:
                said_s = now_s
                self._say("every lane is taken" if places else "no engine there has a lane")
            await _sleep(stop, wait_s)
        return None

    async def better(self, held: HeldLane) -> HeldLane | None:
        """Another lane that is free and whose gate is open now, taken; None: there is none."""
        try:
            places = [place for place in await self._places() if place.lane != held.place.lane]
            return await self._claim(places, open_only=True)
        except (RedisError, OSError):
            return None

    async def _places(self) -> list[Place]:
        return await self._holders.places(node=self._node, lane=self._lane, model=self.model)

    async def _claim(self, places: list[Place], *, open_only: bool) -> HeldLane | None:
        return await self._holders.claim(
            places, owner=self._owner, job=self._job, node=self._node or "", open_only=open_only
        )

    def _say(self, why: str) -> None:
        _log.info(
            "Waiting for a lane. It comes when an engine is up on this node and no other job has its lane; "
            "see `hybridsched pool status`.",
            key="lane_wait",
            node=self._node,
            lane=self._lane,
            model=self.model or "any",
            why=why,
        )


class Tenure:
    """Keeps one lane. `lost` is set before it can be another's, by this process's own clock at the latest."""

    def __init__(self, holders: LaneHolders, held: HeldLane) -> None:
        self._holders = holders
        self.held = held
        self.lost = asyncio.Event()
        self.until_s = 0.0
        """`time.monotonic()` until which the lane is certainly ours."""
        self._timer: asyncio.TimerHandle | None = None
        self._kept(held.asked_s)

    async def run(self) -> None:
        """Renew until the lane is lost or the task is cancelled."""
        while not self.lost.is_set():
            await _sleep(self.lost, BEAT_S)
            asked_s = time.monotonic()
            try:
                kept = await self._holders.renew(self.held)
            except (RedisError, OSError):
                continue  # the timer decides
            if kept and not self.lost.is_set():
                self._kept(asked_s)
            else:
                self._lose()

    async def end(self) -> None:
        """Give the lane back; when Redis is away it comes free by itself."""
        if self._timer is not None:
            self._timer.cancel()
        with suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(BEAT_S):
                await self._holders.release(self.held)

    def _kept(self, asked_s: float) -> None:
        self.until_s = asked_s + LEASE_MS / 1000.0 - MARGIN_S
        if self._timer is not None:
            self._timer.cancel()
        left = max(0.0, self.until_s - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(left, self._lose)

    def _lose(self) -> None:
        if not self.lost.is_set():
            _log.warning(
                "The lane could not be kept: Redis was away too long, or the lane was given to another job. "
                "What runs on it is ended; another lane is looked for.",
                key="lane_lost",
                lane=self.held.place.lane,
            )
            self.until_s = 0.0
            self.lost.set()


async def _sleep(until: asyncio.Event, seconds: float) -> None:
    """Sleep, but not longer than until the event."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await until.wait()
