"""What the policy worker would read of a replica and a lane of the twin, with the ages of their records."""

from __future__ import annotations

from hybridsched.core.values import UNKNOWN, Gate, LaneView, ReplicaView, Signal
from hybridsched.twin.lane import TwinLane
from hybridsched.twin.replica import Replica


def replica_view(replica: Replica, model: str, now_s: float) -> ReplicaView:
    """A replica as its last record and the last reading of its engine show it."""
    age_ms = replica.record_age_s(now_s) * 1e3
    scrape_ms = replica.scrape_age_s(now_s) * 1e3
    engine = replica.engine
    online = replica.inflight
    idle_s = now_s - age_ms / 1e3 - replica.idle_since_s
    if not online and now_s < replica.changed_s:
        online = 1  # it has just fallen idle, and its record does not say so yet
    return ReplicaView(
        replica=engine.meter.lane,
        model=model,
        online_inflight=Signal(value=float(online), age_ms=age_ms),
        online_idle_ms=Signal(value=0.0 if online else max(0.0, idle_s * 1e3), age_ms=age_ms),
        engine_healthy=Signal(value=0.0 if replica.away else 1.0, age_ms=replica.health_age_s(now_s) * 1e3),
        engine_running=Signal(value=float(engine.running), age_ms=scrape_ms),
        engine_waiting=Signal(value=float(engine.waiting), age_ms=scrape_ms),
        kv_use=Signal(value=engine.kv_use, age_ms=scrape_ms),
        frozen_ms=Signal(value=0.0, age_ms=scrape_ms),
    )


def lane_view(lane: TwinLane, gate: Gate | None, epoch: int, age_s: float) -> LaneView:
    """A lane by its worker's record, which is so old, and its gate."""
    executor = lane.executor
    age_ms = age_s * 1e3
    rate = lane.throughput.tokens_per_s
    return LaneView(
        lane=lane.name,
        replica=lane.name,
        gate=gate,
        epoch=epoch,
        offline_inflight=Signal(value=float(executor.inflight), age_ms=age_ms),
        work=Signal(value=float(lane.work), age_ms=age_ms),
        offline_peak=Signal(value=float(executor.peak), age_ms=age_ms),
        tokens_per_s=UNKNOWN if rate is None else Signal(value=rate, age_ms=age_ms),
    )
