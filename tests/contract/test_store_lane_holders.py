"""Holders of lanes on a real server: one job a lane, leases, fences."""

from __future__ import annotations

import asyncio

import pytest
import redis
from redis.asyncio import Redis

from hybridsched.core.reasons import Reason
from hybridsched.core.values import Budget, Gate, GateState
from hybridsched.store.connection import async_client
from hybridsched.store.gates import GateStore
from hybridsched.store.keys import Keys
from hybridsched.store.lane_holders import HeldLane, LaneHolders, Place, decode_holder
from hybridsched.store.telemetry import LaneRecord, ReplicaRecord, TelemetryStore
from hybridsched.workers import lane_claim
from hybridsched.workers.lane_claim import Seeker
from tests.helpers import await_until

POOL = "p"


def place(lane: str) -> Place:
    return Place(lane=lane, replica=lane, model="m", url="http://127.0.0.1:1", node="n1")


@pytest.fixture
def holders(client: Redis) -> LaneHolders:
    return LaneHolders(client, POOL)


async def open_gate(client: Redis, lane: str, state: GateState = GateState.OPEN) -> None:
    await client.set(Keys(POOL).leader, "t")
    gate = Gate(
        lane=lane,
        state=state,
        reason=Reason.IDLE if state is GateState.OPEN else Reason.ONLINE_ACTIVE,
        budget=Budget(max_inflight=4, chunk_tokens=100, slice_tokens=0),
    )
    await GateStore(client, POOL).publish(gate, leader_token="t", expected_epoch=0, lease_ms=5000)


async def test_two_jobs_never_hold_one_lane(holders: LaneHolders) -> None:
    places = [place(f"r{i}") for i in range(4)]
    claims = await asyncio.gather(
        *(holders.claim(places, owner=f"o{i}", job=str(i), node="n1", open_only=False) for i in range(20))
    )
    got = [claim for claim in claims if claim is not None]
    assert sorted(claim.place.lane for claim in got) == ["r0", "r1", "r2", "r3"]
    assert len({claim.fence for claim in got}) == 4
    seen = await holders.read_many(["r0", "r1", "r2", "r3", "r4"])
    assert seen["r4"] is None
    for claim in got:
        holder = seen[claim.place.lane]
        assert holder is not None
        assert (holder.fence, holder.node, holder.lane) == (claim.fence, "n1", claim.place.lane)


async def test_a_job_that_may_not_say_its_model_still_gets_a_lane(
    valkey: redis.Redis, valkey_url: str, client: Redis
) -> None:
    """Its Redis user has the rights of an older release."""
    await TelemetryStore(client, POOL).publish(
        ReplicaRecord(replica="r0", model="m", lane="r0", url="http://127.0.0.1:1", node="n1")
    )
    rules = ["on", ">secret", "+@all", "%R~*", f"~{Keys(POOL).prefix}lane-holder*"]
    valkey.execute_command("ACL", "SETUSER", "old-jobs", "reset", *rules)
    theirs = async_client(valkey_url.replace("unix://", "unix://old-jobs:secret@"))
    try:
        seeker = Seeker(LaneHolders(theirs, POOL), owner="o", job="7", node="n1", model="m", settle_s=0.0)
        held = await seeker.find(asyncio.Event(), within_s=10.0)
        assert held is not None
        assert await client.get(Keys(POOL).lane_job_model("7")) is None
    finally:
        await theirs.aclose()
        valkey.execute_command("ACL", "DELUSER", "old-jobs")


async def test_only_an_open_lane_is_taken_when_asked(client: Redis, holders: LaneHolders) -> None:
    places = [place("r0"), place("r1"), place("r2")]
    await open_gate(client, "r0", GateState.CLOSED)
    await client.set(Keys(POOL).gate("r2"), b"not a gate")
    assert await holders.claim(places, owner="a", open_only=True) is None
    await open_gate(client, "r1")
    first = await holders.claim(places, owner="a", open_only=True)
    assert first is not None
    assert first.place.lane == "r1"
    assert await holders.claim(places, owner="b", open_only=True) is None
    other = await holders.claim(places, owner="b", open_only=False)
    assert other is not None
    assert other.place.lane == "r0"


async def test_a_lane_comes_free_when_its_lease_ends_and_the_old_holder_has_lost_it(
    holders: LaneHolders,
) -> None:
    lane = [place("r0")]
    old = await holders.claim(lane, owner="a", open_only=False, lease_ms=60)
    assert old is not None
    assert await holders.renew(old, lease_ms=80)
    new: list[HeldLane] = []

    async def free() -> bool:
        claim = await holders.claim(lane, owner="b", open_only=False)
        if claim is not None:
            new.append(claim)
        return claim is not None

    await await_until(free, timeout_s=5, what="the end of the lease")
    assert new[0].fence > old.fence
    assert not await holders.renew(old)
    assert not await holders.release(old), "the old holder cannot take the lane from the new one"
    assert await holders.renew(new[0])
    assert await holders.release(new[0])
    assert await holders.claim(lane, owner="a", open_only=False) is not None


@pytest.mark.parametrize("life_ms", [None, 3_600_000])
@pytest.mark.parametrize("found", [b"abc", b"[1]", b"{}", b"{" * 100_000, b"\xff", None])
async def test_what_is_no_holder_has_the_lane_for_one_lease_only(
    valkey: redis.Redis, holders: LaneHolders, found: bytes | None, life_ms: int | None
) -> None:
    key = Keys(POOL).lane_holder("r0")
    if found is None:
        valkey.rpush(key, "x")
    else:
        valkey.set(key, found)
    if life_ms is not None:
        valkey.pexpire(key, life_ms)
    lane = [place("r0")]
    assert await holders.claim(lane, owner="a", open_only=False, lease_ms=60) is None
    seen = await holders.read_token("r0")
    assert seen is None or (seen[1] is None and seen[2] <= 0.06)

    async def taken() -> bool:
        return await holders.claim(lane, owner="a", open_only=False, lease_ms=60_000) is not None

    await await_until(taken, timeout_s=5, what="the end of the lease")
    (holder,) = (await holders.read_many(["r0"])).values()
    assert holder is not None
    assert holder.owner == "a"


async def test_a_holder_without_a_life_gets_one_and_a_living_one_keeps_its_own(
    valkey: redis.Redis, holders: LaneHolders
) -> None:
    lane = [place("r0")]
    assert await holders.claim(lane, owner="a", open_only=False, lease_ms=60_000) is not None
    assert await holders.claim(lane, owner="b", open_only=False, lease_ms=60) is None
    key = Keys(POOL).lane_holder("r0")
    assert valkey.pttl(key) > 30_000
    valkey.persist(key)
    assert await holders.claim(lane, owner="b", open_only=False, lease_ms=60) is None
    assert 0 <= valkey.pttl(key) <= 60 or valkey.pttl(key) == -2


async def test_no_candidate_is_no_lane(holders: LaneHolders) -> None:
    assert await holders.claim([], owner="a", open_only=False) is None
    assert await holders.read_many([]) == {}
    assert decode_holder(b"{}") is None


async def test_places_are_those_of_live_replicas_of_the_node(client: Redis, holders: LaneHolders) -> None:
    telemetry = TelemetryStore(client, POOL)
    for name, node, model in (("a", "n1", "m"), ("b", "n1", "x"), ("c", "n2", "m"), ("d", "n1", "m")):
        await telemetry.publish(
            ReplicaRecord(replica=name, model=model, lane=name, node=node, url=f"http://{name}")
        )
    await telemetry.publish(ReplicaRecord(replica="e", model="m", lane="", node="n1"))
    await telemetry.publish_lane(LaneRecord(lane="d", replica="d", worker="resident"))
    await telemetry.publish_lane(LaneRecord(lane="a", replica="a", work=3))
    assert [p.lane for p in await holders.places(node="n1")] == ["a", "b"]
    assert [p.lane for p in await holders.places(node="n1", model="m")] == ["a"]
    assert [p.url for p in await holders.places(lane="c")] == ["http://c"]
    assert await holders.places(node="n3") == []


@pytest.mark.parametrize(
    ("model", "says"), [("m", "every lane is taken"), ("other", "no engine there has a lane of other")]
)
async def test_a_job_that_waits_is_told_whether_lanes_are_taken_or_absent(
    client: Redis, holders: LaneHolders, monkeypatch: pytest.MonkeyPatch, model: str, says: str
) -> None:
    """Lanes at which a worker stands are no places, and it was said that no engine had a lane."""
    telemetry = TelemetryStore(client, POOL)
    await telemetry.publish(ReplicaRecord(replica="r0", model="m", lane="r0", url="http://e:1", node="n1"))
    await telemetry.publish_lane(LaneRecord(lane="r0", replica="r0", offline_inflight=0, worker="w"))
    said: list[str] = []
    monkeypatch.setattr(lane_claim, "_SAY_FIRST_S", 0.0)
    monkeypatch.setattr(Seeker, "_say", lambda _, why: said.append(why))
    assert (
        await Seeker(holders, owner="o", node="n1", model=model).find(asyncio.Event(), within_s=0.3) is None
    )
    assert said == [says]
