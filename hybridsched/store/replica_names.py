"""A replica's name belongs to one worker at a time, as a lease.

Two workers under one name would share a record, a wake channel and a lane: each would undo what the other
says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hybridsched.store.connection import StoreError
from hybridsched.store.keys import Keys, check_name
from hybridsched.store.scripts import Scripts

if TYPE_CHECKING:
    from redis.asyncio import Redis


class NameTakenError(StoreError):
    """Another worker has the replica's name."""


class NameHolder(msgspec.Struct, frozen=True, kw_only=True):
    """Who has a name."""

    owner: str
    """Unique to the process."""
    host: str = ""
    pid: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host or 'an unknown host'} ({self.owner})"


_HOLDER = msgspec.json.Decoder(NameHolder)


class ReplicaName:
    """One worker's claim on one replica's name. Methods raise what the Redis client raises.

    Raises:
        ValueError: the replica's or the pool's name cannot stand in a key.
    """

    def __init__(self, client: Redis, pool: str, replica: str, holder: NameHolder, *, life_ms: int) -> None:
        self._key = Keys(pool).replica_holder(check_name("replica", replica))
        self._scripts = Scripts(client)
        self._token = msgspec.json.encode(holder)
        self._life_ms = life_ms

    async def take(self) -> NameHolder | None:
        """Take or renew the name. None: this worker has it; else the one that does."""
        had, current = await self._scripts.call("replica_hold", [self._key], [self._token, self._life_ms])
        if had:
            return None
        try:
            return _HOLDER.decode(current)
        except (msgspec.MsgspecError, RecursionError):
            return NameHolder(owner="not written by a worker of ours")

    async def release(self) -> None:
        """Give the name up, if this worker has it."""
        await self._scripts.call("leader_release", [self._key], [self._token])
