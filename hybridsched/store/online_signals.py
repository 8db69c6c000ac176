"""What an online worker is told between its claims: there is work, or a request was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import redis.asyncio

from hybridsched.log import get_logger
from hybridsched.store.connection import SOCKET_TIMEOUT_S
from hybridsched.store.patience import pauses
from hybridsched.store.wire import Wire

_PING_AFTER_S = SOCKET_TIMEOUT_S / 2
"""Silence after which the connection is tried; as much again without an answer, and it is made anew."""

_log = get_logger("online")


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
            for pause in pauses():
                try:
                    await wire.connect()
                    wire.send(("SUBSCRIBE", channel))
                    break
                except (redis.RedisError, OSError):
                    # The worker's claims meet the same outage, and say so once.
                    await asyncio.sleep(pause)
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
        signal = _signal(message)
        if signal is not None:
            yield signal


def _signal(message: Any) -> Wake | Cancel | None:
    """What a message says; None where it is no signal (the answer to a ping) or nobody's of ours."""
    if not isinstance(message, list) or len(message) < 3:
        return None
    kind, _, said = message[:3]
    if kind == b"subscribe":
        return Wake()
    if kind != b"message":
        return None
    word, _, request_id = said.partition(b" ")
    if word == b"wake":
        return Wake()
    if word == b"cancel" and request_id.isascii():
        return Cancel(request_id.decode())
    _log.warning(
        "A message on the wake channel is neither `wake` nor `cancel ID`; it is skipped.",
        key="signal_unknown",
        message=said[:80].decode("utf-8", "replace"),
    )
    return None
