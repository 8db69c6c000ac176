"""Whoever can write to Redis can put anything anywhere: each bad item fails alone, and no reader ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
from redis.asyncio import Redis

from hybridsched.core.reasons import Reason
from hybridsched.core.values import Budget, Gate, GateState
from hybridsched.store.batch_values import LONGEST_DEADLINE_MS, BatchUnknownError, NewBatch
from hybridsched.store.batches import BatchStore
from hybridsched.store.gates import GateStore, Outcome
from hybridsched.store.keys import Keys
from hybridsched.store.leader import LeaderLease, term
from hybridsched.store.online_signals import Cancel, signals
from hybridsched.store.telemetry import server_ms
from tests.helpers import await_until

POOL = "garbage"
KEYS = Keys(POOL)
DEEP = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BYTES = [b"abc", b"-3", b"007", b"1e400", b"9" * 30, b"\xff\xfe", b""]


async def leads(client: Redis) -> LeaderLease:
    lease = LeaderLease(client, POOL)
    assert await lease.acquire()
    return lease


def gate(state: GateState, lane: str = "r0", **changes: Any) -> Gate:
    reason = Reason.IDLE if state is GateState.OPEN else Reason.ONLINE_ACTIVE
    budget = Budget(max_inflight=1, chunk_tokens=1, slice_tokens=1)
    return Gate(lane=lane, state=state, reason=reason, budget=budget, **changes)


@pytest.mark.parametrize("epoch", BYTES)
async def test_an_epoch_that_is_no_count_refuses_openings_and_the_close_makes_it_one_again(
    client: Redis, valkey: redis.Redis, epoch: bytes
) -> None:
    gates, lease = GateStore(client, POOL), await leads(client)
    token = {"leader_token": lease.token, "lease_ms": 60_000.0}
    assert await gates.publish(gate(GateState.OPEN), **token) is Outcome.CHANGED
    valkey.set(KEYS.gate_epoch("r0"), epoch)
    seen = await gates.read("r0")
    assert (seen.gate, seen.epoch, seen.lease_ms) == (None, 0, 0.0), "an opening on it cannot be believed"
    answers = await gates.publish_many([gate(GateState.OPEN), gate(GateState.OPEN, "r1")], **token)
    assert answers == [Outcome.EPOCH_MOVED, Outcome.CHANGED], "only the lane that it concerns"
    assert await gates.publish(gate(GateState.CLOSED), **token) is Outcome.CHANGED
    mended = (await gates.read("r0")).epoch
    assert mended > 10**12, "above every count that there can have been"
    assert await gates.publish(gate(GateState.OPEN, epoch=mended), **token) is Outcome.CHANGED


async def test_keys_of_another_type_concern_their_own_lane_only(client: Redis, valkey: redis.Redis) -> None:
    gates, lease = GateStore(client, POOL), await leads(client)
    for key in (KEYS.gate("r0"), KEYS.gate_epoch("r0")):
        valkey.rpush(key, "x")
    token = {"leader_token": lease.token, "lease_ms": 60_000.0}
    answers = await gates.publish_many([gate(GateState.OPEN), gate(GateState.OPEN, "r1")], **token)
    assert answers == [Outcome.EPOCH_MOVED, Outcome.CHANGED]
    seen = await gates.read_many(["r0", "r1"])
    assert seen["r0"].gate is None
    assert seen["r1"].gate is not None
    await gates.publish(gate(GateState.CLOSED), **token)
    now = (await gates.read("r0")).gate
    assert now is not None
    assert now.reason is Reason.ONLINE_ACTIVE


async def test_a_watch_lives_through_garbage_in_its_keys_and_its_channel(
    client: Redis, valkey: redis.Redis
) -> None:
    gates, lease = GateStore(client, POOL), await leads(client)
    token = {"leader_token": lease.token, "lease_ms": 60_000.0}
    await gates.publish(gate(GateState.OPEN), **token)
    async with gates.watch("r0", poll_ms=5.0) as watch:

        async def stands(state: GateState) -> None:
            async def so() -> bool:
                return watch.current.state is state

            await await_until(so, timeout_s=10, what=f"the watch is {state}")

        await stands(GateState.OPEN)
        for message in (b"", b"\xff", DEEP, b'{"lane":"r0"}', b"[]"):
            valkey.publish(KEYS.gates, message)
        valkey.set(KEYS.gate_epoch("r0"), b"abc")
        await stands(GateState.CLOSED)
        valkey.set(KEYS.gate_epoch("r0"), b"0")
        await stands(GateState.OPEN)
        valkey.set(KEYS.gate("r0"), DEEP)
        await stands(GateState.CLOSED)
        await gates.publish(gate(GateState.CLOSED), **token)
        await gates.publish(gate(GateState.OPEN), **token)
        await stands(GateState.OPEN)
        assert watch.outages == 0


@pytest.mark.parametrize("leader", [b"\xff\xfe", b"nobody", b""])
async def test_a_leader_that_no_worker_wrote_is_replaced(
    client: Redis, valkey: redis.Redis, leader: bytes
) -> None:
    valkey.set(KEYS.leader, leader)
    valkey.set(KEYS.leader_fence, b"garbage")
    lease = LeaderLease(client, POOL)
    assert await lease.acquire()
    assert await lease.acquire(), "and it can be renewed"
    other = LeaderLease(client, POOL)
    assert not await other.acquire()
    assert other.leader == lease.token


async def test_terms_count_on_when_the_server_has_lost_its_data(client: Redis, valkey: redis.Redis) -> None:
    """Hosts remember the last term that they heard of."""
    first = LeaderLease(client, POOL)
    await first.acquire()
    await await_until(
        lambda: server_ms(valkey.time()) >= int(term(first.token)) + 1, what="the next millisecond"
    )
    valkey.delete(KEYS.leader, KEYS.leader_fence)
    second = LeaderLease(client, POOL)
    await second.acquire()
    valkey.delete(KEYS.leader)
    third = LeaderLease(client, POOL)
    await third.acquire()
    terms = [int(term(lease.token)) for lease in (first, second, third)]
    assert terms == sorted(set(terms))
    assert term("x:y") == term("") == ""


async def test_a_leader_with_a_life_is_left_even_when_it_is_no_text(
    client: Redis, valkey: redis.Redis
) -> None:
    valkey.set(KEYS.leader, b"\xff\xfe", px=60_000)
    assert not await LeaderLease(client, POOL).acquire()


async def test_a_dead_leader_does_not_last_because_the_servers_clock_was_set_back(
    client: Redis, valkey: redis.Redis
) -> None:
    dead = LeaderLease(client, POOL)
    await dead.acquire()
    valkey.pexpire(KEYS.leader, 3_600_000)  # as it stands after an hour back
    heir = LeaderLease(client, POOL)
    assert await heir.acquire()
    assert int(term(heir.token)) > int(term(dead.token))
    assert 0 < valkey.pttl(KEYS.leader) <= heir.lease_ms  # type: ignore[operator]
    assert not await dead.acquire()


async def test_a_wake_channel_with_garbage_still_wakes(client: Redis, valkey: redis.Redis) -> None:
    heard = signals(client, KEYS.wake("r0"))
    await anext(heard)
    valkey.publish(KEYS.wake("r0"), b"\xff\xfe")
    valkey.publish(KEYS.wake("r0"), b"cancel abc")
    async with asyncio.timeout(10):
        while await anext(heard) != Cancel("abc"):
            pass
    await heard.aclose()


def new(batch_id: str, **changes: Any) -> NewBatch:
    paths = {name: f"/{name}" for name in ("input", "output", "errors", "work")}
    return NewBatch(id=batch_id, user="u", uid=1, model="m", bytes=1, lines=1, **paths, **changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("uid", b"abc"),
        ("deadline_ms", b"1e400"),
        ("deadline_ms", b"nan"),
        ("deadline_ms", b"9" * 30),
        ("submitted_ms", b"-1"),
        ("status", b"sleeping"),
        ("id", b"another"),
        ("user", b"\xff"),
        ("cursor", b""),
    ],
)
def test_a_batch_with_a_bad_record_does_not_hide_the_others(
    valkey: redis.Redis, field: str, value: bytes
) -> None:
    store = BatchStore(valkey, POOL)
    for name in ("good", "bad", "also-good"):
        store.submit(new(name))
    valkey.hset(store.keys.batch("bad"), field, value)
    assert {batch.id for batch in store.all()} == {"good", "also-good"}
    assert {batch.id for batch in store.active("m")} == {"good", "also-good"}
    assert store.active("m", only="bad") == []
    store.sweep("m", now=True)
    with pytest.raises(BatchUnknownError, match="is no batch that can be read"):
        store.get("bad")


def test_members_and_keys_of_the_wrong_kind_are_passed_over(valkey: redis.Redis) -> None:
    store = BatchStore(valkey, POOL)
    store.submit(new("good"))
    store.submit(new("chunky"))
    valkey.zadd(store.keys.batches_active, {b"\xff\xfe": 1, b"": 2, b"a list": 3})
    valkey.rpush(store.keys.batch("a list"), "x")
    valkey.hset(store.keys.batch_chunks("chunky"), "0", "{")
    assert {batch.id for batch in store.active("m")} == {"chunky", "good"}
    store.sweep("m", now=True)
    assert {batch.id for batch in store.active("m")} == {"chunky", "good"}


@pytest.mark.parametrize("ahead_ms", [LONGEST_DEADLINE_MS + 1, 1e300, float("inf"), float("nan")])
def test_a_deadline_beyond_a_year_is_refused_and_nothing_is_registered(
    valkey: redis.Redis, ahead_ms: float
) -> None:
    store = BatchStore(valkey, POOL)
    with pytest.raises(ValueError, match=r"within these|in the past"):
        store.submit(new("late", deadline_in_ms=ahead_ms))
    assert store.all() == []
