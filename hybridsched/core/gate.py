"""A gate as its holder sees it: open, closed, or expired because nobody renewed it.

`handle(seat, event)` is the only way to a new seat; `hybridsched.store.gate_watch` feeds it what it reads and
hears. `at_ms` of an event is the holder's own (monotonic) clock, `gate.at_ms` is the server's. For a lease to
never be counted longer than it is, `lease_ms` is what is left at `at_ms` of a lease that is counted from when
the holder *began* to ask for it, not from the answer.

What is pushed and what is read come in any order. A close is never refused: to close is always safe. An
opening is refused when it was pushed and is older than what is known, and when it was decided on an older
epoch: every fast-path close raises the lane's.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from hybridsched.core.reasons import Reason
from hybridsched.core.values import Budget, Gate, GateState, Value


class SeatState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    EXPIRED = "expired"
    """Was open, and its lease ended. Only a publication opens it again."""


class Published(Value, frozen=True, kw_only=True, tag="published"):
    """A gate was read or pushed: a decision, a fast-path close, or the same gate with a new lease."""

    gate: Gate
    lease_ms: float
    """What is left of the lease at `at_ms`; above 0 for an open gate, without meaning for a closed one."""
    at_ms: float
    pushed: bool = False
    """It was announced, and may come late. What was read stands in the store, whatever its server time: that
    clock can be set back."""


class Gone(Value, frozen=True, kw_only=True, tag="gone"):
    """No gate stands any more, or what is known of it cannot be relied on: an open one expires."""

    at_ms: float


class TimePassed(Value, frozen=True, kw_only=True, tag="time_passed"):
    at_ms: float


Event = Published | Gone | TimePassed


class Opened(Value, frozen=True, kw_only=True, tag="opened"):
    """The lane may run within `budget`. Comes again when the budget changes."""

    budget: Budget
    epoch: int


class Shut(Value, frozen=True, kw_only=True, tag="shut"):
    """The lane must pause. Comes once for each time it was open."""

    reason: Reason
    grace_ms: float


class Refused(Value, frozen=True, kw_only=True, tag="refused"):
    """An opening was not believed."""

    why: str
    epoch: int
    seen_epoch: int


Instruction = Opened | Shut | Refused


class Seat(Value, frozen=True, kw_only=True):
    """The state of one gate at its holder. Start with `Seat(lane=...)`: closed until told otherwise."""

    lane: str
    state: SeatState = SeatState.CLOSED
    gate: Gate | None = None
    """The last publication that was believed."""
    epoch: int = 0
    """The highest seen. An opening of an older one is refused, unless it was published later."""
    seen_at_ms: float = 0.0
    """Server time of the latest publication seen.

    The store checks an opening's epoch as it publishes it, so one that is published after all we know, on a
    lower epoch, tells that the epochs began anew: Redis was emptied. To refuse it would keep the lane closed
    for good."""
    until_ms: float = 0.0
    """End of the lease while open."""
    now_ms: float = 0.0
    """Time of the last event."""
    story: tuple[str, ...] = ()

    def is_open(self, at_ms: float) -> bool:
        """Whether the lane may run at `at_ms`; no more from the very end of the lease on."""
        return self.state is SeatState.OPEN and at_ms < self.until_ms

    def gate_at(self, at_ms: float) -> Gate:
        """What holds at `at_ms`: the gate that is believed, or a closed one with `lease_expired`."""
        last = self.gate
        if last is not None and (self.state is SeatState.CLOSED or self.is_open(at_ms)):
            return last
        return Gate(
            lane=self.lane,
            state=GateState.CLOSED,
            reason=Reason.LEASE_EXPIRED,
            epoch=last.epoch if last else 0,
            grace_ms=last.grace_ms if last else 0.0,
            policy_version=last.policy_version if last else 0,
            by="watch",
            at_ms=last.at_ms if last else 0.0,
        )


STORY_LENGTH = 24

TRANSITIONS: dict[tuple[SeatState, str], frozenset[SeatState]] = {
    (SeatState.CLOSED, "published"): frozenset({SeatState.CLOSED, SeatState.OPEN}),
    (SeatState.CLOSED, "gone"): frozenset({SeatState.CLOSED}),
    (SeatState.CLOSED, "time_passed"): frozenset({SeatState.CLOSED}),
    (SeatState.OPEN, "published"): frozenset({SeatState.OPEN, SeatState.CLOSED}),
    (SeatState.OPEN, "gone"): frozenset({SeatState.EXPIRED}),
    (SeatState.OPEN, "time_passed"): frozenset({SeatState.OPEN, SeatState.EXPIRED}),
    (SeatState.EXPIRED, "published"): frozenset({SeatState.EXPIRED, SeatState.OPEN, SeatState.CLOSED}),
    (SeatState.EXPIRED, "gone"): frozenset({SeatState.EXPIRED}),
    (SeatState.EXPIRED, "time_passed"): frozenset({SeatState.EXPIRED}),
}
"""Where each event may lead. An event that comes after the lease's end first expires the gate by itself."""


class GateError(Exception):
    """An event that cannot be, or a step that the table does not allow. Carries the gate's story."""

    def __init__(self, message: str, seat: Seat) -> None:
        story = "\n  ".join(seat.story) or "(nothing happened yet)"
        super().__init__(f"gate of lane {seat.lane!r}, {seat.state}: {message}. Its story:\n  {story}")
        self.seat = seat


Step = tuple[Seat, tuple[Instruction, ...]]


def handle(seat: Seat, event: Event) -> Step:
    """The next seat and what its holder must do, in order.

    Raises `GateError` for another lane's gate, for an open gate whose lease is not positive, and for time
    that runs backwards: these are mistakes of the caller.
    """
    _check(seat, event)
    seat = msgspec.structs.replace(seat, now_ms=event.at_ms)
    first: tuple[Instruction, ...] = ()
    if seat.state is SeatState.OPEN and event.at_ms >= seat.until_ms:
        seat, first = _step(seat, TimePassed(at_ms=event.at_ms))
        if isinstance(event, TimePassed):
            return seat, first
    seat, then = _step(seat, event)
    return seat, first + then


def _check(seat: Seat, event: Event) -> None:
    if event.at_ms < seat.now_ms:
        raise GateError(f"time went back from {seat.now_ms:g} to {event.at_ms:g} ms", seat)
    if isinstance(event, Published) and event.gate.lane != seat.lane:
        raise GateError(f"it was given the gate of lane {event.gate.lane!r}", seat)
    if isinstance(event, Published) and event.gate.state is GateState.OPEN and not event.lease_ms > 0:
        raise GateError(f"a lease of {event.lease_ms:g} ms was given; it must be above 0", seat)


def _step(seat: Seat, event: Event) -> Step:
    """One event, checked against the table and told in the story."""
    match event:
        case Published(gate=gate):
            known = _anew(seat, gate)
            new, out = _open(known, event) if gate.state is GateState.OPEN else _close(known, gate)
            new = msgspec.structs.replace(new, seen_at_ms=max(seat.seen_at_ms, gate.at_ms))
        case Gone():
            new, out = _expire(seat)
        case TimePassed(at_ms=at_ms):
            new, out = _expire(seat) if at_ms >= seat.until_ms else (seat, ())
    tag = str(event.__struct_config__.tag)
    if new.state not in TRANSITIONS[(seat.state, tag)]:
        raise GateError(f"{tag} led to {new.state}, which the table does not allow", seat)
    if not out and new.state is seat.state:
        return new, out
    reason = new.gate_at(event.at_ms).reason
    line = f"{event.at_ms:g} ms {tag}: {seat.state} -> {new.state} ({reason}, epoch {new.epoch})"
    return msgspec.structs.replace(new, story=(*seat.story, line)[-STORY_LENGTH:]), out


def _anew(seat: Seat, gate: Gate) -> Seat:
    """The seat with the gate's epoch where that is lower and yet published later: see `seen_at_ms`."""
    if gate.epoch < seat.epoch and gate.at_ms > seat.seen_at_ms:
        return msgspec.structs.replace(seat, epoch=gate.epoch)
    return seat


def _open(seat: Seat, event: Published) -> Step:
    gate, last = event.gate, seat.gate
    if gate.epoch < seat.epoch:
        return seat, (_refused("decided on an older epoch", gate.epoch, seat),)
    if event.pushed and last is not None and gate.at_ms < last.at_ms:
        return seat, (_refused("published before the gate that is known", gate.epoch, seat),)
    new = msgspec.structs.replace(
        seat, state=SeatState.OPEN, gate=gate, epoch=gate.epoch, until_ms=event.at_ms + event.lease_ms
    )
    if seat.state is SeatState.OPEN and last is not None and gate.budget == last.budget:
        return new, ()
    return new, (Opened(budget=gate.budget, epoch=gate.epoch),)


def _close(seat: Seat, gate: Gate) -> Step:
    new = msgspec.structs.replace(
        seat, state=SeatState.CLOSED, gate=gate, epoch=max(seat.epoch, gate.epoch), until_ms=0.0
    )
    out = (Shut(reason=gate.reason, grace_ms=gate.grace_ms),) if seat.state is SeatState.OPEN else ()
    return new, out


def _expire(seat: Seat) -> Step:
    if seat.state is not SeatState.OPEN:
        return seat, ()
    new = msgspec.structs.replace(seat, state=SeatState.EXPIRED, until_ms=0.0)
    grace_ms = seat.gate.grace_ms if seat.gate is not None else 0.0
    return new, (Shut(reason=Reason.LEASE_EXPIRED, grace_ms=grace_ms),)


def _refused(why: str, epoch: int, seat: Seat) -> Refused:
    return Refused(why=why, epoch=epoch, seen_epoch=seat.epoch)
