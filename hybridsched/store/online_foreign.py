"""Entries of an online stream that accept.lua did not write, or that a worker left behind.

Whoever can write to Redis can add entries and consumers. None of them may end a worker or hold up the queue:
an entry that cannot be run is answered as failed where it names a reply stream, and dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from hybridsched.log import get_logger
from hybridsched.store.coalesce import Coalescer
from hybridsched.store.found import name_bad
from hybridsched.store.keys import Keys
from hybridsched.store.online_answers import EntryError, claimed_from
from hybridsched.store.online_values import Claimed, QueueLimits
from hybridsched.store.scripts import Call, WireScripts

_EXPIRED, _REJECT = 1, 2
"""How claim.lua marks what it hands over; 0 is to be run."""

_log = get_logger("online")


class Foreign(NamedTuple):
    """A claimed entry that cannot be run."""

    model: str
    priority: int
    entry: bytes
    consumer: str
    id: bytes
    reply: bytes
    why: str


class Given(NamedTuple):
    """What a claim was given."""

    granted: list[Claimed]
    late: list[Claimed]
    foreign: list[Foreign]


def sort_given(model: str, consumer: str, reply: Any) -> Given:
    """The answer of claim.lua. An entry that cannot be read spoils no other, and a key of another type no
    other class."""
    now_ms, closed, epoch = float(reply[0]), bool(reply[1]), int(reply[2])
    given = Given([], [], [])
    for stream in reply[5] if len(reply) > 5 else ():
        name_bad(
            stream.decode("utf-8", "replace"),
            "the key holds another type than the stream of a model's online requests: none of that class is "
            "accepted or claimed until it is deleted; other classes go on",
        )
    for priority, entry, mark, flat in reply[4]:
        why = "it is not what accept.lua writes"
        if mark != _REJECT:
            try:
                request = claimed_from(model, priority, entry, consumer, flat, now_ms)
            except EntryError as error:
                why = str(error)
            else:
                if mark == _EXPIRED:
                    given.late.append(request)
                else:
                    request.closed_gate, request.epoch = closed, epoch
                    given.granted.append(request)
                continue
        given.foreign.append(
            Foreign(model, priority, entry, consumer, _field(flat, b"id"), _field(flat, b"reply"), why)
        )
    return given


class Rejects:
    """Drops foreign entries beside the work; what cannot be dropped now is when its lease is over."""

    def __init__(self, scripts: WireScripts, keys: Keys, limits: QueueLimits) -> None:
        self._scripts = scripts
        self._keys = keys
        self._limits = limits
        self._queue: Coalescer[Foreign, Any] = Coalescer(self._send)

    def post(self, foreign: Sequence[Foreign]) -> None:
        """Drop them soon. Needs a running loop; never blocks."""
        for one in foreign:
            self._queue.post(one).add_done_callback(_look_away)
        if foreign:
            _log.warning(
                "The queue held entries that accept.lua does not write; they are answered as failed where "
                "they name a reply stream, and dropped.",
                key="entries_rejected",
                model=foreign[0].model,
                count=len(foreign),
                first=foreign[0].entry.decode("ascii", "replace"),
                why=foreign[0].why,
            )

    async def drain(self) -> None:
        """Wait until everything posted has been sent."""
        await self._queue.drain()

    async def _send(self, foreign: Sequence[Foreign]) -> list[Any]:
        limits = self._limits
        return await self._scripts.call_many(
            [
                Call(
                    "reject",
                    _keys(self._keys, one.model, one.priority, one.id, one.reply),
                    [
                        *(one.consumer, one.entry, one.why),
                        *(limits.keep_ms, limits.reply_ttl_ms, limits.reply_maxlen),
                    ],
                )
                for one in foreign
            ]
        )


class Stale(msgspec.Struct, frozen=True):
    """A claimed request that its worker has not renewed, as stale.lua lists it: bytes, whatever they are."""

    model: str
    priority: int
    entry: bytes
    owner: bytes
    id: bytes
    reply: bytes

    @classmethod
    def listed(cls, model: str, row: Any) -> Stale:
        """One row of stale.lua's answer."""
        priority, entry, owner, _, flat = row
        return cls(model, priority, entry, owner, _field(flat, b"id"), _field(flat, b"reply"))

    def keys(self, keys: Keys) -> list[str | bytes]:
        """The keys of reclaim.lua."""
        request, stream, first, *others = _keys(keys, self.model, self.priority, self.id, self.reply)
        return [request, stream, first, keys.replicas(self.model), *others]

    def log(self, error: Exception) -> None:
        """It could not be taken, and stands in nobody else's way."""
        _log.warning(
            "A request of a worker that no longer renews it could not be taken; it is tried again.",
            key="reclaim_failed",
            model=self.model,
            entry=self.entry.decode("ascii", "replace"),
            error=str(error),
        )


def _keys(keys: Keys, model: str, priority: int, request_id: bytes, reply: bytes) -> list[str | bytes]:
    prefix = keys.prefix.encode()
    replies = (reply or prefix + b"reply:").split(b" ")
    return [prefix + b"req:" + request_id, keys.online(model, priority), *replies]


def _field(flat: Sequence[bytes], name: bytes) -> bytes:
    """A field's value; empty where it is missing."""
    return next((value for key, value in zip(flat[::2], flat[1::2], strict=False) if key == name), b"")


def _look_away(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
