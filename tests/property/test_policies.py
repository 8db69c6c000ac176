"""Every policy, whatever it is shown: pure, shut on what is not known, the floor kept, caps in order."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridsched.core.codec import decode, encode
from hybridsched.core.decide import decide
from hybridsched.core.latency import predict
from hybridsched.core.packing import caps, packs
from hybridsched.core.policies import REGISTRY
from hybridsched.core.policy import HeadroomPolicy, PackPolicy, PolicyKind, PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import (
    UNKNOWN,
    Budget,
    Gate,
    GateState,
    LaneView,
    LatencyFit,
    Pack,
    QueueView,
    Rank,
    ReplicaView,
    Signal,
    Snapshot,
)

PROTECTING = [kind for kind in REGISTRY if kind not in (PolicyKind.UNPROTECTED, PolicyKind.ONLINE_ONLY)]
NOW_MS = 1_000_000.0
STALE_MS = 1e7
"""Beyond every limit that a policy of these tests has."""

FIT = LatencyFit(fixed_ms=10.0, free_tokens=32.0, token_ms=0.067, cache_ms=20.0, error=0.05, samples=40)
BAD_FIT = msgspec.structs.replace(FIT, error=0.9)
NO_FIT = msgspec.structs.replace(FIT, token_ms=0.0)

NEEDED = (
    *("online_inflight", "online_idle_ms", "engine_healthy", "engine_running", "engine_waiting"),
    *("kv_use", "frozen_ms"),
)

bad = st.one_of(
    st.just(UNKNOWN),
    st.builds(
        lambda value, age: Signal(value=value, age_ms=age),
        st.sampled_from([0.0, 1.0]),
        st.sampled_from([STALE_MS, -1.0, float("nan"), None]),
    ),
    st.builds(lambda value: Signal(value=value, age_ms=0.0), st.sampled_from([float("nan"), float("inf")])),
)


def good(*values: float) -> st.SearchStrategy[Signal]:
    return st.builds(
        lambda value, age: Signal(value=value, age_ms=age), st.sampled_from(values), st.floats(0.0, 300.0)
    )


def maybe(*values: float) -> st.SearchStrategy[Signal]:
    return st.one_of(good(*values), good(*values), good(*values), bad)


def replicas(name: str) -> st.SearchStrategy[ReplicaView]:
    return st.builds(
        ReplicaView,
        replica=st.just(name),
        model=st.just("m"),
        online_inflight=maybe(0.0, 0.0, 0.0, 1.0, 9.0),
        online_idle_ms=maybe(0.0, 100.0, 5000.0, 5000.0),
        online_load=maybe(0.0, 900.0),
        online_ttft_ms=maybe(100.0, 5000.0),
        online_tpot_ms=maybe(10.0, 90.0),
        engine_healthy=maybe(1.0, 1.0, 1.0, 0.0),
        engine_running=maybe(0.0, 3.0),
        engine_waiting=maybe(0.0, 0.0, 2.0),
        kv_use=maybe(0.0, 0.5, 0.99),
        frozen_ms=maybe(0.0, 0.0, 9000.0),
        latency=st.sampled_from([None, FIT, FIT, BAD_FIT, NO_FIT]),
        latency_age_ms=st.sampled_from([None, 100.0, 100.0, 1e9, float("nan"), -1.0]),
    )


def lanes(name: str) -> st.SearchStrategy[LaneView]:
    gate = Gate(
        lane=name,
        state=GateState.OPEN,
        reason=Reason.IDLE,
        budget=Budget(max_inflight=8, chunk_tokens=9, slice_tokens=9),
    )
    return st.builds(
        LaneView,
        lane=st.just(name),
        replica=st.just(name),
        gate=st.sampled_from([None, gate]),
        epoch=st.sampled_from([0, 0, 7, None]),
        offline_inflight=maybe(0.0, 3.0),
        work=maybe(0.0, 50.0, 50.0),
        offline_peak=maybe(0.0, 3.0),
        own=st.booleans(),
    )


orders = st.builds(
    lambda names, reach, age, tpot: Pack(
        model="m",
        ranks=tuple(
            Rank(replica=name, rank=rank, max_inflight=4, max_load=4000.0) for rank, name in enumerate(names)
        ),
        reach=reach,
        first_tpot_ms=tpot,
        at_ms=NOW_MS - age,
    ),
    st.permutations(["a", "b", "c"]),
    st.integers(0, 4),
    st.sampled_from([0.0, 100.0, STALE_MS, -5.0]),
    st.sampled_from([None, 25.0, 25.0]),
)

snapshots = st.builds(
    lambda views, places, queue, packs: Snapshot(
        pool="p", now_ms=NOW_MS, replicas=views, lanes=places, queues=queue, packs=packs
    ),
    st.tuples(replicas("a"), replicas("b"), replicas("c")),
    st.tuples(lanes("a"), lanes("b"), lanes("c")),
    st.tuples(
        st.builds(
            QueueView,
            model=st.just("m"),
            depth=maybe(0.0, 0.0, 4.0),
            oldest_wait_ms=maybe(0.0, 900.0),
            burst_requests=maybe(0.0, 5.0),
            burst_tokens=maybe(0.0, 9000.0),
        )
    )
    | st.just(()),
    st.tuples(orders) | st.just(()),
)

policies = st.builds(
    lambda kind, floor, packing, peer: PoolPolicy(
        name="p",
        kind=kind,
        floor_gpus=floor,
        pack=PackPolicy(enabled=packing),
        headroom=HeadroomPolicy(peer_share=peer, max_backlog_tokens=1000.0),
    ),
    st.sampled_from(PROTECTING),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([0.0, 0.9]),
)


def known(signal: Signal) -> bool:
    """What every policy of these tests takes for known."""
    value, age = signal.value, signal.age_ms
    return value is not None and value - value == 0.0 and age is not None and 0.0 <= age < STALE_MS


@settings(max_examples=150)
@given(snapshot=snapshots, policy=policies)
def test_a_gate_opens_only_on_what_is_known(snapshot: Snapshot, policy: PoolPolicy) -> None:
    views = {view.replica: view for view in snapshot.replicas}
    for lane, decision in zip(snapshot.lanes, decide(snapshot, policy), strict=True):
        if decision.state is GateState.CLOSED:
            assert decision.budget.max_inflight == 0
            continue
        view = views[lane.replica]
        assert decision.budget.max_inflight > 0
        assert lane.epoch is not None
        for name in (
            "online_inflight",
            "online_idle_ms",
            "engine_healthy",
            "engine_running",
            "engine_waiting",
        ):
            assert known(getattr(view, name)), name
        for name in ("kv_use", "frozen_ms"):
            assert known(getattr(view, name)), name
        assert known(lane.offline_inflight)
        assert snapshot.queues
        assert known(snapshot.queues[0].depth)
        assert view.engine_healthy.value == 1.0
        assert (view.frozen_ms.value or 0.0) < policy.idle.frozen_after_ms


@settings(max_examples=300)
@given(snapshot=snapshots, policy=policies)
def test_beside_online_it_opens_only_on_a_good_fit_and_below_the_objectives(
    snapshot: Snapshot, policy: PoolPolicy
) -> None:
    policy = msgspec.structs.replace(policy, kind=PolicyKind.HEADROOM)
    views = {view.replica: view for view in snapshot.replicas}
    for lane, decision in zip(snapshot.lanes, decide(snapshot, policy), strict=True):
        view = views[lane.replica]
        beside = decision.reason is Reason.HEADROOM
        assert (decision.budget.beside_tokens > 0.0) is beside, "only such a budget may outlive a claim"
        if not beside:
            continue
        assert not lane.own, "what runs in another engine does not show in the iterations of this one"
        assert view.latency is FIT
        assert view.latency_age_ms == 100.0
        assert known(view.online_load)
        assert (view.online_load.value or 0.0) <= policy.headroom.max_backlog_tokens
        for signal, objective in (
            (view.online_ttft_ms, policy.slo.ttft_ms),
            (view.online_tpot_ms, policy.slo.tpot_ms),
        ):
            assert not known(signal) or (signal.value or 0.0) < objective
        running = (view.online_inflight.value or 0.0) + (lane.offline_inflight.value or 0.0)
        iteration_ms = predict(FIT, running, view.kv_use.value or 0.0)
        assert iteration_ms <= policy.slo.tpot_ms
        if policy.pack.enabled and policy.headroom.peer_share > 0.0:
            (order,) = snapshot.packs
            rank = next(rank.rank for rank in order.ranks if rank.replica == lane.replica)
            assert rank > 0, "nobody beside online on the first"


@settings(max_examples=60)
@given(snapshot=snapshots, policy=policies)
def test_the_floor_is_kept(snapshot: Snapshot, policy: PoolPolicy) -> None:
    decisions = decide(snapshot, policy)
    views = {view.replica: view for view in snapshot.replicas}
    healthy = sum(known(view.engine_healthy) and view.engine_healthy.value == 1.0 for view in views.values())
    opened = {
        lane.replica
        for lane, decision in zip(snapshot.lanes, decisions, strict=True)
        if decision.state is GateState.OPEN
    }
    assert len(opened) <= max(0, healthy - policy.floor_gpus)


@settings(max_examples=60)
@given(snapshot=snapshots, policy=policies)
def test_decisions_depend_on_nothing_but_what_they_are_given(snapshot: Snapshot, policy: PoolPolicy) -> None:
    before = encode(snapshot), encode(policy)
    decisions, orders_now = decide(snapshot, policy), packs(snapshot, policy)
    assert (encode(snapshot), encode(policy)) == before
    copy, same_policy = decode(before[0], Snapshot), decode(before[1], PoolPolicy)
    assert msgspec.json.encode(decide(copy, same_policy)) == msgspec.json.encode(decisions)
    assert msgspec.json.encode(packs(copy, same_policy)) == msgspec.json.encode(orders_now)


@settings(max_examples=60)
@given(snapshot=snapshots)
def test_a_lane_in_reach_or_of_unknown_place_keeps_its_iterations_short(snapshot: Snapshot) -> None:
    policy = PoolPolicy(
        name="p", kind=PolicyKind.CONSOLIDATE, pack=PackPolicy(enabled=True, far_slice_tokens=9999)
    )
    far = {
        rank.replica
        for pack in snapshot.packs
        if 0.0 <= NOW_MS - pack.at_ms <= policy.cycle.lease_ms
        for rank in pack.ranks
        if rank.rank >= pack.reach > 0
    }
    for lane, decision in zip(snapshot.lanes, decide(snapshot, policy), strict=True):
        if decision.state is GateState.OPEN:
            idle_ms = decision.numbers["online_idle_ms"]
            assert isinstance(idle_ms, float)
            gap = idle_ms < policy.pack.gap_ms
            near = policy.pack.gap_slice_tokens if gap else policy.offline.slice_tokens
            assert decision.budget.slice_tokens == (9999 if lane.replica in far else near)
            assert (decision.check_in_ms is not None) is (gap and lane.replica not in far)


@settings(max_examples=60)
@given(snapshot=snapshots)
def test_an_order_names_every_replica_once_and_its_reach_is_one_of_them(snapshot: Snapshot) -> None:
    policy = PoolPolicy(name="p", kind=PolicyKind.CONSOLIDATE, pack=PackPolicy(enabled=True))
    (order,) = packs(snapshot, policy)
    assert order.first_tpot_ms is None or order.first_tpot_ms >= 0.0
    assert sorted(rank.replica for rank in order.ranks) == ["a", "b", "c"]
    assert [rank.rank for rank in order.ranks] == [0, 1, 2]
    assert 1 <= order.reach <= 3
    assert policy.pack.least_fill <= order.fill <= 1.0


@given(
    fills=st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
    most=st.integers(1, 500),
    tokens=st.floats(1.0, 1e6),
)
def test_caps_are_monotone(fills: tuple[float, float], most: int, tokens: float) -> None:
    pack = PackPolicy(max_inflight=most, max_wait_tokens=tokens)
    low, high = caps(pack, min(fills)), caps(pack, max(fills))
    assert 1 <= low[0] <= high[0] <= most
    assert 1.0 <= low[1] <= high[1] <= max(1.0, tokens)


@settings(max_examples=60)
@given(snapshot=snapshots, slower=st.floats(1.0, 20.0))
def test_slower_replicas_never_have_higher_caps(snapshot: Snapshot, slower: float) -> None:
    policy = PoolPolicy(name="p", kind=PolicyKind.CONSOLIDATE, pack=PackPolicy(enabled=True, adjust_ms=1.0))
    slowed = msgspec.structs.replace(
        snapshot,
        replicas=tuple(
            msgspec.structs.replace(
                view,
                online_ttft_ms=scaled(view.online_ttft_ms, slower),
                online_tpot_ms=scaled(view.online_tpot_ms, slower),
            )
            for view in snapshot.replicas
        ),
    )
    (fast,), (slow,) = packs(snapshot, policy), packs(slowed, policy)
    assert slow.fill <= fast.fill


def scaled(signal: Signal, by: float) -> Signal:
    return signal if signal.value is None else msgspec.structs.replace(signal, value=signal.value * by)
