"""Operators' holds: orders to keep gates closed, of one lane or of the whole pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import msgspec

from hybridsched.core.values import Hold
from hybridsched.store.keys import Keys, check_name
from hybridsched.store.telemetry import server_ms

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from redis.asyncio import Redis

POOL = "*"
"""Field of the hold of the whole pool."""

_HOLD = msgspec.json.Decoder(Hold)


class HoldStore:
    """The holds of one pool."""

    def __init__(self, client: Redis, pool: str) -> None:
        self._client = client
        self._keys = Keys(pool)

    async def put(self, *, lane: str = "", by: str, why: str, for_ms: float | None = None) -> Hold:
        """Hold a lane, or the pool when `lane` is empty; a hold that stood there is replaced.

        `for_ms`: the hold ends by itself after this long, by the server's clock. Raises ValueError when the
        lane's name cannot stand in a key.
        """
        if lane:
            check_name("lane", lane)
        until = None
        if for_ms is not None:
            until = server_ms(await self._client.time()) + for_ms
        hold = Hold(lane=lane, by=by, why=why, until_ms=until)
        field = lane or POOL
        await self._client.hset(self._keys.holds, field, msgspec.json.encode(hold))
        # A nudge: the policy worker closes the gates now, not at its next interval.
        await self._client.publish(self._keys.telemetry_channel, field)
        return hold

    async def release(self, *, lane: str = "") -> bool:
        """End a hold; whether there was one."""
        field = lane or POOL
        gone = await self._client.hdel(self._keys.holds, field)
        await self._client.publish(self._keys.telemetry_channel, field)
        return bool(gone)

    async def list(self) -> tuple[Hold, ...]:
        """All holds, the pool's first, also those whose time is over."""
        return read_holds(await cast("Awaitable[dict[bytes, bytes]]", self._client.hgetall(self._keys.holds)))


def read_holds(raw: Mapping[bytes, bytes]) -> tuple[Hold, ...]:
    """The stored holds. One that cannot be read still holds: an order to keep closed must not get lost."""
    found = []
    for field, data in raw.items():
        name = field.decode("utf-8", "replace")
        lane = "" if name == POOL else name
        try:
            hold = _HOLD.decode(data)
        except msgspec.MsgspecError:
            hold = Hold(lane=lane, by="unknown", why="a hold that cannot be read; release it and set it anew")
        found.append(msgspec.structs.replace(hold, lane=lane))
    return tuple(sorted(found, key=lambda hold: hold.lane))
