"""Telemetry on a real Valkey: stamps, ages, what is unknown, who is in the index."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import redis
from redis.asyncio import Redis

from hybridsched.core.values import UNKNOWN
from hybridsched.store.keys import Keys
from hybridsched.store.tasks import end_tasks
from hybridsched.store.telemetry import (
    EngineRecord,
    LaneRecord,
    ReplicaRecord,
    TelemetryStore,
    lane_view,
    replica_view,
)

POOL = "telemetry"
KEYS = Keys(POOL)


@pytest.fixture
def store(client: Redis) -> TelemetryStore:
    return TelemetryStore(client, POOL)


def record(replica: str = "r0", **changes: object) -> ReplicaRecord:
    given = {"model": "m", "lane": replica, "online_inflight": 0, "online_idle_ms": 40.0} | changes
    return ReplicaRecord(replica=replica, **given)  # type: ignore[arg-type]


async def test_what_is_published_is_read_with_the_servers_time(
    store: TelemetryStore, valkey: redis.Redis
) -> None:
    engine = EngineRecord(metrics_age_ms=10.0, running=2.0, waiting=0.0, healthy=1.0, health_age_ms=5.0)
    stamp = await store.publish(record(engine=engine, at_ms=1.0))
    lane_stamp = await store.publish_lane(
        LaneRecord(lane="r0", replica="r0", offline_inflight=3, work=9, offline_peak=4, tokens_per_s=12.5)
    )
    seen = await store.read_all()
    assert seen.replicas["r0"] is not None
    assert seen.replicas["r0"].at_ms == stamp != 1.0
    assert seen.now_ms >= lane_stamp >= stamp
    (view,), (lane,) = seen.views()
    since = seen.now_ms - stamp
    assert (view.online_idle_ms.value, view.online_idle_ms.age_ms) == (40.0, since)
    assert (view.engine_running.value, view.engine_running.age_ms) == (2.0, 10.0 + since)
    assert (view.engine_healthy.value, view.engine_healthy.age_ms) == (1.0, 5.0 + since)
    assert view.kv_use == view.gpu_activity == UNKNOWN
    assert (lane.offline_inflight.value, lane.work.value) == (3.0, 9.0)
    assert (lane.offline_peak.value, lane.tokens_per_s.value) == (4.0, 12.5)
    assert 9000 < valkey.pttl(KEYS.telemetry("r0")) <= 10_000


def test_unknown_stays_unknown_and_a_negative_age_is_not_trusted() -> None:
    view = replica_view(record(online_inflight=None, at_ms=100.0), 150.0)
    assert view.online_inflight == UNKNOWN
    assert view.online_idle_ms.age_ms == 50.0
    future = replica_view(record(at_ms=200.0, engine=EngineRecord(metrics_age_ms=60.0, running=1.0)), 150.0)
    assert future.online_inflight == UNKNOWN
    assert future.engine_running.age_ms == 10.0
    unstamped = replica_view(record(), 150.0)
    assert unstamped.online_inflight == UNKNOWN
    no_age = replica_view(record(at_ms=100.0, engine=EngineRecord(running=1.0)), 150.0)
    assert no_age.engine_running == UNKNOWN
    assert lane_view("r0", "r0", None, 1.0).work == UNKNOWN


async def test_a_record_that_expired_or_is_broken_is_none_and_its_lane_stays_known(
    store: TelemetryStore, valkey: redis.Redis
) -> None:
    await store.publish(record("r0"))
    await store.publish(record("r1"))
    valkey.delete(KEYS.telemetry("r0"))
    valkey.set(KEYS.telemetry("r1"), b'{"replica": 5}', px=1000)
    seen = await store.read_all()
    assert seen.replicas == {"r0": None, "r1": None}
    assert seen.places() == {"r0": "r0", "r1": "r1"}
    replicas, lanes = seen.views()
    assert replicas == ()
    assert [lane.lane for lane in lanes] == ["r0", "r1"]


async def test_lanes_without_a_replica_and_replicas_without_a_lane(store: TelemetryStore) -> None:
    await store.publish(record("r0", lane=""))
    await store.publish(record("r1", lane="shared"))
    await store.publish_lane(LaneRecord(lane="own", replica="gpu3", work=1))
    seen = await store.read_all()
    assert seen.places() == {"own": "gpu3", "shared": "r1"}


async def test_what_runs_in_a_lanes_own_engine_is_not_held_against_its_replicas(
    store: TelemetryStore,
) -> None:
    """Else the replica's counters, which do not move for it, would pass for those of an engine that hangs."""
    await store.publish(record("r0", lane="r0"))
    shared = LaneRecord(lane="r0", replica="r0", offline_inflight=5, work=9)
    now_ms = await store.publish_lane(shared)
    assert (await store.offline_inflight("r0", now_ms, 1000.0))[0] == 5
    own = msgspec.structs.replace(shared, engine="http://127.0.0.1:9000")
    now_ms = await store.publish_lane(own)
    assert await store.offline_inflight("r0", now_ms, 1000.0) == (0, 0.0)
    (lane,) = (await store.read_all()).views()[1]
    assert (lane.own, lane.offline_inflight.value) == (True, 5.0)


async def test_the_silent_leave_the_index(store: TelemetryStore, valkey: redis.Redis) -> None:
    valkey.zadd(KEYS.replica_index, {"ancient": 1.0})
    await store.publish(record("r0"))
    assert valkey.zrange(KEYS.replica_index, 0, -1) == [b"r0"]


async def test_an_empty_pool_reads_as_empty(store: TelemetryStore) -> None:
    seen = await store.read_all()
    assert (seen.replicas, seen.lanes, seen.views()) == ({}, {}, ((), ()))
    assert seen.now_ms > 1e12


async def test_only_a_nudge_is_announced(store: TelemetryStore) -> None:
    names: asyncio.Queue[str] = asyncio.Queue()

    async def listen() -> None:
        async for name in store.nudges():
            names.put_nowait(name)

    task = asyncio.create_task(listen())
    try:
        async with asyncio.timeout(5):
            while names.empty():  # until the subscription stands
                await store.publish(record("first"), nudge=True)
                await asyncio.sleep(0.01)
            await store.publish(record("quiet"))
            await store.publish_lane(LaneRecord(lane="l0"), nudge=True)
            await store.withdraw("r9")
            found = []
            while not found or found[-1] != "r9":
                found.append(await names.get())
    finally:
        await end_tasks(task)
    assert "quiet" not in found
    assert found[-2:] == ["l0", "r9"]
