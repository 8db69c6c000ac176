"""Snapshots for tests of decisions: by default one idle lane with work, which opens."""

from __future__ import annotations

import msgspec

from hybridsched.core.decide import decide
from hybridsched.core.policy import IdlePolicy, PolicyKind, PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import (
    Budget,
    Gate,
    GateDecision,
    GateState,
    Hold,
    LaneView,
    QueueView,
    ReplicaView,
    Signal,
    Snapshot,
)

NOW = 1_000_000.0
POLICY = PoolPolicy(name="p", kind=PolicyKind.IDLE_WINDOW)
change = msgspec.structs.replace


def sig(value: float, age_ms: float = 20.0) -> Signal:
    return Signal(value=value, age_ms=age_ms)


def replica(name: str = "r0", **changes: Signal | str) -> ReplicaView:
    view = ReplicaView(
        replica=name,
        model="m",
        online_inflight=sig(0),
        online_idle_ms=sig(500),
        engine_healthy=sig(1),
        engine_running=sig(0),
        engine_waiting=sig(0),
        kv_use=sig(0.1),
        frozen_ms=sig(0),
    )
    return change(view, **changes)


def lane(name: str = "r0", **changes: object) -> LaneView:
    view = LaneView(lane=name, replica=name, offline_inflight=sig(0), work=sig(10), epoch=3)
    return change(view, **changes)


def queue(**changes: Signal) -> QueueView:
    return change(QueueView(model="m", depth=sig(0), oldest_wait_ms=sig(0)), **changes)


def snap(
    *,
    replicas: tuple[ReplicaView, ...] | None = None,
    lanes: tuple[LaneView, ...] | None = None,
    queues: tuple[QueueView, ...] | None = None,
    holds: tuple[Hold, ...] = (),
) -> Snapshot:
    return Snapshot(
        pool="p",
        now_ms=NOW,
        replicas=(replica(),) if replicas is None else replicas,
        lanes=(lane(),) if lanes is None else lanes,
        queues=(queue(),) if queues is None else queues,
        holds=holds,
    )


def one(snapshot: Snapshot, policy: PoolPolicy = POLICY) -> GateDecision:
    (decision,) = decide(snapshot, policy)
    return decision


def open_gate(name: str = "r0", **changes: object) -> Gate:
    gate = Gate(
        lane=name,
        state=GateState.OPEN,
        reason=Reason.IDLE,
        budget=Budget(max_inflight=64, chunk_tokens=1, slice_tokens=1),
        at_ms=NOW - 100,
    )
    return change(gate, **changes)


def idle_policy(**changes: object) -> PoolPolicy:
    return change(POLICY, idle=change(IdlePolicy(), **changes))
