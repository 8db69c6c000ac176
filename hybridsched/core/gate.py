"""A gate as its holder sees it: open, closed, or expired because nobody renewed it.

`handle(seat, event)` is the only way to a new seat. Times are the holder's own (monotonic) clock. For a lease
to never be counted longer than it is, `at_ms` of a publication or renewal is the time at which the holder
*began* to ask for it, not the time of the answer.

Epochs: every fast-path close raises the lane's epoch. An opening or a renewal that was decided on an older
one is refused, whatever order the messages come in. A close is never refused: to close is always safe.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from hybridsched.core.reasons import Reason
from hybridsched.core.values import NO_BUDGET, Budget, Gate, GateState, Value


class SeatState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    EXPIRED = "expired"
    """Was open, and its lease ended. Only a new publication opens it again, no renewal does."""


class Published(Value, frozen=True, kw_only=True, tag="published"):
    """A gate was read or pushed, with what is left of its lease."""

    gate: Gate
    lease_ms: float
    at_ms: float


class FastClose(Value, frozen=True, kw_only=True, tag="fast_close"):
    """The replica's own worker took an online request: closed at once, on a new epoch."""

    epoch: int
    at_ms: float
    grace_ms: float = 0.0


class Renewed(Value, frozen=True, kw_only=True, tag="renewed"):
    """The same gate lives on for `lease_ms` more."""

    epoch: int
    lease_ms: float
    at_ms: float


class TimePassed(Value, frozen=True, kw_only=True, tag="time_passed"):
    at_ms: float


Event = Published | FastClose | Renewed | TimePassed


class Opened(Value, frozen=True, kw_only=True, tag="opened"):
    """The lane may run within `budget`. Comes again when the budget changes."""

    budget: Budget
    epoch: int


class Shut(Value, frozen=True, kw_only=True, tag="shut"):
    """The lane must pause. Comes once for each time it was open."""

    reason: Reason
    grace_ms: float


class Refused(Value, frozen=True, kw_only=True, tag="refused"):
    """An opening or renewal was not believed."""

    why: str
    epoch: int
    seen_epoch: int


Instruction = Opened | Shut | Refused


class Seat(Value, frozen=True, kw_only=True):
    """The state of one gate at its holder. Start with `Seat(lane=...)`: closed until told otherwise."""

    lane: str
    state: SeatState = SeatState.CLOSED
    reason: Reason = Reason.POLICY_CLOSED
    budget: Budget = NO_BUDGET
    grace_ms: float = 0.0
    epoch: int = 0
    """The highest seen."""
    until_ms: float = 0.0
    """End of the lease while open."""
    now_ms: float = 0.0
    """Time of the last event."""
    story: tuple[str, ...] = ()

    def is_open(self, at_ms: float) -> bool:
        """Whether the lane may run at `at_ms`; no more from the very end of the lease on."""
        return self.state is SeatState.OPEN and at_ms < self.until_ms


STORY_LENGTH = 24

TRANSITIONS: dict[tuple[SeatState, str], frozenset[SeatState]] = {
    (SeatState.CLOSED, "published"): frozenset({SeatState.CLOSED, SeatState.OPEN}),
    (SeatState.CLOSED, "fast_close"): frozenset({SeatState.CLOSED}),
    (SeatState.CLOSED, "renewed"): frozenset({SeatState.CLOSED}),
    (SeatState.CLOSED, "time_passed"): frozenset({SeatState.CLOSED}),
    (SeatState.OPEN, "published"): frozenset({SeatState.OPEN, SeatState.CLOSED}),
    (SeatState.OPEN, "fast_close"): frozenset({SeatState.CLOSED}),
    (SeatState.OPEN, "renewed"): frozenset({SeatState.OPEN}),
    (SeatState.OPEN, "time_passed"): frozenset({SeatState.OPEN, SeatState.EXPIRED}),
    (SeatState.EXPIRED, "published"): frozenset({SeatState.EXPIRED, SeatState.OPEN, SeatState.CLOSED}),
    (SeatState.EXPIRED, "fast_close"): frozenset({SeatState.CLOSED}),
    (SeatState.EXPIRED, "renewed"): frozenset({SeatState.EXPIRED}),
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

    Raises `GateError` for another lane's gate, for a lease that is not positive, and for time that runs
    backwards: these are mistakes of the caller.
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
    if isinstance(event, Published | Renewed) and not event.lease_ms > 0:
        raise GateError(f"a lease of {event.lease_ms:g} ms was given; it must be above 0", seat)


def _step(seat: Seat, event: Event) -> Step:
    """One event, checked against the table and told in the story."""
    match event:
        case Published(gate=gate) if gate.state is GateState.OPEN:
            new, out = _open(seat, event)
        case Published(gate=gate):
            new, out = _shut(seat, SeatState.CLOSED, gate.reason, gate.grace_ms, gate.epoch)
        case FastClose(epoch=epoch, grace_ms=grace_ms):
            new, out = _shut(seat, SeatState.CLOSED, Reason.ONLINE_ARRIVED, grace_ms, epoch)
        case Renewed():
            new, out = _renew(seat, event)
        case TimePassed(at_ms=at_ms):
            new, out = seat, ()
            if seat.state is SeatState.OPEN and at_ms >= seat.until_ms:
                new, out = _shut(seat, SeatState.EXPIRED, Reason.LEASE_EXPIRED, seat.grace_ms, seat.epoch)
    tag = str(event.__struct_config__.tag)
    if new.state not in TRANSITIONS[(seat.state, tag)]:
        raise GateError(f"{tag} led to {new.state}, which the table does not allow", seat)
    if not out and new.state is seat.state:
        return new, out
    line = f"{event.at_ms:g} ms {tag}: {seat.state} -> {new.state} ({new.reason}, epoch {new.epoch})"
    return msgspec.structs.replace(new, story=(*seat.story, line)[-STORY_LENGTH:]), out


def _open(seat: Seat, event: Published) -> Step:
    gate = event.gate
    if gate.epoch < seat.epoch:
        return seat, (_refused("decided on an older epoch", gate.epoch, seat),)
    new = msgspec.structs.replace(
        seat,
        state=SeatState.OPEN,
        reason=gate.reason,
        budget=gate.budget,
        grace_ms=gate.grace_ms,
        epoch=gate.epoch,
        until_ms=event.at_ms + event.lease_ms,
    )
    if seat.state is SeatState.OPEN and gate.budget == seat.budget:
        return new, ()
    return new, (Opened(budget=gate.budget, epoch=gate.epoch),)


def _shut(seat: Seat, state: SeatState, reason: Reason, grace_ms: float, epoch: int) -> Step:
    new = msgspec.structs.replace(
        seat, state=state, reason=reason, budget=NO_BUDGET, grace_ms=grace_ms, epoch=max(seat.epoch, epoch)
    )
    return new, (Shut(reason=reason, grace_ms=grace_ms),) if seat.state is SeatState.OPEN else ()


def _renew(seat: Seat, event: Renewed) -> Step:
    if seat.state is not SeatState.OPEN:
        return seat, (_refused("a gate that is not open cannot be renewed", event.epoch, seat),)
    if event.epoch != seat.epoch:
        return seat, (_refused("it renews another epoch", event.epoch, seat),)
    until = max(seat.until_ms, event.at_ms + event.lease_ms)
    return msgspec.structs.replace(seat, until_ms=until), ()


def _refused(why: str, epoch: int, seat: Seat) -> Refused:
    return Refused(why=why, epoch=epoch, seen_epoch=seat.epoch)
