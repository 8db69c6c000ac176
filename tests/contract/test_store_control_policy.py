"""Policies, leadership, holds, decisions and events on a real Valkey."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import redis
from redis.asyncio import Redis

from hybridsched.core.codec import DecisionRecord, replay
from hybridsched.core.decide import decide
from hybridsched.core.policy import IdlePolicy, PolicyKind, PoolPolicy
from hybridsched.core.values import LaneView, QueueView, ReplicaView, Signal, Snapshot
from hybridsched.store import decisions as decisions_module
from hybridsched.store.connection import async_client
from hybridsched.store.decisions import DecisionLog, cut
from hybridsched.store.embedded import EmbeddedValkey
from hybridsched.store.events import EventLog
from hybridsched.store.holds import HoldStore
from hybridsched.store.keys import Keys
from hybridsched.store.leader import LeaderLease, term
from hybridsched.store.policy import PolicyError, PolicyStore
from tests.helpers import await_until

POOL = "control"
KEYS = Keys(POOL)


def named(name: str, window_ms: float = 150.0) -> PoolPolicy:
    return PoolPolicy(name=name, kind=PolicyKind.IDLE_WINDOW, idle=IdlePolicy(window_ms=window_ms))


# policies


async def test_a_policy_gets_a_version_and_comes_back_whole(client: Redis) -> None:
    store = PolicyStore(client, POOL)
    assert await store.current() is None
    assert await store.set(named("a", 33.5), by="me", note="first") == 1
    assert await store.set(named("b")) == 2
    current = await store.current()
    assert current is not None
    assert (current.name, current.version) == ("b", 2)
    newest, first = await store.history()
    assert (newest.version, first.version, first.by, first.note) == (2, 1, "me", "first")
    assert first.policy is not None
    assert first.policy.idle.window_ms == 33.5
    assert first.policy.version == 1


async def test_rollback_is_a_new_version_with_the_old_content(client: Redis) -> None:
    store = PolicyStore(client, POOL)
    await store.set(named("a", 33.5))
    await store.set(named("b"))
    assert await store.rollback(1, by="me") == 3
    current = await store.current()
    assert current is not None
    assert (current.name, current.idle.window_ms, current.version) == ("a", 33.5, 3)
    assert (await store.history(limit=1))[0].note == "rollback to 1"


async def test_rollback_to_nowhere_says_what_there_is(client: Redis) -> None:
    store = PolicyStore(client, POOL)
    with pytest.raises(PolicyError, match="nothing yet"):
        await store.rollback(1)
    await store.set(named("a"))
    with pytest.raises(PolicyError, match=r"version 9 .* 1 to 1"):
        await store.rollback(9)


async def test_versions_set_at_once_are_all_different(client: Redis) -> None:
    store = PolicyStore(client, POOL)
    versions = await asyncio.gather(*(store.set(named(f"p{i}")) for i in range(20)))
    assert sorted(versions) == list(range(1, 21))
    assert len(await store.history()) == 20


@pytest.mark.parametrize("stored", [b"", b"{}", b'{"name":"x","kind":"idle-window","surprise":1}', b"[]"])
async def test_what_is_no_policy_is_an_error_that_says_what_to_do(
    client: Redis, valkey: redis.Redis, stored: bytes
) -> None:
    valkey.set(KEYS.policy_current, stored)
    with pytest.raises(PolicyError, match="pool policy set"):
        await PolicyStore(client, POOL).current()


async def test_watch_gives_the_policy_now_and_after_each_change(client: Redis) -> None:
    store = PolicyStore(client, POOL)
    async with asyncio.timeout(5):
        watch = store.watch()
        assert await anext(watch) is None
        await store.set(named("a"))
        seen = await anext(watch)
        assert seen is not None
        assert seen.name == "a"
        await watch.aclose()  # type: ignore[attr-defined]


# leadership


async def test_one_leads_and_the_next_gets_a_higher_fence(client: Redis, valkey: redis.Redis) -> None:
    first, second = LeaderLease(client, POOL, owner="a"), LeaderLease(client, POOL, owner="b")
    assert await first.acquire()
    token = first.token
    assert token == f"{term(token)}:a"
    assert not await second.acquire()
    assert (second.token, second.leader) == ("", token)
    assert await first.acquire()
    assert first.token == token
    assert await first.release()
    assert not await first.release()
    assert await second.acquire()
    assert second.token == f"{int(term(token)) + 1}:b"
    assert 0 < valkey.pttl(KEYS.leader) <= second.lease_ms


async def test_a_leader_whose_lease_ran_out_comes_back_with_a_new_token(
    client: Redis, valkey: redis.Redis
) -> None:
    lease = LeaderLease(client, POOL, owner="a")
    assert await lease.acquire()
    before = int(term(lease.token))
    valkey.delete(KEYS.leader)
    assert await lease.acquire()
    assert lease.token == f"{before + 1}:a"


async def test_release_does_not_touch_another_leader(client: Redis, valkey: redis.Redis) -> None:
    first, second = LeaderLease(client, POOL, owner="a"), LeaderLease(client, POOL, owner="b")
    assert await first.acquire()
    valkey.delete(KEYS.leader)
    assert await second.acquire()
    assert not await first.release()
    assert valkey.get(KEYS.leader) == second.token.encode()


# holds


async def test_holds_of_lanes_and_of_the_pool(client: Redis, valkey: redis.Redis) -> None:
    store = HoldStore(client, POOL)
    assert await store.list() == ()
    await store.put(lane="r1", by="me", why="driver")
    timed = await store.put(by="you", why="all", for_ms=60_000)
    pool, lane = await store.list()
    assert pool == timed
    assert (lane.lane, lane.by, lane.why, lane.until_ms) == ("r1", "me", "driver", None)
    seconds, micros = valkey.time()
    assert timed.until_ms is not None
    assert 50_000 < timed.until_ms - (seconds * 1000 + micros / 1000) <= 60_000
    assert await store.release([lane]) == (lane,)
    assert await store.release([lane]) == ()
    assert await store.release([pool]) == (pool,)
    assert await store.list() == ()


async def test_a_second_hold_leaves_the_first_standing(client: Redis) -> None:
    store = HoldStore(client, POOL)
    first = await store.put(by="me", why="GPU repair, do not open")
    second = await store.put(by="you", why="quick test", for_ms=20)
    assert {hold.id for hold in await store.standing()} >= {first.id}
    while await store.standing() != (first,):
        await asyncio.sleep(0.005)
    # What has ended goes with the next order, so that the hash does not grow for ever.
    third = await store.put(lane="r1", by="you", why="x")
    assert await store.list() == (first, third)
    assert second.id not in {first.id, third.id}


async def test_a_hold_of_an_earlier_release_holds_and_can_be_released(
    client: Redis, valkey: redis.Redis
) -> None:
    valkey.hset(KEYS.holds, "*", b'{"lane":"","by":"me","why":"old"}')
    store = HoldStore(client, POOL)
    (hold,) = await store.list()
    assert (hold.id, hold.lane, hold.why) == ("*", "", "old")
    assert await store.release([hold]) == (hold,)
    assert await store.list() == ()


async def test_a_hold_that_cannot_be_read_still_holds(client: Redis, valkey: redis.Redis) -> None:
    valkey.hset(KEYS.holds, "a1 r7", b"broken")
    store = HoldStore(client, POOL)
    (hold,) = await store.list()
    assert (hold.lane, hold.id) == ("r7", "a1")
    assert "release it" in hold.why
    assert await store.release([hold]) == (hold,)


# decisions


def snapshot(lanes: int, inflight: float = 0.0) -> Snapshot:
    def known(value: float) -> Signal:
        return Signal(value=value, age_ms=1.0 / 3.0)

    return Snapshot(
        pool=POOL,
        now_ms=1234567890123.456,
        replicas=tuple(
            ReplicaView(
                replica=f"r{i}",
                model="m",
                online_inflight=known(inflight),
                online_idle_ms=known(0.1 + 0.2),
                engine_healthy=known(1.0),
                engine_running=known(0.0),
                engine_waiting=known(0.0),
                kv_use=known(0.0),
                frozen_ms=known(0.0),
            )
            for i in range(lanes)
        ),
        lanes=tuple(
            LaneView(lane=f"r{i}", replica=f"r{i}", offline_inflight=known(0.0), work=known(5.0))
            for i in range(lanes)
        ),
        queues=(QueueView(model="m", depth=known(0.0)),),
    )


def record(cycle: int, seen: Snapshot) -> DecisionRecord:
    policy = named("p")
    return DecisionRecord(cycle=cycle, snapshot=seen, policy=policy, decisions=decide(seen, policy))


async def test_records_come_back_in_order_and_replay(client: Redis) -> None:
    log = DecisionLog(client, POOL)
    for cycle in range(1, 6):
        await log.append(record(cycle, snapshot(2, inflight=cycle % 2)))
    found = await log.read()
    assert [r.cycle for r in found] == [1, 2, 3, 4, 5]
    assert [r.cycle for r in await log.read(limit=2)] == [4, 5]
    assert [r.cycle for r in await log.read(lane="r9")] == []
    assert all(replay(r) == () for r in found)
    assert found[0] == record(1, snapshot(2, inflight=1))
    assert len([line async for line in log.raw()]) == 5


async def test_a_cut_snapshot_decides_the_same_for_its_lanes() -> None:
    whole, policy = snapshot(5), named("p")
    part = cut(whole, ["r3", "r1"])
    assert [v.lane for v in part.lanes] == ["r1", "r3"]
    assert decide(part, policy) == tuple(d for d in decide(whole, policy) if d.lane in ("r1", "r3"))


async def test_what_cannot_be_read_is_passed_over(client: Redis, valkey: redis.Redis) -> None:
    log = DecisionLog(client, POOL)
    await log.append(record(1, snapshot(1)))
    valkey.xadd(KEYS.decisions, {"r": b"broken"})
    valkey.xadd(KEYS.decisions, {"other": b"x"})
    await log.append(record(2, snapshot(1)))
    assert [r.cycle for r in await log.read()] == [1, 2]


async def test_the_log_is_bounded_by_its_bytes(
    client: Redis, valkey: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions_module, "MAX_BYTES", 1)
    log = DecisionLog(client, POOL)
    for cycle in range(400):
        await log.append(record(cycle, snapshot(1)))
    assert 100 <= valkey.xlen(KEYS.decisions) < 400


async def test_follow_gives_what_is_written_from_now_on(client: Redis) -> None:
    log = DecisionLog(client, POOL)
    await log.append(record(1, snapshot(1)))
    following = log.follow()
    task = asyncio.create_task(anext(following))  # type: ignore[arg-type]
    cycle = 1

    async def more() -> bool:
        nonlocal cycle
        cycle += 1
        await log.append(record(cycle, snapshot(1)))
        return task.done()

    await await_until(more, what="a followed record")
    assert task.result().cycle >= 2
    await following.aclose()  # type: ignore[attr-defined]


# events


async def test_events_are_written_in_order_without_waiting(client: Redis) -> None:
    async with EventLog(client, POOL, flush_ms=1) as log:
        log.append({"t": "quiet", "lane": "r0", "mono_s": 1.5})
        log.append_many({"t": "chunk", "n": i} for i in range(1200))
        reader = EventLog(client, POOL)

        async def all_there() -> bool:
            return len(await reader.read_all()) == 1201

        await await_until(all_there, what="the events")
        log.append({"t": "last"})
    found = await reader.read_all()
    assert found[0] == {"t": "quiet", "lane": "r0", "mono_s": 1.5}
    assert [e["n"] for e in found if e["t"] == "chunk"] == list(range(1200))
    assert found[-1] == {"t": "last"}
    assert await reader.read_all(kinds=["quiet"]) == found[:1]


async def test_flushing_from_two_sides_writes_each_event_once(client: Redis) -> None:
    log = EventLog(client, POOL, flush_ms=0)
    for i in range(50):
        log.append_many({"t": "x", "n": i * 10 + j} for j in range(10))
        await asyncio.gather(log.flush(), log.flush())
    await log.close()
    assert [e["n"] for e in await log.read_all()] == list(range(500))


async def test_events_survive_an_outage(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path) as server:
        client = async_client(server.url)
        log = EventLog(client, POOL, flush_ms=1)
        server.kill()
        log.append({"t": "during"})
        await await_until(lambda: len(log._buffer) == 1, what="the event to be kept")
        server.start()

        async def there() -> bool:
            try:
                return [e["t"] for e in await log.read_all()] == ["during"]
            except (redis.RedisError, OSError):
                return False

        await await_until(there, what="the event after the outage")
        await log.close()
        assert log.lost == 0
        server.kill()
        log.append({"t": "never"})
        await log.close()
        assert log.lost == 1
        await client.aclose()
