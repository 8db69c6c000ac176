"""The offline worker's lane as a state machine: the rungs of the pause ladder that a worker takes by itself.

    CLOSED    nothing is admitted and nothing runs
    OPEN      work is admitted within the budget
    GRACE     nothing more is admitted; what is in flight may still end by itself (rung: boundary)
    ENDING    what was in flight has been told to end and its answers are awaited (rung: iteration)

A lane with an engine of its own stops all of it in place of ending its requests, which loses nothing:

    HOLDING   the engine has been told to stand still at its next iteration (rung: iteration)
    HELD      it stands still, with the requests in it, for as long as the policy says; then they are ended as
              on a shared engine, so that their tokens are on the disk and another lane may go on with them
    SLEEPING  it holds nothing and has been told to free its memory (rung: sleep)
    ASLEEP    it has
    WAKING    the gate is open; the engine has been told to go on, and to answer a question where it has slept

On a shared lane none of these five is ever reached: online would stop with it.

`handle(state, event)` is the only way to a new state. It returns instructions for the worker, which carries
them out in order and reports what came of them as events. A pause begins with a close that finds the lane
open and has a number; its instructions and timers carry it, so that a late timer cannot touch the next pause.
The caller's duties: to send `AllQuiet` once no offline request of the lane is in the engine any more while
a pause lasts (a held one aside), and to say with each close whether any is (`inflight`).
"""

from __future__ import annotations

import msgspec

from hybridsched.core.lane_values import QUIET as QUIET
from hybridsched.core.lane_values import STORY_LENGTH, TRANSITIONS
from hybridsched.core.lane_values import AbortInflight as AbortInflight
from hybridsched.core.lane_values import Admit as Admit
from hybridsched.core.lane_values import AllQuiet as AllQuiet
from hybridsched.core.lane_values import CancelGrace as CancelGrace
from hybridsched.core.lane_values import CancelLetGo as CancelLetGo
from hybridsched.core.lane_values import CancelRest as CancelRest
from hybridsched.core.lane_values import EngineAsleep as EngineAsleep
from hybridsched.core.lane_values import EngineGoes as EngineGoes
from hybridsched.core.lane_values import EngineHeld as EngineHeld
from hybridsched.core.lane_values import Event as Event
from hybridsched.core.lane_values import GateSeen as GateSeen
from hybridsched.core.lane_values import GraceOver as GraceOver
from hybridsched.core.lane_values import HoldEngine as HoldEngine
from hybridsched.core.lane_values import HoldFailed as HoldFailed
from hybridsched.core.lane_values import Instruction as Instruction
from hybridsched.core.lane_values import KeepOver as KeepOver
from hybridsched.core.lane_values import LaneError as LaneError
from hybridsched.core.lane_values import LaneState as LaneState
from hybridsched.core.lane_values import LeaseOver as LeaseOver
from hybridsched.core.lane_values import LetGo as LetGo
from hybridsched.core.lane_values import Phase as Phase
from hybridsched.core.lane_values import PutToSleep as PutToSleep
from hybridsched.core.lane_values import Release as Release
from hybridsched.core.lane_values import ReportAsleep as ReportAsleep
from hybridsched.core.lane_values import ReportQuiet as ReportQuiet
from hybridsched.core.lane_values import SleepDue as SleepDue
from hybridsched.core.lane_values import SleepFailed as SleepFailed
from hybridsched.core.lane_values import StartGrace as StartGrace
from hybridsched.core.lane_values import StartRest as StartRest
from hybridsched.core.lane_values import Stop as Stop
from hybridsched.core.lane_values import StopAdmitting as StopAdmitting
from hybridsched.core.policy import Rung
from hybridsched.core.reasons import Reason
from hybridsched.core.values import NO_BUDGET, Gate, GateState

__all__ = ["TRANSITIONS", "handle"]

Step = tuple[LaneState, tuple[Instruction, ...]]

_replace = msgspec.structs.replace


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
                new, out = _close(_anew(state, gate), gate.reason, gate.grace_ms, inflight, epoch=gate.epoch)
            new = _replace(new, seen_at_ms=max(state.seen_at_ms, gate.at_ms))
        case LeaseOver(inflight=inflight):
            new, out = _lease_over(state, inflight)
        case GraceOver(pause=pause):
            new, out = _grace_over(state, pause)
        case AllQuiet():
            new, out = _quiet(state)
        case Stop(inflight=inflight, grace_ms=grace_ms):
            state = _replace(state, stopping=True, pending=None)
            new, out = _close(state, Reason.STOPPING, grace_ms, inflight, epoch=state.epoch)
        case EngineHeld() | HoldFailed():
            new, out = _hold_answered(state, event)
        case KeepOver() | SleepDue():
            new, out = _rest_over(state, event)
        case EngineAsleep() | SleepFailed():
            new, out = _sleep_answered(state, event)
        case EngineGoes(turn=turn):
            new, out = _goes(state, turn)
    return _told(state, event, new), out


def _told(state: LaneState, event: Event, new: LaneState) -> LaneState:
    """Check the step against the table and add it to the story."""
    tag = str(event.__struct_config__.tag)
    if new.phase not in TRANSITIONS[(state.phase, tag)]:
        raise LaneError(f"{tag} led to phase {new.phase}, which the table does not allow", state)
    if new.phase is state.phase and new.pause == state.pause and new.pending is state.pending:
        return new
    line = f"{tag}: {state.phase} -> {new.phase} (pause {new.pause}, {new.reason}, epoch {new.epoch})"
    return _replace(new, story=(*state.story, line)[-STORY_LENGTH:])


# --- the gate ------------------------------------------------------------------------------


def _open(state: LaneState, gate: Gate) -> Step:
    state = _anew(state, gate)
    if state.stopping or gate.epoch < state.epoch:
        return state, ()
    if state.phase in (Phase.ENDING, Phase.HOLDING, Phase.SLEEPING, Phase.WAKING):
        return _replace(state, pending=gate, epoch=gate.epoch), ()
    if state.phase is not Phase.OPEN and state.phase is not Phase.GRACE and _stands(state):
        return _let_go(_replace(state, pending=gate, epoch=gate.epoch))
    new = _replace(
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
    new, cancel = _no_rest(new)
    return new, (*cancel, admit)


def _anew(state: LaneState, gate: Gate) -> LaneState:
    """The state with the gate's epoch where that is lower and yet published later: see `seen_at_ms`."""
    if gate.epoch < state.epoch and gate.at_ms > state.seen_at_ms:
        return _replace(state, epoch=gate.epoch)
    return state


def _lease_over(state: LaneState, inflight: int) -> Step:
    return _close(state, Reason.LEASE_EXPIRED, state.grace_ms, inflight, epoch=state.epoch)


def _close(state: LaneState, reason: Reason, grace_ms: float, inflight: int, *, epoch: int) -> Step:
    if inflight < 0:
        raise LaneError(f"it was told of {inflight} requests in flight", state)
    state = _replace(state, epoch=max(state.epoch, epoch), pending=None)
    if state.phase is Phase.GRACE and _to_be_ended_now(state, reason, grace_ms):
        return _take_out(_replace(state, reason=reason))
    if state.phase is Phase.WAKING:
        return _close_waking(state, reason, inflight)
    if state.stopping and state.phase is Phase.HELD:
        return _unload(state)
    if state.stopping and state.phase is Phase.CLOSED:
        return _left(state)
    if state.phase is not Phase.OPEN:
        return state, ()
    pause = state.pause + 1
    state = _replace(
        state,
        phase=Phase.GRACE,
        budget=NO_BUDGET,
        pause=pause,
        reason=reason,
        grace_running=False,
        told=False,
        sleep_due=False,
    )
    stop = StopAdmitting(pause=pause, reason=reason)
    if inflight == 0:
        state, closed = _closed(state, Rung.BOUNDARY, had_work=False)
        return state, (stop, *closed)
    if Rung.ITERATION not in state.ladder:
        return state, (stop,)
    if grace_ms <= 0:
        state, abort = _take_out(state)
        return state, (stop, *abort)
    return _replace(state, grace_running=True), (stop, StartGrace(pause=pause, ms=grace_ms))


def _to_be_ended_now(state: LaneState, reason: Reason, grace_ms: float) -> bool:
    """A second close that allows no grace ends what the first one let run; the end of the lease does not."""
    return grace_ms <= 0 and reason is not Reason.LEASE_EXPIRED and Rung.ITERATION in state.ladder


def _take_out(state: LaneState) -> Step:
    """The rung of the iteration: stop an engine of our own, end the requests in one that others use too. A
    worker that leaves takes its requests along."""
    return _hold(state) if state.holds and not state.stopping else _abort(state)


def _abort(state: LaneState) -> Step:
    out: tuple[Instruction, ...] = (AbortInflight(pause=state.pause),)
    if state.grace_running:
        out = (CancelGrace(pause=state.pause), *out)
    return _replace(state, phase=Phase.ENDING, grace_running=False), out


def _grace_over(state: LaneState, pause: int) -> Step:
    if state.phase is not Phase.GRACE or pause != state.pause or not state.grace_running:
        return state, ()
    state = _replace(state, grace_running=False)
    if Rung.ITERATION not in state.ladder:
        return state, ()
    return _take_out(state)


def _quiet(state: LaneState) -> Step:
    if state.phase is Phase.ENDING:
        return _ended(state)
    if state.phase is not Phase.GRACE:
        return state, ()
    return _closed(state, Rung.BOUNDARY, had_work=True)


def _closed(state: LaneState, rung: Rung, *, had_work: bool) -> Step:
    """Nothing of the lane's is in the engine any more."""
    out: tuple[Instruction, ...] = ()
    if not state.told:
        out = (ReportQuiet(pause=state.pause, rung=rung, reason=state.reason, had_work=had_work),)
    if state.grace_running:
        out = (CancelGrace(pause=state.pause), *out)
    pending = state.pending
    state = _replace(state, phase=Phase.CLOSED, grace_running=False, pending=None, told=True)
    if pending is not None:
        reopened, more = _open(state, pending)
        return reopened, (*out, *more)
    state, more = _rest(state)
    return state, (*out, *more)


# --- an engine of the lane's own --------------------------------------------------------------


def _stands(state: LaneState) -> bool:
    """Whether the engine has to be told to go on, or to answer, before it gets work."""
    return state.own and (state.stopped or state.unproven or (state.sleeps and not state.proved))


def _let_go(state: LaneState) -> Step:
    turn = state.turn + 1
    check = state.unproven or (state.sleeps and not state.proved)
    state, out = _no_rest(state)
    state = _replace(state, phase=Phase.WAKING, turn=turn, checking=check)
    return state, (*out, LetGo(turn=turn, check=check))


def _goes(state: LaneState, turn: int) -> Step:
    gate = state.pending
    if state.phase is not Phase.WAKING or turn != state.turn or gate is None:
        return state, ()
    proved = state.proved or state.checking
    state = _replace(
        state, phase=Phase.CLOSED, stopped=False, unproven=False, proved=proved, checking=False, pending=None
    )
    return _open(state, gate)


def _close_waking(state: LaneState, reason: Reason, inflight: int) -> Step:
    """The order to go on may have been carried out, so requests that the engine held may run."""
    state = _replace(
        state,
        phase=Phase.CLOSED,
        pause=state.pause + (1 if inflight else 0),
        reason=reason,
        told=inflight == 0,
        sleep_due=False,
        unproven=state.unproven or state.checking,
        checking=False,
    )
    cancel = CancelLetGo(turn=state.turn)
    if inflight:
        state, more = _take_out(state)
    else:
        state, more = _left(state) if state.stopping else _rest(state)
    return state, (cancel, *more)


def _hold(state: LaneState) -> Step:
    out: tuple[Instruction, ...] = (HoldEngine(pause=state.pause),)
    if state.grace_running:
        out = (CancelGrace(pause=state.pause), *out)
    return _replace(state, phase=Phase.HOLDING, grace_running=False, stopped=True), out


def _hold_answered(state: LaneState, event: EngineHeld | HoldFailed) -> Step:
    if state.phase is not Phase.HOLDING or event.pause != state.pause:
        return state, ()
    if isinstance(event, HoldFailed):
        return _abort(_replace(state, cannot_hold=state.cannot_hold or event.never))
    quiet = ReportQuiet(pause=state.pause, rung=Rung.ITERATION, reason=state.reason, had_work=True, held=True)
    state = _replace(state, phase=Phase.HELD, told=True)
    if state.stopping:
        state, more = _unload(state)
    elif state.pending is not None:
        state, more = _let_go(state)
    else:
        state, more = _rest(state)
    return state, (quiet, *more)


def _unload(state: LaneState) -> Step:
    """End the requests that the engine holds."""
    state, out = (state, ()) if state.sleeps and not state.stopping else _no_rest(state)
    state, abort = _abort(state)
    return state, (*out, *abort)


def _ended(state: LaneState) -> Step:
    """The requests that were told to end are back."""
    if state.stopping and state.own and state.stopped:
        state, cancel = _no_rest(state)
        state, out = _closed(state, Rung.ITERATION, had_work=True)
        return _replace(state, stopped=False), (*cancel, *out, Release())
    if not state.told or state.pending is not None:
        return _closed(state, Rung.ITERATION, had_work=True)
    if state.sleep_due:
        return _sleep(state)
    return _replace(state, phase=Phase.HELD), ()


def _left(state: LaneState) -> Step:
    """A worker that leaves has an engine go on that it has stopped and that holds nothing. One that may sleep
    sleeps on: its memory may be online's by now."""
    state, out = _no_rest(state)
    if not (state.own and state.turn and state.stopped) or state.unproven:
        return state, out
    return _replace(state, stopped=False), (*out, Release())


def _rest(state: LaneState) -> Step:
    """The lane is quiet: how long may it stay as it is?"""
    if state.stopping or not state.own:
        return state, ()
    keep_ms = state.keep_ms if state.phase is Phase.HELD else None
    # Without knowing how it answers nobody could tell afterwards whether a wake went well.
    sleep_ms = state.sleep_after_ms if state.sleeps and state.proved else None
    if keep_ms is None and sleep_ms is None:
        return state, ()
    return _replace(state, resting=True), (StartRest(pause=state.pause, keep_ms=keep_ms, sleep_ms=sleep_ms),)


def _no_rest(state: LaneState) -> Step:
    if not state.resting:
        return state, ()
    return _replace(state, resting=False), (CancelRest(pause=state.pause),)


def _rest_over(state: LaneState, event: KeepOver | SleepDue) -> Step:
    if event.pause != state.pause or not state.resting:
        return state, ()
    if isinstance(event, KeepOver):
        return _unload(state) if state.phase is Phase.HELD else (state, ())
    if not (state.sleeps and state.proved):
        return state, ()
    if state.phase is Phase.ENDING:
        return _replace(state, sleep_due=True), ()
    if state.phase is Phase.HELD:
        return _unload(_replace(state, sleep_due=True))
    return _sleep(state) if state.phase is Phase.CLOSED else (state, ())


def _sleep(state: LaneState) -> Step:
    state, out = _no_rest(_replace(state, sleep_due=False))
    state = _replace(state, phase=Phase.SLEEPING, stopped=True, unproven=True)
    return state, (*out, PutToSleep(pause=state.pause))


def _sleep_answered(state: LaneState, event: EngineAsleep | SleepFailed) -> Step:
    if state.phase is not Phase.SLEEPING or event.pause != state.pause:
        return state, ()
    out: tuple[Instruction, ...] = ()
    phase = Phase.CLOSED
    if isinstance(event, EngineAsleep):
        phase, out = Phase.ASLEEP, (ReportAsleep(pause=state.pause, reason=state.reason),)
    state = _replace(state, phase=phase)
    if state.pending is None:
        return state, out
    state, more = _let_go(state)
    return state, (*out, *more)
