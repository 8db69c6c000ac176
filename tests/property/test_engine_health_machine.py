"""The health of an engine over random histories, and a model of an engine that breaks in every way."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridsched.core import engine_health as health
from hybridsched.core.engine_health import (
    Answered,
    EndRequests,
    EngineHealth,
    Event,
    Failed,
    Fault,
    GiveUp,
    Phase,
    Restart,
    Seen,
    Suspected,
    Test,
    Unanswered,
    step,
    wrong_answer,
)
from hybridsched.core.policy import HealthPolicy

POLICY = HealthPolicy(
    doubt_ms=1000, test_ms=2000, drain_ms=3000, memory_growth_mib=100.0, settle_ms=1000, restarts=2
)
TICKS = st.floats(10, 2500, allow_nan=False)
TAKEN_OUT = (Phase.DRAINING, Phase.OUT)


class Keeper(RuleBasedStateMachine):
    """Feeds whatever may come, in any order; checks what must hold of every answer."""

    @initialize()
    def start(self) -> None:
        self.state = EngineHealth()
        self.now = 0.0
        self.out = 0
        self.passed = False
        """The engine has passed a test since it came up, woke, was suspected or answered wrongly."""
        self.restarts: list[float] = []

    def feed(self, event: Event) -> None:
        before = self.state
        self.state, orders = step(before, event, POLICY)
        assert step(before, event, POLICY) == (self.state, orders), "not deterministic"
        if (before.testing and not self.state.testing) or (isinstance(event, Seen) and event.restarted):
            self.out = 0  # whoever sends the tests gives up one that is out before it sends the next
        for order in orders:
            match order:
                case Test():
                    assert self.out == 0, "one test at a time"
                    assert self.state.phase not in (Phase.DOWN, Phase.ASLEEP, Phase.DRAINING)
                    self.out += 1
                case Restart(fault=fault):
                    assert self.state.phase is Phase.OUT
                    assert fault is self.state.fault is not Fault.ASLEEP
                    self.restarts.append(self.now)
                case GiveUp():
                    assert self.state.phase is Phase.OUT
                case EndRequests():
                    assert not self.state.serves
        if (
            self.state.phase in (Phase.DOWN, Phase.ASLEEP, Phase.UNPROVEN)
            and self.state.phase != before.phase
        ):
            self.passed = False
        if before.serves and self.state.phase in TAKEN_OUT:
            assert self.state.fault is not Fault.NONE, "taken out for a reason that is said"

    @rule(
        after=TICKS,
        up=st.booleans(),
        restarted=st.booleans(),
        asleep=st.booleans(),
        still=st.sampled_from([None, 0.0, 500.0, 5000.0]),
        metrics=st.sampled_from([None, 0.0, 5000.0]),
        memory=st.sampled_from([None, 100.0, 150.0, 5000.0]),
        held=st.integers(0, 3),
    )
    def look(
        self,
        after: float,
        up: bool,
        restarted: bool,
        asleep: bool,
        still: float | None,
        metrics: float | None,
        memory: float | None,
        held: int,
    ) -> None:
        self.now += after
        if restarted:
            self.passed = False
        self.feed(
            Seen(
                now_ms=self.now,
                up=up,
                restarted=restarted,
                asleep=asleep,
                still_ms=still,
                metrics_ms=metrics,
                memory_mib=memory,
                held=held,
            )
        )

    @rule(after=TICKS, still=st.sampled_from([0.0, 5000.0]))
    def look_at_a_good_one(self, after: float, still: float) -> None:
        self.now += after
        self.feed(Seen(now_ms=self.now, up=True, still_ms=still, metrics_ms=0.0, memory_mib=100.0, held=1))

    @rule()
    def suspect(self) -> None:
        was = self.state.serves
        self.feed(Suspected(now_ms=self.now))
        assert not self.state.serves
        if was:
            assert self.state.phase is Phase.UNPROVEN

    @precondition(lambda self: self.out)
    @rule(right=st.booleans(), moved=st.sampled_from([None, True, False]))
    def answer(self, right: bool, moved: bool | None) -> None:
        self.passed = right
        self.feed(Answered(now_ms=self.now, right=right, moved=moved))
        if not right:
            assert not self.state.serves

    @precondition(lambda self: self.out)
    @rule(after=TICKS, progress=st.booleans())
    def silence(self, after: float, progress: bool) -> None:
        self.now += after
        before = self.state
        self.feed(Unanswered(now_ms=self.now, progress=progress))
        if progress:
            assert self.state.phase not in TAKEN_OUT or before.phase in TAKEN_OUT, "it is only busy"
        elif before.serves:
            assert self.state.phase is Phase.OUT
            assert self.state.fault is Fault.HUNG

    @precondition(lambda self: self.out)
    @rule(after=TICKS)
    def fail(self, after: float) -> None:
        self.now += after
        self.feed(Failed(now_ms=self.now))
        assert not self.state.serves

    @rule(event=st.sampled_from([Failed, Unanswered, Answered]))
    def stale_result(self, event: type) -> None:
        """Of a test that is not awaited any more: it must change nothing."""
        if self.state.testing:
            return
        more = {"right": False, "moved": None} if event is Answered else {}
        more |= {"progress": False} if event is Unanswered else {}
        before = self.state
        self.feed(event(now_ms=self.now, **more))
        assert self.state == before

    @invariant()
    def serves_only_what_has_passed(self) -> None:
        if self.state.serves:
            assert self.passed
            assert self.state.fault is Fault.NONE

    @invariant()
    def restarts_stay_within_the_budget(self) -> None:
        for at in self.restarts:
            window = [one for one in self.restarts if 0 <= one - at < health.RESTARTS_WITHIN_MS]
            assert len(window) <= POLICY.restarts


TestKeeper = Keeper.TestCase
TestKeeper.settings = settings(max_examples=150, stateful_step_count=40)


@given(
    fault=st.sampled_from(["hangs", "wrong", "frozen", "unread", "grows", "fails"]),
    tick=st.floats(100, 900),
    held=st.integers(1, 5),
    boot=st.floats(0, 20_000),
)
def test_a_broken_engine_is_taken_out_started_again_and_put_back(
    fault: str, tick: float, held: int, boot: float
) -> None:
    """Against an engine that breaks once and is good after a restart."""
    now, state, broken, up_at = 0.0, EngineHealth(), False, 0.0
    ended, restarts, served_again, still = 0, 0, False, 0.0
    test_due: float | None = None
    while now < 200_000:
        now += tick
        up = now >= up_at
        if state.serves and not broken and restarts == 0 and now > 10_000:
            broken = True
        still = still + tick if broken and fault in ("hangs", "frozen") else 0.0
        event: Event = Seen(
            now_ms=now,
            up=up,
            restarted=False,
            still_ms=still,
            metrics_ms=still if fault != "unread" else (5_000.0 if broken else 0.0),
            memory_mib=900.0 if broken and fault == "grows" else 300.0,
            held=held if state.serves else 0,
        )
        if broken and fault in ("wrong", "fails") and state.serves:
            event = Suspected(now_ms=now)
        events: list[Event] = [event]
        if test_due is not None and now >= test_due and up:
            test_due = None
            if broken and fault == "hangs":
                events.append(Unanswered(now_ms=now, progress=False))
            elif broken and fault == "fails":
                events.append(Failed(now_ms=now))
            else:
                moved = None if broken and fault == "unread" else not (broken and fault == "frozen")
                events.append(Answered(now_ms=now, right=not (broken and fault == "wrong"), moved=moved))
        for one in events:
            state, orders = step(state, one, POLICY)
            for order in orders:
                if isinstance(order, Test):
                    test_due = now + (POLICY.test_ms if broken and fault == "hangs" else 1.0)
                ended += isinstance(order, EndRequests)
                if isinstance(order, Restart):
                    restarts += 1
                    broken, up_at, test_due = False, now + boot, None
        served_again = served_again or (restarts > 0 and state.serves)
    assert restarts == 1
    assert served_again
    assert state.serves
    assert ended == (fault in ("hangs", "wrong", "fails"))


@given(st.lists(st.text(max_size=3), min_size=4, max_size=4), st.integers(0, 4))
def test_one_answer_may_turn_over_and_most_may_not(usual: list[str], turned: int) -> None:
    now = [text + "!" if i < turned else text for i, text in enumerate(usual)]
    assert wrong_answer(tuple(usual), tuple(now)) is (turned > 2)
    assert wrong_answer(tuple(usual), tuple(usual[:3]))
