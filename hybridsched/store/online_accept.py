"""Handing requests in: what may be sent, and how many of them become one round trip."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from hybridsched.store.coalesce import Coalescer
from hybridsched.store.keys import PRIORITIES, Keys, check_name
from hybridsched.store.online_answers import AT_ONCE, call_all
from hybridsched.store.online_values import Acceptance, Accepted, QueueLimits, Request
from hybridsched.store.scripts import Call, WireScripts

MAX_TIMEOUT_MS = 30 * 86_400_000.0
"""The longest time to a deadline, as in accept.lua: what is kept of a request must have an end."""

_OUTCOMES = {outcome.value.encode(): outcome for outcome in Acceptance}


class _Asked(NamedTuple):
    request: Request
    at: float
    """Monotonic seconds at which the caller handed it in: its deadline counts from here."""


class Accepts:
    """Accepts of one process. Those of one turn of the event loop share a round trip."""

    def __init__(self, scripts: WireScripts, keys: Keys, limits: QueueLimits) -> None:
        self._scripts = scripts
        self._keys = keys
        self._limits = limits
        self._queue: Coalescer[_Asked, Accepted] = Coalescer(self._send, for_callers=True)

    async def one(self, request: Request) -> Accepted:
        """Accept one request.

        Raises:
            ValueError: see `check`.
        """
        check(self._keys, request)
        return await self._queue.post(_Asked(request, time.monotonic()))

    async def many(self, requests: Sequence[Request]) -> list[Accepted]:
        """Accept several at once.

        Raises:
            ValueError: see `check`; then none of them was sent.
        """
        for request in requests:
            check(self._keys, request)
        now = time.monotonic()
        return await self._send([_Asked(request, now) for request in requests])

    def abandon(self, error: Exception) -> set[asyncio.Task[None]]:
        """Everyone who waits for an answer gets `error`; what was sent may have been accepted.

        Returns what is still to be cancelled and awaited.
        """
        return self._queue.abandon(error)

    async def drain(self) -> None:
        """Wait until everything handed in has been sent."""
        await self._queue.drain()

    async def _send(self, asked: Sequence[_Asked]) -> list[Accepted]:
        calls = [self._call(asked[i : i + AT_ONCE]) for i in range(0, len(asked), AT_ONCE)]
        rows = [row for answer in await call_all(self._scripts, calls) for row in answer]
        return [
            Accepted(one.request.id, _OUTCOMES[word], text.decode("utf-8", "replace"), live)
            for one, (word, text, live) in zip(asked, rows, strict=True)
        ]

    def _call(self, asked: Sequence[_Asked]) -> Call:
        limits, prefix, now = self._limits, self._keys.prefix, time.monotonic()
        keys: list[str] = []
        args: list[str | bytes | int | float] = [
            prefix,
            limits.keep_ms,
            limits.retry_budget,
            limits.reply_ttl_ms,
            limits.reply_maxlen,
        ]
        for r, at in asked:
            keys += (
                f"{prefix}req:{r.id}",
                f"{prefix}online:{r.model}:{r.priority}",
                r.reply,
                f"{prefix}replicas:{r.model}",
            )
            args += (
                r.id,
                r.path,
                r.body,
                1 if r.stream else 0,
                # What it has waited here for an earlier round trip is gone from its time.
                max(0.0, r.timeout_ms - (now - at) * 1000.0),
                r.cost,
                r.prompt_tokens,
                r.priority,
                r.max_waiting,
            )
        return Call("accept", keys, args)


def check(keys: Keys, request: Request) -> None:
    """See that a request can be sent.

    Raises:
        ValueError: an id, model or reply stream that cannot stand in a key or is not the pool's; a class,
            path, body or timeout that no request can have.
    """
    check_name("request id", request.id)
    if not isinstance(request.path, str):
        raise ValueError(_bad_path(request.path))  # noqa: TRY004 - one kind for all that cannot be sent
    if type(request.priority) is not int:
        raise ValueError(_bad_priority(request.priority))
    _check_place(keys.reply(""), request.reply, request.model, request.priority, request.path)
    timeout_ms = request.timeout_ms
    if not 0 <= timeout_ms <= MAX_TIMEOUT_MS:
        raise ValueError(f"timeout_ms is {timeout_ms}; give a number from 0 to {MAX_TIMEOUT_MS:.0f}")


@lru_cache(maxsize=1024, typed=True)
def _check_place(replies: str, reply: str, model: str, priority: int, path: str) -> None:
    """What requests of one service have in common, looked at once."""
    check_name("model", model)
    if priority not in PRIORITIES:
        raise ValueError(_bad_priority(priority))
    if not reply.startswith(replies):
        raise ValueError(
            f"reply stream {reply!r} is none of the pool's; take {replies + 'NAME'!r} with a name of your own"
        )
    check_name("reply stream's name", reply.removeprefix(replies))
    if not (path.isascii() and path.isprintable()):
        raise ValueError(_bad_path(path))


def _bad_priority(priority: object) -> str:
    return f"priority {priority!r} is unknown; use 0 (most urgent), 1 (normal) or 2 (low)"


def _bad_path(path: object) -> str:
    return f"path {path!r} cannot be sent; give one like '/v1/chat/completions'"
