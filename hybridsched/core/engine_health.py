"""Whether one engine may serve, and when it has to be started again. Pure: events in, state and orders out.

A health check says only that a process lives. An engine that answers it can hang (it takes requests and
answers none), answer wrongly after a wake, show metrics that stand still, or grow until the machine
has no memory left. What tells them apart is one small request of our own, the *test*: was it answered, was
the answer the usual one, and did the counters move meanwhile? So nothing is taken out on a suspicion alone.

    unproven  it has come up, woken, or failed a request: serves nothing until it has passed the test
    serving   takes requests
    doubted   takes requests; its counters stand still or cannot be read, and the test is out
    draining  works and has to be started again: takes no requests, what it holds may end
    out       cannot be used until it is started again, or recovers by itself: the test is sent now and then
    asleep    somebody has put it to sleep; nothing is sent, and it is not started again
    down      its health check fails, or it serves another model

Times are milliseconds on one clock of the caller's.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from hybridsched.core.policy import HealthPolicy
from hybridsched.core.values import Value

TEST_PAUSE_MS = 1_000.0
"""Between two tests of an engine that does not serve."""

DOUBT_PAUSE_MS = 30_000.0
"""The same for one that serves, though starting it again has not set its counters moving."""

RESTARTS_WITHIN_MS = 3_600_000.0
"""Span over which `HealthPolicy.restarts` counts."""

_MARGIN = 0.5
"""More than this share of the test's prompts must come back with another answer before it counts as wrong.
Rounding may turn one over, as it depends on what else is in the engine's batch; other weights turn most."""


class Phase(StrEnum):
    UNPROVEN = "unproven"
    SERVING = "serving"
    DOUBTED = "doubted"
    DRAINING = "draining"
    OUT = "out"
    ASLEEP = "asleep"
    DOWN = "down"


class Fault(StrEnum):
    """Why an engine that answers its health check is not used. Values are codes of `core.reasons.Reason`."""

    NONE = ""
    HUNG = "engine_hung"
    WRONG_ANSWER = "engine_wrong_answer"
    FROZEN = "metric_frozen"
    MEMORY = "engine_memory"
    ASLEEP = "engine_asleep"


class EngineHealth(Value, frozen=True, kw_only=True):
    """What is remembered of one engine."""

    phase: Phase = Phase.DOWN
    fault: Fault = Fault.NONE
    since_ms: float = 0.0
    """Since when it has been in this phase."""
    testing: bool = False
    """The test is out."""
    test_at_ms: float = 0.0
    """No test before that."""
    failing_ms: float | None = None
    """Since when the tests of an unproven engine have failed with errors; None: they have not."""
    least_mib: float | None = None
    """Its memory once it had settled."""
    restarts_ms: tuple[float, ...] = ()
    """When it was asked to be started again, over the last hour."""
    asked: bool = False
    """It was asked for in this phase; false in `out`: the budget was used up."""

    @property
    def serves(self) -> bool:
        """Whether it may take requests."""
        return self.phase in (Phase.SERVING, Phase.DOUBTED)


class Seen(Value, frozen=True, kw_only=True):
    """One look at the engine."""

    now_ms: float
    up: bool
    """It answers its health check and serves its model."""
    restarted: bool = False
    """A counter has fallen since the last look: another process answers."""
    asleep: bool = False
    still_ms: float | None = None
    """How long it has held requests with no counter moving; None: unknown."""
    metrics_ms: float | None = None
    """Age of the last reading of its metrics; None: there was none yet."""
    memory_mib: float | None = None
    """Resident memory of its processes; None: unknown."""
    held: int = 0
    """Requests of ours that it holds."""


class Suspected(Value, frozen=True, kw_only=True):
    """A request found that it was gone, said nothing, or answered with what is no answer."""

    now_ms: float


class Answered(Value, frozen=True, kw_only=True):
    """The test was answered."""

    now_ms: float
    right: bool
    """As this engine has answered it before; true where that is not known."""
    moved: bool | None
    """Whether its counters moved meanwhile; None: they cannot be read."""


class Unanswered(Value, frozen=True, kw_only=True):
    """The test got no answer within its limit."""

    now_ms: float
    progress: bool
    """Whether its counters moved, or another request was answered, meanwhile: then it is only busy."""


class Failed(Value, frozen=True, kw_only=True):
    """The test came back with an error of the engine's."""

    now_ms: float


class Test(Value, frozen=True, kw_only=True):
    """Send the test, and come back with one of `Answered`, `Unanswered` and `Failed`."""


class EndRequests(Value, frozen=True, kw_only=True):
    """End what it holds: requests go back to the queue where nothing was sent yet, else they are answered."""

    fault: Fault


class Restart(Value, frozen=True, kw_only=True):
    """Have it started again, by whoever starts it."""

    fault: Fault


class GiveUp(Value, frozen=True, kw_only=True):
    """It was started again as often as the policy allows: it stays out. Said once."""

    fault: Fault


Event = Seen | Suspected | Answered | Unanswered | Failed
Order = Test | EndRequests | Restart | GiveUp
Step = tuple[EngineHealth, tuple[Order, ...]]


def wrong_answer(usual: tuple[str, ...], now: tuple[str, ...]) -> bool:
    """Whether the answers to the test's prompts differ from the usual ones by more than rounding does."""
    if len(usual) != len(now):
        return True
    differ = sum(a != b for a, b in zip(usual, now, strict=True))
    return differ > _MARGIN * len(usual)


def step(state: EngineHealth, event: Event, policy: HealthPolicy) -> Step:
    """Take one event. The state of a test that is not awaited any more is ignored."""
    match event:
        case Seen():
            return _seen(state, event, policy)
        case Suspected():
            if not state.serves:
                return state, ()
            return _test(_to(state, Phase.UNPROVEN, event.now_ms), event.now_ms)
        case _ if not state.testing:
            return state, ()
        case Answered():
            return _answered(msgspec.structs.replace(state, testing=False), event, policy)
        case Unanswered():
            return _unanswered(msgspec.structs.replace(state, testing=False), event, policy)
        case Failed():
            return _failed(msgspec.structs.replace(state, testing=False), event, policy)


def _to(state: EngineHealth, phase: Phase, now_ms: float, fault: Fault = Fault.NONE) -> EngineHealth:
    return msgspec.structs.replace(
        state, phase=phase, fault=fault, since_ms=now_ms, test_at_ms=now_ms, failing_ms=None, asked=False
    )


def _test(state: EngineHealth, now_ms: float) -> Step:
    """Send the test, unless it is out or was sent a moment ago."""
    if state.testing or now_ms < state.test_at_ms:
        return state, ()
    return msgspec.structs.replace(state, testing=True, test_at_ms=now_ms + TEST_PAUSE_MS), (Test(),)


def _out(state: EngineHealth, fault: Fault, now_ms: float, policy: HealthPolicy, *, ending: bool) -> Step:
    """Out, and started again if the budget allows."""
    orders: tuple[Order, ...] = (EndRequests(fault=fault),) if ending else ()
    state, more = _restart(_to(state, Phase.OUT, now_ms, fault), now_ms, policy)
    return state, orders + (more or (GiveUp(fault=fault),))


def _recent(state: EngineHealth, now_ms: float) -> tuple[float, ...]:
    return tuple(at for at in state.restarts_ms if now_ms - at < RESTARTS_WITHIN_MS)


def _budget(state: EngineHealth, now_ms: float, policy: HealthPolicy) -> bool:
    """Whether it may be started again."""
    return len(_recent(state, now_ms)) < policy.restarts


def _restart(state: EngineHealth, now_ms: float, policy: HealthPolicy) -> Step:
    if not _budget(state, now_ms, policy):
        return state, ()
    state = msgspec.structs.replace(
        state,
        restarts_ms=(*_recent(state, now_ms), now_ms),
        asked=True,
        test_at_ms=now_ms + TEST_PAUSE_MS,
    )
    return state, (Restart(fault=state.fault),)


def _seen(state: EngineHealth, seen: Seen, policy: HealthPolicy) -> Step:
    now = seen.now_ms
    if not seen.up:
        if state.phase is Phase.DOWN:
            return state, ()
        # A test that is out ends in an error by itself, and nobody waits for it.
        return msgspec.structs.replace(_to(state, Phase.DOWN, now), testing=False, least_mib=None), ()
    if seen.asleep:
        if state.phase is Phase.ASLEEP:
            return state, ()
        asleep = msgspec.structs.replace(_to(state, Phase.ASLEEP, now, Fault.ASLEEP), testing=False)
        return asleep, (EndRequests(fault=Fault.ASLEEP),) if seen.held else ()
    if seen.restarted:
        state = msgspec.structs.replace(_to(state, Phase.UNPROVEN, now), least_mib=None, testing=False)
    match state.phase:
        case Phase.DOWN | Phase.ASLEEP:
            return _test(_to(state, Phase.UNPROVEN, now), now)
        case Phase.UNPROVEN:
            return _test(state, now)
        case Phase.DRAINING:
            if seen.held and now - state.since_ms < policy.drain_ms:
                return state, ()
            return _out(state, state.fault, now, policy, ending=seen.held > 0)
        case Phase.OUT if state.fault is Fault.MEMORY and not _grown(state, seen, policy):
            return _test(_to(state, Phase.UNPROVEN, now), now)
        case Phase.OUT if not state.asked:
            state, orders = _restart(state, now, policy)
            return (state, orders) if orders else _test(state, now)
        case Phase.OUT:
            return _test(state, now)
        case _:
            return _of_serving(state, seen, policy)


def _of_serving(state: EngineHealth, seen: Seen, policy: HealthPolicy) -> Step:
    now = seen.now_ms
    if state.least_mib is None and now - state.since_ms >= policy.settle_ms:
        state = msgspec.structs.replace(state, least_mib=seen.memory_mib)
    if _grown(state, seen, policy):
        state = msgspec.structs.replace(state, testing=False)
        return _to(state, Phase.DRAINING, now, Fault.MEMORY), ()
    still = (seen.still_ms or 0.0) >= policy.doubt_ms
    unread = seen.metrics_ms is not None and seen.metrics_ms >= policy.doubt_ms
    if not still and not unread:
        return state, ()
    if state.phase is Phase.SERVING:
        # The memory's settling goes on: doubt is no restart.
        since, doubted = state.since_ms, _to(state, Phase.DOUBTED, now)
        state = msgspec.structs.replace(doubted, since_ms=since)
    return _test(state, now)


def _grown(state: EngineHealth, seen: Seen, policy: HealthPolicy) -> bool:
    """Whether its memory is known to be beyond the limit; while it is unknown, what it was last counts."""
    limit, least = policy.memory_growth_mib, state.least_mib
    if limit is None or least is None:
        return False
    if seen.memory_mib is None:
        return state.fault is Fault.MEMORY
    return seen.memory_mib > least + limit


def _serving(state: EngineHealth, now_ms: float) -> EngineHealth:
    if state.phase is Phase.DOUBTED:
        return msgspec.structs.replace(state, phase=Phase.SERVING)
    return _to(state, Phase.SERVING, now_ms)


def _answered(state: EngineHealth, event: Answered, policy: HealthPolicy) -> Step:
    now = event.now_ms
    if not event.right and state.phase is not Phase.OUT:
        return _out(state, Fault.WRONG_ANSWER, now, policy, ending=True)
    match state.phase:
        case Phase.UNPROVEN:
            return _serving(state, now), ()
        case Phase.DOUBTED if event.moved:
            return _serving(state, now), ()
        case Phase.DOUBTED if _budget(state, now, policy):
            return _to(state, Phase.DRAINING, now, Fault.FROZEN), ()
        case Phase.DOUBTED:
            # Online loses nothing by its metrics, and the gate of its lane is closed.
            return msgspec.structs.replace(state, test_at_ms=now + DOUBT_PAUSE_MS), ()
        case Phase.OUT if event.right and state.fault in (Fault.HUNG, Fault.WRONG_ANSWER):
            return _serving(state, now), ()
        case Phase.OUT if event.right and state.fault is Fault.FROZEN and event.moved:
            return _serving(state, now), ()
        case _:
            return state, ()


def _unanswered(state: EngineHealth, event: Unanswered, policy: HealthPolicy) -> Step:
    if event.progress:
        return (_serving(state, event.now_ms), ()) if state.phase is Phase.DOUBTED else (state, ())
    if state.phase in (Phase.OUT, Phase.ASLEEP, Phase.DOWN):
        return state, ()
    return _out(state, Fault.HUNG, event.now_ms, policy, ending=True)


def _failed(state: EngineHealth, event: Failed, policy: HealthPolicy) -> Step:
    now = event.now_ms
    if state.phase is Phase.DOUBTED:
        state = _to(state, Phase.UNPROVEN, now)
    if state.phase is not Phase.UNPROVEN:
        return state, ()
    since = now if state.failing_ms is None else state.failing_ms
    if now - since >= policy.test_ms:
        return _out(state, Fault.HUNG, now, policy, ending=True)
    return msgspec.structs.replace(state, failing_ms=since), ()
