"""The lane's pause ladder, step by step."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from hybridsched.core.lane import (
    TRANSITIONS,
    AbortInflight,
    Admit,
    AllQuiet,
    CancelGrace,
    Event,
    GateSeen,
    GraceOver,
    Instruction,
    LaneError,
    LaneState,
    LeaseOver,
    Phase,
    ReportQuiet,
    StartGrace,
    Stop,
    StopAdmitting,
    handle,
)
from hybridsched.core.policy import Rung
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Budget, Gate, GateState

BUDGET = Budget(max_inflight=8, chunk_tokens=100, slice_tokens=10)
BOUNDARY_ONLY = (Rung.BOUNDARY,)


def opened(epoch: int = 0, budget: Budget = BUDGET, grace_ms: float = 0.0) -> Gate:
    return Gate(
        lane="l", state=GateState.OPEN, reason=Reason.IDLE, budget=budget, epoch=epoch, grace_ms=grace_ms
    )


def closed(epoch: int = 0, grace_ms: float = 0.0, reason: Reason = Reason.ONLINE_ARRIVED) -> Gate:
    return Gate(lane="l", state=GateState.CLOSED, reason=reason, epoch=epoch, grace_ms=grace_ms)


def run(state: LaneState, *events: Event) -> tuple[LaneState, list[Instruction]]:
    """All the events; the instructions of the last one."""
    out: tuple[Instruction, ...] = ()
    for event in events:
        state, out = handle(state, event)
    return state, list(out)


def open_lane(**changes: object) -> LaneState:
    state, _ = run(LaneState(lane="l"), GateSeen(gate=opened()))
    return msgspec.structs.replace(state, **changes)


def test_an_open_gate_admits_and_again_only_when_the_budget_changes() -> None:
    state, out = run(LaneState(lane="l"), GateSeen(gate=opened()))
    assert (state.phase, out) == (Phase.OPEN, [Admit(budget=BUDGET, resumed=True)])
    state, out = run(state, GateSeen(gate=opened(), inflight=3))
    assert out == []
    less = msgspec.structs.replace(BUDGET, max_inflight=2)
    state, out = run(state, GateSeen(gate=opened(budget=less), inflight=3))
    assert out == [Admit(budget=less, resumed=False)]


def test_without_grace_a_close_ends_what_is_in_flight_at_once() -> None:
    state, out = run(open_lane(), GateSeen(gate=closed(epoch=1), inflight=3))
    assert out == [StopAdmitting(pause=1, reason=Reason.ONLINE_ARRIVED), AbortInflight(pause=1)]
    assert (state.phase, state.epoch) == (Phase.ENDING, 1)
    state, out = run(state, AllQuiet())
    assert out == [ReportQuiet(pause=1, rung=Rung.ITERATION, reason=Reason.ONLINE_ARRIVED, had_work=True)]
    assert state.phase is Phase.CLOSED


def test_with_grace_work_may_end_by_itself() -> None:
    state, out = run(open_lane(), GateSeen(gate=closed(grace_ms=50), inflight=3))
    assert out == [StopAdmitting(pause=1, reason=Reason.ONLINE_ARRIVED), StartGrace(pause=1, ms=50)]
    assert state.phase is Phase.GRACE
    state, out = run(state, AllQuiet())
    quiet = ReportQuiet(pause=1, rung=Rung.BOUNDARY, reason=Reason.ONLINE_ARRIVED, had_work=True)
    assert out == [CancelGrace(pause=1), quiet]


def test_when_the_grace_is_over_it_is_ended() -> None:
    state, out = run(open_lane(), GateSeen(gate=closed(grace_ms=50), inflight=3), GraceOver(pause=1))
    assert (state.phase, out) == (Phase.ENDING, [AbortInflight(pause=1)])
    assert run(state, GraceOver(pause=1)) == (state, [])


def test_a_repeated_close_neither_restarts_the_grace_nor_pauses_again() -> None:
    state, _ = run(open_lane(), GateSeen(gate=closed(grace_ms=50), inflight=3))
    again, out = run(state, GateSeen(gate=closed(grace_ms=50, epoch=4), inflight=2))
    assert (again.phase, again.pause, out) == (Phase.GRACE, 1, [])


def test_a_second_close_without_grace_cuts_the_first_ones_grace_short() -> None:
    state, out = run(
        open_lane(),
        GateSeen(gate=closed(grace_ms=50), inflight=3),
        GateSeen(gate=closed(epoch=1), inflight=2),
    )
    assert (state.phase, out) == (Phase.ENDING, [CancelGrace(pause=1), AbortInflight(pause=1)])


@pytest.mark.parametrize("grace_ms", [0.0, 50.0])
def test_with_the_boundary_rung_alone_nothing_is_ever_ended(grace_ms: float) -> None:
    start = open_lane(ladder=BOUNDARY_ONLY)
    state, out = run(start, GateSeen(gate=closed(grace_ms=grace_ms), inflight=3))
    assert (state.phase, out) == (Phase.GRACE, [StopAdmitting(pause=1, reason=Reason.ONLINE_ARRIVED)])
    state, out = run(state, GraceOver(pause=1), GateSeen(gate=closed(epoch=1), inflight=1))
    assert (state.phase, out) == (Phase.GRACE, [])
    _, out = run(state, AllQuiet())
    assert [type(i) for i in out] == [ReportQuiet]


def test_a_close_with_nothing_in_flight_is_quiet_at_once() -> None:
    state, out = run(open_lane(), GateSeen(gate=closed(), inflight=0))
    assert state.phase is Phase.CLOSED
    assert out == [
        StopAdmitting(pause=1, reason=Reason.ONLINE_ARRIVED),
        ReportQuiet(pause=1, rung=Rung.BOUNDARY, reason=Reason.ONLINE_ARRIVED, had_work=False),
    ]


def test_opening_again_within_the_grace_takes_the_pause_back() -> None:
    state, out = run(
        open_lane(), GateSeen(gate=closed(epoch=1, grace_ms=50), inflight=3), GateSeen(gate=opened(epoch=1))
    )
    assert (state.phase, out) == (Phase.OPEN, [CancelGrace(pause=1), Admit(budget=BUDGET, resumed=True)])
    late, out = run(state, GraceOver(pause=1))
    assert (late, out) == (state, [])


def test_a_late_timer_does_not_touch_the_next_pause() -> None:
    state, _ = run(
        open_lane(),
        GateSeen(gate=closed(grace_ms=50), inflight=3),
        GateSeen(gate=opened()),
        GateSeen(gate=closed(grace_ms=50), inflight=3),
    )
    assert run(state, GraceOver(pause=1)) == (state, [])
    assert run(state, GraceOver(pause=2))[0].phase is Phase.ENDING


def test_opening_again_while_ending_waits_until_all_is_quiet() -> None:
    state, out = run(
        open_lane(), GateSeen(gate=closed(epoch=1), inflight=3), GateSeen(gate=opened(epoch=1), inflight=2)
    )
    assert (state.phase, out) == (Phase.ENDING, [])
    state, out = run(state, AllQuiet())
    assert state.phase is Phase.OPEN
    assert [type(i) for i in out] == [ReportQuiet, Admit]


def test_closing_again_while_ending_forgets_the_opening() -> None:
    events = (GateSeen(gate=closed(epoch=1), inflight=3), GateSeen(gate=opened(epoch=1), inflight=2))
    for again in (GateSeen(gate=closed(epoch=2), inflight=2), LeaseOver(inflight=2), GateSeen(gate=None)):
        state, out = run(open_lane(), *events, again, AllQuiet())
        assert (state.phase, [type(i) for i in out]) == (Phase.CLOSED, [ReportQuiet])


@pytest.mark.parametrize("event", [LeaseOver(inflight=2), GateSeen(gate=None, inflight=2)])
def test_the_end_of_the_lease_closes_with_the_grace_of_the_gate(event: Event) -> None:
    start, _ = run(LaneState(lane="l"), GateSeen(gate=opened(grace_ms=20)))
    state, out = run(start, event)
    assert out == [StopAdmitting(pause=1, reason=Reason.LEASE_EXPIRED), StartGrace(pause=1, ms=20)]
    _, out = run(open_lane(), event)
    assert out == [StopAdmitting(pause=1, reason=Reason.LEASE_EXPIRED), AbortInflight(pause=1)]
    assert state.reason is Reason.LEASE_EXPIRED


def test_the_end_of_the_lease_does_not_cut_a_running_grace_short() -> None:
    state, out = run(open_lane(), GateSeen(gate=closed(grace_ms=50), inflight=3), LeaseOver(inflight=3))
    assert (state.phase, out) == (Phase.GRACE, [])


def test_an_opening_of_an_older_epoch_is_refused() -> None:
    state, out = run(open_lane(), GateSeen(gate=closed(epoch=5), inflight=0), GateSeen(gate=opened(epoch=4)))
    assert (state.phase, out) == (Phase.CLOSED, [])
    assert run(state, GateSeen(gate=opened(epoch=5)))[0].phase is Phase.OPEN


def test_a_stopping_lane_pauses_once_and_never_opens_again() -> None:
    state, out = run(open_lane(), Stop(inflight=3, grace_ms=10))
    assert out == [StopAdmitting(pause=1, reason=Reason.STOPPING), StartGrace(pause=1, ms=10)]
    state, out = run(state, GateSeen(gate=opened(epoch=9)))
    assert (state.phase, out) == (Phase.GRACE, [])
    state, out = run(state, GraceOver(pause=1), AllQuiet(), GateSeen(gate=opened(epoch=10)))
    assert (state.phase, out) == (Phase.CLOSED, [])


def test_quiet_outside_a_pause_says_nothing() -> None:
    assert run(open_lane(), AllQuiet()) == (open_lane(), [])
    assert run(LaneState(lane="l"), AllQuiet()) == (LaneState(lane="l"), [])


def test_mistakes_of_the_caller_carry_the_story() -> None:
    state, _ = run(open_lane(), GateSeen(gate=closed(epoch=7), inflight=3))
    with pytest.raises(LaneError, match=r"lane 'other'(?s:.*)open -> ending \(pause 1.*epoch 7"):
        handle(state, GateSeen(gate=msgspec.structs.replace(opened(), lane="other")))
    with pytest.raises(LaneError, match="-1 requests"):
        handle(open_lane(), LeaseOver(inflight=-1))


def test_the_table_names_every_phase_and_event() -> None:
    tags = {str(event.__struct_config__.tag) for event in get_args(Event)}
    assert len(tags) == 12
    assert set(TRANSITIONS) == {(phase, tag) for phase in Phase for tag in tags}


def test_the_story_is_bounded() -> None:
    state = LaneState(lane="l")
    for _ in range(50):
        state, _ = run(state, GateSeen(gate=opened()), GateSeen(gate=closed()))
    assert len(state.story) == 24


def test_state_events_and_instructions_round_trip_through_json() -> None:
    state, out = run(open_lane(), GateSeen(gate=closed(grace_ms=5), inflight=3))
    assert msgspec.json.decode(msgspec.json.encode(state), type=LaneState) == state
    assert msgspec.json.decode(msgspec.json.encode(out), type=list[Instruction]) == out
    event = GateSeen(gate=None, inflight=1)
    assert msgspec.json.decode(msgspec.json.encode(event), type=Event) == event


def test_epochs_that_began_anew_do_not_keep_the_lane_closed() -> None:
    """Redis was emptied: its epochs count from 0 again, and what it publishes is later than all before."""

    def at(gate: Gate, at_ms: float) -> Gate:
        return msgspec.structs.replace(gate, at_ms=at_ms)

    before, _ = run(LaneState(lane="l"), GateSeen(gate=at(opened(6), 100)), GateSeen(gate=at(closed(7), 200)))
    late, out = run(before, GateSeen(gate=at(opened(6), 150)))
    assert (late.phase, out) == (Phase.CLOSED, []), "published before the close: still refused"
    anew, out = run(late, GateSeen(gate=at(opened(0), 300)))
    assert (anew.phase, anew.epoch, out) == (Phase.OPEN, 0, [Admit(budget=BUDGET, resumed=True)])
    shut, _ = run(before, GateSeen(gate=at(closed(0), 300)))
    _, out = run(shut, GateSeen(gate=at(opened(0), 300)))
    assert out == [Admit(budget=BUDGET, resumed=True)], "a close tells of it as well"
