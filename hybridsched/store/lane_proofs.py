"""How the engine of a lane answered before it slept, for the worker that wakes it: perhaps another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridsched.store.keys import Keys

if TYPE_CHECKING:
    from redis.asyncio import Redis

PROOF_LIFE_S = 7 * 86_400
"""No engine sleeps for longer; a worker that lives writes it anew at each sleep."""


class LaneProofs:
    """One string for each lane, which only its worker understands. Raises what the Redis client raises."""

    def __init__(self, client: Redis, pool: str) -> None:
        self._client: Any = client
        self._keys = Keys(pool)

    async def read(self, lane: str) -> bytes | None:
        """What the lane's last worker wrote; None: nothing, or too long ago."""
        found: bytes | None = await self._client.get(self._keys.lane_proof(lane))
        return found

    async def write(self, lane: str, proof: bytes) -> None:
        """Keep it for whoever wakes the engine."""
        await self._client.set(self._keys.lane_proof(lane), proof, ex=PROOF_LIFE_S)
