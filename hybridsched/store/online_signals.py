"""What an online worker is told between its claims: there is work, or a request was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import redis.asyncio
import stamina

from hybridsched.store.connection import SOCKET_TIMEOUT_S
from hybridsched.store.wire import Wire

_PING_AFTER_S = SOCKET_TIMEOUT_S / 2
"""Silence after which the connection is tried; as much again without an answer, and it is made anew."""


class Wake(msgspec.Struct, frozen=True):
    """Claim now. Also comes after each (re)connection, when something may have been missed."""


class Cancel(msgspec.Struct, frozen=True):
    """Abort this request and answer it as cancelled, if the worker holds it."""

    id: str


async def signals(client: redis.asyncio.Redis, channel: str) -> AsyncIterator[Wake | Cancel]:
    """Signals on a wake channel, for ever; lost connections are made again with back-off.

    Messages sent while there is no connection are lost, so a worker also claims on a timer.
    """
    heard: asyncio.Queue[Any] = asyncio.Queue()
    wire = Wire(client, listener=heard.put_nowait)
    try:
        while True:
            async for attempt in stamina.retry_context(
                on=(redis.RedisError, OSError),
                attempts=None,
                timeout=None,
                wait_initial=0.05,
                wait_max=1.0,
                wait_jitter=0.1,
            ):
                with attempt:
                    await wire.connect()
                    wire.send(("SUBSCRIBE", channel))
            async for signal in _until_lost(wire, heard):
                yield signal
    finally:
        await wire.aclose()


async def _until_lost(wire: Wire, heard: asyncio.Queue[Any]) -> AsyncIterator[Wake | Cancel]:
    asked = False
    while True:
        try:
            async with asyncio.timeout(_PING_AFTER_S):
                message = await heard.get()
        except TimeoutError:
            if asked:
                wire.abort(redis.TimeoutError("a subscription fell silent"))
            else:
                wire.send(("PING",))
                asked = True
            continue
        asked = False
        if message is None:
            return
        if isinstance(message, Exception):
            raise message
        if message[0] == b"subscribe":
            yield Wake()
        elif message[0] == b"message":
            word, _, request_id = message[2].decode().partition(" ")
            yield Cancel(request_id) if word == "cancel" else Wake()
