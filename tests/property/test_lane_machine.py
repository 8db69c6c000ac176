"""The lane's state machine against a model of its worker, over random histories."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridsched.core.lane import (
    AbortInflight,
    Admit,
    AllQuiet,
    CancelGrace,
    Event,
    GateSeen,
    GraceOver,
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

REASONS = st.sampled_from([Reason.ONLINE_ARRIVED, Reason.ONLINE_ACTIVE, Reason.HELD])
EPOCH_STEP = st.integers(-2, 2)


class Worker(RuleBasedStateMachine):
    """A worker that does what the lane says, admits when it may, and keeps count."""

    @initialize(ladder=st.sampled_from([(Rung.BOUNDARY,), (Rung.BOUNDARY, Rung.ITERATION)]))
    def start(self, ladder: tuple[Rung, ...]) -> None:
        self.state = LaneState(lane="l", ladder=ladder)
        self.may_admit = False
        self.inflight = 0
        self.budget = 0
        self.seen_epoch = 0
        self.stopped = False
        self.timers: set[int] = set()
        self.old_timers: set[int] = set()
        self.aborts: list[int] = []
        self.quiets: list[int] = []
        self.taken_back: set[int] = set()

    def feed(self, event: Event) -> None:
        before = self.state
        self.state, instructions = handle(before, event)
        assert handle(before, event) == (self.state, instructions), "not deterministic"
        for instruction in instructions:
            match instruction:
                case Admit(budget=budget, resumed=resumed):
                    assert resumed is not self.may_admit
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
                case ReportQuiet(pause=pause, rung=rung):
                    assert self.inflight == 0
                    assert (rung is Rung.ITERATION) == (pause in self.aborts)
                    self.quiets.append(pause)

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

    @rule(step=EPOCH_STEP, reason=REASONS, grace=st.sampled_from([0.0, 30.0]))
    def gate_closes(self, step: int, reason: Reason, grace: float) -> None:
        epoch = max(0, self.seen_epoch + step)
        gate = Gate(lane="l", state=GateState.CLOSED, reason=reason, epoch=epoch, grace_ms=grace)
        self.feed(GateSeen(gate=gate, inflight=self.inflight))
        self.seen_epoch = max(self.seen_epoch, epoch)
        assert not self.may_admit
        if grace == 0.0 and Rung.ITERATION in self.state.ladder:
            assert self.state.phase in (Phase.ENDING, Phase.CLOSED)

    @rule(by_clock=st.booleans())
    def lease_ends(self, by_clock: bool) -> None:
        n = self.inflight
        self.feed(LeaseOver(inflight=n) if by_clock else GateSeen(gate=None, inflight=n))
        assert not self.may_admit
        assert self.state.pending is None

    @precondition(lambda self: self.may_admit and self.inflight < self.budget)
    @rule()
    def a_request_is_sent(self) -> None:
        assert self.state.phase is Phase.OPEN
        self.inflight += 1

    @precondition(lambda self: self.inflight > 0)
    @rule()
    def a_request_ends(self) -> None:
        self.inflight -= 1
        if self.inflight == 0:
            self.feed(AllQuiet())

    @precondition(lambda self: self.timers)
    @rule()
    def the_grace_is_over(self) -> None:
        (pause,) = self.timers
        self.timers.clear()
        self.feed(GraceOver(pause=pause))
        assert self.aborts
        assert self.aborts[-1] == pause

    @precondition(lambda self: self.old_timers)
    @rule()
    def a_cancelled_timer_fires_all_the_same(self) -> None:
        before = self.state
        self.feed(GraceOver(pause=min(self.old_timers)))
        assert self.state == before

    @rule(grace=st.sampled_from([0.0, 30.0]))
    def the_worker_stops(self, grace: float) -> None:
        self.stopped = True
        self.feed(Stop(inflight=self.inflight, grace_ms=grace))
        assert not self.may_admit

    @invariant()
    def admission_is_the_open_phase(self) -> None:
        assert self.may_admit == (self.state.phase is Phase.OPEN)
        assert not (self.stopped and self.may_admit)

    @invariant()
    def a_pause_aborts_at_most_once_and_is_quiet_exactly_once(self) -> None:
        assert len(self.aborts) == len(set(self.aborts))
        assert len(self.quiets) == len(set(self.quiets))
        running = {self.state.pause} if self.state.phase in (Phase.GRACE, Phase.ENDING) else set()
        assert set(self.quiets) | self.taken_back | running == set(range(1, self.state.pause + 1))
        assert not set(self.quiets) & (self.taken_back | running)

    @invariant()
    def a_lane_that_waits_has_something_to_wait_for(self) -> None:
        if self.state.phase in (Phase.GRACE, Phase.ENDING):
            assert self.inflight > 0
        assert self.state.grace_running == bool(self.timers)

    def teardown(self) -> None:
        if hasattr(self, "state"):
            assert msgspec.json.decode(msgspec.json.encode(self.state), type=LaneState) == self.state


TestWorker = Worker.TestCase
TestWorker.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
