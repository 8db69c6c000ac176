"""What any Redis client may have put into the online queue's keys: it stands in nobody's way."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
import structlog
from redis.asyncio import Redis

from hybridsched.core.values import Gate, GateState
from hybridsched.store.online import OnlineQueue
from hybridsched.store.online_signals import Cancel, Wake
from hybridsched.store.online_values import Claimed, End, EndStatus, QueueLimits, Request
from hybridsched.store.scripts import load

MINUTE = 60_000.0
FAR = b"4102444800000.0"
"""A deadline in the year 2100."""


@pytest.fixture
def queue(client: Redis) -> OnlineQueue:
    return OnlineQueue(client, "p", QueueLimits(patience_ms=1e12))


def request(queue: OnlineQueue, request_id: str, **fields: Any) -> Request:
    values: dict[str, Any] = {
        "id": request_id,
        "model": "m",
        "body": b"{}",
        "reply": queue.keys.reply("good"),
        "timeout_ms": MINUTE,
        "prompt_tokens": 10,
        "cost": 30,
    }
    return Request(**(values | fields))


def entry(queue: OnlineQueue, **changes: bytes | None) -> dict[bytes, bytes]:
    """An entry as accept.lua writes it, but for `changes`; None leaves a field out."""
    fields: dict[str, bytes | None] = {
        "id": b"bad",
        "path": b"/v1/completions",
        "body": b"{}",
        "stream": b"0",
        "reply": queue.keys.reply("bad").encode(),
        "deadline_ms": FAR,
        "accepted_ms": b"1700000000000.0",
        "cost": b"30",
        "prompt_tokens": b"10",
        "attempt": b"1",
    }
    return {name.encode(): value for name, value in (fields | changes).items() if value is not None}


async def add(queue: OnlineQueue, fields: dict[bytes, bytes], priority: int = 1) -> bytes:
    client: Any = queue.client
    found: bytes = await client.xadd(queue.keys.online("m", priority), fields)
    return found


async def claim(queue: OnlineQueue, replica: str = "r0", **options: Any) -> list[Claimed]:
    values: dict[str, Any] = {"load": 0.0, "inflight": 0, "cap": 64}
    return await queue.claim("m", replica, f"{replica}:1", **(values | options))


async def ends(queue: OnlineQueue, name: str) -> list[tuple[bytes, End]]:
    entries = await queue.client.xrange(queue.keys.reply(name))
    return [(f[b"id"], msgspec.json.decode(f[b"end"], type=End)) for _, f in entries if b"end" in f]


BAD: list[dict[str, bytes | None]] = [
    {"cost": b"abc"},
    {"cost": b"1e999"},
    {"cost": b"nan"},
    {"cost": b"-1"},
    {"cost": b"0x10"},
    {"cost": None},
    {"prompt_tokens": b"inf"},
    {"prompt_tokens": b""},
    {"id": b"\xff\xfe"},
    {"id": b"a\r\nX-Evil: 1"},
    {"id": b"with space"},
    {"id": b"x" * 201},
    {"id": b""},
    {"id": None},
    {"deadline_ms": b"soon"},
    {"deadline_ms": b"nan"},
    {"deadline_ms": b"1e999"},
    {"deadline_ms": None},
    {"accepted_ms": b"-5"},
    {"accepted_ms": None},
    {"attempt": b"many"},
    {"attempt": b"1.5"},
    {"attempt": b"0"},
    {"attempt": None},
    {"path": b"\xff"},
    {"path": None},
    {"body": None},
    {"stream": None},
]


@pytest.mark.parametrize("changes", BAD, ids=repr)
async def test_an_entry_that_cannot_be_run_is_answered_and_dropped(
    queue: OnlineQueue, changes: dict[str, bytes | None]
) -> None:
    await add(queue, entry(queue, **changes))
    await queue.accept(request(queue, "good"))
    granted = await claim(queue)
    assert [one.id for one in granted] == ["good"], "the rest of the claim is served"
    assert await queue.finish(granted[0], End(status=EndStatus.OK))
    await queue.drain()
    [(named, end)] = await ends(queue, "bad")
    assert (end.status, end.code, end.http_status) == (EndStatus.FAILED, "bad_request", 400)
    assert named == (changes.get("id", b"bad") or b"")
    assert (await queue.depth("m")).claimed == (0, 0, 0)
    assert [end.status for _, end in await ends(queue, "good")] == [EndStatus.OK]


@pytest.mark.parametrize("changes", BAD, ids=repr)
async def test_a_worker_that_died_over_such_an_entry_leaves_no_trap(
    queue: OnlineQueue, changes: dict[str, bytes | None]
) -> None:
    client: Any = queue.client
    await add(queue, entry(queue, **changes))
    await queue.accept(request(queue, "good"))
    stream = queue.keys.online("m", 1)
    await client.xgroup_create(stream, "workers", "0")
    await client.xreadgroup("workers", b"\xff dead", {stream: ">"})
    assert (await queue.reclaim("m", 0)) == Counter(failed=1, requeued=1) or changes == {"path": b"\xff"}
    assert [one.id for one in await claim(queue)] == ["good"]
    await queue.drain()
    assert [end.code for _, end in await ends(queue, "bad")] == ["bad_request"]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("id", "a\r\nX: 1", "its id must be"),
        ("id", "with space", "its id must be"),
        ("id", "x" * 201, "its id must be"),
        ("cost", "abc", "its cost must be"),
        ("cost", "1e999", "its cost must be"),
        ("cost", "nan", "its cost must be"),
        ("prompt_tokens", "-1", "its prompt_tokens must be"),
    ],
)
async def test_accept_refuses_what_no_worker_could_run(
    queue: OnlineQueue, field: str, value: str, says: str
) -> None:
    """Called as any client in any language would; the one beside it is accepted."""
    client: Any = queue.client
    prefix = queue.keys.prefix
    keys: list[str] = []
    args: list[str] = [prefix, "60000", "2", "120000", "1000"]
    for odd in (True, False):
        one = {"id": "odd" if odd else "good", "cost": "9", "prompt_tokens": "1"}
        if odd:
            one[field] = value
        keys += [f"{prefix}req:{one['id']}", f"{prefix}online:m:1", f"{prefix}reply:c", f"{prefix}replicas:m"]
        args += [
            one["id"],
            "/v1/completions",
            "{}",
            "0",
            "30000",
            one["cost"],
            one["prompt_tokens"],
            "1",
            "0",
        ]
    answer = await client.eval(load("accept"), len(keys), *keys, *args)
    assert [one[0] for one in answer] == [b"refused", b"accepted"]
    assert answer[0][1].decode().startswith(says)


async def test_a_foreign_entry_ends_no_other_request_of_the_same_id(queue: OnlineQueue) -> None:
    await queue.accept(request(queue, "mine"))
    await add(queue, entry(queue, id=b"mine", cost=b"abc"))
    [mine] = await claim(queue)
    await queue.drain()
    assert await queue.result("mine") is None
    assert await queue.finish(mine, End(status=EndStatus.OK))
    assert [end.status for _, end in await ends(queue, "good")] == [EndStatus.OK]


async def test_a_reply_stream_of_another_type_spoils_no_other_answer(queue: OnlineQueue) -> None:
    client: Any = queue.client
    await client.set(queue.keys.reply("text"), "no stream")
    await queue.accept_many([request(queue, "a", reply=queue.keys.reply("text")), request(queue, "b")])
    granted = await claim(queue)
    await client.delete(queue.keys.request("a"))
    await client.set(queue.keys.request("a"), "no hash")
    assert [await queue.emit(one, 1, [b"{}"]) for one in granted] == [True, True]
    assert await queue.finish_many([(one, End(status=EndStatus.OK)) for one in granted]) == [True, True]
    assert [named for named, _ in await ends(queue, "good")] == [b"b"]
    assert (await queue.depth("m")).claimed == (0, 0, 0)


async def test_a_hash_of_another_type_does_not_stop_the_reclaim(queue: OnlineQueue) -> None:
    client: Any = queue.client
    await queue.accept_many([request(queue, "a"), request(queue, "b")])
    granted = await claim(queue)
    await client.delete(queue.keys.request("a"))
    await client.set(queue.keys.request("a"), "no hash")
    assert await queue.reclaim("m", 0) == Counter(requeued=2)
    again = await claim(queue)
    assert sorted(one.id for one in again) == ["a", "b"]
    assert await queue.release(again[0]) == "released"
    assert not any(await queue.finish_many([(one, End(status=EndStatus.OK)) for one in granted]))


@pytest.mark.parametrize("reply", [b"\xff\xfe", b"hs:{p}:reply:\xff", b"hs:{p}:reply:a\nb", b" "])
async def test_a_reply_stream_that_is_no_text_is_left_alone(queue: OnlineQueue, reply: bytes) -> None:
    client: Any = queue.client
    await add(queue, entry(queue, reply=reply))
    [one] = await claim(queue)
    assert await queue.finish(one, End(status=EndStatus.OK))
    await queue.accept(request(queue, "moved"))
    [one] = await claim(queue)
    await client.hset(queue.keys.request("moved"), "reply", reply)
    assert await queue.finish(one, End(status=EndStatus.OK))
    assert await client.exists(reply) == 0
    assert (await queue.depth("m")).claimed == (0, 0, 0)


@pytest.mark.parametrize(
    "gate",
    [
        b"garbage",
        b"\xff",
        b"[" * 5000,
        b"7",
        b'{"state":"open","grace_ms":1e999,"policy_version":1e999}',
        b'{"state":"open","grace_ms":[],"policy_version":"x"}',
        b'{"state":"open","grace_ms":-1}',
        None,
    ],
    ids=lambda gate: repr(gate)[:30],
)
@pytest.mark.parametrize("epoch", [b"7", b"abc", b"9223372036854775807"])
async def test_whatever_stands_in_the_gates_keys_a_claim_closes_it_and_serves(
    queue: OnlineQueue, gate: bytes | None, epoch: bytes
) -> None:
    client: Any = queue.client
    if gate is None:
        await client.rpush(queue.keys.gate("r0"), "a list")
    else:
        await client.set(queue.keys.gate("r0"), gate)
    await client.set(queue.keys.gate_epoch("r0"), epoch)
    await queue.accept(request(queue, "a"))
    [one] = await claim(queue, lane="r0")
    assert one.closed_gate
    assert one.epoch == (8 if epoch == b"7" else one.epoch)
    assert one.epoch > 7
    kept = msgspec.json.decode(await client.get(queue.keys.gate("r0")), type=Gate)
    assert (kept.state, kept.epoch) == (GateState.CLOSED, one.epoch)
    assert int(await client.get(queue.keys.gate_epoch("r0"))) == one.epoch


@pytest.mark.parametrize(
    "record", [b"inf 0 0 8 0", b"9999999999999999 0 0 8 0", b"%s nan 0 8 0", b"%s -5 0 8 0", b"%s -inf 0 8 0"]
)
async def test_a_record_that_no_worker_writes_draws_no_work(queue: OnlineQueue, record: bytes) -> None:
    now = await queue.register_replica("m", "r0", load=5000, inflight=1, cap=64)
    await queue.client.hset(queue.keys.replicas("m"), "ghost", record.replace(b"%s", b"%.0f" % (now + 3000)))
    await queue.accept(request(queue, "a"))
    assert len(await claim(queue, load=5000.0, inflight=1)) == 1


@pytest.mark.parametrize("kind", ["string", "list"])
async def test_replicas_of_another_type_are_replaced_and_nobody_waits(queue: OnlineQueue, kind: str) -> None:
    client: Any = queue.client
    key = queue.keys.replicas("m")

    async def spoil() -> None:
        await client.delete(key)
        await (client.set(key, "x") if kind == "string" else client.rpush(key, "x"))

    await spoil()
    await queue.accept(request(queue, "a"))
    assert [one.id for one in await claim(queue)] == ["a"]
    assert b"r0" in await client.hgetall(key)
    await spoil()
    await queue.register_replica("m", "r1", load=0, inflight=0, cap=64)
    assert list(await client.hgetall(key)) == [b"r1"]
    await spoil()
    assert await queue.unregister("m", "r1", "r1:1") == 0


async def test_garbage_on_the_wake_channel_is_skipped(queue: OnlineQueue) -> None:
    heard: list[Wake | Cancel] = []
    async for signal in queue.signals("r0"):
        heard.append(signal)
        if len(heard) == 1:
            for said in (b"\xff\xfe", b"", b"dance", b"cancel \xff", b"cancel q1", b"wake"):
                await queue.client.publish(queue.keys.wake("r0"), said)
        if len(heard) == 3:
            break
    assert heard == [Wake(), Cancel("q1"), Wake()]


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("cost", [0, 30, 3000])
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_burst_on_idle_replicas_is_spread_evenly(
    queue: OnlineQueue, cost: int, at_once: bool, each: int
) -> None:
    """Small requests too: all of them together are less than the slack."""
    replicas = [f"r{i}" for i in range(5)]
    for replica in replicas:
        await queue.register_replica("m", replica, load=0, inflight=0, cap=64)
    burst = [request(queue, f"q{i}", prompt_tokens=cost // 3, cost=cost) for i in range(len(replicas) * each)]
    for part in [burst] if at_once else [[one] for one in burst]:
        await queue.accept_many(part)
    held: dict[str, list[Claimed]] = {replica: [] for replica in replicas}
    while woken := [
        name.decode()
        for name, record in (await queue.client.hgetall(queue.keys.replicas("m"))).items()
        if record.endswith(b" 1")
    ]:
        [replica] = woken
        held[replica] += await claim(
            queue, replica, load=sum(one.load for one in held[replica]), inflight=len(held[replica])
        )
    assert {replica: len(held[replica]) for replica in replicas} == dict.fromkeys(replicas, each)


async def test_of_a_field_that_stands_twice_both_sides_read_the_same(queue: OnlineQueue) -> None:
    """What Lua finds good must be what the worker reads."""
    client: Any = queue.client
    fields = [part for pair in entry(queue).items() for part in pair]
    await client.execute_command(
        "XADD", queue.keys.online("m", 1), "*", *fields, "cost", "abc", "id", b"\xff"
    )
    await client.execute_command("XADD", queue.keys.online("m", 1), "*", "cost", "abc", *fields)
    await queue.accept(request(queue, "good"))
    assert [one.id for one in await claim(queue)] == ["bad", "good"]
    await queue.drain()
    assert [end.code for _, end in await ends(queue, "bad")] == ["bad_request"]


@pytest.mark.parametrize("how", ["consumer deleted", "group moved"])
async def test_a_request_that_nobody_holds_or_will_be_given_runs_again(queue: OnlineQueue, how: str) -> None:
    client: Any = queue.client
    await queue.accept_many([request(queue, f"q{i}") for i in range(3)])
    stream = queue.keys.online("m", 1)
    if how == "consumer deleted":
        [held] = await claim(queue, limit=1)
        await queue.claim("m", "r1", "r1:1", load=0.0, inflight=0, cap=64)
        await client.xgroup_delconsumer(stream, "workers", "r1:1")
    else:
        [held] = await claim(queue, limit=1)
        await client.xgroup_setid(stream, "workers", "$")
    assert await claim(queue) == []
    assert (await queue.depth("m")).depth == 2, "they wait, for nobody"
    assert await queue.reclaim("m", 1000) == Counter()
    assert await queue.reclaim("m", 1000) == Counter(requeued=2)
    assert [one.id for one in await claim(queue)] == ["q1", "q2"]
    assert await queue.finish(held, End(status=EndStatus.OK)), "what is held is left alone"


async def test_a_reply_stream_that_takes_no_more_spoils_no_other_answer(queue: OnlineQueue) -> None:
    client: Any = queue.client
    full = queue.keys.reply("full")
    await client.xadd(full, {"a": "b"}, id="18446744073709551615-18446744073709551615")
    await queue.accept_many([request(queue, "a", reply=full), request(queue, "b")])
    granted = await claim(queue)
    assert [await queue.emit(one, 1, [b"{}"]) for one in granted] == [True, True]
    assert await queue.finish_many([(one, End(status=EndStatus.OK)) for one in granted]) == [True, True]
    assert [named for named, _ in await ends(queue, "good")] == [b"b"]


@pytest.mark.parametrize("reply", [b"", b" ", b"  x", b"\xff", b"x " * 300])
async def test_whatever_the_hash_names_as_reply_streams_a_reclaim_comes_to_an_end(
    queue: OnlineQueue, reply: bytes
) -> None:
    client: Any = queue.client
    await queue.accept_many([request(queue, "a"), request(queue, "b")])
    await claim(queue)
    await client.hset(queue.keys.request("a"), "reply", reply)
    assert await queue.reclaim("m", 0) == Counter(requeued=2)
    again = await claim(queue)
    assert await queue.finish_many([(one, End(status=EndStatus.OK)) for one in again]) == [True, True]


@pytest.mark.parametrize("value", ["text", "list", "hash"])
@pytest.mark.parametrize("odd", [0, 1, 2])
async def test_a_class_whose_key_is_of_another_type_holds_up_no_other_and_is_named_once(
    queue: OnlineQueue, odd: int, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridsched.store.found._named", set())
    client: Any = queue.client
    key = queue.keys.online("m", odd)
    match value:
        case "text":
            await client.set(key, "text")
        case "list":
            await client.rpush(key, "text")
        case _:
            await client.hset(key, "a", "b")
    others = [priority for priority in (0, 1, 2) if priority != odd]
    with structlog.testing.capture_logs() as said:
        for replica in ("r0", "r1"):
            await queue.register_replica("m", replica, load=0.0, inflight=0, cap=64)
        for turn in range(3):
            outcomes = await queue.accept_many(
                [request(queue, f"id-{turn}-{one}", priority=one) for one in (0, 1, 2)]
            )
            assert [one.outcome.value for one in outcomes] == [
                "refused" if priority == odd else "accepted" for priority in (0, 1, 2)
            ]
            got = [*await claim(queue), *await claim(queue, "r1")]
            assert sorted(one.priority for one in got) == others
            for one in got:
                assert await queue.finish(one, End(status=EndStatus.OK))
        depth = await queue.depth("m")
        assert depth.waiting == depth.claimed == (0, 0, 0)
        assert await queue.reclaim("m", 0) == {}
        assert await queue.unregister("m", "r0", "r0:1") == 0
        named = [one for one in said if one.get("item") == key]
    assert len(named) == 1
    assert "other classes go on" in named[0]["problem"]
    await client.delete(key)
    assert await queue.accept(request(queue, "again", priority=odd))
    assert [one.id for one in await claim(queue)] == ["again"]
