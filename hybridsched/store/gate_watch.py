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

from hybridsched.core.gate import Event, Gone, Published, Seat, SeatState, TimePassed, handle
from hybridsched.core.values import Gate, GateState
from hybridsched.log import get_logger
from hybridsched.store.channels import messages
from hybridsched.store.found import read_json
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

    Until the first reading the gate is closed. What is believed, and for how long, is decided by
    `hybridsched.core.gate`; the watch brings it what is pushed and polled, and the time. Pushes and polls
    travel on two connections: a poll is not brought when something was pushed while it was under way.
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
        self._provisional_ms = provisional_ms
        self._seat = Seat(lane=lane)
        """Replaced as a whole, and only on the loop: other threads read it."""
        self._told = self._seat.gate_at(_now_ms())
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
        """The gate now; closed with `lease_expired` when its lease is over. From any thread."""
        return self._seat.gate_at(_now_ms())

    @property
    def lease_left_ms(self) -> float:
        """How long an open gate may still be relied on without renewal; 0 when closed. From any thread."""
        seat = self._seat
        return max(0.0, seat.until_ms - _now_ms()) if seat.state is SeatState.OPEN else 0.0

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
            except Exception as error:  # noqa: BLE001 - the outer edge: whoever follows the gate must live on
                self._fault(error)
            await asyncio.sleep(back_off)
            back_off = min(back_off * 2, BACK_OFF_S[1])

    def _pushed(self, data: bytes) -> None:
        gate = read_json(_GATE, data, self._channel)
        if gate is None:
            self._poll_now.set()
            return
        if gate.lane != self._lane:
            return
        self._pushes += 1
        self._published(gate, _now_ms(), self._provisional_ms, pushed=True)
        self._poll_now.set()

    async def _poll(self) -> None:
        back_off = BACK_OFF_S[0]
        while True:
            self._poll_now.clear()
            seen = self._pushes
            asked_ms = _now_ms()
            try:
                reading = await self._read()
            except (RedisError, OSError) as error:
                self._outage(error)
                await asyncio.sleep(back_off)
                back_off = min(back_off * 2, BACK_OFF_S[1])
                continue
            except Exception as error:  # noqa: BLE001 - the outer edge: whoever follows the gate must live on
                self._fault(error)
                await asyncio.sleep(back_off)
                back_off = min(back_off * 2, BACK_OFF_S[1])
                continue
            back_off = BACK_OFF_S[0]
            if seen != self._pushes:
                continue
            self._polled(reading, asked_ms)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poll_now.wait(), self._poll_s)

    def _polled(self, reading: Reading, asked_ms: float) -> None:
        gate, now_ms = reading.gate, _now_ms()
        if gate is None or gate.lane != self._lane:
            self._feed(Gone(at_ms=now_ms))
        else:
            # The server measured the rest after it was asked: counting from then is never too long.
            self._published(gate, now_ms, asked_ms + reading.lease_ms - now_ms)

    def _published(self, gate: Gate, now_ms: float, left_ms: float, *, pushed: bool = False) -> None:
        if gate.state is GateState.OPEN and left_ms <= 0:
            self._feed(Gone(at_ms=now_ms))
        else:
            self._feed(Published(gate=gate, lease_ms=left_ms, at_ms=now_ms, pushed=pushed))

    def _feed(self, event: Event) -> None:
        # A lease that ended before the event is told by itself, also where the event opens the gate again.
        between, _ = handle(self._seat, TimePassed(at_ms=event.at_ms))
        self._seat, _ = handle(between, event)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._seat.state is SeatState.OPEN:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.lease_left_ms / 1000.0, self._time_passed)
        for seat in (between, self._seat):
            self._tell(seat.gate_at(event.at_ms))

    def _time_passed(self) -> None:
        self._feed(TimePassed(at_ms=_now_ms()))

    def _tell(self, gate: Gate) -> None:
        if gate == self._told:
            return
        self._told = gate
        if self._on_change is not None:
            self._on_change(gate)
        self._changes.append(gate)
        self._changed.set()

    def _fault(self, error: Exception) -> None:
        """What nobody foresaw: the gate closes, and the watch goes on."""
        _log.error(
            "Following the gate failed; the gate is closed and the watch goes on. Report this as a defect.",
            key="gate_watch_fault",
            lane=self._lane,
            error=repr(error)[:300],
        )
        self._feed(Gone(at_ms=_now_ms()))

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


def _now_ms() -> float:
    return time.monotonic() * 1000.0
