"""Pack orders in Redis: who takes online requests first, as a lease that dies unless it is renewed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hybridsched.core.values import Pack
from hybridsched.store.found import read_json
from hybridsched.store.keys import Keys, check_name
from hybridsched.store.scripts import Arg, Scripts
from hybridsched.store.telemetry import open_object

if TYPE_CHECKING:
    from redis.asyncio import Redis

_PACK = msgspec.json.Decoder(Pack)


class PackStore:
    """The pack orders of one pool. Raises what the Redis client raises."""

    def __init__(self, client: Redis, pool: str) -> None:
        self._keys = Keys(pool)
        self._scripts = Scripts(client)

    async def publish(self, pack: Pack, *, leader_token: str, lease_ms: float) -> bool:
        """Publish or renew the order of one model: for policy workers to read, and in the records of its
        replicas, by which they claim. False: `leader_token` is not that of the leader."""
        model = check_name("model", pack.model)
        args: list[Arg] = [leader_token, max(1, round(lease_ms)), open_object(pack, "at_ms")]
        for rank in pack.ranks:
            args += (rank.replica, rank.rank, rank.max_inflight, f"{rank.max_load:.3f}")
        keys = [self._keys.leader, self._keys.replicas(model), self._keys.pack(model)]
        return bool(await self._scripts.call("pack_publish", keys, args) == 1)


def decode_pack(raw: bytes | None, model: str) -> Pack | None:
    """A stored order; None when its lease is over, or it is none of this model."""
    pack = read_json(_PACK, raw, "the pack order of model", model)
    return pack if pack is not None and pack.model == model else None
