"""Decisions on a snapshot: the order of lanes, holds, the floor, autonomy and the budget."""

from __future__ import annotations

import pytest

from hybridsched.core.decide import decide
from hybridsched.core.policies import REGISTRY
from hybridsched.core.policy import Autonomy, EnginePolicy, OfflinePolicy, PolicyKind
from hybridsched.core.reasons import Reason
from hybridsched.core.values import UNKNOWN, Budget, GateState, Hold, Snapshot
from tests.unit.decide_views import NOW, POLICY, change, lane, one, open_gate, replica, sig, snap


def test_an_idle_lane_with_work_opens_with_a_budget_and_its_epoch() -> None:
    decision = one(snap())
    assert (decision.state, decision.reason, decision.epoch) == (GateState.OPEN, Reason.IDLE, 3)
    assert decision.budget == Budget(max_inflight=64, chunk_tokens=131_072, slice_tokens=512)
    assert decision.numbers["online_idle_ms"] == 520


class TestHolds:
    def hold(self, where: str, until_ms: float | None = None) -> Hold:
        return Hold(lane=where, by="ops", why="maintenance", until_ms=until_ms)

    @pytest.mark.parametrize("where", ["", "*", "r0"])
    @pytest.mark.parametrize("kind", list(PolicyKind))
    def test_a_hold_of_the_lane_or_the_pool_closes_under_every_policy(
        self, where: str, kind: PolicyKind
    ) -> None:
        decision = one(snap(holds=(self.hold(where),)), change(POLICY, kind=kind))
        assert (decision.state, decision.reason) == (GateState.CLOSED, Reason.HELD)
        assert decision.numbers["why"] == "maintenance"
        assert decision.numbers["held_lane"] == (where or "*")

    def test_a_hold_of_another_lane_or_one_that_has_ended_does_not(self) -> None:
        holds = (self.hold("r1"), self.hold("r0", until_ms=NOW), self.hold("", until_ms=NOW - 1))
        assert one(snap(holds=holds)).state is GateState.OPEN
        assert one(snap(holds=(self.hold("r0", until_ms=NOW + 1),))).reason is Reason.HELD

    def test_a_lane_is_held_while_any_of_several_stands_and_the_last_to_end_is_named(self) -> None:
        short = Hold(lane="", by="you", why="quick test", until_ms=NOW + 3000, id="b")
        long = Hold(lane="r0", by="me", why="GPU repair, do not open", id="a")
        for holds in ((short, long), (long, short)):
            decision = one(snap(holds=holds))
            assert decision.reason is Reason.HELD
            assert (decision.numbers["hold"], decision.numbers["holds"]) == ("a", 2)
            assert decision.numbers["until_ms"] is None
        ended = change(short, until_ms=NOW)
        assert one(snap(holds=(ended, long))).reason is Reason.HELD


class TestFloor:
    def pool(self, count: int, open_lanes: tuple[int, ...] = ()) -> Snapshot:
        return snap(
            replicas=tuple(replica(f"r{i}") for i in range(count)),
            lanes=tuple(
                lane(f"r{i}", gate=open_gate(f"r{i}") if i in open_lanes else None) for i in range(count)
            ),
        )

    def opened(self, snapshot: Snapshot, floor: int) -> list[str]:
        decisions = decide(snapshot, change(POLICY, floor_gpus=floor))
        closed = {d.reason for d in decisions if d.state is GateState.CLOSED}
        assert closed <= {Reason.FLOOR, Reason.ENGINE_UNHEALTHY}
        return [d.lane for d in decisions if d.state is GateState.OPEN]

    def test_it_leaves_online_its_replicas(self) -> None:
        assert self.opened(self.pool(4), 1) == ["r0", "r1", "r2"]
        assert self.opened(self.pool(4), 4) == []
        assert self.opened(self.pool(4), 9) == []

    def test_lanes_that_are_open_keep_their_place(self) -> None:
        assert self.opened(self.pool(4, open_lanes=(3,)), 3) == ["r3"]

    def test_a_replica_that_is_not_healthy_is_not_left_for_online(self) -> None:
        snapshot = self.pool(3)
        sick = change(snapshot.replicas[0], engine_healthy=sig(0))
        snapshot = change(snapshot, replicas=(sick, *snapshot.replicas[1:]))
        assert self.opened(snapshot, 1) == ["r1"]

    def test_two_lanes_of_one_replica_count_once(self) -> None:
        snapshot = snap(
            replicas=(replica("r0"), replica("r1")),
            lanes=(lane("r0"), change(lane("r0b"), replica="r0"), lane("r1")),
        )
        assert self.opened(snapshot, 1) == ["r0", "r0b"]


class TestAutonomy:
    @pytest.mark.parametrize("autonomy", [Autonomy.SUGGEST, Autonomy.APPROVE])
    def test_it_closes_what_would_open_and_says_what_that_is(self, autonomy: Autonomy) -> None:
        decision = one(snap(), change(POLICY, autonomy=autonomy))
        assert (decision.state, decision.reason) == (GateState.CLOSED, Reason.AUTONOMY)
        assert decision.budget.max_inflight == 0
        assert decision.numbers["would"] == "open"
        assert decision.numbers["would_reason"] == "idle"
        assert decision.numbers["would_max_inflight"] == 64

    def test_what_would_stay_closed_keeps_its_reason(self) -> None:
        busy = replica(online_inflight=sig(1))
        decision = one(snap(replicas=(busy,)), change(POLICY, autonomy=Autonomy.SUGGEST))
        assert decision.reason is Reason.ONLINE_ACTIVE


class TestBudget:
    def test_slots_for_online_are_left(self) -> None:
        policy = change(POLICY, engine=change(POLICY.engine, max_num_seqs=40))
        assert one(snap(), policy).budget.max_inflight == 8

    def test_without_a_slot_the_gate_stays_closed(self) -> None:
        policy = change(POLICY, engine=change(POLICY.engine, max_num_seqs=32))
        assert one(snap(), policy).reason is Reason.NO_ROOM

    def test_a_full_kv_cache_admits_no_more(self) -> None:
        full = replica(kv_use=sig(0.9), engine_running=sig(20))
        running = lane(offline_inflight=sig(20), gate=open_gate())
        assert one(snap(replicas=(full,), lanes=(running,))).budget.max_inflight == 20
        assert one(snap(replicas=(replica(kv_use=sig(0.9)),))).reason is Reason.NO_ROOM
        just_full = replica(kv_use=sig(0.85), engine_running=sig(20))
        assert one(snap(replicas=(just_full,), lanes=(running,))).budget.max_inflight == 64

    def test_a_scrape_from_before_our_last_requests_ended_does_not_shut_the_lane(self) -> None:
        old = replica(kv_use=sig(0.9), engine_running=sig(0), engine_waiting=sig(20))
        ended = lane(offline_inflight=sig(0), offline_peak=sig(20), gate=open_gate())
        assert one(snap(replicas=(old,), lanes=(ended,))).budget.max_inflight == 64

    def test_chunks_follow_the_measured_throughput(self) -> None:
        assert one(snap(lanes=(lane(tokens_per_s=sig(1000)),))).budget.chunk_tokens == 5000


class TestBaselines:
    def test_unprotected_opens_whatever_online_does(self) -> None:
        policy = change(POLICY, kind=PolicyKind.UNPROTECTED)
        decision = one(snap(replicas=(replica(online_inflight=sig(9)),), queues=()), policy)
        assert (decision.state, decision.reason) == (GateState.OPEN, Reason.UNPROTECTED)
        assert one(snap(replicas=()), policy).state is GateState.OPEN
        assert one(snap(lanes=(lane(work=UNKNOWN),)), policy).reason is Reason.NO_WORK
        packed = replica(online_inflight=sig(250))
        assert one(snap(replicas=(packed,)), policy).reason is Reason.NO_ROOM

    def test_online_only_never_opens(self) -> None:
        assert one(snap(), change(POLICY, kind=PolicyKind.ONLINE_ONLY)).reason is Reason.POLICY_CLOSED

    def test_every_kind_has_its_function(self) -> None:
        assert set(REGISTRY) == set(PolicyKind)


def test_decisions_keep_the_order_of_lanes_and_are_deterministic() -> None:
    names = [f"r{i}" for i in (5, 1, 9, 0)]
    snapshot = snap(
        replicas=tuple(replica(name) for name in sorted(names)), lanes=tuple(lane(name) for name in names)
    )
    decisions = decide(snapshot, POLICY)
    assert [d.lane for d in decisions] == names
    assert decide(snapshot, POLICY) == decisions


def test_the_grace_of_the_policy_goes_with_every_decision() -> None:
    policy = change(POLICY, pause=change(POLICY.pause, grace_ms=40.0))
    assert one(snap(), policy).grace_ms == 40
    assert one(snap(replicas=()), policy).grace_ms == 40


def test_an_unknown_epoch_closes_its_lane_alone() -> None:
    lanes = (lane(epoch=None), lane("r1"))
    spoilt, good = decide(snap(replicas=(replica(), replica("r1")), lanes=lanes), POLICY)
    assert (spoilt.state, spoilt.reason) == (GateState.CLOSED, Reason.EPOCH_UNKNOWN)
    assert good.state is GateState.OPEN


def test_an_engine_of_the_lanes_own_keeps_no_slot_for_online_and_has_a_cache_of_its_own() -> None:
    policy = change(
        POLICY,
        offline=OfflinePolicy(max_inflight=64, slots_for_online=50, kv_share=0.5),
        engine=EnginePolicy(max_num_seqs=60),
    )
    full = replica(kv_use=sig(0.9))
    assert one(snap(replicas=(full,)), policy).reason is Reason.NO_ROOM
    own = one(snap(replicas=(full,), lanes=(lane(own=True),)), policy)
    assert (own.state, own.budget.max_inflight) == (GateState.OPEN, 60)
