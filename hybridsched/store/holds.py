"""Operators' holds: orders to keep gates closed, of one lane or of the whole pool.

Each stands for itself under an id of its own: an order to keep closed ends by its own time or by its own
release, never because somebody else gave another.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, cast

import msgspec

from hybridsched.core.values import Hold
from hybridsched.store.found import read_json
from hybridsched.store.keys import Keys, check_name
from hybridsched.store.telemetry import server_ms

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from redis.asyncio import Redis

POOL = "*"
"""Stands for the whole pool in a hold's field."""

_HOLD = msgspec.json.Decoder(Hold)


class HoldStore:
    """The holds of one pool."""

    def __init__(self, client: Redis, pool: str) -> None:
        self._client = client
        self._keys = Keys(pool)

    async def put(self, *, lane: str = "", by: str, why: str, for_ms: float | None = None) -> Hold:
        """Hold a lane, or the pool when `lane` is empty, beside whatever holds stand already.

        `for_ms`: the hold ends by itself after this long, by the server's clock. Raises ValueError when the
        lane's name cannot stand in a key.
        """
        if lane:
            check_name("lane", lane)
        now_ms = server_ms(await self._client.time())
        until = None if for_ms is None else now_ms + for_ms
        hold = Hold(lane=lane, by=by, why=why, until_ms=until)
        while True:
            hold = msgspec.structs.replace(hold, id=secrets.token_hex(3))
            if await self._client.hsetnx(self._keys.holds, _field(hold), _text(hold)):
                break
        # A nudge: the policy worker closes the gates now, not at its next interval.
        await self._client.publish(self._keys.telemetry_channel, lane or POOL)
        # Those whose time is over have no other end. An id is given once, so no standing one goes with them.
        ended = [_field(other) for other in await self.list() if not other.stands(now_ms)]
        if ended:
            await self._client.hdel(self._keys.holds, *ended)
        return hold

    async def release(self, holds: Collection[Hold]) -> tuple[Hold, ...]:
        """End these holds, as `list` gave them; those of them that were still there."""
        gone = []
        for hold in holds:
            if await self._client.hdel(self._keys.holds, _field(hold)):
                gone.append(hold)
                await self._client.publish(self._keys.telemetry_channel, hold.lane or POOL)
        return tuple(gone)

    async def list(self) -> tuple[Hold, ...]:
        """All holds, the pool's first, also those whose time is over."""
        return read_holds(await cast("Awaitable[dict[bytes, bytes]]", self._client.hgetall(self._keys.holds)))

    async def standing(self) -> tuple[Hold, ...]:
        """The holds whose time is not over, by the server's clock; the pool's first."""
        now_ms = server_ms(await self._client.time())
        return tuple(hold for hold in await self.list() if hold.stands(now_ms))


def _text(hold: Hold) -> bytes:
    return msgspec.json.encode(hold)


def _field(hold: Hold) -> str:
    """`ID LANE`: names hold no space, so what is held is known even where the order itself cannot be read."""
    place = hold.lane or POOL
    return place if hold.id == place else f"{hold.id} {place}"


def read_holds(raw: Mapping[bytes, bytes]) -> tuple[Hold, ...]:
    """The stored holds. One that cannot be read still holds: an order to keep closed must not get lost.

    A field without an id is a hold of an earlier release, which knew one for each place: the place is its id.
    """
    found = []
    for field, data in raw.items():
        name = field.decode("utf-8", "replace")
        hold_id, _, place = name.rpartition(" ")
        lane = "" if place == POOL else place
        hold = read_json(_HOLD, data, "the hold of", name)
        if hold is None:
            hold = Hold(lane=lane, by="unknown", why="a hold that cannot be read; release it and set it anew")
        found.append(msgspec.structs.replace(hold, id=hold_id or place, lane=lane))
    return tuple(sorted(found, key=lambda hold: (hold.lane, hold.id)))
