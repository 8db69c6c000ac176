"""Following one lane's gate: pushed for speed, polled for certainty; its lease ends without Redis too."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

import msgspec
from redis.exceptions import RedisError

from hybridsched.core.reasons import Reason
from hybridsched.core.values import Gate, GateState
from hybridsched.log import get_logger
from hybridsched.store.channels import messages
from hybridsched.store.tasks import end_tasks

if TYPE_CHECKING:
    from types import TracebackType

    from redis.asyncio import Redis

BACK_OFF_S = (0.02, 1.0)
"""First and longest wait between attempts to reach Redis again."""

UNREAD = 1024
"""Changes kept for a reader that is behind, or that only uses the callback."""

_GATE = msgspec.json.Decoder(Gate)
_log = get_logger("gates")


class Reading(Protocol):
    """What a poll returns (`hybridsched.store.gates.GateReading`)."""

    @property
    def gate(self) -> Gate | None: ...
    @property
    def lease_ms(self) -> float: ...
    @property
    def epoch(self) -> int: ...


class GateWatch:
    """One lane's gate as this process may rely on it. Made by `GateStore.watch`; use it as an async context.

    Until the first reading the gate is closed. Pushes and polls travel on two connections, so they can arrive
    out of order; the rules are: a close always counts; an opening counts only when it is not older than what
    is known; a poll does not count when something was pushed while it was under way.
    """

    def __init__(
        self,
        *,
        client: Redis,
        lane: str,
        channel: str,
        read: Callable[[], Awaitable[Reading]],
        on_change: Callable[[Gate], None] | None,
        poll_ms: float,
        provisional_ms: float,
    ) -> None:
        self._client = client
        self._lane = lane
        self._channel = channel
        self._read = read
        self._on_change = on_change
        self._poll_s = poll_ms / 1000.0
        self._provisional_s = provisional_ms / 1000.0
        self._current = _closed(lane, None)
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pushes = 0
        self._poll_now = asyncio.Event()
        self._changes: deque[Gate] = deque(maxlen=UNREAD)
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.subscriptions = 0
        """Times that pushes began or began again to come."""
        self.outages = 0
        """Times that Redis could not be reached."""

    @property
    def current(self) -> Gate:
        """The gate now; closed with `lease_expired` when its lease is over."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._expire()
        return self._current

    @property
    def lease_left_ms(self) -> float:
        """How long an open gate may still be relied on without renewal; 0 when closed. From any thread."""
        deadline = self._deadline
        return 0.0 if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000.0)

    async def __aenter__(self) -> GateWatch:
        self._tasks = [
            asyncio.create_task(self._listen(), name=f"gate-push-{self._lane}"),
            asyncio.create_task(self._poll(), name=f"gate-poll-{self._lane}"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await end_tasks(*self._tasks)

    def __aiter__(self) -> AsyncIterator[Gate]:
        return self

    async def __anext__(self) -> Gate:
        """The next change, in order. Who does not read for long loses the oldest ones."""
        while not self._changes:
            self._changed.clear()
            await self._changed.wait()
        return self._changes.popleft()

    async def _listen(self) -> None:
        back_off = BACK_OFF_S[0]
        while True:
            try:
                async for message in messages(self._client, self._channel):
                    back_off = BACK_OFF_S[0]
                    if message is None:
                        # What was announced before now is lost to this connection: read it.
                        self.subscriptions += 1
                        self._poll_now.set()
                    else:
                        self._pushed(message)
            except (RedisError, OSError) as error:
                self._outage(error)
            await asyncio.sleep(back_off)
            back_off = min(back_off * 2, BACK_OFF_S[1])

    def _pushed(self, data: bytes) -> None:
        try:
            gate = _GATE.decode(data)
        except msgspec.MsgspecError:
            self._poll_now.set()
            return
        if gate.lane != self._lane:
            return
        self._pushes += 1
        if gate.state is GateState.CLOSED:
            self._set(gate, None)
        elif gate.at_ms >= self._current.at_ms:
            self._set(gate, time.monotonic() + self._provisional_s)
        self._poll_now.set()

    async def _poll(self) -> None:
        back_off = BACK_OFF_S[0]
        while True:
            self._poll_now.clear()
            seen = self._pushes
            asked = time.monotonic()
            try:
                reading = await self._read()
            except (RedisError, OSError) as error:
                self._outage(error)
                await asyncio.sleep(back_off)
                back_off = min(back_off * 2, BACK_OFF_S[1])
                continue
            back_off = BACK_OFF_S[0]
            if seen != self._pushes:
                continue
            self._polled(reading, asked)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poll_now.wait(), self._poll_s)

    def _polled(self, reading: Reading, asked: float) -> None:
        gate = reading.gate
        if gate is None or gate.lane != self._lane:
            if self._current.state is GateState.OPEN:
                self._expire()
        elif gate.state is GateState.CLOSED:
            self._set(gate, None)
        else:
            # The server measured the rest after it was asked: counting from then is never too long.
            self._set(gate, asked + reading.lease_ms / 1000.0)

    def _set(self, gate: Gate, deadline: float | None) -> None:
        self._deadline = deadline
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, deadline - time.monotonic()), self._expire_if_due)
        if gate != self._current:
            self._current = gate
            if self._on_change is not None:
                self._on_change(gate)
            self._changes.append(gate)
            self._changed.set()

    def _expire_if_due(self) -> None:
        if self._deadline is None:
            return
        left = self._deadline - time.monotonic()
        if left > 0:
            self._timer = asyncio.get_running_loop().call_later(left, self._expire_if_due)
        else:
            self._expire()

    def _expire(self) -> None:
        self._set(_closed(self._lane, self._current), None)

    def _outage(self, error: Exception) -> None:
        self.outages += 1
        if self.outages == 1 or self.outages % 100 == 0:
            _log.warning(
                "Redis cannot be reached to follow the gate; it closes when its lease is over. "
                "Check that the server runs; the watch goes on trying.",
                key="gate_watch_outage",
                lane=self._lane,
                error=str(error),
                outages=self.outages,
            )


def _closed(lane: str, last: Gate | None) -> Gate:
    return Gate(
        lane=lane,
        state=GateState.CLOSED,
        reason=Reason.LEASE_EXPIRED,
        epoch=last.epoch if last else 0,
        grace_ms=last.grace_ms if last else 0.0,
        policy_version=last.policy_version if last else 0,
        by="watch",
        at_ms=last.at_ms if last else 0.0,
    )
