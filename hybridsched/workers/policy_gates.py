"""Between decisions and gates: what is published for a decision, and when nothing needs to be."""

from __future__ import annotations

import msgspec

from hybridsched.core.reasons import Reason
from hybridsched.core.values import Gate, GateDecision, GateState, Snapshot
from hybridsched.store.gates import Outcome


def all_closed(snapshot: Snapshot) -> tuple[GateDecision, ...]:
    """Without a policy nothing opens."""
    return tuple(
        GateDecision(
            lane=lane.lane,
            state=GateState.CLOSED,
            reason=Reason.POLICY_CLOSED,
            epoch=lane.epoch,
            numbers={"policy": None},
        )
        for lane in snapshot.lanes
    )


def gate_of(decision: GateDecision, version: int, token: str) -> Gate:
    """The gate that carries the decision out; `token` is the leader's."""
    return Gate(
        lane=decision.lane,
        state=decision.state,
        reason=decision.reason,
        budget=decision.budget,
        epoch=decision.epoch,
        grace_ms=decision.grace_ms,
        policy_version=version,
        by=token,
    )


def outcome_text(outcome: Outcome | None) -> str:
    """The word for the decision log; None: the gate stood so and was not published."""
    return "stands" if outcome is None else outcome.name.lower()


def stands(stored: Gate | None, wanted: Gate) -> bool:
    """Whether the gate in Redis already says what is wanted, so that only its lease matters."""
    if stored is None:
        return False
    if stored.state is GateState.CLOSED and stored.reason is wanted.reason is Reason.ONLINE_ARRIVED:
        return True
    return msgspec.structs.replace(stored, at_ms=0.0, epoch=0) == msgspec.structs.replace(wanted, epoch=0)
