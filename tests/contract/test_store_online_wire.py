"""The shared connection: order, losses, silence, cancelled callers; signals that survive a loss."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
import redis
from redis.asyncio import Redis

from hybridsched.store.connection import EmbeddedValkey, async_client, sync_client
from hybridsched.store.online import OnlineQueue
from hybridsched.store.online_signals import Cancel, Wake
from hybridsched.store.scripts import Call, WireScripts
from hybridsched.store.wire import Wire
from tests.helpers import await_until


async def test_answers_come_to_their_callers_in_order(client: Redis) -> None:
    wire = Wire(client)
    answers = await asyncio.gather(*[wire.call("ECHO", f"{i}") for i in range(500)])
    assert answers == [b"%d" % i for i in range(500)]


async def test_an_error_is_its_callers_alone(client: Redis) -> None:
    wire = Wire(client)
    one, two, three = await asyncio.gather(
        wire.call("ECHO", "1"), wire.call("NONSENSE"), wire.call("ECHO", "3"), return_exceptions=True
    )
    assert (one, three) == (b"1", b"3")
    assert isinstance(two, redis.ResponseError)


async def test_a_cancelled_caller_does_not_shift_the_answers(client: Redis) -> None:
    wire = Wire(client)
    await wire.call("PING")
    gone = asyncio.create_task(wire.call("ECHO", "gone"))
    await asyncio.sleep(0)
    gone.cancel()
    assert await wire.call("ECHO", "mine") == b"mine"
    with pytest.raises(asyncio.CancelledError):
        await gone


async def test_all_that_wait_hear_of_a_loss_and_the_next_command_connects_again(
    client: Redis, valkey: redis.Redis
) -> None:
    wire = Wire(client)
    await wire.call("PING")
    blocked = [asyncio.create_task(wire.call("BLPOP", f"k{i}", 0)) for i in range(3)]
    await asyncio.sleep(0)
    valkey.client_kill_filter(_type="normal", skipme=True)
    results = await asyncio.gather(*blocked, return_exceptions=True)
    assert all(isinstance(result, redis.ConnectionError) for result in results)
    assert await wire.call("ECHO", "back") == b"back"


async def test_silence_is_an_error_in_the_end(client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridsched.store.wire.SOCKET_TIMEOUT_S", 0.05)
    wire = Wire(client)
    await wire.call("PING")
    with pytest.raises(redis.TimeoutError):
        await wire.call("BLPOP", "k", 0)
    assert await wire.call("ECHO", "back") == b"back"


async def test_closing_the_client_ends_the_wire(valkey: redis.Redis, valkey_url: str) -> None:
    client = async_client(valkey_url)
    wire = Wire(client)
    await wire.call("PING")
    blocked = asyncio.create_task(wire.call("BLPOP", "k", 0))
    await asyncio.sleep(0)
    await client.aclose()
    with pytest.raises(redis.ConnectionError):
        await blocked


async def test_without_a_server_the_error_is_redis_pys(tmp_path: Path) -> None:
    client = async_client(f"unix://{tmp_path}/none")
    with pytest.raises(redis.ConnectionError):
        await Wire(client).call("PING")
    await client.aclose()


async def test_scripts_keep_their_places_and_are_taught_when_unknown(
    client: Redis, valkey: redis.Redis
) -> None:
    scripts = WireScripts(client, ["depth"])
    keys = [f"hs:{{p}}:online:m:{i}" for i in range(3)]
    results = await scripts.call_many(
        [Call("depth", keys, []), Call("depth", [], []), Call("depth", keys, [])]
    )
    assert [isinstance(result, redis.ResponseError) for result in results] == [False, True, False]
    for _ in range(2):
        valkey.script_flush()
        assert len((await scripts.call_many([Call("depth", keys, [])]))[0]) == 8
        valkey.script_flush()
        assert len(await scripts.call("depth", keys, [])) == 8


async def test_signals_come_again_after_the_server_was_killed(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path) as server, contextlib.closing(sync_client(server.url)) as other:
        client = async_client(server.url)
        queue = OnlineQueue(client, "p")
        signals = queue.signals("r0")
        assert await anext(signals) == Wake()
        other.publish(queue.keys.wake("r0"), "cancel x")
        assert await anext(signals) == Cancel("x")
        server.kill()
        again = asyncio.ensure_future(anext(signals))
        await asyncio.to_thread(server.start)
        assert await again == Wake(), "whatever was missed: look"
        other.publish(queue.keys.wake("r0"), "wake")
        assert await anext(signals) == Wake()
        await signals.aclose()
        await client.aclose()


async def test_what_cannot_be_sent_leaves_the_others_answers_where_they_belong(client: Redis) -> None:
    wire = Wire(client)
    await wire.call("PING")
    for bad in (None, "\ud800"):
        with pytest.raises(redis.DataError, match="ECHO"):
            await wire.call("ECHO", bad)  # type: ignore[arg-type]
    answers = await asyncio.gather(*[wire.call("ECHO", f"{i}") for i in range(5)])
    assert answers == [b"%d" % i for i in range(5)]


async def test_an_answer_nobody_asked_for_ends_the_connection(client: Redis) -> None:
    wire = Wire(client)
    await wire.call("PING")
    first = wire._transport
    wire.send(("PING",))
    await await_until(lambda: wire._transport is None)
    assert first.is_closing()
    assert await wire.call("ECHO", "back") == b"back"
