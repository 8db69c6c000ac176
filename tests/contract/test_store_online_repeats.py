"""An id that is sent again, by the same caller or by another: who gets what, until when, and what is kept."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from hybridsched.store.online import OnlineQueue
from hybridsched.store.online_values import Claimed, End, EndStatus, QueueLimits, Request
from hybridsched.store.scripts import Scripts
from tests.helpers import await_until

OK = End(status=EndStatus.OK, finish_reason="stop", body=msgspec.Raw(b'{"n":7}'))
MINUTE = 60_000.0


@pytest.fixture
def queue(client: Redis) -> OnlineQueue:
    return OnlineQueue(client, "p")


def request(queue: OnlineQueue, reply: str = "a", **fields: Any) -> Request:
    values: dict[str, Any] = {
        "id": "x",
        "model": "m",
        "body": b"{}",
        "reply": queue.keys.reply(reply),
        "timeout_ms": MINUTE,
        "prompt_tokens": 10,
        "cost": 30,
    }
    return Request(**(values | fields))


async def accept(queue: OnlineQueue, reply: str = "a", **fields: Any) -> str:
    return (await queue.accept(request(queue, reply, **fields))).outcome.value


async def claim(queue: OnlineQueue, replica: str = "r0") -> list[Claimed]:
    got = await queue.claim("m", replica, f"{replica}:1", load=0.0, inflight=0, cap=8)
    await queue.drain()
    return got


async def told(queue: OnlineQueue, reply: str) -> list[str]:
    """What a reader of the reply stream saw: numbers of groups, and how it ended."""
    found = []
    for _, fields in await queue.client.xrange(queue.keys.reply(reply)):
        end = fields.get(b"end")
        found.append(
            fields[b"n"].decode() if end is None else msgspec.json.decode(end, type=End).status.value
        )
    return found


# attaching


@pytest.mark.parametrize("running", [False, True])
async def test_all_that_sent_the_same_request_get_its_answer(queue: OnlineQueue, running: bool) -> None:
    assert await accept(queue, "a") == "accepted"
    got = await claim(queue) if running else []
    assert await accept(queue, "b") == "attached"
    [one] = got or await claim(queue)
    assert await queue.finish(one, OK)
    assert (await told(queue, "a"), await told(queue, "b")) == (["ok"], ["ok"])


async def test_an_attached_reader_gets_the_whole_stream(queue: OnlineQueue) -> None:
    await accept(queue, "a", stream=True)
    [one] = await claim(queue)
    assert await accept(queue, "b", stream=True) == "attached"
    for number in (1, 2):
        assert await queue.emit(one, number, [b"{}"])
    assert await queue.finish(one, OK)
    assert await told(queue, "a") == await told(queue, "b") == ["1", "2", "ok"]


async def test_who_comes_when_part_of_a_stream_is_gone_is_told_so_and_takes_nothing(
    queue: OnlineQueue,
) -> None:
    await accept(queue, "a", stream=True)
    [one] = await claim(queue)
    await queue.emit(one, 1, [b"{}"])
    assert await accept(queue, "b", stream=True) == "stream_gap"
    await queue.emit(one, 2, [b"{}"])
    await queue.finish(one, OK)
    assert await accept(queue, "b", stream=True) == "stream_gap"
    assert (await told(queue, "a"), await told(queue, "b")) == (["1", "2", "ok"], [])


async def test_the_first_reader_may_send_again_while_it_streams(queue: OnlineQueue) -> None:
    """A client that did not hear that its request was accepted: all of the answer is on its own stream."""
    await accept(queue, "a", stream=True)
    [one] = await claim(queue)
    await queue.emit(one, 1, [b"{}"])
    assert await accept(queue, "a", stream=True) == "attached"
    await queue.finish(one, OK)
    assert await told(queue, "a") == ["1", "ok"]


@pytest.mark.parametrize(
    "other",
    [{"body": b'{"n":2}'}, {"path": "/v1/completions"}, {"stream": True}, {"priority": 0}, {"model": "n"}],
)
@pytest.mark.parametrize("state", ["queued", "running", "done"])
async def test_another_request_under_a_used_id_is_a_conflict_and_changes_nothing(
    queue: OnlineQueue, other: dict[str, Any], state: str
) -> None:
    await accept(queue, "a")
    got = [] if state == "queued" else await claim(queue)
    if state == "done":
        await queue.finish(got[0], OK)
    before = await queue.client.hgetall(queue.keys.request("x"))
    assert await accept(queue, "b", **other) == "conflict"
    assert await queue.client.hgetall(queue.keys.request("x")) == before
    if state != "done":
        [one] = got or await claim(queue)
        assert await queue.finish(one, OK)
    assert (await told(queue, "a"), await told(queue, "b")) == (["ok"], [])


async def test_answers_follow_those_who_came_while_a_worker_died(queue: OnlineQueue) -> None:
    await accept(queue, "a", stream=True)
    [one] = await claim(queue)
    await accept(queue, "b", stream=True)
    await queue.emit(one, 1, [b"{}"])
    assert await queue.reclaim("m", 0) == {"failed": 1}
    assert await told(queue, "a") == await told(queue, "b") == ["1", "failed"]


async def test_all_that_wait_stay_through_another_attempt(queue: OnlineQueue) -> None:
    await accept(queue, "a")
    await claim(queue)
    await accept(queue, "b")
    assert await queue.reclaim("m", 0) == {"requeued": 1}
    [one] = await claim(queue)
    assert await queue.release(one) == "released"
    [one] = await claim(queue)
    await queue.finish(one, OK)
    assert await told(queue, "a") == await told(queue, "b") == ["ok"]


# leaving


@pytest.mark.parametrize("running", [False, True])
async def test_only_the_last_to_leave_cancels(queue: OnlineQueue, running: bool) -> None:
    await accept(queue, "a")
    await accept(queue, "b")
    got = await claim(queue) if running else []
    keys = queue.keys
    assert await queue.leave("x", keys.reply("never")) == "left"
    assert await queue.leave("x", keys.reply("b")) == "left"
    assert await queue.leave("x", keys.reply("b")) == "left"
    assert await queue.client.hexists(keys.request("x"), "cancel") == 0
    assert await queue.leave("x", keys.reply("a")) == ("aborting" if running else "cancelled")
    if running:
        await queue.finish(got[0], End.cancelled())
    assert (await told(queue, "a"), await told(queue, "b")) == (["cancelled"], [])


async def test_a_cancel_is_for_all(queue: OnlineQueue) -> None:
    await accept(queue, "a")
    await accept(queue, "b")
    assert await queue.cancel("x") == "cancelled"
    assert await told(queue, "a") == await told(queue, "b") == ["cancelled"]


# deadlines


async def test_who_waits_longer_keeps_the_request_alive(queue: OnlineQueue) -> None:
    await accept(queue, "short", timeout_ms=0.0)
    await accept(queue, "long", timeout_ms=MINUTE)
    assert await claim(queue) == []
    assert (await told(queue, "short"), await told(queue, "long")) == (["expired"], [])
    [one] = await claim(queue)
    assert 50_000 < one.left_ms <= MINUTE
    await queue.finish(one, OK)
    assert (await told(queue, "short"), await told(queue, "long")) == (["expired"], ["ok"])


async def test_a_shorter_repeat_takes_nothing_from_the_first(queue: OnlineQueue) -> None:
    await accept(queue, "long", timeout_ms=MINUTE)
    await accept(queue, "short", timeout_ms=0.0)
    [one] = await claim(queue)
    assert one.left_ms > 50_000
    await queue.finish(one, OK)
    assert await told(queue, "long") == ["ok"]


async def test_a_worker_that_is_early_ends_what_nobody_waits_longer_for(queue: OnlineQueue) -> None:
    """It counts from before the claim, so it may see the deadline before the server does."""
    await accept(queue, "a", timeout_ms=MINUTE)
    [one] = await claim(queue)
    assert await queue.finish(one, End.expired())
    assert await told(queue, "a") == ["expired"]
    assert (await queue.depth("m")).depth == 0


async def test_a_stream_that_has_begun_ends_for_all_at_its_first_deadline(queue: OnlineQueue) -> None:
    await accept(queue, "a", stream=True)
    [one] = await claim(queue)
    await accept(queue, "b", stream=True, timeout_ms=10 * MINUTE)
    await queue.emit(one, 1, [b"{}"])
    await queue.finish(one, End.expired())
    assert await told(queue, "a") == await told(queue, "b") == ["1", "expired"]


async def test_a_claim_counts_what_is_left_from_its_sending(
    queue: OnlineQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    await accept(queue, "a", timeout_ms=MINUTE)
    await accept(queue, "b", id="y", timeout_ms=1000.0)
    call, late_s = queue._scripts.call, 0.0

    async def slow(*args: Any) -> Any:
        nonlocal late_s
        answer = await call(*args)
        late_s += 1.5
        return answer

    monotonic = time.monotonic
    monkeypatch.setattr(queue._scripts, "call", slow)
    monkeypatch.setattr("hybridsched.store.online.time.monotonic", lambda: monotonic() + late_s)
    [one] = await claim(queue)
    assert one.id == "x", "the other may be past its deadline by now: it is not run"
    assert one.left_ms <= one.deadline_ms - one.accepted_ms - one.age_ms - 1500.0
    assert await told(queue, "b") == ["expired"]


# keys


@pytest.mark.parametrize(
    "reply",
    [
        *(
            "hs:{p}:policy:history",
            "hs:{p}:decisions",
            "hs:{p}:online:m:1",
            "hs:{p}:reply:",
            "hs:{p}:reply:a b",
        ),
        *("hs:{other}:reply:a", "text", "", "hs:{p}:reply:\ud800"),
    ],
)
async def test_a_reply_stream_that_is_none_of_the_pools_is_refused_and_untouched(
    queue: OnlineQueue, reply: str
) -> None:
    with pytest.raises(ValueError, match="reply stream"):
        await queue.accept(Request(id="x", model="m", body=b"{}", reply=reply, timeout_ms=MINUTE))


async def test_the_script_itself_touches_no_key_that_is_not_what_it_should_be(queue: OnlineQueue) -> None:
    client: Any = queue.client
    await client.xadd("hs:{p}:policy:history", {"v": "1"})
    await client.set("hs:{p}:req:text", "no hash")
    before = sorted(await client.keys())
    good = ["hs:{p}:req:x", "hs:{p}:online:m:1", "hs:{p}:reply:a", "hs:{p}:replicas:m"]
    item = ["x", "/v1/completions", "{}", 0, 30000, 9, 1, 1, 0]
    bad: list[tuple[list[str], list[Any]]] = [
        ([*good[:2], "hs:{p}:policy:history", good[3]], item),
        ([*good[:2], "hs:{q}:reply:a", good[3]], item),
        (["hs:{p}:batch:x", *good[1:]], item),
        (["hs:{p}:req:y", *good[1:]], item),
        ([good[0], "hs:{p}:decisions", *good[2:]], item),
        ([good[0], "hs:{p}:online:n:1", *good[2:]], item),
        ([*good[:3], "hs:{p}:holds"], item),
        (["hs:{p}:req:text", *good[1:]], ["text", *item[1:]]),
        *[(good, [*item[:4], timeout, *item[5:]]) for timeout in ("inf", "nan", "1e300", "-1", "soon", "")],
        (good, [*item[:7], 3, 0]),
    ]
    keys = [key for one, _ in bad for key in one]
    args = [arg for _, one in bad for arg in one]
    rows = await Scripts(client).call(
        "accept", [*keys, *good], ["hs:{p}:", 60000, 2, 120000, 1000, *args, *item]
    )
    assert [row[0] for row in rows] == [b"refused"] * len(bad) + [b"accepted"]
    assert all(row[1] for row in rows)
    assert sorted(await client.keys()) == sorted([*before, b"hs:{p}:req:x", b"hs:{p}:online:m:1"])
    assert await client.pttl("hs:{p}:policy:history") == -1


async def test_an_answer_is_never_written_into_another_key(queue: OnlineQueue) -> None:
    """An entry that somebody wrote by hand, with a key of the pool's for its reply stream."""
    client: Any = queue.client
    await client.xadd(queue.keys.policy_history, {"v": "1"})
    await accept(queue)
    [(_, fields)] = await client.xrange(queue.keys.online("m", 1))
    await client.xadd(
        queue.keys.online("m", 1), fields | {b"id": b"y", b"reply": queue.keys.policy_history.encode()}
    )
    for one in await claim(queue):
        await queue.emit(one, 1, [b"{}"])
        assert await queue.finish(one, OK)
    assert await client.xlen(queue.keys.policy_history) == 1
    assert await client.pttl(queue.keys.policy_history) == -1
    assert await told(queue, "a") == ["1", "ok"]


async def test_every_key_that_an_accept_makes_has_an_end(queue: OnlineQueue) -> None:
    for number in range(50):
        await accept(queue, id=f"q{number}", model="lama")
        await accept(queue, id=f"q{number}", model="lama", reply="b", timeout_ms=10 * MINUTE)
    await queue.cancel("q0")
    keys = await queue.client.keys()
    assert len(keys) == 53, "a hash for each, one queue, two reply streams"
    for key in keys:
        life = await queue.client.pttl(key)
        assert 0 < life <= 12 * MINUTE, key
    stream = queue.keys.online("lama", 1)
    assert await queue.client.pttl(stream) >= 10 * MINUTE, "not before the last deadline"


async def test_a_queue_of_a_served_model_outlives_its_last_deadline(queue: OnlineQueue) -> None:
    await queue.register_replica("m", "r0", load=0, inflight=0, cap=8)
    await accept(queue, timeout_ms=1000.0)
    await accept(queue, id="y", timeout_ms=100 * MINUTE)
    await accept(queue, id="z", timeout_ms=1000.0)
    assert await queue.client.pttl(queue.keys.online("m", 1)) > 100 * MINUTE


async def test_without_a_worker_what_has_expired_does_not_pile_up(client: Redis) -> None:
    queue = OnlineQueue(client, "p", QueueLimits(keep_ms=1))
    for number in range(40):
        await accept(queue, id=f"q{number}", timeout_ms=1.0)
    await accept(queue, id="alive")
    stream = queue.keys.online("m", 1)

    async def only_the_living() -> bool:
        await accept(queue, id="alive2")
        await client.delete(queue.keys.request("alive2"))
        waiting = [fields[b"id"] for _, fields in await client.xrange(stream)]
        return set(waiting) == {b"alive", b"alive2"}

    await await_until(only_the_living)


async def test_a_request_whose_queue_is_gone_is_accepted_anew(queue: OnlineQueue) -> None:
    await accept(queue)
    await queue.client.delete(queue.keys.online("m", 1))
    assert await accept(queue, "b") == "accepted"
    [one] = await claim(queue)
    assert await queue.finish(one, OK)
    assert await told(queue, "b") == ["ok"]


async def test_an_accept_says_how_many_replicas_are_live(queue: OnlineQueue) -> None:
    assert (await queue.accept(request(queue))).live == 0
    await queue.register_replica("m", "r0", load=0, inflight=0, cap=8)
    await queue.register_replica("m", "full", load=0, inflight=8, cap=8)
    assert (await queue.accept(request(queue))).live == 2


async def test_what_waited_for_another_round_trip_has_less_time_left(
    queue: OnlineQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monotonic, late_s = time.monotonic, 0.0
    monkeypatch.setattr("hybridsched.store.online_accept.time.monotonic", lambda: monotonic() + late_s)
    send = queue._accepts._queue._send

    async def late(asked: Any) -> Any:
        nonlocal late_s
        late_s += 1.5
        return await send(asked)

    monkeypatch.setattr(queue._accepts._queue, "_send", late)
    await accept(queue, timeout_ms=2000.0)
    [one] = await claim(queue)
    assert one.deadline_ms - one.accepted_ms <= 500.0


GARBAGE: list[dict[str, str]] = [
    {"state": "queued"},
    {"state": "queued", "stream": "hs:{p}:online:m:1", "reply": "hs:{p}:reply:a"},
    {"state": "queued", "stream": "hs:{p}:online:m:1", "reply": "hs:{p}:reply:a", "entry": "soon"},
    {"state": "done", "entry": "1-1", "reply": "hs:{p}:reply:a"},
    {"state": "done", "entry": "1-1", "result": "{}"},
]


@pytest.mark.parametrize("fields", GARBAGE, ids=repr)
async def test_a_hash_that_stands_for_no_request_is_replaced(
    queue: OnlineQueue, fields: dict[str, str]
) -> None:
    client: Any = queue.client
    await client.hset(queue.keys.request("x"), mapping=fields)
    assert await queue.cancel("x") in ("unknown", "done", "cancelled")
    await client.delete(queue.keys.request("x"), queue.keys.reply("a"))
    await client.hset(queue.keys.request("x"), mapping=fields)
    outcomes = await queue.accept_many(
        [request(queue, id="before"), request(queue), request(queue, id="after")]
    )
    assert [one.outcome.value for one in outcomes] == ["accepted"] * 3
    for one in await claim(queue):
        assert await queue.finish(one, OK)
    assert await told(queue, "a") == ["ok"] * 3


async def test_a_count_of_repeats_that_is_no_number_allows_none(queue: OnlineQueue) -> None:
    await accept(queue)
    await queue.client.hset(queue.keys.request("x"), "retries", "many")
    assert await accept(queue, "b") == "retry_budget_exhausted"
    assert len(await claim(queue)) == 1


async def test_a_queue_of_another_type_refuses_its_own_requests_only(queue: OnlineQueue) -> None:
    client: Any = queue.client
    await client.set(queue.keys.online("bad", 1), "text")
    await client.set(queue.keys.replicas("odd"), "text")
    outcomes = await queue.accept_many(
        [
            *(request(queue, id="1", model="bad"), request(queue, id="2", model="bad", max_waiting=5)),
            *(request(queue, id="3", model="odd"), request(queue, id="4")),
        ]
    )
    assert [one.outcome.value for one in outcomes] == ["refused", "refused", "accepted", "accepted"]
    assert "another type" in outcomes[0].entry
    assert await client.exists(queue.keys.request("1")) == 0


async def test_who_leaves_takes_its_longer_deadline_along(queue: OnlineQueue) -> None:
    await accept(queue, "a", timeout_ms=1.0)
    [_] = await queue.client.xrange(queue.keys.online("m", 1))
    await accept(queue, "b", timeout_ms=MINUTE)
    assert await queue.leave("x", queue.keys.reply("b")) == "left"
    client: Any = queue.client

    async def expired() -> bool:
        seconds, micros = await client.time()
        deadline = float(await client.hget(queue.keys.request("x"), "deadline_ms"))
        return bool(deadline < seconds * 1000 + micros / 1000)

    await await_until(expired)
    await client.xgroup_create(queue.keys.online("m", 1), "workers", "0")
    await client.xreadgroup("workers", "r0:1", {queue.keys.online("m", 1): ">"})
    assert await queue.reclaim("m", 0) == {"expired": 1}
    assert await told(queue, "a") == ["expired"]


async def test_a_caller_who_goes_before_its_turn_sends_nothing(queue: OnlineQueue) -> None:
    first = asyncio.create_task(accept(queue, id="first"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the first is on its way; what comes now waits for its answer
    gone = asyncio.create_task(accept(queue, id="gone"))
    await asyncio.sleep(0)
    gone.cancel()
    assert await first == "accepted"
    await queue.drain()
    assert [one.id for one in await claim(queue)] == ["first"]
