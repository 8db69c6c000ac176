"""Reading a pub/sub channel or a stream, the same way for gates, telemetry, policies and logs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redis.asyncio import Redis

SILENCE_S = 5.0
"""Longest wait for one message before the connection is checked: below every socket timeout in use."""


def entries(answer: Any) -> list[tuple[str, dict[bytes, bytes]]]:
    """The entries that XRANGE and XREVRANGE answer: (id, fields). Deleted ones are left out."""
    return [(key.decode(), fields) for key, fields in answer or () if fields is not None]


async def messages(client: Redis, *channels: str) -> AsyncIterator[bytes | None]:
    """Messages of the channels; None each time a subscription begins, as what came before it is lost.

    Delivery is at most once: whoever relies on a message must also poll. Raises redis-py's errors when the
    connection is lost and cannot be had again at once.
    """
    async with aclosing(client.pubsub()) as subscription:
        await subscription.subscribe(*channels)
        while True:
            message = await subscription.get_message(timeout=SILENCE_S)
            if message is None:
                continue
            if message["type"] == "subscribe":
                yield None
            elif message["type"] == "message":
                yield message["data"]
