"""The lane's state machine against a model of its worker and its engine, over random histories."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridsched.core.lane import (
    QUIET,
    AbortInflight,
    Admit,
    AllQuiet,
    CancelGrace,
    CancelLetGo,
    CancelRest,
    EngineAsleep,
    EngineGoes,
    EngineHeld,
    Event,
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
    handle,
)
from hybridsched.core.policy import Rung
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Budget, Gate, GateState

REASONS = st.sampled_from([Reason.ONLINE_ARRIVED, Reason.ONLINE_ACTIVE, Reason.HELD])
EPOCH_STEP = st.integers(-2, 2)
LADDERS = ((Rung.BOUNDARY,), (Rung.BOUNDARY, Rung.ITERATION), (Rung.BOUNDARY, Rung.ITERATION, Rung.SLEEP))
MAY_STAND = (Phase.HOLDING, Phase.HELD, Phase.ENDING, Phase.SLEEPING, Phase.ASLEEP, Phase.WAKING)


class Worker(RuleBasedStateMachine):
    """A worker that does what the lane says, admits when it may, and keeps count."""

    @initialize(
        ladder=st.sampled_from(LADDERS), own=st.booleans(), found=st.sampled_from([None, True, False])
    )
    def start(self, ladder: tuple[Rung, ...], own: bool, found: bool | None) -> None:
        self.own = own
        self.state = LaneState(lane="l", own=own, ladder=ladder)
        self.stands = own and found is not False
        """Whether the engine stands still or sleeps, as far as an order of the lane's can tell."""
        self.asleep = bool(found and own)
        self.proved = True
        """Whether it has answered rightly since it slept."""
        if found is not None:
            self.state = self.state.found(stands=found)
            self.proved = not found
        self.may_admit = False
        self.inflight = 0
        self.budget = 0
        self.seen_epoch = 0
        self.stopped = False
        self.timers: set[int] = set()
        self.old_timers: set[int] = set()
        self.aborts: list[int] = []
        self.quiets: list[int] = []
        self.holds: set[int] = set()
        self.taken_back: set[int] = set()
        self.holding: int | None = None
        self.going: LetGo | None = None
        self.falling_asleep: int | None = None
        self.rest: StartRest | None = None

    def feed(self, event: Event) -> None:
        before = self.state
        self.state, instructions = handle(before, event)
        assert handle(before, event) == (self.state, instructions), "not deterministic"
        for instruction in instructions:
            self.obey(instruction, before)

    def obey(self, instruction: object, before: LaneState) -> None:
        match instruction:
            case Admit(budget=budget, resumed=resumed):
                assert resumed is not self.may_admit
                assert not self.stands, "work for an engine that stands still"
                assert self.proved or not self.own, "work for an engine that nobody has asked since its sleep"
                if before.phase is Phase.GRACE:
                    self.taken_back.add(before.pause)
                self.may_admit, self.budget = True, budget.max_inflight
            case StopAdmitting():
                assert self.may_admit
                self.may_admit = False
            case StartGrace(pause=pause):
                assert not self.timers
                self.timers.add(pause)
            case CancelGrace(pause=pause):
                assert pause in self.timers
                self.timers.discard(pause)
                self.old_timers.add(pause)
            case AbortInflight(pause=pause):
                assert not self.may_admit
                assert Rung.ITERATION in self.state.ladder
                self.aborts.append(pause)
            case ReportQuiet(pause=pause, rung=rung, held=held):
                assert held or self.inflight == 0
                assert held is (pause in self.holds and self.stands and pause not in self.aborts)
                assert (rung is Rung.ITERATION) == (pause in self.aborts or held)
                self.quiets.append(pause)
            case HoldEngine(pause=pause):
                assert self.own, "a pause would stop online"
                assert not self.may_admit
                assert Rung.ITERATION in self.state.ladder
                assert self.holding is None
                assert self.going is None
                self.holding = pause
                self.holds.add(pause)
            case PutToSleep(pause=pause):
                assert self.own, "a sleep would stop online"
                assert Rung.SLEEP in self.state.ladder
                assert self.inflight == 0, "it would forget what it holds"
                assert self.rest is None
                self.falling_asleep = pause
            case ReportAsleep():
                assert self.asleep
            case LetGo():
                assert self.own
                assert self.holding is None
                assert self.falling_asleep is None
                assert self.rest is None
                assert instruction.check or (self.proved and not self.asleep)
                self.going = instruction
            case CancelLetGo(turn=turn):
                assert self.going is not None
                assert self.going.turn == turn
                self.going = None
            case StartRest():
                assert self.own
                assert self.rest is None
                assert instruction.sleep_ms is None or Rung.SLEEP in self.state.ladder
                self.rest = instruction
            case CancelRest():
                self.rest = None
            case Release():
                assert self.stopped
                assert self.inflight == 0
                self.stands = False
            case _:
                raise AssertionError(f"unknown instruction {instruction}")

    @rule(step=EPOCH_STEP, size=st.integers(1, 4), grace=st.sampled_from([0.0, 30.0]))
    def gate_opens(self, step: int, size: int, grace: float) -> None:
        epoch = max(0, self.seen_epoch + step)
        was_open = self.state.phase is Phase.OPEN
        budget = Budget(max_inflight=size, chunk_tokens=1, slice_tokens=0)
        gate = Gate(
            lane="l", state=GateState.OPEN, reason=Reason.IDLE, budget=budget, epoch=epoch, grace_ms=grace
        )
        self.feed(GateSeen(gate=gate, inflight=self.inflight))
        if epoch < self.seen_epoch or self.stopped:
            assert was_open == (self.state.phase is Phase.OPEN), "an older epoch opened the lane"
            assert self.state.pending is not gate
        elif not self.stopped:
            self.seen_epoch = epoch
            assert self.state.phase is Phase.OPEN or self.state.pending is gate, "the opening is lost"

    @rule(step=EPOCH_STEP, reason=REASONS, grace=st.sampled_from([0.0, 30.0]))
    def gate_closes(self, step: int, reason: Reason, grace: float) -> None:
        epoch = max(0, self.seen_epoch + step)
        gate = Gate(lane="l", state=GateState.CLOSED, reason=reason, epoch=epoch, grace_ms=grace)
        self.feed(GateSeen(gate=gate, inflight=self.inflight))
        self.seen_epoch = max(self.seen_epoch, epoch)
        assert not self.may_admit
        assert self.going is None
        if grace == 0.0 and Rung.ITERATION in self.state.ladder:
            assert self.state.phase not in (Phase.OPEN, Phase.GRACE)

    @rule(by_clock=st.booleans())
    def lease_ends(self, by_clock: bool) -> None:
        n = self.inflight
        self.feed(LeaseOver(inflight=n) if by_clock else GateSeen(gate=None, inflight=n))
        assert not self.may_admit
        assert self.going is None
        assert self.state.pending is None

    @precondition(lambda self: self.may_admit and self.inflight < self.budget)
    @rule()
    def a_request_is_sent(self) -> None:
        assert self.state.phase is Phase.OPEN
        self.inflight += 1

    @precondition(lambda self: self.inflight > 0 and not self.stands)
    @rule()
    def a_request_ends(self) -> None:
        self.inflight -= 1
        if self.inflight == 0:
            self.feed(AllQuiet())

    @precondition(lambda self: self.state.phase is Phase.ENDING)
    @rule()
    def the_requests_that_were_told_to_end_are_back(self) -> None:
        self.inflight = 0
        self.feed(AllQuiet())

    @precondition(lambda self: self.timers)
    @rule()
    def the_grace_is_over(self) -> None:
        (pause,) = self.timers
        self.timers.clear()
        self.feed(GraceOver(pause=pause))
        assert pause in self.holds or self.aborts[-1] == pause

    @precondition(lambda self: self.old_timers)
    @rule()
    def a_cancelled_timer_fires_all_the_same(self) -> None:
        before = self.state
        self.feed(GraceOver(pause=min(self.old_timers)))
        assert self.state == before

    @precondition(lambda self: self.holding is not None)
    @rule(how=st.sampled_from(["held", "held", "held", "failed", "never"]))
    def the_engine_answers_the_hold(self, how: str) -> None:
        pause, self.holding = self.holding, None
        assert pause is not None
        self.stands = True
        if how == "held":
            self.feed(EngineHeld(pause=pause))
        else:
            self.feed(HoldFailed(pause=pause, never=how == "never"))

    @precondition(lambda self: self.going is not None)
    @rule()
    def the_engine_goes(self) -> None:
        going, self.going = self.going, None
        assert going is not None
        self.stands = self.asleep = False
        self.proved = self.proved or going.check
        self.feed(EngineGoes(turn=going.turn))
        assert self.may_admit

    @precondition(lambda self: self.falling_asleep is not None)
    @rule(well=st.booleans())
    def the_engine_answers_the_sleep(self, well: bool) -> None:
        pause, self.falling_asleep = self.falling_asleep, None
        assert pause is not None
        self.stands = self.asleep = True  # after a failure nobody knows, so the worst is taken
        self.proved = False
        self.feed(EngineAsleep(pause=pause) if well else SleepFailed(pause=pause))

    @precondition(lambda self: self.rest is not None)
    @rule(keep=st.booleans())
    def it_has_rested_for_long(self, keep: bool) -> None:
        rest = self.rest
        assert rest is not None
        if keep and rest.keep_ms is not None:
            self.rest = msgspec.structs.replace(rest, keep_ms=None)
            self.feed(KeepOver(pause=rest.pause))
        elif not keep and rest.sleep_ms is not None:
            self.feed(SleepDue(pause=rest.pause))

    @rule(pause=st.integers(-1, 1), turn=st.integers(-2, -1))
    def what_belongs_to_another_pause_changes_nothing(self, pause: int, turn: int) -> None:
        before, other = self.state, self.state.pause + (pause or 2)
        late: list[Event] = [EngineHeld(pause=other), HoldFailed(pause=other), KeepOver(pause=other)]
        late += [SleepDue(pause=other), EngineAsleep(pause=other), SleepFailed(pause=other)]
        for event in (*late, EngineGoes(turn=before.turn + turn)):
            self.feed(event)
            assert self.state == before

    @rule(grace=st.sampled_from([0.0, 30.0]))
    def the_worker_stops(self, grace: float) -> None:
        self.stopped = True
        self.feed(Stop(inflight=self.inflight, grace_ms=grace))
        assert not self.may_admit
        assert self.going is None

    @rule(ladder=st.sampled_from(LADDERS))
    def another_policy_comes(self, ladder: tuple[Rung, ...]) -> None:
        if Rung.ITERATION in self.state.ladder and Rung.ITERATION in ladder:
            self.state = self.state.with_ladder(ladder)

    @invariant()
    def admission_is_the_open_phase(self) -> None:
        assert self.may_admit == (self.state.phase is Phase.OPEN)
        assert not (self.stopped and self.may_admit)

    @invariant()
    def a_shared_engine_is_never_stopped(self) -> None:
        own = (Phase.HOLDING, Phase.HELD, Phase.SLEEPING, Phase.ASLEEP, Phase.WAKING)
        assert self.own or self.state.phase not in own

    @invariant()
    def a_pause_is_quiet_exactly_once(self) -> None:
        assert len(self.quiets) == len(set(self.quiets))
        waits = self.state.phase in (Phase.GRACE, Phase.ENDING, Phase.HOLDING) and not self.state.told
        running = {self.state.pause} if waits else set()
        assert set(self.quiets) | self.taken_back | running == set(range(1, self.state.pause + 1))
        assert not set(self.quiets) & (self.taken_back | running)

    @invariant()
    def a_lane_that_waits_has_something_to_wait_for(self) -> None:
        phase = self.state.phase
        if phase is Phase.GRACE or (phase is Phase.ENDING and not self.state.told and not self.own):
            assert self.inflight > 0
        assert (phase is Phase.HOLDING) == (self.holding is not None)
        assert (phase is Phase.SLEEPING) == (self.falling_asleep is not None)
        assert (phase is Phase.WAKING) == (self.going is not None) == (self.going is not None)
        assert self.state.grace_running == bool(self.timers)
        assert self.state.resting == (self.rest is not None)

    @invariant()
    def what_stands_still_is_told_to_go_on_before_it_gets_work(self) -> None:
        if self.own and self.stands and not self.stopped:
            assert self.state.stopped or self.state.phase in MAY_STAND

    @invariant()
    def a_stopped_worker_leaves_nothing_in_an_engine_that_stands(self) -> None:
        if self.stopped and self.state.phase in QUIET:
            assert self.inflight == 0

    def teardown(self) -> None:
        if hasattr(self, "state"):
            assert msgspec.json.decode(msgspec.json.encode(self.state), type=LaneState) == self.state


TestWorker = Worker.TestCase
TestWorker.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
