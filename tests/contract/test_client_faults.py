"""The clients when something is wrong: it ends the request that it concerns, in time, and no other."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from hybridsched.client import (
    AsyncClient,
    Cancelled,
    Client,
    ClientClosed,
    Conflict,
    Expired,
    Failed,
    NotServed,
    RequestError,
    RetryBudgetExhausted,
    StoreError,
    StoreUnavailable,
)
from hybridsched.core.policy import PolicyKind, PoolPolicy, ReplicasPolicy, SlurmPolicy
from hybridsched.store.connection import EmbeddedValkey, redact
from hybridsched.store.online import OnlineQueue
from hybridsched.store.online_values import Claimed, End, EndStatus
from hybridsched.store.policy import PolicyStore
from hybridsched.store.telemetry import ReplicaRecord, TelemetryStore
from tests.contract.client_workers import echo, hang, worker
from tests.helpers import await_until, wait_until

GENEROUS_S = 8.0
"""Far under every socket timeout, far over what a loaded machine needs."""


@pytest.fixture
async def client(valkey: redis.Redis, valkey_url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(valkey_url, "p", default_timeout_s=30.0) as found:
        yield found


@pytest.fixture
async def other(valkey: redis.Redis, valkey_url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(valkey_url, "p", default_timeout_s=30.0) as found:
        yield found


async def running(client: AsyncClient, number: int) -> bool:
    return sum((await client._queue.depth("m")).claimed) == number


# answers that make no sense


async def garbage(queue: OnlineQueue, request: Claimed) -> None:
    """Odd prompts get a stream with garbage in its second group, the others what they asked for."""
    prompt = msgspec.json.decode(request.body)["prompt"]
    if prompt[0] % 2:
        await queue.emit(request, 1, [b'{"t":1}'])
        await queue.emit(request, 2, [b"data: \xff garbage"])
        await queue.finish(request, End(status=EndStatus.OK, finish_reason="stop"))
    else:
        await echo(queue, request)


async def test_a_garbage_event_ends_its_request_alone(client: AsyncClient, valkey_url: str) -> None:
    async def read(number: int) -> Any:
        seen = []
        try:
            async for chunk in client.stream(model="m", prompt=[number, number]):
                seen.append(chunk["t"])
        except Failed as error:
            return seen, error.code
        return seen

    async with worker(valkey_url, garbage):
        outcomes = await asyncio.gather(*[read(number) for number in range(20)])
        assert outcomes == [([1], "engine_bad_answer") if n % 2 else [n, n] for n in range(20)]
        assert (await client.complete(model="m", prompt=[2])).body["prompt"] == [2]


async def unfinished(queue: OnlineQueue, request: Claimed) -> None:
    await queue.emit(request, 1, [b'{"t":1}'])
    await queue.finish(request, End(status=EndStatus.OK))


async def test_a_stream_without_a_proper_end_is_an_error(client: AsyncClient, valkey_url: str) -> None:
    async with worker(valkey_url, unfinished), client.stream(model="m", prompt=[1]) as chunks:
        assert await anext(chunks) == {"t": 1}
        with pytest.raises(Failed, match="without finish reason") as caught:
            await anext(chunks)
        assert caught.value.code == "engine_bad_answer"


# requests that cannot be sent


async def test_what_cannot_be_sent_is_refused_and_the_others_get_their_own_answers(
    client: AsyncClient, valkey_url: str
) -> None:
    bad: list[dict[str, Any]] = [
        *({"path": None}, {"path": "/\ud800"}, {"prompt": "\ud800"}, {"request_id": "a b"}, {"priority": 7}),
        *({"priority": True}, {"model": "\ud800"}, {"model": 5}, {"timeout_s": "20"}, {"body": [1]}),
        *(
            {"timeout_s": float("inf")},
            {"timeout_s": 1e300},
            {"timeout_s": float("nan")},
            {"prompt": {1, object()}},
        ),
    ]

    async def one(number: int) -> Any:
        if number % 3:
            return (await client.complete(model="m", prompt=[number])).body["prompt"]
        with pytest.raises(ValueError, match=r"give|take|use|JSON"):
            await client.complete(**({"model": "m", "prompt": [1]} | bad[number // 3 % len(bad)]))
        return None

    async with worker(valkey_url, echo):
        for _ in range(2):
            outcomes = await asyncio.gather(*[one(number) for number in range(60)])
            assert outcomes == [[number] if number % 3 else None for number in range(60)]


async def test_a_request_that_was_never_sent_is_not_left(client: AsyncClient) -> None:
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unheard.append(context))
    for _ in range(2):
        with pytest.raises(ValueError, match="request id 'a b' cannot be used"):
            await client.complete(model="m", prompt=[1], request_id="a b")
    while client._link._background:
        await asyncio.sleep(0)
    gc.collect()
    assert unheard == []


@pytest.mark.parametrize(
    "options",
    [
        *({"default_timeout_s": "60"}, {"default_timeout_s": 0}, {"patience_s": float("nan")}),
        *({"max_waiting": -1}, {"max_waiting": 1.5}, {"unserved_patience_s": -3}),
    ],
)
def test_a_client_says_which_number_it_cannot_use(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} is .*; give"):
        AsyncClient("redis://localhost", "p", **options)


# the same id again


async def test_two_clients_that_send_the_same_both_get_the_answer(
    client: AsyncClient, other: AsyncClient, valkey_url: str
) -> None:
    async def read(one: AsyncClient) -> list[int]:
        return [chunk["t"] async for chunk in one.stream(model="m", prompt=[7, 8], request_id="s")]

    plain = [
        asyncio.create_task(one.complete(model="m", prompt=[1], request_id="x")) for one in (client, other)
    ]
    streams = [asyncio.create_task(read(one)) for one in (client, other)]
    await await_until(lambda: retried(client, "x", 1))
    await await_until(lambda: retried(client, "s", 1))
    async with worker(valkey_url, echo):
        assert [reply.body["prompt"] for reply in await asyncio.gather(*plain)] == [[1], [1]]
        assert await asyncio.gather(*streams) == [[7, 8], [7, 8]]


async def retried(client: AsyncClient, request_id: str, times: int) -> bool:
    found = await client._commands.hget(client._queue.keys.request(request_id), "retries")
    return int(found or -1) == times


@pytest.mark.parametrize("mine", [True, False])
async def test_a_refused_repeat_leaves_the_original_alone(
    client: AsyncClient, other: AsyncClient, valkey_url: str, mine: bool
) -> None:
    async with worker(valkey_url, hang):
        second = client if mine else other
        original = asyncio.create_task(client.complete(model="m", prompt=[1], request_id="x"))
        await await_until(lambda: running(client, 1))
        with pytest.raises(Conflict, match="use a new id"):
            await second.complete(model="m", prompt=[2], request_id="x")
        with pytest.raises(Conflict):
            await anext(second.stream(model="m", prompt=[1], request_id="x"))
        repeats = [
            asyncio.create_task(second.complete(model="m", prompt=[1], request_id="x")) for _ in range(2)
        ]
        await await_until(lambda: retried(client, "x", 2))
        with pytest.raises(RetryBudgetExhausted):
            await second.complete(model="m", prompt=[1], request_id="x")
        assert await running(client, 1)
        assert not await client._commands.hexists(client._queue.keys.request("x"), "cancel")
        assert await client.cancel("x") == "aborting"
        for task in (original, *repeats):
            with pytest.raises(Cancelled):
                await task


@pytest.mark.parametrize("mine", [True, False])
async def test_a_repeat_with_a_short_deadline_ends_for_itself_alone(
    client: AsyncClient, other: AsyncClient, valkey_url: str, mine: bool
) -> None:
    second = client if mine else other
    original = asyncio.create_task(client.complete(model="m", prompt=[1], request_id="x"))
    await await_until(lambda: retried(client, "x", 0))
    with pytest.raises(Expired):
        await second.complete(model="m", prompt=[1], request_id="x", timeout_s=1.0)
    left = asyncio.create_task(second.complete(model="m", prompt=[1], request_id="x"))
    await await_until(lambda: retried(client, "x", 2))
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    await await_until(lambda: not second._link._background)
    async with worker(valkey_url, echo):
        assert (await original).body["prompt"] == [1]


async def test_a_repeat_with_a_long_deadline_outlives_the_first(
    client: AsyncClient, other: AsyncClient, valkey_url: str
) -> None:
    first = asyncio.create_task(client.complete(model="m", prompt=[1], request_id="x", timeout_s=1.0))
    await await_until(lambda: retried(client, "x", 0))
    second = asyncio.create_task(other.complete(model="m", prompt=[1], request_id="x"))
    with pytest.raises(Expired):
        await first
    async with worker(valkey_url, echo):
        assert (await second).body["prompt"] == [1]


async def test_a_finished_stream_that_is_asked_for_again_is_a_gap(
    client: AsyncClient, other: AsyncClient, valkey_url: str
) -> None:
    async with worker(valkey_url, echo):
        assert len([chunk async for chunk in client.stream(model="m", prompt=[1, 2], request_id="x")]) == 2
        for one in (client, other):
            with pytest.raises(Failed, match="stream_gap"):
                await anext(one.stream(model="m", prompt=[1, 2], request_id="x"))


async def test_a_finished_answer_is_given_again(
    client: AsyncClient, other: AsyncClient, valkey_url: str
) -> None:
    async with worker(valkey_url, echo):
        for one in (client, other, client):
            assert (await one.complete(model="m", prompt=[5], request_id="x")).body["prompt"] == [5]


# deadlines, outages, closing


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[tuple[EmbeddedValkey, int]]:
    """A server and its process id, to be stopped (SIGSTOP) by the test; it goes on at the end."""
    with EmbeddedValkey(tmp_path) as server:
        probe = redis.Redis.from_url(server.url)
        pid = int(probe.info("server")["process_id"])
        probe.close()
        try:
            yield server, pid
        finally:
            os.kill(pid, signal.SIGCONT)


def stream_whole(client: AsyncClient) -> Any:
    async def send(**fields: Any) -> Any:
        async with client.stream(**fields) as chunks:
            return [chunk async for chunk in chunks]

    return send


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("connected", [False, True])
async def test_a_frozen_redis_holds_nobody_past_the_deadline(
    frozen: tuple[EmbeddedValkey, int], stream: bool, connected: bool
) -> None:

    server, pid = frozen
    async with AsyncClient(server.url, "p", unserved_patience_s=None) as client:
        if connected:
            assert await client.cancel("nobody") == "unknown"
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        send: Any = stream_whole(client) if stream else client.complete
        with pytest.raises(StoreUnavailable, match="did not answer within the request's 1 s"):
            await send(model="m", prompt=[1], timeout_s=1.0)
        assert time.monotonic() - began < GENEROUS_S
        began = time.monotonic()
    assert time.monotonic() - began < GENEROUS_S, "closing waits for a frozen server neither"


async def test_a_server_that_freezes_after_it_took_the_request_is_an_expiry(
    frozen: tuple[EmbeddedValkey, int],
) -> None:

    server, pid = frozen
    async with AsyncClient(server.url, "p") as client:
        task = asyncio.create_task(client.complete(model="m", prompt=[1], request_id="x", timeout_s=3.0))
        await await_until(lambda: retried(client, "x", 0))
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(Expired):
            await task
        assert time.monotonic() - began < GENEROUS_S


async def test_sending_again_after_an_outage_is_no_repeat_and_gains_no_time(
    client: AsyncClient, valkey: redis.Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request was taken and only the word of it was lost."""
    accept, tries = client._queue.accept, []

    async def lossy(request: Any) -> Any:
        done = await accept(request)
        tries.append(valkey.hgetall(client._queue.keys.request(request.id)))
        if len(tries) == 1:
            raise redis.ConnectionError("lost")
        return done

    monkeypatch.setattr(client._queue, "accept", lossy)
    task = asyncio.create_task(client.complete(model="m", prompt=[1], request_id="x"))
    await await_until(lambda: tries and not client._link.outages._away)
    assert [valkey.hgetall(client._queue.keys.request("x"))] == tries
    async with worker(valkey_url, echo):
        assert (await task).body["prompt"] == [1]


async def test_a_hung_worker_does_not_hold_a_stream_past_its_deadline(
    client: AsyncClient, valkey_url: str
) -> None:
    async with worker(valkey_url, hang):
        async with client.stream(model="m", prompt=[1], timeout_s=3.0) as chunks:
            assert await anext(chunks) == {"t": 1}
            with pytest.raises(Expired):
                await anext(chunks)
        await await_until(lambda: running(client, 0), what="the abort in the worker")


async def test_closing_ends_those_who_wait(valkey: redis.Redis, valkey_url: str) -> None:
    client = AsyncClient(valkey_url, "p")
    chunks = client.stream(model="m", prompt=[1])
    tasks = [
        asyncio.create_task(client.complete(model="m", prompt=[1])),
        asyncio.ensure_future(anext(chunks)),
    ]
    await await_until(lambda: waiting(client, 2))
    await client.aclose()
    for task in tasks:
        with pytest.raises(ClientClosed, match="left to its deadline"):
            await task
    with pytest.raises(ClientClosed):
        await client.complete(model="m", prompt=[1])
    with pytest.raises(ClientClosed):
        await client.cancel("x")
    await client.aclose()


async def waiting(client: AsyncClient, number: int) -> bool:
    return (await client._queue.depth("m")).depth == number


@pytest.mark.parametrize("what", ["answer", "accept", "connect"])
def test_closing_ends_the_threads_that_wait(frozen: tuple[EmbeddedValkey, int], what: str) -> None:

    server, pid = frozen
    client = Client(server.url, "p")
    probe = redis.Redis.from_url(server.url)
    if what == "accept":
        assert client.cancel("nobody") == "unknown"
    if what != "answer":
        os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(client.complete, model="m", prompt=[1], timeout_s=600.0) for _ in range(3)]
        if what == "answer":
            wait_until(lambda: probe.xlen("hs:{p}:online:m:1") == 3)
        else:
            wait_until(lambda: len(client._calls) == 3)
        began = time.monotonic()
        client.close()
        for call in calls:
            with pytest.raises(ClientClosed):
                call.result()
        assert time.monotonic() - began < GENEROUS_S
    with pytest.raises(ClientClosed):
        client.complete(model="m", prompt=[1])
    client.close()
    probe.close()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "hybridsched-client"])


async def test_an_outage_is_one_line_without_the_password(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with AsyncClient("redis://user:p@ss:w@127.0.0.1:1/0", "p", patience_s=0.5) as client:
        for _ in range(2):
            with pytest.raises(StoreError) as caught:
                await client.complete(model="m", prompt=[1])
            assert "redis://user:***@127.0.0.1:1/0" in str(caught.value)
    assert [record.getMessage().count("cannot be reached") for record in caplog.records] == [1]
    assert "p@ss" not in caplog.text + str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://u:a@b@h:1/0", "redis://u:***@h:1/0"),
        ("redis://:pw@h", "redis://:***@h"),
        ("redis://u:a/b?c@h", "redis://u:***@h"),
        ("redis://h:1/0?password=x", "redis://h:1/0?password=***"),
        ("redis://h:1/0", "redis://h:1/0"),
    ],
)
def test_no_part_of_a_password_is_shown(url: str, said: str) -> None:
    assert redact(url) == said


# models that nobody serves


async def publish(client: AsyncClient, *models: str) -> None:
    for model in models:
        await TelemetryStore(client._commands, "p").publish(
            ReplicaRecord(replica=f"r-{model}", model=model, lane="")
        )


@pytest.fixture
async def hasty(valkey: redis.Redis, valkey_url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(valkey_url, "p", unserved_patience_s=0.2) as found:
        yield found


async def test_a_model_that_nobody_serves_is_said_early(hasty: AsyncClient, valkey: redis.Redis) -> None:
    await publish(hasty, "llama", "qwen")
    began = time.monotonic()
    with pytest.raises(NotServed, match=r"no replica serves model lama .*models served: llama, qwen"):
        await hasty.complete(model="lama", prompt=[1], timeout_s=600.0)
    with pytest.raises(NotServed):
        async with hasty.stream(model="lama", prompt=[1], timeout_s=600.0) as chunks:
            await anext(chunks)
    assert time.monotonic() - began < GENEROUS_S
    await await_until(lambda: not hasty._link._background)
    assert valkey.xlen("hs:{p}:online:lama:1") == 0, "what nobody waits for any more is taken back"
    for key in valkey.keys("*lama*"):
        assert valkey.pttl(key) > 0


@pytest.mark.parametrize("known", ["nothing", "telemetry", "policy", "record"])
async def test_a_model_that_may_be_starting_is_waited_for(
    hasty: AsyncClient, valkey_url: str, known: str
) -> None:
    if known != "nothing":
        await publish(hasty, "llama")
    if known == "telemetry":
        await publish(hasty, "m")
    if known == "policy":
        slurm = SlurmPolicy(replicas=(ReplicasPolicy(model="m"),))
        policy = PoolPolicy(name="x", kind=PolicyKind.IDLE_WINDOW, slurm=slurm)
        await PolicyStore(hasty._commands, "p").set(policy)
    looks = 0
    look = hasty._link.models._look

    async def counted(model: str) -> Any:
        nonlocal looks
        found = await look(model)
        looks += 1
        return found

    hasty._link.models._look = counted
    task = asyncio.create_task(hasty.complete(model="m", prompt=[1], timeout_s=60.0))
    if known == "record":
        await await_until(lambda: waiting(hasty, 1))
        await hasty._queue.register_replica("m", "r9", load=0, inflight=0, cap=0)
    await await_until(lambda: looks >= 1)
    assert not task.done()
    async with worker(valkey_url, echo):
        assert (await task).body["prompt"] == [1]


async def test_errors_of_requests_are_request_errors() -> None:
    assert all(issubclass(kind, RequestError) for kind in (ClientClosed, Conflict, NotServed))
