"""The pause ladder of a lane with an engine of its own, step by step."""

from __future__ import annotations

import msgspec
import pytest

from hybridsched.core.lane import (
    AbortInflight,
    Admit,
    AllQuiet,
    CancelGrace,
    CancelLetGo,
    CancelRest,
    EngineAsleep,
    EngineGoes,
    EngineHeld,
    GateSeen,
    GraceOver,
    HoldEngine,
    HoldFailed,
    KeepOver,
    LaneState,
    LeaseOver,
    LetGo,
    Phase,
    PutToSleep,
    Release,
    ReportAsleep,
    ReportQuiet,
    SleepDue,
    SleepFailed,
    StartGrace,
    StartRest,
    Stop,
    StopAdmitting,
)
from hybridsched.core.policy import PausePolicy, Rung
from hybridsched.core.reasons import Reason
from tests.unit.test_core_lane import BUDGET, closed, opened, run

PAUSE = PausePolicy(
    ladder=(Rung.BOUNDARY, Rung.ITERATION, Rung.SLEEP), keep_ms=20_000.0, sleep_after_ms=60_000.0
)
WHY = Reason.ONLINE_ARRIVED


def own_lane(pause: PausePolicy = PAUSE) -> LaneState:
    """A lane whose worker has just begun."""
    return LaneState(lane="l", own=True).with_pause(pause)


def open_lane(pause: PausePolicy = PAUSE) -> LaneState:
    state, _ = run(own_lane(pause), GateSeen(gate=opened()), EngineGoes(turn=1))
    assert state.phase is Phase.OPEN
    return state


def held_lane(pause: PausePolicy = PAUSE) -> LaneState:
    state, _ = run(open_lane(pause), GateSeen(gate=closed(epoch=1), inflight=3), EngineHeld(pause=1))
    assert state.phase is Phase.HELD
    return state


def test_the_first_opening_lets_the_engine_go_whoever_stopped_it_and_asks_how_it_answers() -> None:
    state, out = run(own_lane(), GateSeen(gate=opened()))
    assert (state.phase, out) == (Phase.WAKING, [LetGo(turn=1, check=True)])
    state, out = run(state, EngineGoes(turn=1))
    assert (state.phase, out) == (Phase.OPEN, [Admit(budget=BUDGET, resumed=True)])
    without = PausePolicy()
    assert run(own_lane(without), GateSeen(gate=opened()))[1] == [LetGo(turn=1, check=False)]


def test_an_engine_that_was_found_going_gets_work_at_once_and_one_that_stood_is_asked() -> None:
    going = own_lane(PausePolicy()).found(stands=False)
    assert run(going, GateSeen(gate=opened()))[1] == [Admit(budget=BUDGET, resumed=True)]
    stood = own_lane(PausePolicy()).found(stands=True)
    assert run(stood, GateSeen(gate=opened()))[1] == [LetGo(turn=1, check=True)]
    assert held_lane().found(stands=False) == held_lane(), "the answer came too late to count"


def test_a_close_stops_the_engine_with_the_requests_in_it() -> None:
    state, out = run(open_lane(), GateSeen(gate=closed(epoch=1), inflight=3))
    assert (state.phase, out) == (Phase.HOLDING, [StopAdmitting(pause=1, reason=WHY), HoldEngine(pause=1)])
    state, out = run(state, EngineHeld(pause=1))
    quiet = ReportQuiet(pause=1, rung=Rung.ITERATION, reason=WHY, had_work=True, held=True)
    assert out == [quiet, StartRest(pause=1, keep_ms=20_000.0, sleep_ms=60_000.0)]
    state, out = run(state, GateSeen(gate=opened(epoch=1), inflight=3))
    assert (state.phase, out) == (Phase.WAKING, [CancelRest(pause=1), LetGo(turn=2, check=False)])
    state, out = run(state, EngineGoes(turn=2))
    assert (state.phase, out) == (Phase.OPEN, [Admit(budget=BUDGET, resumed=True)])


def test_the_grace_comes_first_here_too() -> None:
    state, out = run(open_lane(), GateSeen(gate=closed(grace_ms=50), inflight=3))
    assert out == [StopAdmitting(pause=1, reason=WHY), StartGrace(pause=1, ms=50)]
    assert run(state, GraceOver(pause=1))[1] == [HoldEngine(pause=1)]
    assert run(state, GateSeen(gate=closed(epoch=1), inflight=2))[1] == [
        CancelGrace(pause=1),
        HoldEngine(pause=1),
    ]


def test_an_opening_while_the_engine_stops_waits_for_its_word() -> None:
    state, out = run(
        open_lane(), GateSeen(gate=closed(epoch=1), inflight=3), GateSeen(gate=opened(epoch=1), inflight=3)
    )
    assert (state.phase, out) == (Phase.HOLDING, [])
    state, out = run(state, EngineHeld(pause=1))
    assert [type(i) for i in out] == [ReportQuiet, LetGo]


@pytest.mark.parametrize("never", [False, True])
def test_an_engine_that_cannot_be_stopped_has_its_requests_ended(never: bool) -> None:
    state, out = run(
        open_lane(), GateSeen(gate=closed(epoch=1), inflight=3), HoldFailed(pause=1, never=never)
    )
    assert (state.phase, out) == (Phase.ENDING, [AbortInflight(pause=1)])
    state, out = run(state, AllQuiet())
    assert out[0] == ReportQuiet(pause=1, rung=Rung.ITERATION, reason=WHY, had_work=True)
    # It may have stopped all the same, so it is told to go on.
    state, out = run(state, GateSeen(gate=opened(epoch=1)))
    assert [type(i) for i in out] == [CancelRest, LetGo]
    _, out = run(state, EngineGoes(turn=2), GateSeen(gate=closed(epoch=2), inflight=1))
    assert type(out[1]) is (AbortInflight if never else HoldEngine)


def test_what_is_held_for_long_is_ended_with_its_tokens_and_quiet_is_said_once() -> None:
    state, out = run(held_lane(), KeepOver(pause=1))
    assert (state.phase, out) == (Phase.ENDING, [AbortInflight(pause=1)])
    state, out = run(state, AllQuiet())
    assert (state.phase, out) == (Phase.HELD, [])
    state, out = run(state, SleepDue(pause=1), AllQuiet())
    assert (state.phase, out) == (Phase.SLEEPING, [CancelRest(pause=1), PutToSleep(pause=1)])


def test_a_lane_that_stays_closed_sleeps_and_is_asked_before_it_works_again() -> None:
    state, out = run(held_lane(), SleepDue(pause=1))
    assert (state.phase, out) == (Phase.ENDING, [AbortInflight(pause=1)])
    state, out = run(state, AllQuiet())
    assert (state.phase, out) == (Phase.SLEEPING, [CancelRest(pause=1), PutToSleep(pause=1)])
    state, out = run(state, EngineAsleep(pause=1))
    assert (state.phase, out) == (Phase.ASLEEP, [ReportAsleep(pause=1, reason=WHY)])
    state, out = run(state, GateSeen(gate=opened(epoch=1)))
    assert (state.phase, out) == (Phase.WAKING, [LetGo(turn=2, check=True)])
    assert run(state, EngineGoes(turn=2))[1] == [Admit(budget=BUDGET, resumed=True)]


def test_a_lane_that_was_empty_sleeps_too_and_none_without_the_rung() -> None:
    state, out = run(open_lane(), GateSeen(gate=closed(epoch=1), inflight=0))
    assert out[-1] == StartRest(pause=1, keep_ms=None, sleep_ms=60_000.0)
    assert run(state, SleepDue(pause=1))[1] == [CancelRest(pause=1), PutToSleep(pause=1)]
    _, out = run(open_lane(PausePolicy()), GateSeen(gate=closed(epoch=1), inflight=0))
    assert [type(i) for i in out] == [StopAdmitting, ReportQuiet]
    refused = open_lane().with_sleep(can=False)
    _, out = run(refused, GateSeen(gate=closed(epoch=1), inflight=2), EngineHeld(pause=1))
    assert out[-1] == StartRest(pause=1, keep_ms=20_000.0, sleep_ms=None)


def test_an_opening_while_it_falls_asleep_wakes_it_and_a_failed_sleep_is_asked_after() -> None:
    start, _ = run(held_lane(), SleepDue(pause=1), AllQuiet())
    state, out = run(start, GateSeen(gate=opened(epoch=1)))
    assert (state.phase, out) == (Phase.SLEEPING, [])
    assert [type(i) for i in run(state, EngineAsleep(pause=1))[1]] == [ReportAsleep, LetGo]
    state, out = run(start, SleepFailed(pause=1))
    assert (state.phase, out) == (Phase.CLOSED, [])
    assert run(state, GateSeen(gate=opened(epoch=1)))[1] == [LetGo(turn=2, check=True)]


def test_a_worker_that_leaves_has_an_engine_go_on_that_holds_nothing_unless_it_may_sleep() -> None:
    empty, _ = run(held_lane(), KeepOver(pause=1), AllQuiet(), GateSeen(gate=opened(epoch=2)))
    assert empty.phase is Phase.WAKING
    assert run(empty, Stop())[1] == [CancelLetGo(turn=2), Release()]
    shut, _ = run(empty, GateSeen(gate=closed(epoch=2)))
    state, out = run(shut, Stop())
    assert (state.phase, out[-1]) == (Phase.CLOSED, Release())
    assert run(state, Stop())[1] == []
    asleep, _ = run(held_lane(), SleepDue(pause=1), AllQuiet(), EngineAsleep(pause=1))
    assert asleep.phase is Phase.ASLEEP
    assert run(asleep, Stop())[1] == []
    waking, _ = run(asleep, GateSeen(gate=opened(epoch=2)))
    assert run(waking, Stop())[1] == [CancelLetGo(turn=2)]
    assert run(own_lane(), Stop())[1] == [], "whoever stopped it"


@pytest.mark.parametrize("close", [GateSeen(gate=closed(epoch=2)), LeaseOver(), Stop()])
def test_a_close_during_a_wake_gives_it_up_and_the_next_opening_asks_anew(close: GateSeen) -> None:
    waking, _ = run(
        held_lane(), SleepDue(pause=1), AllQuiet(), EngineAsleep(pause=1), GateSeen(gate=opened(epoch=1))
    )
    state, out = run(waking, close)
    assert (state.phase, out[0]) == (Phase.CLOSED, CancelLetGo(turn=2))
    late, out = run(state, EngineGoes(turn=2))
    assert (late, out) == (state, [])
    if not state.stopping:
        assert run(state, GateSeen(gate=opened(epoch=2)))[1][-1] == LetGo(turn=3, check=True)


def test_a_close_while_held_requests_are_let_go_stops_them_again() -> None:
    state, _ = run(held_lane(), GateSeen(gate=opened(epoch=1), inflight=3))
    state, out = run(state, GateSeen(gate=closed(epoch=2), inflight=3))
    assert (state.phase, out) == (Phase.HOLDING, [CancelLetGo(turn=2), HoldEngine(pause=2)])
    assert run(state, EngineHeld(pause=1)) == (state, []), "the word of another pause"
    assert run(state, EngineHeld(pause=2))[0].phase is Phase.HELD


def test_a_worker_that_stops_takes_its_requests_along_and_leaves_the_engine_going() -> None:
    state, out = run(held_lane(), Stop(inflight=3))
    assert (state.phase, out) == (Phase.ENDING, [CancelRest(pause=1), AbortInflight(pause=1)])
    state, out = run(state, AllQuiet())
    assert (state.phase, out) == (Phase.CLOSED, [Release()])
    state, out = run(open_lane(), Stop(inflight=3))
    assert out == [StopAdmitting(pause=1, reason=Reason.STOPPING), AbortInflight(pause=1)]
    stopping, _ = run(open_lane(), GateSeen(gate=closed(epoch=1), inflight=3), Stop(inflight=3))
    assert [type(i) for i in run(stopping, EngineHeld(pause=1))[1]] == [ReportQuiet, AbortInflight]


def test_a_shared_lane_passes_over_the_rungs_that_would_stop_online() -> None:
    state, _ = run(LaneState(lane="l").with_pause(PAUSE), GateSeen(gate=opened()))
    state, out = run(state, GateSeen(gate=closed(epoch=1), inflight=3))
    assert out == [StopAdmitting(pause=1, reason=WHY), AbortInflight(pause=1)]
    state, out = run(state, AllQuiet())
    assert [type(i) for i in out] == [ReportQuiet]
    assert run(state, SleepDue(pause=1), KeepOver(pause=1)) == (state, [])


def test_the_state_round_trips_through_json() -> None:
    state = held_lane()
    assert msgspec.json.decode(msgspec.json.encode(state), type=LaneState) == state
