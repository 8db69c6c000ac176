"""What an online worker is told between its claims: there is work, or a request was cancelled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import redis.asyncio
import stamina

from hybridsched.store.connection import MAX_BLOCK_MS


class Wake(msgspec.Struct, frozen=True):
    """Claim now. Also comes after each (re)connection, when something may have been missed."""


class Cancel(msgspec.Struct, frozen=True):
    """Abort this request and answer it as cancelled, if the worker holds it."""

    id: str


async def signals(client: redis.asyncio.Redis, channel: str) -> AsyncIterator[Wake | Cancel]:
    """Signals on a wake channel, for ever; lost connections are made again with back-off.

    Messages sent while there is no connection are lost, so a worker also claims on a timer.
    """
    while True:
        async for attempt in stamina.retry_context(
            on=(redis.RedisError, OSError), attempts=None, timeout=None, wait_initial=0.05, wait_max=1.0
        ):
            with attempt:
                pubsub: Any = client.pubsub(ignore_subscribe_messages=True)
                await pubsub.subscribe(channel)
        async with pubsub:
            yield Wake()
            try:
                while True:
                    message = await pubsub.get_message(timeout=MAX_BLOCK_MS / 1000)
                    if message is None:
                        continue
                    word, _, request_id = message["data"].decode().partition(" ")
                    yield Cancel(request_id) if word == "cancel" else Wake()
            except (redis.RedisError, OSError):
                continue
