"""The online worker's hold on its replica's name: taken before it serves, renewed while it does."""

from __future__ import annotations

import asyncio
import time

from redis.exceptions import RedisError

from hybridsched.log import get_logger
from hybridsched.store.replica_names import NameHolder, NameTakenError, ReplicaName

LIFE_S = 3.0
"""Life of a hold without renewal: so long a restarted worker waits for one that was killed."""

_LOOK_S = 0.1

_log = get_logger("online")


class NameHold:
    """Takes the name and keeps it.

    `lost` is set when another worker has taken it, after this one could not renew it for its life.
    """

    def __init__(self, name: ReplicaName, *, replica: str, life_s: float = LIFE_S) -> None:
        self._name = name
        self._replica = replica
        self._life_s = life_s
        self._other: NameHolder | None = None
        self.lost = asyncio.Event()

    async def take(self) -> None:
        """Take the name.

        Waits for Redis as long as it takes, and for a dead holder as long as its hold can last.

        Raises:
            NameTakenError: a living worker has the name.
        """
        asked: float | None = None
        while True:
            try:
                other = await self._name.take()
            except (RedisError, OSError) as error:
                if asked != 0.0:
                    _log.warning(
                        "Redis cannot be reached or refuses; the worker waits for it.",
                        key="store_outage",
                        doing="name",
                        error=str(error),
                    )
                asked = 0.0
                await asyncio.sleep(_LOOK_S)
                continue
            if other is None:
                return
            now = time.monotonic()
            if not asked:
                asked = now
                _log.info(
                    "Another worker has this replica's name; waiting to see whether it still lives.",
                    key="name_taken",
                    replica=self._replica,
                    by=str(other),
                    at_most_s=self._life_s,
                )
            if now - asked > self._life_s + 2 * _LOOK_S:
                raise NameTakenError(self._taken(other))
            await asyncio.sleep(_LOOK_S)

    async def keep(self) -> None:
        """Renew it until cancelled, or until it is lost."""
        while not self.lost.is_set():
            await asyncio.sleep(self._life_s / 3)
            try:
                self._other = await self._name.take()
            except (RedisError, OSError):
                continue  # the other loops say so; who can reach Redis first after an outage has the name
            if self._other is not None:
                _log.error(
                    "Another worker has taken this replica's name; this one stops.",
                    key="name_lost",
                    replica=self._replica,
                    by=str(self._other),
                )
                self.lost.set()

    async def release(self) -> None:
        """Give it up. Raises what the Redis client raises."""
        await self._name.release()

    def error(self) -> NameTakenError:
        """Why a worker that lost its name ends."""
        return NameTakenError(self._taken(self._other or NameHolder(owner="unknown")))

    def _taken(self, other: NameHolder) -> str:
        return (
            f"replica {self._replica} is served by another worker: {other}; stop that one, or give this one "
            "another --replica"
        )
