"""The gate as its holder sees it: leases, epochs, and mistakes of the caller."""

from __future__ import annotations

import msgspec
import pytest

from hybridsched.core.gate import (
    TRANSITIONS,
    Event,
    FastClose,
    GateError,
    Instruction,
    Opened,
    Published,
    Refused,
    Renewed,
    Seat,
    SeatState,
    Shut,
    TimePassed,
    handle,
)
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Budget, Gate, GateState

BUDGET = Budget(max_inflight=8, chunk_tokens=100, slice_tokens=10)
OPEN = Gate(lane="l", state=GateState.OPEN, reason=Reason.IDLE, budget=BUDGET, epoch=2, grace_ms=30)
CLOSED = Gate(lane="l", state=GateState.CLOSED, reason=Reason.HELD, epoch=2, grace_ms=5)


def published(gate: Gate, at_ms: float, lease_ms: float = 100) -> Published:
    return Published(gate=gate, lease_ms=lease_ms, at_ms=at_ms)


def run(*events: Event) -> tuple[Seat, list[Instruction]]:
    seat, out = Seat(lane="l"), ()
    for event in events:
        seat, out = handle(seat, event)
    return seat, list(out)


def test_a_lease_is_open_until_its_very_end() -> None:
    seat, out = run(published(OPEN, 10))
    assert out == [Opened(budget=BUDGET, epoch=2)]
    assert (seat.is_open(109.9), seat.is_open(110)) == (True, False)
    assert handle(seat, TimePassed(at_ms=109.9))[1] == ()
    seat, out = handle(seat, TimePassed(at_ms=110))
    assert (seat.state, list(out)) == (SeatState.EXPIRED, [Shut(reason=Reason.LEASE_EXPIRED, grace_ms=30)])


def test_a_renewal_prolongs_and_never_shortens() -> None:
    seat, _ = run(published(OPEN, 10), Renewed(epoch=2, lease_ms=100, at_ms=50))
    assert seat.until_ms == 150
    seat, _ = handle(seat, Renewed(epoch=2, lease_ms=1, at_ms=60))
    assert seat.until_ms == 150


def test_a_renewal_that_comes_too_late_does_not_bring_the_gate_back() -> None:
    seat, out = run(published(OPEN, 10), Renewed(epoch=2, lease_ms=100, at_ms=110))
    assert seat.state is SeatState.EXPIRED
    assert [type(i) for i in out] == [Shut, Refused]


def test_a_publication_after_the_lease_shuts_and_opens() -> None:
    seat, out = run(published(OPEN, 10), published(OPEN, 200))
    assert (seat.state, [type(i) for i in out]) == (SeatState.OPEN, [Shut, Opened])


def test_only_a_new_budget_is_told_again() -> None:
    assert run(published(OPEN, 10), published(OPEN, 20))[1] == []
    less = msgspec.structs.replace(OPEN, budget=msgspec.structs.replace(BUDGET, max_inflight=1))
    assert run(published(OPEN, 10), published(less, 20))[1] == [Opened(budget=less.budget, epoch=2)]


def test_a_fast_close_refuses_what_was_decided_before_it() -> None:
    events = (published(OPEN, 10), FastClose(epoch=3, at_ms=20, grace_ms=7))
    seat, out = run(*events)
    assert out == [Shut(reason=Reason.ONLINE_ARRIVED, grace_ms=7)]
    late, out = run(*events, published(OPEN, 30))
    assert (late.state, out) == (
        SeatState.CLOSED,
        [Refused(why="decided on an older epoch", epoch=2, seen_epoch=3)],
    )
    newer = msgspec.structs.replace(OPEN, epoch=3)
    assert handle(seat, published(newer, 30))[0].state is SeatState.OPEN


def test_a_close_of_an_older_epoch_still_closes() -> None:
    old = msgspec.structs.replace(CLOSED, epoch=0)
    seat, out = run(published(OPEN, 10), published(old, 20))
    assert (seat.state, seat.epoch, out) == (SeatState.CLOSED, 2, [Shut(reason=Reason.HELD, grace_ms=5)])
    assert handle(seat, published(old, 30))[1] == ()


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (published(msgspec.structs.replace(OPEN, lane="m"), 20), "the gate of lane 'm'"),
        (published(OPEN, 20, lease_ms=0), "lease of 0 ms"),
        (published(OPEN, 20, lease_ms=float("nan")), "lease of nan ms"),
        (TimePassed(at_ms=9), "time went back from 10 to 9 ms"),
    ],
)
def test_mistakes_of_the_caller_carry_the_story(event: Event, says: str) -> None:
    seat, _ = run(published(OPEN, 10))
    with pytest.raises(GateError, match=f"{says}(?s:.*)10 ms published: closed -> open"):
        handle(seat, event)


def test_the_table_names_every_state_and_event() -> None:
    tags = {"published", "fast_close", "renewed", "time_passed"}
    assert set(TRANSITIONS) == {(state, tag) for state in SeatState for tag in tags}


def test_events_and_instructions_round_trip_through_json() -> None:
    seat, out = run(published(OPEN, 10))
    assert msgspec.json.decode(msgspec.json.encode(seat), type=Seat) == seat
    assert msgspec.json.decode(msgspec.json.encode(out), type=list[Instruction]) == out
    event = published(OPEN, 1)
    assert msgspec.json.decode(msgspec.json.encode(event), type=Event) == event
