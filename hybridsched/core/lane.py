"""The offline worker's lane as a state machine: the first two rungs of the pause ladder.

    CLOSED   nothing is admitted and nothing runs
    OPEN     work is admitted within the budget
    GRACE    nothing more is admitted; what is in flight may still end by itself (rung: boundary)
    ENDING   what was in flight has been told to end and its answers are awaited (rung: iteration)

`handle(state, event)` is the only way to a new state. It returns instructions for the worker, which carries
them out in order and reports what came of them as events. A pause begins with a close that finds the lane
open and has a number; its instructions and timers carry it, so that a late timer cannot touch the next pause.
The caller's duties: to send `AllQuiet` once no offline request of the lane is in the engine any more while
a pause lasts, and to say with each close whether any is (`inflight`).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from hybridsched.core.policy import Rung
from hybridsched.core.reasons import Reason
from hybridsched.core.values import NO_BUDGET, Budget, Gate, GateState, Value


class Phase(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    GRACE = "grace"
    ENDING = "ending"


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


Event = GateSeen | LeaseOver | GraceOver | AllQuiet | Stop


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
    """The pause has taken effect: no offline work is in the engine. Once for each pause."""

    pause: int
    rung: Rung
    reason: Reason
    had_work: bool
    """False when nothing was in flight at the close, so nothing had to be paused."""


Instruction = Admit | StopAdmitting | StartGrace | CancelGrace | AbortInflight | ReportQuiet


# --- state ---------------------------------------------------------------------------------


class LaneState(Value, frozen=True, kw_only=True):
    """The state of a lane at its worker. Start with `LaneState(lane=..., ladder=policy.pause.ladder)`."""

    lane: str
    ladder: tuple[Rung, ...] = (Rung.BOUNDARY, Rung.ITERATION)
    phase: Phase = Phase.CLOSED
    budget: Budget = NO_BUDGET
    epoch: int = 0
    """The highest epoch seen. An opening of an older one is refused."""
    pause: int = 0
    """Number of the last pause."""
    reason: Reason = Reason.POLICY_CLOSED
    """Why the lane is (being) closed; the gate's reason while it is open."""
    grace_ms: float = 0.0
    """Of the open gate; it holds for a close by the end of the lease."""
    grace_running: bool = False
    pending: Gate | None = None
    """An opening that came while aborted requests were still awaited."""
    stopping: bool = False
    story: tuple[str, ...] = ()
    """The last steps, newest last."""

    def with_ladder(self, ladder: tuple[Rung, ...]) -> LaneState:
        """The same lane under another ladder (a new policy); it counts from the next close or timer on."""
        return msgspec.structs.replace(self, ladder=ladder)


STORY_LENGTH = 24

TRANSITIONS: dict[tuple[Phase, str], frozenset[Phase]] = {
    (Phase.CLOSED, "gate_seen"): frozenset({Phase.CLOSED, Phase.OPEN}),
    (Phase.CLOSED, "lease_over"): frozenset({Phase.CLOSED}),
    (Phase.CLOSED, "grace_over"): frozenset({Phase.CLOSED}),
    (Phase.CLOSED, "all_quiet"): frozenset({Phase.CLOSED}),
    (Phase.CLOSED, "stop"): frozenset({Phase.CLOSED}),
    (Phase.OPEN, "gate_seen"): frozenset({Phase.OPEN, Phase.GRACE, Phase.ENDING, Phase.CLOSED}),
    (Phase.OPEN, "lease_over"): frozenset({Phase.GRACE, Phase.ENDING, Phase.CLOSED}),
    (Phase.OPEN, "grace_over"): frozenset({Phase.OPEN}),
    (Phase.OPEN, "all_quiet"): frozenset({Phase.OPEN}),
    (Phase.OPEN, "stop"): frozenset({Phase.GRACE, Phase.ENDING, Phase.CLOSED}),
    (Phase.GRACE, "gate_seen"): frozenset({Phase.GRACE, Phase.OPEN, Phase.ENDING}),
    (Phase.GRACE, "lease_over"): frozenset({Phase.GRACE}),
    (Phase.GRACE, "grace_over"): frozenset({Phase.GRACE, Phase.ENDING}),
    (Phase.GRACE, "all_quiet"): frozenset({Phase.CLOSED}),
    (Phase.GRACE, "stop"): frozenset({Phase.GRACE, Phase.ENDING}),
    (Phase.ENDING, "gate_seen"): frozenset({Phase.ENDING}),
    (Phase.ENDING, "lease_over"): frozenset({Phase.ENDING}),
    (Phase.ENDING, "grace_over"): frozenset({Phase.ENDING}),
    (Phase.ENDING, "all_quiet"): frozenset({Phase.CLOSED, Phase.OPEN}),
    (Phase.ENDING, "stop"): frozenset({Phase.ENDING}),
}
"""Where each event may lead from each phase. `handle` refuses anything else."""


class LaneError(Exception):
    """An event that cannot be, or a step that the table does not allow. Carries the lane's story."""

    def __init__(self, message: str, state: LaneState) -> None:
        story = "\n  ".join(state.story) or "(nothing happened yet)"
        super().__init__(f"lane {state.lane!r} in phase {state.phase}: {message}. Its story:\n  {story}")
        self.state = state


Step = tuple[LaneState, tuple[Instruction, ...]]


def handle(state: LaneState, event: Event) -> Step:
    """The next state and what the worker must do, in order.

    Raises `LaneError` for another lane's gate or a negative count: these are mistakes of the caller.
    """
    match event:
        case GateSeen(gate=None, inflight=inflight):
            new, out = _lease_over(state, inflight)
        case GateSeen(gate=Gate() as gate, inflight=inflight):
            if gate.lane != state.lane:
                raise LaneError(f"it was given the gate of lane {gate.lane!r}", state)
            if gate.state is GateState.OPEN:
                new, out = _open(state, gate)
            else:
                new, out = _close(state, gate.reason, gate.grace_ms, inflight, epoch=gate.epoch)
        case LeaseOver(inflight=inflight):
            new, out = _lease_over(state, inflight)
        case GraceOver(pause=pause):
            new, out = _grace_over(state, pause)
        case AllQuiet():
            new, out = _quiet(state)
        case Stop(inflight=inflight, grace_ms=grace_ms):
            state = msgspec.structs.replace(state, stopping=True, pending=None)
            new, out = _close(state, Reason.STOPPING, grace_ms, inflight, epoch=state.epoch)
    return _told(state, event, new), out


def _told(state: LaneState, event: Event, new: LaneState) -> LaneState:
    """Check the step against the table and add it to the story."""
    tag = str(event.__struct_config__.tag)
    if new.phase not in TRANSITIONS[(state.phase, tag)]:
        raise LaneError(f"{tag} led to phase {new.phase}, which the table does not allow", state)
    if new.phase is state.phase and new.pause == state.pause and new.pending is state.pending:
        return new
    line = f"{tag}: {state.phase} -> {new.phase} (pause {new.pause}, {new.reason}, epoch {new.epoch})"
    return msgspec.structs.replace(new, story=(*state.story, line)[-STORY_LENGTH:])


def _open(state: LaneState, gate: Gate) -> Step:
    if state.stopping or gate.epoch < state.epoch:
        return state, ()
    if state.phase is Phase.ENDING:
        return msgspec.structs.replace(state, pending=gate, epoch=gate.epoch), ()
    new = msgspec.structs.replace(
        state,
        phase=Phase.OPEN,
        budget=gate.budget,
        epoch=gate.epoch,
        reason=gate.reason,
        grace_ms=gate.grace_ms,
        grace_running=False,
        pending=None,
    )
    if state.phase is Phase.OPEN:
        changed = gate.budget != state.budget
        return new, (Admit(budget=gate.budget, resumed=False),) if changed else ()
    admit = Admit(budget=gate.budget, resumed=True)
    if state.grace_running:
        return new, (CancelGrace(pause=state.pause), admit)
    return new, (admit,)


def _lease_over(state: LaneState, inflight: int) -> Step:
    return _close(state, Reason.LEASE_EXPIRED, state.grace_ms, inflight, epoch=state.epoch)


def _close(state: LaneState, reason: Reason, grace_ms: float, inflight: int, *, epoch: int) -> Step:
    if inflight < 0:
        raise LaneError(f"it was told of {inflight} requests in flight", state)
    state = msgspec.structs.replace(state, epoch=max(state.epoch, epoch), pending=None)
    if state.phase is Phase.GRACE and _to_be_ended_now(state, reason, grace_ms):
        return _abort(msgspec.structs.replace(state, reason=reason))
    if state.phase is not Phase.OPEN:
        return state, ()
    pause = state.pause + 1
    state = msgspec.structs.replace(
        state, phase=Phase.GRACE, budget=NO_BUDGET, pause=pause, reason=reason, grace_running=False
    )
    stop = StopAdmitting(pause=pause, reason=reason)
    if inflight == 0:
        quiet = ReportQuiet(pause=pause, rung=Rung.BOUNDARY, reason=reason, had_work=False)
        return msgspec.structs.replace(state, phase=Phase.CLOSED), (stop, quiet)
    if Rung.ITERATION not in state.ladder:
        return state, (stop,)
    if grace_ms <= 0:
        state, abort = _abort(state)
        return state, (stop, *abort)
    return msgspec.structs.replace(state, grace_running=True), (stop, StartGrace(pause=pause, ms=grace_ms))


def _to_be_ended_now(state: LaneState, reason: Reason, grace_ms: float) -> bool:
    """A second close that allows no grace ends what the first one let run; the end of the lease does not."""
    return grace_ms <= 0 and reason is not Reason.LEASE_EXPIRED and Rung.ITERATION in state.ladder


def _abort(state: LaneState) -> Step:
    out: tuple[Instruction, ...] = (AbortInflight(pause=state.pause),)
    if state.grace_running:
        out = (CancelGrace(pause=state.pause), *out)
    return msgspec.structs.replace(state, phase=Phase.ENDING, grace_running=False), out


def _grace_over(state: LaneState, pause: int) -> Step:
    if state.phase is not Phase.GRACE or pause != state.pause or not state.grace_running:
        return state, ()
    state = msgspec.structs.replace(state, grace_running=False)
    if Rung.ITERATION not in state.ladder:
        return state, ()
    return _abort(state)


def _quiet(state: LaneState) -> Step:
    if state.phase in (Phase.CLOSED, Phase.OPEN):
        return state, ()
    rung = Rung.ITERATION if state.phase is Phase.ENDING else Rung.BOUNDARY
    out: tuple[Instruction, ...] = (
        ReportQuiet(pause=state.pause, rung=rung, reason=state.reason, had_work=True),
    )
    if state.grace_running:
        out = (CancelGrace(pause=state.pause), *out)
    closed = msgspec.structs.replace(state, phase=Phase.CLOSED, grace_running=False, pending=None)
    if state.pending is None:
        return closed, out
    reopened, admit = _open(closed, state.pending)
    return reopened, (*out, *admit)
