"""Packing against a real Valkey: the policy worker publishes an order, and claims and wakes go by it."""

from __future__ import annotations

import json

import redis

from hybridsched.core.codec import replay
from hybridsched.core.policy import PackPolicy, PolicyKind
from hybridsched.core.values import Pack
from hybridsched.store.decisions import DecisionLog
from hybridsched.store.keys import Keys
from hybridsched.store.online import OnlineQueue
from hybridsched.store.online_values import QueueLimits, Request
from hybridsched.store.packs import PackStore, decode_pack
from tests.helpers import await_until
from tests.integration.policy_pool import MODEL, POOL, ScriptedPool, lane, leading, policy, replica, scripted

KEYS = Keys(POOL)
PACKING = policy(
    kind=PolicyKind.CONSOLIDATE,
    pack=PackPolicy(enabled=True, max_inflight=2, max_wait_tokens=5000.0, spare=0),
)


def measured(name: str, **changes: object) -> object:
    return replica(name, online_load=0.0, claimed=0, claimed_tokens=0, **changes)


async def order_of(pool: ScriptedPool) -> Pack | None:
    return decode_pack(await pool.client.get(KEYS.pack(MODEL)), MODEL)


async def sees_order(pool: ScriptedPool, *names: str) -> Pack:
    found: Pack | None = None

    async def check() -> bool:
        nonlocal found
        found = await order_of(pool)
        return found is not None and [rank.replica for rank in found.ranks] == list(names)

    await await_until(check, timeout_s=10, what=f"the order {names}")
    assert found is not None
    return found


def request(queue: OnlineQueue, number: int) -> Request:
    return Request(
        id=f"q{number}",
        model=MODEL,
        body=b'{"prompt":[1]}',
        reply=queue.keys.reply("c"),
        timeout_ms=60_000.0,
        prompt_tokens=10,
        cost=20,
    )


async def take(queue: OnlineQueue, name: str, inflight: int = 0) -> list[str]:
    """What a replica is given that carries so many requests."""
    got = await queue.claim(
        MODEL, name, f"{name}:1", load=10.0 * inflight, inflight=inflight, cap=8, lane=name
    )
    return [one.id for one in got]


async def test_requests_go_to_the_first_of_the_order_up_to_its_caps(
    valkey: redis.Redis, valkey_url: str
) -> None:
    async with scripted(valkey_url, given=PACKING) as pool, leading(valkey_url):
        # No request has waited too long here, however slow the machine is.
        queue = OnlineQueue(pool.client, POOL, QueueLimits(patience_ms=60_000.0))
        for name in ("r0", "r1", "r2"):
            await queue.register_replica(MODEL, name, load=0.0, inflight=0, cap=8)
            await pool.say(measured(name), lane(name))  # type: ignore[arg-type]
        order = await sees_order(pool, "r0", "r1", "r2")
        assert (order.ranks[0].max_inflight, order.policy_version, order.by != "") == (2, 1, True)
        assert order.reach == 3, "nothing is known of bursts yet"

        async def placed() -> bool:
            records = valkey.hgetall(KEYS.replicas(MODEL))
            return all(len(record.split()) == 9 for record in records.values()) and len(records) == 3

        await await_until(placed, timeout_s=10, what="places in the replicas' records")
        wakes = valkey.pubsub()
        wakes.psubscribe(f"{KEYS.prefix}wake:*")
        await queue.accept_many([request(queue, number) for number in range(5)])

        woken: list[str] = []

        async def heard() -> bool:
            message = wakes.get_message(ignore_subscribe_messages=True)
            woken.extend([message["channel"].decode().rpartition(":")[2]] if message else [])
            return len(woken) > 0

        await await_until(heard, timeout_s=10, what="a wake")
        assert woken == ["r0"]
        assert await take(queue, "r1") == [], "it is the other's turn, however idle this one is"
        assert len(await take(queue, "r0")) == 2, "up to its cap"
        assert len(await take(queue, "r1")) == 2, "the next one"
        assert await take(queue, "r0", inflight=2) == []
        assert len(await take(queue, "r2")) == 1
        wakes.close()


async def test_an_order_whose_worker_has_gone_runs_out_and_routing_is_by_load_again(
    valkey: redis.Redis, valkey_url: str
) -> None:
    async with scripted(valkey_url, given=PACKING) as pool:
        queue = OnlineQueue(pool.client, POOL)
        for name in ("r0", "r1"):
            await queue.register_replica(MODEL, name, load=1000.0 if name == "r0" else 0.0, inflight=1, cap=8)
        async with leading(valkey_url):
            await pool.say(measured("r0"), measured("r1"))  # type: ignore[arg-type]
            await sees_order(pool, "r0", "r1")

        async def gone() -> bool:
            return await order_of(pool) is None

        await await_until(gone, timeout_s=10, what="the end of the lease")
        await queue.accept(request(queue, 0))
        got = await queue.claim(MODEL, "r0", "r0:1", load=1000.0, inflight=1, cap=8, lane="r0")
        assert got == [], "the other one carries less"
        assert len(await take(queue, "r1", inflight=1)) == 1


async def test_only_the_leader_publishes_and_what_is_none_of_ours_is_no_order(
    valkey: redis.Redis, valkey_url: str
) -> None:
    async with scripted(valkey_url) as pool:
        store = PackStore(pool.client, POOL)
        valkey.set(KEYS.leader, "somebody")
        assert not await store.publish(Pack(model=MODEL), leader_token="me", lease_ms=1000.0)
        assert not await store.publish(Pack(model=MODEL), leader_token="", lease_ms=1000.0)
        assert valkey.get(KEYS.pack(MODEL)) is None
        assert await store.publish(Pack(model=MODEL, reach=3), leader_token="somebody", lease_ms=1000.0)
        stored = await order_of(pool)
        assert stored is not None
        assert (stored.reach, stored.at_ms > 0) == (3, True)
        valkey.set(KEYS.pack(MODEL), json.dumps({"model": "another"}))
        assert await order_of(pool) is None
        valkey.set(KEYS.pack(MODEL), b"\xff{")
        assert await order_of(pool) is None


async def test_orders_are_logged_with_what_they_were_decided_on(valkey: redis.Redis, valkey_url: str) -> None:
    async with scripted(valkey_url, given=PACKING) as pool, leading(valkey_url):
        await pool.say(measured("r0"), measured("r1"), lane("r0"))  # type: ignore[arg-type]
        await sees_order(pool, "r0", "r1")
        log = DecisionLog(pool.client, POOL)

        async def logged() -> bool:
            return any(record.packs and record.snapshot.packs for record in await log.read())

        await await_until(logged, timeout_s=10, what="a record that was decided on an order")
        for record in await log.read():
            assert replay(record) == ()
