"""How a Slurm job gets a lane of its node, and keeps it."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from typing import NamedTuple
from uuid import uuid4

from redis import RedisError
from redis.exceptions import NoPermissionError

from hybridsched.log import get_logger
from hybridsched.store.lane_holders import LEASE_MS, HeldLane, LaneHolders, Models, Place
from hybridsched.store.patience import hopeless

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
_SAY_FIRST_S = 5.0
"""Slurm may start more jobs than lanes are free: one that waits says so soon, and then now and then."""

_BACK_OFF_S = (0.2, 5.0)

_log = get_logger("lane")


def owner_name() -> str:
    """A name that no other process has."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"


class Seeker:
    """Looks for a free lane: of a node, or the one with a name; of a model, of one of several, or of any."""

    def __init__(
        self,
        holders: LaneHolders,
        *,
        owner: str,
        job: str = "",
        node: str | None = None,
        lane: str | None = None,
        model: Models = None,
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

        Raises:
            redis.RedisError: Redis does not take the login, or the user lacks a right (`patience.hopeless`).
        """
        began_s = time.monotonic()
        say_s = began_s + _SAY_FIRST_S
        looked_s, back_off = float("-inf"), _BACK_OFF_S[0]
        # With several models no node is the wrong one before it is known which of them it serves.
        model = self.model if isinstance(self.model, str) else ""
        noted = not (self._job and model)
        places: list[Place] = []
        while not stop.is_set():
            now_s, wait_s = time.monotonic(), _POLL_S
            if within_s is not None and now_s - began_s >= within_s:
                return None
            try:
                if not noted:  # so that Slurm starts its next run where the model is
                    await self._note(model)
                    noted = True
                if now_s - looked_s >= _LOOK_S or (not places and now_s - began_s < _LOOK_S):
                    looked_s, places = now_s, await self._places()
                held = await self._claim(places, open_only=now_s - began_s < self._settle_s)
                if held is not None:
                    return held
                back_off = _BACK_OFF_S[0]
            except (RedisError, OSError) as error:
                if hopeless(error):
                    raise
                if back_off >= 1.0:
                    self._say(f"Redis cannot be reached ({error})")
                wait_s, back_off = back_off, min(back_off * 2, _BACK_OFF_S[1])
            if now_s >= say_s:
                say_s = now_s + _SAY_S
                self._say("every lane is taken" if places else await self._nothing())
            await _sleep(stop, wait_s)
        return None

    async def _note(self, model: str) -> None:
        try:
            await self._holders.models.note(self._job, model)
        except NoPermissionError as error:
            _log.warning(
                "The job may not say which model it needs, so Slurm may start it on nodes without that. Its "
                "Redis user needs the rights in docs/slurm-jobs.md.",
                key="job_model_unsaid",
                error=str(error),
            )

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

    async def _nothing(self) -> str:
        """Why there is no place: those at which another works have a worker of their own."""
        with suppress(RedisError, OSError):
            if await self._holders.places_with_taken(node=self._node, lane=self._lane, model=self.model):
                return "every lane is taken"
        return f"no engine there has a lane of {self._named}" if self.model else "no engine there has a lane"

    @property
    def _named(self) -> str:
        return self.model if isinstance(self.model, str) else " or ".join(self.model or ()) or "any"

    def _say(self, why: str) -> None:
        _log.info(
            "Waiting for a lane. It comes when an engine is up on this node and no other job has its lane; "
            "see `hybridsched pool status`.",
            key="lane_wait",
            node=self._node,
            lane=self._lane,
            model=self._named,
            why=why,
        )


class Pace(NamedTuple):
    """How long a lane is held without renewal, how often it is renewed, and how early it is left if not."""

    lease_ms: int = LEASE_MS
    beat_s: float = BEAT_S
    margin_s: float = MARGIN_S


class Tenure:
    """Keeps one lane. `lost` is set before it can be another's, by this process's own clock at the latest."""

    def __init__(self, holders: LaneHolders, held: HeldLane, *, pace: Pace = Pace()) -> None:  # noqa: B008
        self._holders = holders
        self._pace = pace
        self.held = held
        self.lost = asyncio.Event()
        self.until_s = 0.0
        """`time.monotonic()` until which the lane is certainly ours."""
        self._timer: asyncio.TimerHandle | None = None
        self._kept(held.asked_s)

    async def run(self) -> None:
        """Renew until the lane is lost or the task is cancelled."""
        while not self.lost.is_set():
            await _sleep(self.lost, self._pace.beat_s)
            asked_s = time.monotonic()
            try:
                kept = await self._holders.renew(self.held, lease_ms=self._pace.lease_ms)
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
        self.until_s = asked_s + self._pace.lease_ms / 1000.0 - self._pace.margin_s
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
