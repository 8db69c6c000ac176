"""What a lane's state machine (`core.lane`) is told, what it orders, and what it remembers."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from hybridsched.core.policy import PausePolicy, Rung
from hybridsched.core.reasons import Reason
from hybridsched.core.values import NO_BUDGET, Budget, Gate, Value


class Phase(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    GRACE = "grace"
    ENDING = "ending"
    HOLDING = "holding"
    HELD = "held"
    SLEEPING = "sleeping"
    ASLEEP = "asleep"
    WAKING = "waking"


QUIET = frozenset({Phase.CLOSED, Phase.HELD, Phase.ASLEEP})
"""No offline work runs, and nothing is awaited of the engine."""


# --- events --------------------------------------------------------------------------------


class GateSeen(Value, frozen=True, kw_only=True, tag="gate_seen"):
    """The gate as the worker sees it now; None when there is none (its lease has expired in Redis)."""

    gate: Gate | None
    inflight: int = 0
    """Offline requests of the lane that are in the engine, or on their way to it."""


class LeaseOver(Value, frozen=True, kw_only=True, tag="lease_over"):
    """By the worker's own clock the open gate has not been renewed in time."""

    inflight: int = 0


class GraceOver(Value, frozen=True, kw_only=True, tag="grace_over"):
    """The timer of `StartGrace` has run out."""

    pause: int


class AllQuiet(Value, frozen=True, kw_only=True, tag="all_quiet"):
    """No offline request of the lane is in the engine, and none is on its way."""


class Stop(Value, frozen=True, kw_only=True, tag="stop"):
    """The worker is being stopped: a last pause, after which no gate opens the lane."""

    inflight: int = 0
    grace_ms: float = 0.0


class EngineHeld(Value, frozen=True, kw_only=True, tag="engine_held"):
    """The engine stands still, as `HoldEngine` asked."""

    pause: int


class HoldFailed(Value, frozen=True, kw_only=True, tag="hold_failed"):
    """The engine could not be stopped, or nobody knows whether it was."""

    pause: int
    never: bool = False
    """It has no such endpoint: it is not asked again."""


class KeepOver(Value, frozen=True, kw_only=True, tag="keep_over"):
    """The engine has held the requests of this pause for as long as the policy lets it."""

    pause: int


class SleepDue(Value, frozen=True, kw_only=True, tag="sleep_due"):
    """The lane has been closed for as long as the policy lets the engine keep its memory."""

    pause: int


class EngineAsleep(Value, frozen=True, kw_only=True, tag="engine_asleep"):
    """The engine sleeps, as `PutToSleep` asked."""

    pause: int


class SleepFailed(Value, frozen=True, kw_only=True, tag="sleep_failed"):
    """The engine was not put to sleep, or nobody knows whether it was."""

    pause: int


class EngineGoes(Value, frozen=True, kw_only=True, tag="engine_goes"):
    """The engine goes on, and has answered rightly where `LetGo` asked for that."""

    turn: int


Event = (
    GateSeen
    | LeaseOver
    | GraceOver
    | AllQuiet
    | Stop
    | EngineHeld
    | HoldFailed
    | KeepOver
    | SleepDue
    | EngineAsleep
    | SleepFailed
    | EngineGoes
)


# --- instructions --------------------------------------------------------------------------


class Admit(Value, frozen=True, kw_only=True, tag="admit"):
    """Admit work within `budget` from now on. Comes again when the budget changes."""

    budget: Budget
    resumed: bool
    """False when only the budget changed."""


class StopAdmitting(Value, frozen=True, kw_only=True, tag="stop_admitting"):
    """Send nothing more to the engine."""

    pause: int
    reason: Reason


class StartGrace(Value, frozen=True, kw_only=True, tag="start_grace"):
    """Come back with `GraceOver(pause)` after `ms`."""

    pause: int
    ms: float


class CancelGrace(Value, frozen=True, kw_only=True, tag="cancel_grace"):
    """The timer of this pause is not needed any more."""

    pause: int


class AbortInflight(Value, frozen=True, kw_only=True, tag="abort_inflight"):
    """End every offline request of the lane at the engine's next iteration, and keep what each produced."""

    pause: int


class ReportQuiet(Value, frozen=True, kw_only=True, tag="report_quiet"):
    """The pause has taken effect: no offline work runs. Once for each pause."""

    pause: int
    rung: Rung
    reason: Reason
    had_work: bool
    """False when nothing was in flight at the close, so nothing had to be paused."""
    held: bool = False
    """The requests are still in the engine, which stands still."""


class HoldEngine(Value, frozen=True, kw_only=True, tag="hold_engine"):
    """Stop the whole engine at its next iteration, and come back with `EngineHeld` or `HoldFailed`. Only for
    an engine of the lane's own."""

    pause: int


class StartRest(Value, frozen=True, kw_only=True, tag="start_rest"):
    """Come back with `KeepOver(pause)` after `keep_ms` and with `SleepDue(pause)` after `sleep_ms`. None: not
    at all."""

    pause: int
    keep_ms: float | None
    sleep_ms: float | None


class CancelRest(Value, frozen=True, kw_only=True, tag="cancel_rest"):
    """Neither of those timers is needed any more."""

    pause: int


class PutToSleep(Value, frozen=True, kw_only=True, tag="put_to_sleep"):
    """Have the engine, which holds nothing, free the memory of its GPU; then `EngineAsleep` or
    `SleepFailed`."""

    pause: int


class ReportAsleep(Value, frozen=True, kw_only=True, tag="report_asleep"):
    """The pause has come to the rung of sleep."""

    pause: int
    reason: Reason


class LetGo(Value, frozen=True, kw_only=True, tag="let_go"):
    """Have the engine go on, whatever it was told before and by whom; try until it does, then come back with
    `EngineGoes(turn)`."""

    turn: int
    check: bool
    """It has to answer as it did before; where nobody knows how that was, its answer is kept for later."""


class CancelLetGo(Value, frozen=True, kw_only=True, tag="cancel_let_go"):
    """Give up that: nothing of it may run from here on."""

    turn: int


class Release(Value, frozen=True, kw_only=True, tag="release"):
    """Have the engine go on for whoever comes next; nothing of ours is in it. Once, as well as it goes."""


Instruction = (
    Admit
    | StopAdmitting
    | StartGrace
    | CancelGrace
    | AbortInflight
    | ReportQuiet
    | HoldEngine
    | StartRest
    | CancelRest
    | PutToSleep
    | ReportAsleep
    | LetGo
    | CancelLetGo
    | Release
)


# --- state ---------------------------------------------------------------------------------


class LaneState(Value, frozen=True, kw_only=True):
    """The state of a lane at its worker. Start with `LaneState(lane=...).with_pause(policy.pause)`."""

    lane: str
    own: bool = False
    """It has an engine to itself, which may be stopped and put to sleep."""
    ladder: tuple[Rung, ...] = (Rung.BOUNDARY, Rung.ITERATION)
    keep_ms: float = PausePolicy().keep_ms
    sleep_after_ms: float = PausePolicy().sleep_after_ms
    phase: Phase = Phase.CLOSED
    budget: Budget = NO_BUDGET
    epoch: int = 0
    """The highest epoch seen. An opening of an older one is refused, unless it was published later."""
    seen_at_ms: float = 0.0
    """Server time of the latest publication seen.

    The store checks an opening's epoch as it publishes it, so one that is published after all we know, on a
    lower epoch, tells that the epochs began anew: Redis was emptied. To refuse it would keep the lane closed
    for good."""
    pause: int = 0
    """Number of the last pause."""
    reason: Reason = Reason.POLICY_CLOSED
    """Why the lane is (being) closed; the gate's reason while it is open."""
    grace_ms: float = 0.0
    """Of the open gate; it holds for a close by the end of the lease."""
    grace_running: bool = False
    pending: Gate | None = None
    """An opening that came while something was still awaited of the engine."""
    stopping: bool = False

    # An engine of its own:
    stopped: bool = True
    """It may stand still or sleep: at the start nobody knows how a worker before this one has left it."""
    unproven: bool = False
    """It has slept, and must answer rightly before it gets work."""
    proved: bool = False
    """How it answers is known, to compare with after a sleep."""
    told: bool = False
    """That the present pause is quiet has been said."""
    resting: bool = False
    """The timers of `StartRest` run."""
    sleep_due: bool = False
    """It sleeps as soon as it holds nothing."""
    cannot_hold: bool = False
    cannot_sleep: bool = False
    """Its engine has refused the rung for good."""
    turn: int = 0
    """Number of the last `LetGo`."""
    checking: bool = False
    """That one asked for a check."""
    story: tuple[str, ...] = ()
    """The last steps, newest last."""

    def with_ladder(self, ladder: tuple[Rung, ...]) -> LaneState:
        """The same lane under another ladder (a new policy); it counts from the next close or timer on."""
        return msgspec.structs.replace(self, ladder=ladder)

    def with_pause(self, pause: PausePolicy) -> LaneState:
        """The same with all that a policy says of pauses."""
        return msgspec.structs.replace(
            self, ladder=pause.ladder, keep_ms=pause.keep_ms, sleep_after_ms=pause.sleep_after_ms
        )

    def with_sleep(self, *, can: bool) -> LaneState:
        """The same lane, once its engine has said whether it can sleep."""
        return msgspec.structs.replace(self, cannot_sleep=not can)

    def found(self, *, stands: bool) -> LaneState:
        """The same lane, once its engine has said whether it stands still or sleeps. From the first order on
        the lane knows better."""
        if self.turn or self.phase is not Phase.CLOSED:
            return self
        return msgspec.structs.replace(self, stopped=stands, unproven=stands)

    @property
    def holds(self) -> bool:
        """Whether a pause may stop the whole engine. Never one that others use too."""
        return self.own and Rung.ITERATION in self.ladder and not self.cannot_hold

    @property
    def sleeps(self) -> bool:
        """Whether a pause may put the engine to sleep. Never one that others use too."""
        return self.own and Rung.SLEEP in self.ladder and not self.cannot_sleep


STORY_LENGTH = 24

_STAYS = {phase: frozenset({phase}) for phase in Phase}
_CLOSING = frozenset({Phase.GRACE, Phase.ENDING, Phase.HOLDING, Phase.CLOSED})

TRANSITIONS: dict[tuple[Phase, str], frozenset[Phase]] = {
    **{
        (phase, tag): _STAYS[phase]
        for phase in Phase
        for tag in (
            "gate_seen",
            "lease_over",
            "grace_over",
            "all_quiet",
            "stop",
            "engine_held",
            "hold_failed",
            "keep_over",
            "sleep_due",
            "engine_asleep",
            "sleep_failed",
            "engine_goes",
        )
    },
    (Phase.CLOSED, "gate_seen"): frozenset({Phase.CLOSED, Phase.OPEN, Phase.WAKING}),
    (Phase.CLOSED, "sleep_due"): frozenset({Phase.CLOSED, Phase.SLEEPING}),
    (Phase.OPEN, "gate_seen"): _CLOSING | {Phase.OPEN},
    (Phase.OPEN, "lease_over"): _CLOSING,
    (Phase.OPEN, "stop"): _CLOSING,
    (Phase.GRACE, "gate_seen"): frozenset({Phase.GRACE, Phase.OPEN, Phase.ENDING, Phase.HOLDING}),
    (Phase.GRACE, "grace_over"): frozenset({Phase.GRACE, Phase.ENDING, Phase.HOLDING}),
    (Phase.GRACE, "all_quiet"): frozenset({Phase.CLOSED}),
    (Phase.GRACE, "stop"): frozenset({Phase.GRACE, Phase.ENDING, Phase.HOLDING}),
    (Phase.ENDING, "all_quiet"): frozenset(
        {Phase.CLOSED, Phase.OPEN, Phase.HELD, Phase.SLEEPING, Phase.WAKING}
    ),
    (Phase.HOLDING, "engine_held"): frozenset({Phase.HELD, Phase.WAKING, Phase.ENDING, Phase.HOLDING}),
    (Phase.HOLDING, "hold_failed"): frozenset({Phase.ENDING, Phase.HOLDING}),
    (Phase.HELD, "gate_seen"): frozenset({Phase.HELD, Phase.WAKING}),
    (Phase.HELD, "keep_over"): frozenset({Phase.HELD, Phase.ENDING}),
    (Phase.HELD, "sleep_due"): frozenset({Phase.HELD, Phase.ENDING}),
    (Phase.HELD, "stop"): frozenset({Phase.ENDING}),
    (Phase.SLEEPING, "engine_asleep"): frozenset({Phase.ASLEEP, Phase.WAKING, Phase.SLEEPING}),
    (Phase.SLEEPING, "sleep_failed"): frozenset({Phase.CLOSED, Phase.WAKING, Phase.SLEEPING}),
    (Phase.ASLEEP, "gate_seen"): frozenset({Phase.ASLEEP, Phase.WAKING}),
    (Phase.WAKING, "gate_seen"): frozenset({Phase.WAKING, Phase.HOLDING, Phase.ENDING, Phase.CLOSED}),
    (Phase.WAKING, "lease_over"): frozenset({Phase.HOLDING, Phase.ENDING, Phase.CLOSED}),
    (Phase.WAKING, "stop"): frozenset({Phase.HOLDING, Phase.ENDING, Phase.CLOSED}),
    (Phase.WAKING, "engine_goes"): frozenset({Phase.OPEN, Phase.WAKING}),
}
"""Where each event may lead from each phase. `handle` refuses anything else."""


class LaneError(Exception):
    """An event that cannot be, or a step that the table does not allow. Carries the lane's story."""

    def __init__(self, message: str, state: LaneState) -> None:
        story = "\n  ".join(state.story) or "(nothing happened yet)"
        super().__init__(f"lane {state.lane!r} in phase {state.phase}: {message}. Its story:\n  {story}")
        self.state = state
