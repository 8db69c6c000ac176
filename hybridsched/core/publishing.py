"""From a decision to the gate that carries it out, and whether that gate stands already."""

from __future__ import annotations

import msgspec

from hybridsched.core.reasons import Reason
from hybridsched.core.values import Gate, GateDecision, GateState


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


def stands(stored: Gate | None, wanted: Gate) -> bool:
    """Whether the gate that is published already says what is wanted, so that only its lease matters."""
    if stored is None:
        return False
    if stored.state is GateState.CLOSED and stored.reason is wanted.reason is Reason.ONLINE_ARRIVED:
        return True
    said = msgspec.structs.replace(stored, at_ms=0.0, since_ms=0.0, epoch=0)
    return said == msgspec.structs.replace(wanted, epoch=0)
