"""Leadership among a pool's policy workers: a lease with a fencing token."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from hybridsched.store.keys import Keys
from hybridsched.store.scripts import Call, Scripts

if TYPE_CHECKING:
    from redis.asyncio import Redis

LEADER_LEASE_MS = 1500
"""Life of the leadership without renewal: six cycles of the default interval. Then a standby takes over."""


async def leads(client: Redis, pool: str, token: str) -> bool:
    """Whether the holder of a token leads now, by the server's word. Raises what the Redis client raises."""
    found: Any = await client.get(Keys(pool).leader)
    return bool(token) and found == token.encode()


def term(token: str) -> str:
    """The number of a leader's term: whoever leads later has a higher one. Empty: the token has none."""
    number = token.partition(":")[0]
    return number if number.isascii() and number.isdecimal() and len(number) <= 18 else ""


class LeaderLease:
    """One process's claim to lead a pool.

    The token is fenced: whoever leads later has a higher one, and the server refuses gates that come with an
    earlier token. So a leader that was frozen or cut off does no harm when it comes back.
    """

    def __init__(
        self, client: Redis, pool: str, *, owner: str | None = None, lease_ms: int = LEADER_LEASE_MS
    ) -> None:
        self._keys = Keys(pool)
        self._scripts = Scripts(client)
        self.owner = owner or f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"
        self.lease_ms = lease_ms
        self.token = ""
        """The fencing token while leading, as far as this process knows; empty otherwise."""
        self.leader = ""
        """Token of whoever led at the last look."""

    async def acquire(self) -> bool:
        """Take the leadership or renew it, well within the lease. Raises what the Redis client raises."""
        return self.note(await self._scripts.call(*self.call()))

    def call(self) -> Call:
        """The same as a call for a pipeline of the caller's own; give its answer to `note`."""
        return Call(
            "leader", [self._keys.leader, self._keys.leader_fence], [self.owner, self.token, self.lease_ms]
        )

    def note(self, answer: tuple[int, bytes]) -> bool:
        """Take over the answer of the script: whether this process leads."""
        leads, token = answer
        self.leader = token.decode("utf-8", "replace")
        self.token = self.leader if leads else ""
        return bool(leads)

    async def release(self) -> bool:
        """Give the leadership up so that a standby need not wait; whether there was any to give up."""
        token, self.token = self.token, ""
        if not token:
            return False
        return bool(await self._scripts.call("leader_release", [self._keys.leader], [token]))
