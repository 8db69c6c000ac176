"""The clients against a real server, with a worker that does what each test tells it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from hybridsched.client import (
    AsyncClient,
    Cancelled,
    Client,
    Expired,
    Failed,
    QueueFull,
    RetryBudgetExhausted,
    StoreUnavailable,
)
from hybridsched.store.connection import EmbeddedValkey
from tests.contract.client_workers import echo, fail, hang, worker, worker_thread
from tests.helpers import await_until, wait_until


@pytest.fixture
async def client(valkey: redis.Redis, valkey_url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(valkey_url, "p", default_timeout_s=30.0) as found:
        yield found


async def test_complete_gives_the_engines_answer(client: AsyncClient, valkey_url: str) -> None:
    async with worker(valkey_url, echo):
        reply = await client.complete(model="m", prompt=[1, 2], path="/v1/completions")
        assert reply.body == {"model": "m", "prompt": [1, 2]}
        assert (reply.finish_reason, reply.usage, reply.replica) == ("stop", {"completion_tokens": 3}, "r0")
        replies = await asyncio.gather(
            *[client.complete({"model": "m", "prompt": [i]}) for i in range(300)],
        )
    assert [reply.body["prompt"] for reply in replies] == [[i] for i in range(300)]


async def test_stream_gives_chunks_in_order_and_then_the_usage(client: AsyncClient, valkey_url: str) -> None:
    async with worker(valkey_url, echo), client.stream(model="m", prompt=[7, 8, 9]) as chunks:
        assert [chunk["t"] async for chunk in chunks] == [7, 8, 9]
        assert (chunks.usage, chunks.finish_reason) == ({"completion_tokens": 3}, "stop")


async def test_failures_carry_code_and_status(client: AsyncClient, valkey_url: str) -> None:
    async with worker(valkey_url, fail):
        with pytest.raises(Failed, match="too long") as caught:
            await client.complete(model="m", prompt=[1])
        assert (caught.value.code, caught.value.http_status) == ("bad_request", 400)
        with pytest.raises(Failed):
            await anext(client.stream(model="m", prompt=[1]))


async def test_with_no_worker_the_client_gives_up_after_the_deadline(
    client: AsyncClient,
) -> None:
    with pytest.raises(Expired, match="an online worker of model m runs"):
        await client.complete(model="m", prompt=[1], timeout_s=0.5)
    with pytest.raises(Expired):
        await anext(client.stream(model="m", prompt=[1], timeout_s=0.5))


@pytest.mark.parametrize("stream", [False, True])
async def test_where_the_model_is_served_it_is_the_deadline_that_was_too_short(
    client: AsyncClient, valkey_url: str, stream: bool
) -> None:
    async with worker(valkey_url, hang):
        await client._queue.register_replica("m", "r0", load=0.0, inflight=0, cap=100)

        async def ask() -> None:
            if stream:
                async for _ in client.stream(model="m", prompt=[1], timeout_s=0.5):
                    pass
            else:
                await client.complete(model="m", prompt=[1], timeout_s=0.5)

        with pytest.raises(Expired, match=r"model m is served.* longer timeout_s"):
            await ask()


async def test_an_answer_lost_on_its_way_is_found_by_its_id(
    client: AsyncClient, valkey: redis.Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridsched.store.replies.parse", lambda flat: None)
    async with worker(valkey_url, echo):
        reply = await client.complete(model="m", prompt=[4], timeout_s=1.0)
    assert reply.body["prompt"] == [4]


async def test_cancel_ends_a_waiting_and_a_running_request(client: AsyncClient, valkey_url: str) -> None:
    waiting = asyncio.create_task(client.complete(model="m", prompt=[1], request_id="w"))
    await await_until(lambda: cancelled_as(client, "w", "cancelled"))
    with pytest.raises(Cancelled):
        await waiting
    async with worker(valkey_url, hang):
        running = asyncio.create_task(client.complete(model="m", prompt=[1], request_id="r"))
        await await_until(lambda: running_now(client, 1))
        assert await client.cancel("r") == "aborting"
        with pytest.raises(Cancelled):
            await running


async def cancelled_as(client: AsyncClient, request_id: str, word: str) -> bool:
    return await client.cancel(request_id) == word


async def running_now(client: AsyncClient, number: int) -> bool:
    return sum((await client._queue.depth("m")).claimed) == number


async def test_who_stops_waiting_cancels_the_request(client: AsyncClient, valkey_url: str) -> None:
    async with worker(valkey_url, hang):
        task = asyncio.create_task(client.complete(model="m", prompt=[1]))
        await await_until(lambda: running_now(client, 1))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await await_until(lambda: running_now(client, 0), what="the worker's abort")
        async with client.stream(model="m", prompt=[1]) as chunks:
            async for _ in chunks:
                break
        await await_until(lambda: running_now(client, 0), what="the abort of the left stream")
    assert client._link.inbox._waiting == {}


async def test_a_repeated_id_runs_once_and_too_many_repeats_are_refused(
    client: AsyncClient, valkey_url: str
) -> None:
    twins = [asyncio.create_task(client.complete(model="m", prompt=[1], request_id="x")) for _ in range(3)]
    fourth = asyncio.create_task(client.complete(model="m", prompt=[1], request_id="x"))
    with pytest.raises(RetryBudgetExhausted, match="more than 2 times"):
        await fourth
    async with worker(valkey_url, echo):
        replies = await asyncio.gather(*twins)
    assert [reply.body["prompt"] for reply in replies] == [[1]] * 3


async def test_a_full_queue_is_refused_at_once(valkey: redis.Redis, valkey_url: str) -> None:
    async with AsyncClient(valkey_url, "p", max_waiting=1) as client:
        first = asyncio.create_task(client.complete(model="m", prompt=[1]))
        await await_until(lambda: waits(client, 1))
        with pytest.raises(QueueFull, match="1 requests of m wait already"):
            await client.complete(model="m", prompt=[1])
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first


async def waits(client: AsyncClient, number: int) -> bool:
    return (await client._queue.depth("m")).depth == number


async def test_without_redis_the_client_says_so_after_its_patience(tmp_path: Path) -> None:
    async with AsyncClient(f"unix://{tmp_path}/none", "p", patience_s=0.1) as client:
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            await client.complete(model="m", prompt=[1])


async def test_a_server_that_is_killed_and_comes_back_is_waited_for(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path) as server:
        async with AsyncClient(server.url, "p", patience_s=20.0) as client, worker(server.url, echo):
            await client.complete(model="m", prompt=[1])
            server.kill()
            later = asyncio.create_task(client.complete(model="m", prompt=[2]))
            await asyncio.to_thread(server.start)
            assert (await later).body["prompt"] == [2]


def test_the_synchronous_client_serves_threads(valkey: redis.Redis, valkey_url: str) -> None:
    with worker_thread(valkey_url, echo), Client(valkey_url, "p", default_timeout_s=30.0) as client:

        def one(number: int) -> object:
            if number % 2:
                return client.complete(model="m", prompt=[number]).body["prompt"]
            with client.stream(model="m", prompt=[number]) as chunks:
                return [chunk["t"] for chunk in chunks]

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(one, range(40))) == [[i] for i in range(40)]
        assert client.cancel("nobody") == "unknown"


def test_the_synchronous_client_raises_and_closes(valkey: redis.Redis, valkey_url: str) -> None:
    with worker_thread(valkey_url, fail), Client(valkey_url, "p") as client:
        with pytest.raises(Failed, match="too long"):
            client.complete(model="m", prompt=[1])
        with pytest.raises(Failed), client.stream(model="m", prompt=[1]) as chunks:
            list(chunks)
    client.close()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "hybridsched-client"])
