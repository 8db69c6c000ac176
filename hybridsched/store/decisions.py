"""The decision log: what each cycle saw, what it decided, and what became of it.

A record (`hybridsched.core.codec`) holds the snapshot and the policy it was decided with, so it can be
replayed alone, anywhere. One is written when the state or the reason of a lane changes, and as a heartbeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

import msgspec

from hybridsched.core.codec import CodecError, DecisionRecord, decode_record, encode
from hybridsched.core.values import Snapshot
from hybridsched.store.channels import entries
from hybridsched.store.keys import Keys

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.client import Pipeline

MAX_RECORDS = 100_000
"""Records that the log keeps, about."""

MAX_BYTES = 64 * 1024 * 1024
"""Memory that the log may take, about: of large pools it keeps fewer records."""

_PAGE = 200
_FOLLOW_S = 0.1


def cut(snapshot: Snapshot, lanes: Iterable[str]) -> Snapshot:
    """The part of a snapshot that decides on `lanes`. Not enough under a floor, which compares all lanes."""
    wanted = frozenset(lanes)
    views = tuple(view for view in snapshot.lanes if view.lane in wanted)
    names = frozenset(view.replica for view in views)
    return msgspec.structs.replace(
        snapshot,
        lanes=views,
        replicas=tuple(view for view in snapshot.replicas if view.replica in names),
    )


class DecisionLog:
    """The log of one pool. Raises what the Redis client raises."""

    def __init__(self, client: Redis, pool: str) -> None:
        self._client = client
        self._key = Keys(pool).decisions

    async def append(self, record: DecisionRecord) -> None:
        """Write one record."""
        pipe = self._client.pipeline(transaction=False)
        self.queue(pipe, record)
        await pipe.execute()

    def queue(self, pipe: Pipeline, record: DecisionRecord) -> None:
        """The same on a pipeline of the caller's own."""
        data = encode(record)
        keep = max(100, min(MAX_RECORDS, MAX_BYTES // len(data)))
        pipe.xadd(self._key, {"r": data}, maxlen=keep, approximate=True)

    async def read(self, *, limit: int | None = None, lane: str | None = None) -> list[DecisionRecord]:
        """The newest `limit` records (None: all), oldest first; with `lane` only those that decide on it."""
        found: list[DecisionRecord] = []
        async for record in self.backwards():
            if limit is not None and len(found) >= limit:
                break
            if lane is None or any(decision.lane == lane for decision in record.decisions):
                found.append(record)
        return found[::-1]

    async def backwards(self) -> AsyncIterator[DecisionRecord]:
        """Every record, newest first. What this release cannot read is passed over."""
        end = "+"
        while True:
            page = entries(await self._client.xrevrange(self._key, max=end, min="-", count=_PAGE))
            for _, fields in page:
                record = _record(fields)
                if record is not None:
                    yield record
            if len(page) < _PAGE:
                return
            end = "(" + page[-1][0]

    async def raw(self) -> AsyncIterator[bytes]:
        """Every record as its line of JSON, oldest first: for a file."""
        start = "-"
        while True:
            page = entries(await self._client.xrange(self._key, min=start, max="+", count=_PAGE))
            for _, fields in page:
                if b"r" in fields:
                    yield fields[b"r"]
            if len(page) < _PAGE:
                return
            start = "(" + page[-1][0]

    async def follow(self) -> AsyncIterator[DecisionRecord]:
        """Records as they are written, from now on; never ends by itself."""
        newest = entries(await self._client.xrevrange(self._key, count=1))
        start = newest[0][0] if newest else "0-0"
        while True:
            page = entries(await self._client.xrange(self._key, min="(" + start, max="+", count=_PAGE))
            for key, fields in page:
                start = key
                record = _record(fields)
                if record is not None:
                    yield record
            if not page:
                await asyncio.sleep(_FOLLOW_S)


def _record(fields: dict[bytes, bytes]) -> DecisionRecord | None:
    try:
        return decode_record(fields.get(b"r", b""))
    except CodecError:
        return None
