"""The clocks of the modes. Neither is this machine's wall clock, which may be set at any time."""

from __future__ import annotations

import time
from collections.abc import Callable

from redis.asyncio import Redis

from hybridsched.store.telemetry import server_ms


def _monotonic_ms() -> float:
    return time.monotonic() * 1000.0


class ServerClock:
    """Two clocks, in ms of the epoch: the Redis server's, and one that nobody sets.

    The calendar, operators' orders and their ends go by the server's clock as it was at the last look. What
    is measured and what has a limit goes by the other: it is the server's at the start of the term, and from
    there on counts the time that passes.
    """

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._steady = self._calendar = time.time() * 1000.0 - _monotonic_ms()

    def steady_ms(self) -> float:
        """For durations and limits."""
        return _monotonic_ms() + self._steady

    def calendar_ms(self) -> float:
        """For windows, orders and approvals."""
        return _monotonic_ms() + self._calendar

    async def look(self) -> None:
        """Ask the server. Raises what the Redis client raises."""
        before = _monotonic_ms()
        now = server_ms(await self._client.time())
        self._calendar = now - (before + _monotonic_ms()) / 2.0

    async def begin(self) -> float:
        """The same at the start of a term; by how much the steady clock was set. Raises the same."""
        await self.look()
        shift, self._steady = self._calendar - self._steady, self._calendar
        return shift


class GivenClock:
    """One clock for both, of the caller's."""

    def __init__(self, clock_ms: Callable[[], float]) -> None:
        self.steady_ms = self.calendar_ms = clock_ms

    async def look(self) -> None:
        """Nothing to ask."""

    async def begin(self) -> float:
        """Nothing to set."""
        return 0.0
