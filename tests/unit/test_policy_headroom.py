"""Policy headroom, by decision: what opens a lane beside online, and each thing that keeps it shut."""

from __future__ import annotations

import msgspec
import pytest

from hybridsched.core.decide import decide
from hybridsched.core.policy import HeadroomPolicy, PackPolicy, PolicyKind, PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import (
    UNKNOWN,
    GateDecision,
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

NOW_MS = 1_000_000.0
FIT = LatencyFit(fixed_ms=10.0, free_tokens=32.0, token_ms=0.07, cache_ms=20.0, error=0.05, samples=40)
ALONE = PoolPolicy(name="p", kind=PolicyKind.HEADROOM)
PACKED = msgspec.structs.replace(ALONE, pack=PackPolicy(enabled=True))


def now(value: float) -> Signal:
    return Signal(value=value, age_ms=10.0)


def one(
    policy: PoolPolicy = ALONE,
    *,
    rank: int | None = None,
    first_tpot_ms: float | None = 40.0,
    queue: Signal = UNKNOWN,
    lane: dict[str, object] | None = None,
    **signals: object,
) -> GateDecision:
    known: dict[str, object] = {
        "online_inflight": now(3.0),
        "online_idle_ms": now(0.0),
        "online_load": now(300.0),
        "online_ttft_ms": now(200.0),
        "online_tpot_ms": now(15.0),
        "engine_healthy": now(1.0),
        "engine_running": now(3.0),
        "engine_waiting": now(0.0),
        "kv_use": now(0.1),
        "frozen_ms": now(0.0),
        "latency": FIT,
        "latency_age_ms": 100.0,
    }
    view: dict[str, object] = {"offline_inflight": now(2.0), "work": now(50.0)}
    ranks = () if rank is None else (Rank(replica="r", rank=rank, max_inflight=8, max_load=4000.0),)
    order = Pack(model="m", ranks=ranks, reach=2, first_tpot_ms=first_tpot_ms, at_ms=NOW_MS)
    snapshot = Snapshot(
        pool="p",
        now_ms=NOW_MS,
        replicas=(ReplicaView(replica="r", model="m", **(known | signals)),),  # type: ignore[arg-type]
        lanes=(LaneView(lane="r", replica="r", **(view | (lane or {}))),),  # type: ignore[arg-type]
        queues=(QueueView(model="m", depth=now(0.0) if queue is UNKNOWN else queue),),
        packs=(order,) if ranks else (),
    )
    return decide(snapshot, policy)[0]


def test_beside_online_with_a_budget_that_outlives_claims() -> None:
    found = one()
    assert (found.state, found.reason) == (GateState.OPEN, Reason.HEADROOM)
    assert found.budget.beside_tokens == ALONE.headroom.max_backlog_tokens
    # 30 ms less the 12 of now are 257 tokens, and 27 are free of the hinge.
    assert found.budget.slice_tokens == (27 + int(18.0 / 0.07)) // 16 * 16
    assert found.numbers["iteration_ms"] == pytest.approx(12.0)


@pytest.mark.parametrize(
    ("reason", "signals"),
    [
        (Reason.LATENCY_UNKNOWN, {"latency": None}),
        (Reason.LATENCY_UNKNOWN, {"latency": msgspec.structs.replace(FIT, error=0.31)}),
        (Reason.LATENCY_UNKNOWN, {"latency": msgspec.structs.replace(FIT, token_ms=0.0)}),
        (Reason.LATENCY_UNKNOWN, {"latency": msgspec.structs.replace(FIT, cache_ms=-1.0)}),
        (Reason.LATENCY_UNKNOWN, {"latency_age_ms": None}),
        (Reason.LATENCY_UNKNOWN, {"latency_age_ms": 600_001.0}),
        (Reason.LATENCY_UNKNOWN, {"latency_age_ms": -1.0}),
        (Reason.NO_HEADROOM, {"online_load": now(2049.0)}),
        (Reason.NO_HEADROOM, {"online_tpot_ms": now(50.0)}),
        (Reason.NO_HEADROOM, {"online_ttft_ms": now(1000.0)}),
        (Reason.NO_HEADROOM, {"latency": msgspec.structs.replace(FIT, fixed_ms=60.0)}),
        (Reason.TELEMETRY_MISSING, {"online_load": UNKNOWN}),
        (Reason.TELEMETRY_STALE, {"online_inflight": Signal(value=3.0, age_ms=60_000.0)}),
        (Reason.METRIC_STALE, {"kv_use": Signal(value=0.1, age_ms=60_000.0)}),
        (Reason.METRIC_FROZEN, {"frozen_ms": now(5000.0)}),
        (Reason.ENGINE_UNHEALTHY, {"engine_healthy": now(0.0)}),
        (Reason.ONLINE_QUEUED, {"queue": now(4.0)}),
        (Reason.QUEUE_UNKNOWN, {"queue": Signal(value=0.0, age_ms=60_000.0)}),
        (Reason.NO_WORK, {"lane": {"work": now(0.0), "offline_inflight": now(0.0)}}),
        (Reason.NO_ROOM, {"online_inflight": now(230.0)}),
    ],
)
def test_what_keeps_it_shut(reason: Reason, signals: dict[str, object]) -> None:
    found = one(**signals)  # type: ignore[arg-type]
    assert (found.state, found.reason) == (GateState.CLOSED, reason)


def test_where_online_is_idle_the_next_claim_closes_it_whatever_the_fit() -> None:
    for fit in (FIT, None):
        found = one(
            online_inflight=now(0.0), online_idle_ms=now(5000.0), engine_running=now(2.0), latency=fit
        )
        assert (found.state, found.reason) == (GateState.OPEN, Reason.IDLE)
        assert found.budget.beside_tokens == 0.0


def test_nobody_is_slowed_beyond_the_first_of_the_order() -> None:
    assert one(PACKED, rank=0).reason is Reason.NO_HEADROOM, "the first has no offline work beside online"
    assert one(PACKED).reason is Reason.NO_HEADROOM, "its place is not known"
    assert one(PACKED, rank=1, first_tpot_ms=None).reason is Reason.NO_HEADROOM
    wide, tight = one(PACKED, rank=1), one(PACKED, rank=1, first_tpot_ms=20.0)
    assert (wide.reason, tight.reason) == (Reason.HEADROOM, Reason.HEADROOM)
    assert wide.numbers["limit_ms"] == 30.0, "the objective's share"
    assert tight.numbers["limit_ms"] == pytest.approx(18.0)
    assert tight.budget.slice_tokens < wide.budget.slice_tokens


def test_with_peer_share_0_the_objectives_alone_are_the_limit() -> None:
    policy = msgspec.structs.replace(PACKED, headroom=HeadroomPolicy(peer_share=0.0))
    assert one(policy, rank=0).reason is Reason.HEADROOM


def test_the_floor_holds_beside_online_too() -> None:
    assert one(msgspec.structs.replace(ALONE, floor_gpus=1)).reason is Reason.FLOOR


@pytest.mark.parametrize("latency", [{"token_ms": 5e-324}, {"cache_ms": 1e308}, {"free_tokens": 1e308}, {}])
@pytest.mark.parametrize(
    "signals",
    [{"online_inflight": now(1.7e308)}, {"kv_use": now(1e300)}, {"online_tpot_ms": now(1e308)}, {}],
    ids=str,
)
@pytest.mark.parametrize("offline", [0.0, 2.0, 1.7e308])
def test_numbers_that_no_engine_has_fail_no_cycle(
    latency: dict[str, float], signals: dict[str, object], offline: float
) -> None:
    """A cycle that fails over one replica's numbers closes the lanes of all."""
    fit = msgspec.structs.replace(FIT, **latency)
    decision = one(latency=fit, lane={"offline_inflight": now(offline)}, **signals)
    assert 0 <= decision.budget.max_inflight <= 64
    assert decision.budget.slice_tokens <= ALONE.offline.slice_tokens
    if signals:
        assert decision.state is GateState.CLOSED
