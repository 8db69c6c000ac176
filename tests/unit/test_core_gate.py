"""The gate as its holder sees it: leases, epochs, and mistakes of the caller."""

from __future__ import annotations

import msgspec
import pytest

from hybridsched.core.gate import (
    TRANSITIONS,
    Event,
    GateError,
    Gone,
    Instruction,
    Opened,
    Published,
    Refused,
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


def pushed(gate: Gate, at_ms: float) -> Published:
    return Published(gate=gate, lease_ms=100, at_ms=at_ms, pushed=True)


def of(gate: Gate, *, server_ms: float, epoch: int = 2) -> Gate:
    return msgspec.structs.replace(gate, at_ms=server_ms, epoch=epoch)


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


def test_a_renewal_counts_from_when_it_was_read_and_the_last_reading_holds() -> None:
    seat, out = run(published(OPEN, 10), published(OPEN, 50))
    assert (seat.until_ms, out) == (150, [])
    seat, _ = handle(seat, published(OPEN, 60, lease_ms=1))
    assert seat.until_ms == 61


def test_a_gate_that_is_gone_expires_and_a_closed_one_stays_what_it_was() -> None:
    seat, out = run(published(OPEN, 10), Gone(at_ms=20))
    assert (seat.state, out) == (SeatState.EXPIRED, [Shut(reason=Reason.LEASE_EXPIRED, grace_ms=30)])
    assert handle(seat, Gone(at_ms=30))[1] == ()
    seat, out = run(published(CLOSED, 10), Gone(at_ms=20))
    assert (seat.gate_at(20), out) == (CLOSED, [])


def test_what_holds_is_the_gate_until_its_lease_ends_and_then_a_closed_one_of_the_same_descent() -> None:
    seat, _ = run(published(of(OPEN, server_ms=7), 10))
    assert seat.gate_at(109.9) == of(OPEN, server_ms=7)
    over = seat.gate_at(110)
    assert (over.state, over.reason, over.by) == (GateState.CLOSED, Reason.LEASE_EXPIRED, "watch")
    assert (over.epoch, over.grace_ms, over.at_ms) == (2, 30, 7)
    assert handle(seat, TimePassed(at_ms=110))[0].gate_at(110) == over
    assert Seat(lane="l").gate_at(0).reason is Reason.LEASE_EXPIRED


def test_a_publication_after_the_lease_shuts_and_opens() -> None:
    seat, out = run(published(OPEN, 10), published(OPEN, 200))
    assert (seat.state, [type(i) for i in out]) == (SeatState.OPEN, [Shut, Opened])


def test_only_a_new_budget_is_told_again() -> None:
    assert run(published(OPEN, 10), published(OPEN, 20))[1] == []
    less = msgspec.structs.replace(OPEN, budget=msgspec.structs.replace(BUDGET, max_inflight=1))
    assert run(published(OPEN, 10), published(less, 20))[1] == [Opened(budget=less.budget, epoch=2)]


def test_a_fast_close_refuses_what_was_decided_before_it() -> None:
    fast = msgspec.structs.replace(CLOSED, reason=Reason.ONLINE_ARRIVED, epoch=3, grace_ms=7)
    events = (published(OPEN, 10), pushed(fast, 20))
    seat, out = run(*events)
    assert out == [Shut(reason=Reason.ONLINE_ARRIVED, grace_ms=7)]
    late, out = run(*events, published(OPEN, 30))
    assert (late.state, out) == (
        SeatState.CLOSED,
        [Refused(why="decided on an older epoch", epoch=2, seen_epoch=3)],
    )
    newer = msgspec.structs.replace(OPEN, epoch=3)
    assert handle(seat, published(newer, 30))[0].state is SeatState.OPEN


def test_a_push_that_comes_late_does_not_open() -> None:
    seat, out = run(pushed(of(CLOSED, server_ms=100), 10), pushed(of(OPEN, server_ms=99), 20))
    assert (seat.state, seat.gate) == (SeatState.CLOSED, of(CLOSED, server_ms=100))
    assert out == [Refused(why="published before the gate that is known", epoch=2, seen_epoch=2)]
    assert handle(seat, pushed(of(OPEN, server_ms=100), 30))[0].state is SeatState.OPEN


def test_what_stands_in_the_store_opens_also_when_the_servers_clock_was_set_back() -> None:
    seat, _ = run(pushed(of(CLOSED, server_ms=100), 10), published(of(OPEN, server_ms=40), 20))
    assert seat.state is SeatState.OPEN


def test_epochs_that_began_anew_open_when_published_after_all_that_was_seen() -> None:
    seat, _ = run(published(of(CLOSED, server_ms=100, epoch=9), 10))
    same, out = handle(seat, published(of(OPEN, server_ms=100, epoch=0), 20))
    assert (same.state, [type(i) for i in out]) == (SeatState.CLOSED, [Refused])
    later, _ = handle(seat, published(of(OPEN, server_ms=101, epoch=0), 20))
    assert (later.state, later.epoch) == (SeatState.OPEN, 0)


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


def test_a_closed_gate_needs_no_lease() -> None:
    assert run(published(OPEN, 10), published(CLOSED, 20, lease_ms=0))[0].gate == CLOSED


def test_the_table_names_every_state_and_event() -> None:
    tags = {"published", "gone", "time_passed"}
    assert set(TRANSITIONS) == {(state, tag) for state in SeatState for tag in tags}


def test_events_and_instructions_round_trip_through_json() -> None:
    seat, out = run(published(OPEN, 10))
    assert msgspec.json.decode(msgspec.json.encode(seat), type=Seat) == seat
    assert msgspec.json.decode(msgspec.json.encode(out), type=list[Instruction]) == out
    event = published(OPEN, 1)
    assert msgspec.json.decode(msgspec.json.encode(event), type=Event) == event
