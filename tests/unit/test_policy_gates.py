"""Lanes that the modes shut: as holds in the snapshot, and so in the decision log."""

from __future__ import annotations

from hybridsched.core.codec import DecisionRecord, replay
from hybridsched.core.decide import decide
from hybridsched.core.policy import PolicyKind, PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import GateState, LaneView, ReplicaView, Signal, Snapshot
from hybridsched.workers.policy_gates import shut_lanes

POLICY = PoolPolicy(name="p", kind=PolicyKind.UNPROTECTED)


def snapshot() -> Snapshot:
    fresh = Signal(value=1.0, age_ms=0.0)
    replicas = tuple(
        ReplicaView(replica=f"r{i}", model="m", node=node, engine_healthy=fresh)
        for i, node in enumerate(("n1", "night-n2", ""))
    )
    lanes = tuple(LaneView(lane=r.replica, replica=r.replica, work=fresh) for r in replicas)
    return Snapshot(pool="p", now_ms=1.0, replicas=replicas, lanes=lanes)


def test_only_the_lanes_of_these_nodes_are_held_and_it_says_why() -> None:
    shut = shut_lanes(snapshot(), {"night-n2": "host n2 changes its mode (draining)", "n9": "x"})
    decisions = {d.lane: d for d in decide(shut, POLICY)}
    held = decisions["r1"]
    assert (held.state, held.reason) == (GateState.CLOSED, Reason.HELD)
    assert held.numbers["why"] == "host n2 changes its mode (draining)"
    before = {d.lane: d for d in decide(snapshot(), POLICY)}
    assert decisions["r0"] == before["r0"]
    assert decisions["r2"] == before["r2"], "a lane outside Slurm is on no node"


def test_nothing_shut_leaves_the_snapshot_as_it_is() -> None:
    assert shut_lanes(snapshot(), {}) == snapshot()
    assert shut_lanes(snapshot(), {"n9": "x"}) == snapshot()


def test_the_record_replays_without_modes() -> None:
    shut = shut_lanes(snapshot(), {"n1": "mode day has no lanes"})
    record = DecisionRecord(cycle=1, snapshot=shut, policy=POLICY, decisions=decide(shut, POLICY))
    assert replay(record) == ()
