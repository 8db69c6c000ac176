"""Each script of the online queue by itself, and as any client in any language would call it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from redis.asyncio import Redis

from hybridsched.core.reasons import Reason
from hybridsched.core.values import NO_BUDGET, Budget, Gate, GateState
from hybridsched.store.online import OnlineQueue, new_consumer
from hybridsched.store.online_values import (
    DECODE_WEIGHT,
    Claimed,
    End,
    EndStatus,
    QueueLimits,
    Request,
)
from hybridsched.store.scripts import load
from hybridsched.store.wire import Wire

LUA = Path(__file__).parents[2] / "hybridsched" / "store" / "lua"
SCRIPTS = (
    *("accept", "cancel", "claim", "depth", "emit", "extend", "finish", "reclaim", "register", "reject"),
    *("release", "stale", "unregister"),
)
MINUTE = 60_000.0


@pytest.fixture
def queue(client: Redis) -> OnlineQueue:
    return OnlineQueue(client, "p")


def request(queue: OnlineQueue, request_id: str, **fields: Any) -> Request:
    values: dict[str, Any] = {
        "id": request_id,
        "model": "m",
        "body": b'{"prompt":[1]}',
        "reply": queue.keys.reply("c"),
        "timeout_ms": MINUTE,
        "prompt_tokens": 10,
        "cost": 30,
    }
    return Request(**(values | fields))


async def claim(queue: OnlineQueue, replica: str = "r0", **options: Any) -> list[Claimed]:
    values: dict[str, Any] = {"load": 0.0, "inflight": 0, "cap": 8}
    return await queue.claim("m", replica, f"{replica}:1", **(values | options))


async def ends(queue: OnlineQueue, name: str = "c") -> list[tuple[str, End]]:
    entries = await queue.client.xrange(queue.keys.reply(name))
    return [
        (fields[b"id"].decode(), msgspec.json.decode(fields[b"end"], type=End))
        for _, fields in entries
        if b"end" in fields
    ]


# the files


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_what_it_takes_and_touches_only_its_keys(name: str) -> None:
    own = (LUA / f"{name}.lua").read_text()
    header = own.split("\n--@include")[0]
    assert "KEYS" in header
    assert "Returns" in header
    # A channel may be built from the prefix (PUBLISH is no key access); a key may not.
    code = re.sub(r"--.*", "", load(name))
    calls = re.findall(
        r"redis\.p?call\('(\w+)',(?: '(?:GROUPS|CONSUMERS|CREATE|DELCONSUMER)',)? ([^,)]+)", code
    )
    assert calls, "the pattern finds the calls"
    for command, key in calls:
        assert ".." not in key or command == "PUBLISH", f"{name}.lua builds a key: {command} {key}"


def test_an_unknown_script_is_named() -> None:
    with pytest.raises(LookupError, match="nowhere"):
        load("nowhere")


# accept


async def test_accept_sets_the_deadline_by_the_servers_clock(queue: OnlineQueue) -> None:
    await queue.accept(request(queue, "a", timeout_ms=1500.0))
    seconds, micros = await queue.client.time()
    [got] = await claim(queue)
    now = seconds * 1000 + micros / 1000
    assert 0.0 < got.deadline_ms - got.accepted_ms <= 1500.0
    assert got.left_ms <= got.deadline_ms - got.accepted_ms - got.age_ms
    assert 0.0 <= now - got.accepted_ms < 10_000.0
    assert (got.body, got.path, got.stream, got.attempt) == (
        b'{"prompt":[1]}',
        "/v1/chat/completions",
        False,
        1,
    )


async def test_an_id_is_accepted_once_and_its_retries_are_counted(queue: OnlineQueue) -> None:
    outcomes = [(await queue.accept(request(queue, "a"))).outcome.value for _ in range(4)]
    assert outcomes == ["accepted", "attached", "attached", "retry_budget_exhausted"]
    assert len(await claim(queue)) == 1


async def test_a_retry_after_the_answer_gets_the_kept_answer(queue: OnlineQueue) -> None:
    await queue.accept(request(queue, "a"))
    [got] = await claim(queue)
    await queue.finish(got, End(status=EndStatus.OK, body=msgspec.Raw(b'{"n":7}')))
    again = await queue.accept(request(queue, "a", reply=queue.keys.reply("other")))
    assert again.outcome.value == "done"
    [(_, end)] = await ends(queue, "other")
    assert bytes(end.body) == b'{"n":7}'


async def test_a_full_queue_refuses(queue: OnlineQueue) -> None:
    outcomes = await queue.accept_many([request(queue, f"q{i}", max_waiting=2) for i in range(3)])
    assert [o.outcome.value for o in outcomes] == ["accepted", "accepted", "queue_full"]
    await claim(queue, limit=1)
    assert (await queue.accept(request(queue, "late", max_waiting=2))).outcome.value == "accepted"


async def test_many_accepts_are_one_round_trip(queue: OnlineQueue) -> None:
    outcomes = await queue.accept_many([request(queue, f"q{i}") for i in range(200)])
    assert [o.id for o in outcomes] == [f"q{i}" for i in range(200)]
    assert (await queue.depth("m")).waiting == (0, 200, 0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"request_id": "a b"}, "request id 'a b'"),
        ({"model": "{m}"}, "model"),
        ({"priority": 3}, "priority 3"),
    ],
)
async def test_what_cannot_stand_in_a_key_is_refused(
    queue: OnlineQueue, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        await queue.accept(request(queue, **({"request_id": "x"} | fields)))


# claim


async def test_claims_go_by_priority_then_age(queue: OnlineQueue) -> None:
    for request_id, priority in (("low", 2), ("n1", 1), ("n2", 1), ("high", 0)):
        await queue.accept(request(queue, request_id, priority=priority))
    assert [r.id for r in await claim(queue, limit=3)] == ["high", "n1", "n2"]
    assert [r.id for r in await claim(queue)] == ["low"]


async def test_a_replica_takes_no_more_than_its_cap(queue: OnlineQueue) -> None:
    await queue.accept_many([request(queue, f"q{i}") for i in range(5)])
    assert len(await claim(queue, inflight=6, cap=8)) == 2
    assert await claim(queue, inflight=8, cap=8) == []


async def test_the_least_loaded_replica_takes_the_work(queue: OnlineQueue) -> None:
    await queue.register_replica("m", "r1", load=0, inflight=0, cap=8)
    await queue.accept(request(queue, "a"))
    assert await claim(queue, "r0", load=5000.0, inflight=1) == []
    assert [r.id for r in await claim(queue, "r1")] == ["a"]


async def test_a_burst_is_spread_over_equal_replicas(queue: OnlineQueue) -> None:
    await queue.register_replica("m", "r1", load=0, inflight=0, cap=8)
    await queue.accept_many([request(queue, f"q{i}", prompt_tokens=500, cost=500) for i in range(4)])
    first = await claim(queue, "r0")
    second = await claim(queue, "r1")
    assert (len(first), len(second)) == (1, 2), "r0 until it leads by a slack, then r1 until it leads r0"


async def test_a_full_or_dead_replica_holds_nobody_back(client: Redis) -> None:
    queue = OnlineQueue(client, "p", QueueLimits(patience_ms=1e12))
    await queue.register_replica("m", "full", load=0, inflight=8, cap=8)
    gone = OnlineQueue(client, "p", QueueLimits(record_ttl_ms=0))
    await gone.register_replica("m", "gone", load=0, inflight=0, cap=8)
    await asyncio.sleep(0.002)  # the life of a record is kept in whole milliseconds
    await queue.accept(request(queue, "a"))
    assert len(await claim(queue, "r0", load=5000.0, inflight=1)) == 1
    assert not await client.hexists(queue.keys.replicas("m"), "gone")


async def test_patience_gives_the_work_to_whoever_asks(client: Redis) -> None:
    queue = OnlineQueue(client, "p", QueueLimits(patience_ms=0.0))
    await queue.register_replica("m", "silent", load=0, inflight=0, cap=8)
    await queue.accept(request(queue, "a"))
    assert len(await claim(queue, "r0", load=5000.0, inflight=1)) == 1


async def test_an_expired_request_is_answered_and_never_handed_out(queue: OnlineQueue) -> None:
    await queue.client.set(queue.keys.gate("r0"), msgspec.json.encode(open_gate("r0")))
    await queue.accept(request(queue, "late", timeout_ms=0.0))
    assert await claim(queue, lane="r0") == []
    await queue.drain()
    [(request_id, end)] = await ends(queue)
    assert (request_id, end.status, end.code, end.http_status) == (
        "late",
        EndStatus.EXPIRED,
        "deadline_exceeded",
        504,
    )
    assert await queue.client.exists(queue.keys.gate_epoch("r0")) == 0, "nothing ran: no gate was touched"


async def test_a_foreign_entry_without_a_reply_stream_does_not_block_the_queue(queue: OnlineQueue) -> None:
    await queue.client.xadd(queue.keys.online("m", 1), {"hello": "world"})
    await queue.accept(request(queue, "a"))
    assert [r.id for r in await claim(queue)] == ["a"]
    assert (await queue.depth("m")).claimed == (0, 1, 0)


async def test_a_claim_adds_its_load_to_the_record(queue: OnlineQueue) -> None:
    await queue.accept(request(queue, "a", prompt_tokens=100, cost=300))
    [got] = await claim(queue, load=50.0, inflight=1)
    assert got.load == 100 + DECODE_WEIGHT * 200
    record = await queue.client.hget(queue.keys.replicas("m"), "r0")
    assert record is not None
    assert record.split()[1:] == [b"%d" % (50 + got.load), b"2", b"8", b"0"]


# wakes


async def test_wakes_go_to_the_least_loaded_once_and_then_on(queue: OnlineQueue) -> None:
    await queue.register_replica("m", "r0", load=900, inflight=1, cap=8)
    await queue.register_replica("m", "r1", load=10, inflight=1, cap=8)
    async with queue.client.pubsub(ignore_subscribe_messages=True) as pubsub:
        await pubsub.subscribe(queue.keys.wake("r0"), queue.keys.wake("r1"))
        await queue.accept_many([request(queue, f"q{i}") for i in range(3)])
        await queue.accept(request(queue, "q3"))
        await claim(queue, "r1", load=10.0, inflight=1, limit=1)
        await queue.client.publish(queue.keys.wake("r0"), "end of test")
        heard = []
        while (message := await next_message(pubsub))["data"] != b"end of test":
            heard.append(message["channel"].decode().rpartition(":")[2])
    assert heard == ["r1", "r0"], "one wake for the burst, and the chain's wake for what r1 left"


async def next_message(pubsub: Any) -> dict[str, Any]:
    for _ in range(50):
        message = await pubsub.get_message(timeout=0.2)
        if message is not None:
            return dict(message)
    raise AssertionError("no message came within 10 s")


# the gate


def open_gate(lane: str) -> Gate:
    budget = Budget(max_inflight=4, chunk_tokens=100, slice_tokens=0)
    return Gate(
        lane=lane, state=GateState.OPEN, reason=Reason.IDLE, budget=budget, grace_ms=7.5, policy_version=3
    )


async def test_a_claim_closes_the_open_gate_in_the_same_step(queue: OnlineQueue) -> None:
    keys = queue.keys
    await queue.client.set(keys.gate("r0"), msgspec.json.encode(open_gate("r0")))
    await queue.accept(request(queue, "a"))
    async with queue.client.pubsub(ignore_subscribe_messages=True) as pubsub:
        await pubsub.subscribe(keys.gates)
        [got] = await claim(queue, lane="r0")
        message = await next_message(pubsub)
    kept = await queue.client.get(keys.gate("r0"))
    assert message["data"] == kept
    gate = msgspec.json.decode(kept or b"", type=Gate)
    assert got.closed_gate
    assert (gate.lane, gate.state, gate.reason, gate.by) == (
        *("r0", GateState.CLOSED, Reason.ONLINE_ARRIVED, "r0"),
    )
    assert (gate.budget, gate.grace_ms, gate.policy_version, gate.epoch) == (NO_BUDGET, 7.5, 3, 1)
    assert 0 < await queue.client.pttl(keys.gate("r0")) <= queue.limits.gate_ttl_ms


async def test_each_granted_claim_raises_the_epoch_but_reports_one_close(queue: OnlineQueue) -> None:
    await queue.client.set(queue.keys.gate("r0"), msgspec.json.encode(open_gate("r0")))
    closes = []
    for i in range(3):
        await queue.accept(request(queue, f"q{i}"))
        [got] = await claim(queue, lane="r0")
        closes.append((got.closed_gate, got.epoch))
    assert closes == [(True, 1), (False, 2), (False, 3)]


async def test_a_gate_that_cannot_be_read_is_closed(queue: OnlineQueue) -> None:
    await queue.client.set(queue.keys.gate("r0"), b"not json")
    await queue.accept(request(queue, "a"))
    [got] = await claim(queue, lane="r0")
    assert got.closed_gate
    kept = await queue.client.get(queue.keys.gate("r0"))
    assert msgspec.json.decode(kept or b"", type=Gate).state is GateState.CLOSED


async def test_without_a_lane_no_gate_is_touched(queue: OnlineQueue) -> None:
    raw = msgspec.json.encode(open_gate("r0"))
    await queue.client.set(queue.keys.gate("r0"), raw)
    await queue.accept(request(queue, "a"))
    [got] = await claim(queue)
    assert not got.closed_gate
    assert await queue.client.get(queue.keys.gate("r0")) == raw


# ends


async def test_only_the_holder_ends_a_request(queue: OnlineQueue) -> None:
    await queue.accept(request(queue, "a"))
    [got] = await claim(queue)
    thief = msgspec.structs.replace(got, consumer=new_consumer("r0"))
    assert not await queue.finish(thief, End(status=EndStatus.OK))
    assert not await queue.emit(thief, 1, [b"{}"])
    assert await queue.release(thief) == "lost"
    assert await queue.heartbeat(thief.consumer, [thief]) == [thief]
    assert await queue.finish(got, End(status=EndStatus.OK))
    assert not await queue.finish(got, End(status=EndStatus.OK))
    assert len(await ends(queue)) == 1


async def test_emits_stay_before_their_end_when_sent_together(queue: OnlineQueue) -> None:
    await queue.accept_many([request(queue, f"q{i}", stream=True) for i in range(3)])
    held = await claim(queue)
    await asyncio.gather(
        *[queue.emit(r, n, [b'{"n":%d}' % n]) for n in (1, 2) for r in held],
        *[queue.finish(r, End(status=EndStatus.OK)) for r in held],
    )
    seen: dict[bytes, list[bytes]] = {}
    for _, fields in await queue.client.xrange(queue.keys.reply("c")):
        seen.setdefault(fields[b"id"], []).append(fields.get(b"n", b"end"))
    assert set(map(tuple, seen.values())) == {(b"1", b"2", b"end")}


async def test_results_and_reply_streams_do_not_live_for_ever(queue: OnlineQueue) -> None:
    await queue.accept(request(queue, "a"))
    assert 0 < await queue.client.pttl(queue.keys.request("a")) <= MINUTE + queue.limits.keep_ms
    [got] = await claim(queue)
    await queue.finish(got, End(status=EndStatus.OK))
    assert 0 < await queue.client.pttl(queue.keys.request("a")) <= queue.limits.keep_ms
    assert 0 < await queue.client.pttl(queue.keys.reply("c")) <= queue.limits.reply_ttl_ms
    assert await queue.client.xlen(queue.keys.online("m", 1)) == 0


# workers that die, stop, or are told to stop


async def test_a_dead_workers_request_runs_again_behind_fresh_work_and_three_times_at_most(
    queue: OnlineQueue,
) -> None:
    await queue.accept(request(queue, "a"))
    for attempt in (1, 2, 3):
        [got] = await claim(queue)
        assert (got.id, got.attempt) == ("a", attempt)
        if attempt == 1:
            await queue.accept(request(queue, "fresh"))
            assert await queue.reclaim("m", 0) == {"requeued": 1}
            [first] = await claim(queue, limit=1)
            assert first.id == "fresh", "a retry does not jump ahead"
            await queue.finish(first, End(status=EndStatus.OK))
        elif attempt == 2:
            assert await queue.reclaim("m", 0) == {"requeued": 1}
    assert await queue.reclaim("m", 0) == {"failed": 1}
    assert [(name, end.code) for name, end in await ends(queue)] == [("fresh", None), ("a", "engine_lost")]


async def test_a_renewed_lease_is_not_reclaimed(queue: OnlineQueue) -> None:
    await queue.accept(request(queue, "a"))
    held = await claim(queue)
    assert await queue.heartbeat("r0:1", held) == []
    assert await queue.reclaim("m", 60_000) == {}


async def test_after_its_first_tokens_a_request_is_not_run_again(queue: OnlineQueue) -> None:
    await queue.accept(request(queue, "a", stream=True))
    [got] = await claim(queue)
    await queue.emit(got, 1, [b"{}"])
    assert await queue.reclaim("m", 0) == {"failed": 1}
    [(_, end)] = await ends(queue)
    assert (end.status, end.code) == (EndStatus.FAILED, "engine_lost")


async def test_release_gives_back_without_counting(queue: OnlineQueue) -> None:
    await queue.accept(request(queue, "a"))
    for _ in range(5):
        [got] = await claim(queue)
        assert got.attempt == 1
        assert await queue.release(got) == "released"
    assert (await queue.depth("m")).waiting == (0, 1, 0)


async def test_cancel_of_a_waiting_request_answers_it(queue: OnlineQueue) -> None:
    await queue.accept(request(queue, "a"))
    assert await queue.cancel("a") == "cancelled"
    assert await queue.cancel("a") == "done"
    assert await queue.cancel("nobody") == "unknown"
    assert [end.status for _, end in await ends(queue)] == [EndStatus.CANCELLED]
    assert await claim(queue) == []


async def test_cancel_of_a_running_request_tells_its_worker_and_it_is_never_retried(
    queue: OnlineQueue,
) -> None:
    await queue.accept(request(queue, "a"))
    async with queue.client.pubsub(ignore_subscribe_messages=True) as pubsub:
        await pubsub.subscribe(queue.keys.wake("r0"))
        await claim(queue)
        assert await queue.cancel("a") == "aborting"
        assert (await next_message(pubsub))["data"] == b"cancel a"
    assert await queue.reclaim("m", 0) == {"cancelled": 1}
    assert await claim(queue) == []


async def test_unregister_reports_what_is_still_held(queue: OnlineQueue) -> None:
    await queue.accept(request(queue, "a"))
    [got] = await claim(queue)
    assert await queue.unregister("m", "r0", "r0:1") == 1
    await queue.finish(got, End(status=EndStatus.OK))
    assert await queue.unregister("m", "r0", "r0:1") == 0
    assert await queue.client.xinfo_consumers(queue.keys.online("m", 1), "workers") == []


async def test_depth_tells_waiting_from_claimed(queue: OnlineQueue) -> None:
    empty = await queue.depth("m")
    assert (empty.depth, empty.oldest_wait_ms) == (0, None)
    await queue.accept_many([request(queue, f"q{i}", priority=i % 2) for i in range(4)])
    await claim(queue, limit=1)
    depth = await queue.depth("m")
    assert (depth.waiting, depth.claimed) == ((1, 2, 0), (1, 0, 0))
    assert depth.oldest_wait_ms is not None
    assert 0.0 <= depth.oldest_wait_ms < 10_000.0


# what an operation costs, and other languages


async def test_each_operation_is_one_round_trip(queue: OnlineQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    await queue.accept(request(queue, "warm"))  # teaches the server the scripts that follow
    [warm] = await claim(queue)
    await queue.emit(warm, 1, [b"{}"])
    await queue.heartbeat(warm.consumer, [warm])
    await queue.finish(warm, End(status=EndStatus.OK))
    await queue.depth("m")
    trips = []
    flush = Wire._flush

    def counted(self: Wire) -> None:
        trips.append(1)
        flush(self)

    monkeypatch.setattr(Wire, "_flush", counted)
    counts = {}

    async def count(name: str, work: Any) -> Any:
        trips.clear()
        result = await work
        counts[name] = len(trips)
        return result

    await count("accept", queue.accept(request(queue, "one")))
    await count("accept_many", queue.accept_many([request(queue, f"q{i}") for i in range(150)]))
    held = await count("claim", claim(queue, cap=500, limit=500))
    await count("emit", queue.emit(held[0], 1, [b"{}"]))
    await count("heartbeat", queue.heartbeat("r0:1", held))
    await count("finish_many", queue.finish_many([(r, End(status=EndStatus.OK)) for r in held]))
    await count("depth", queue.depth("m"))
    assert counts == dict.fromkeys(counts, 1)


async def test_a_restarted_server_is_taught_the_scripts_again(queue: OnlineQueue) -> None:
    await queue.accept(request(queue, "a"))
    await queue.client.script_flush()
    assert [r.id for r in await claim(queue)] == ["a"]


def test_any_client_can_send_a_request(valkey: redis.Redis) -> None:
    """The example of docs/online-requests.md: nothing but EVAL and XREAD."""
    reply = valkey.eval(
        load("accept"),
        4,
        *("hs:{p}:req:my-id", "hs:{p}:online:m:1", "hs:{p}:reply:me", "hs:{p}:replicas:m"),
        *("hs:{p}:", 60000, 2, 120000, 100000),
        *("my-id", "/v1/completions", '{"prompt":"Hi","max_tokens":8}', 0, 30000, 9, 1, 1, 0),
    )
    assert reply[0][0] == b"accepted"
    assert valkey.xlen("hs:{p}:online:m:1") == 1
