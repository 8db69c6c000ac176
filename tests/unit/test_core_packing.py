"""Pack orders: who stands where, how far a burst reaches, and when caps shrink."""

from __future__ import annotations

import msgspec
import pytest

from hybridsched.core.arrivals import BIN_MS, BINS, LEAST_BINS, Arrivals
from hybridsched.core.packing import caps, packs, same
from hybridsched.core.policy import PackPolicy, PolicyKind, PoolPolicy
from hybridsched.core.values import UNKNOWN, Hold, LaneView, Pack, QueueView, ReplicaView, Signal, Snapshot

POLICY = PoolPolicy(
    name="p",
    kind=PolicyKind.CONSOLIDATE,
    pack=PackPolicy(enabled=True, max_inflight=10, max_wait_tokens=4000.0),
)


def now(value: float) -> Signal:
    return Signal(value=value, age_ms=0.0)


def replica(name: str, **signals: Signal) -> ReplicaView:
    known = {
        "engine_healthy": now(1.0),
        "online_inflight": now(0.0),
        "online_load": now(0.0),
    }
    return ReplicaView(replica=name, model="m", **(known | signals))


NONE = now(0.0)


def queue(requests: Signal = NONE, tokens: Signal = NONE) -> QueueView:
    return QueueView(model="m", depth=now(0.0), burst_requests=requests, burst_tokens=tokens)


def order(*replicas: ReplicaView, now_ms: float = 1000.0, **more: object) -> Pack:
    values: dict[str, object] = {"queues": (queue(),)}
    snapshot = Snapshot(pool="p", now_ms=now_ms, replicas=replicas, **(values | more))  # type: ignore[arg-type]
    (pack,) = packs(snapshot, POLICY)
    return pack


def names(pack: Pack) -> list[str]:
    return [rank.replica for rank in pack.ranks]


def test_none_without_packing() -> None:
    snapshot = Snapshot(pool="p", now_ms=0.0, replicas=(replica("a"),))
    assert packs(snapshot, msgspec.structs.replace(POLICY, pack=PackPolicy())) == ()


def test_the_order_is_kept_and_new_ones_come_behind() -> None:
    first = order(replica("b"), replica("c"))
    assert names(first) == ["b", "c"]
    assert names(order(replica("a"), replica("b"), replica("c"), packs=(first,))) == ["b", "c", "a"]


@pytest.mark.parametrize("health", [UNKNOWN, now(0.0), Signal(value=1.0, age_ms=60_000.0)])
def test_one_whose_health_is_not_known_comes_last(health: Signal) -> None:
    stood = order(replica("a"), replica("b"))
    assert names(order(replica("a", engine_healthy=health), replica("b"), packs=(stood,))) == ["b", "a"]


def test_a_held_lane_costs_offline_nothing_so_its_replica_is_first() -> None:
    lanes = tuple(LaneView(lane=name, replica=name) for name in ("a", "b"))
    hold = Hold(lane="b", by="ops", why="test")
    assert names(order(replica("a"), replica("b"), lanes=lanes, holds=(hold,))) == ["b", "a"]
    over = Hold(lane="b", by="ops", why="test", until_ms=999.0)
    assert names(order(replica("a"), replica("b"), lanes=lanes, holds=(over,))) == ["a", "b"]


def test_the_reach_covers_what_is_here_a_burst_and_the_spare() -> None:
    four = [replica(name) for name in "abcd"]
    assert order(*four).reach == 1 + 1, "one takes the next request, one is spare"
    assert order(*four, queues=(queue(now(11.0), now(0.0)),)).reach == 2 + 1
    assert order(*four, queues=(queue(now(0.0), now(8001.0)),)).reach == 3 + 1
    busy = [replica("a", online_inflight=now(15.0)), *four[1:]]
    assert order(*busy, queues=(queue(now(6.0)),)).reach == 3 + 1


@pytest.mark.parametrize(
    "burst", [UNKNOWN, Signal(value=1.0, age_ms=1e6), Signal(value=float("nan"), age_ms=0.0)]
)
def test_an_unknown_burst_reaches_all(burst: Signal) -> None:
    four = [replica(name) for name in "abcd"]
    assert order(*four, queues=(queue(burst),)).reach == 4
    assert order(*four, queues=()).reach == 4
    assert order(*four[:3], replica("d", online_load=burst)).reach == 4


def test_counts_that_no_replica_has_reach_all() -> None:
    """Finite each; their sum is not. A cycle that fails over them would close the lanes of every replica."""
    most = [replica(name, online_load=now(1.7e308)) for name in "abcd"]
    assert order(*most).reach == 4


def test_caps_shrink_above_the_objective_and_grow_slowly() -> None:
    begun = order(replica("a"))
    assert (begun.fill, begun.adjusted_ms) == (1.0, 1000.0)
    slow = replica("a", online_tpot_ms=now(70.0))  # the objective's share is 35 ms
    early = order(slow, now_ms=5000.0, packs=(begun,))
    assert (early.fill, early.adjusted_ms) == (1.0, 1000.0), "not before its time"
    shrunk = order(slow, now_ms=6000.0, packs=(begun,))
    assert (shrunk.fill, shrunk.adjusted_ms) == (pytest.approx(0.7), 6000.0)
    assert shrunk.ranks[0].max_inflight == 7
    grown = order(replica("a", online_tpot_ms=now(10.0)), now_ms=11_000.0, packs=(shrunk,))
    assert grown.fill == pytest.approx(0.7 * 1.05)
    unmeasured = order(replica("a"), now_ms=11_000.0, packs=(shrunk,))
    assert unmeasured.fill == shrunk.fill, "what was not measured changes nothing"


def test_caps_have_an_end() -> None:
    pack = order(replica("a"))
    for step in range(1, 30):
        bad = replica("a", online_ttft_ms=now(50_000.0))
        pack = order(bad, now_ms=1000.0 + 5000.0 * step, packs=(pack,))
    assert pack.fill == POLICY.pack.least_fill
    assert caps(POLICY.pack, 1e-9) == (1, 1.0)


def test_what_stands_is_compared_without_its_lease() -> None:
    pack = order(replica("a"))
    stored = msgspec.structs.replace(pack, at_ms=5.0, by="leader")
    assert same(stored, pack)
    assert not same(None, pack)
    assert not same(msgspec.structs.replace(stored, reach=3), pack)
    assert not stored.stands(1005.1, 1000.0)
    assert stored.stands(1005.0, 1000.0)
    assert not stored.stands(4.9, 1000.0), "published in the future"


def observed(counts: list[tuple[float, float]]) -> Arrivals:
    arrivals = Arrivals()
    total = (0.0, 0.0)
    arrivals.observe(0.0, {"r": total})
    for number, (requests, tokens) in enumerate(counts):
        total = (total[0] + requests, total[1] + tokens)
        arrivals.observe((number + 0.5) * BIN_MS, {"r": total})
    arrivals.observe(len(counts) * BIN_MS, {"r": total})
    return arrivals


def test_a_burst_is_a_quantile_of_the_bins() -> None:
    assert observed([(1.0, 10.0)] * (LEAST_BINS - 1)).burst(0.99) is None, "too few"
    counts = [(1.0, 500.0)] * 98 + [(30.0, 90.0), (4.0, 60.0)]
    assert observed(counts).burst(0.99) == (4.0, 500.0)
    assert observed(counts).burst(1.0) == (30.0, 500.0)
    assert observed(counts).burst(0.5) == (1.0, 500.0)


def test_bursts_are_forgotten_in_time() -> None:
    assert observed([(99.0, 9.0)] + [(1.0, 9.0)] * BINS).burst(1.0) == (1.0, 9.0)


def test_a_worker_that_began_anew_is_no_burst_and_neither_is_a_new_one() -> None:
    arrivals = Arrivals()
    for number in range(LEAST_BINS):
        arrivals.observe(number * BIN_MS, {"a": (1000.0 + number, 0.0)})
    arrivals.observe(LEAST_BINS * BIN_MS, {"a": (2.0, 0.0), "b": (5000.0, 0.0)})
    arrivals.observe((LEAST_BINS + 2) * BIN_MS, {"a": (2.0, 0.0), "b": (5001.0, 0.0)})
    assert arrivals.burst(1.0) == (2.0, 0.0)


def test_a_gap_in_observing_begins_anew() -> None:
    arrivals = observed([(1.0, 1.0)] * LEAST_BINS)
    arrivals.observe(10_000_000.0, {"r": (5000.0, 0.0)})
    assert arrivals.burst(0.99) is None
