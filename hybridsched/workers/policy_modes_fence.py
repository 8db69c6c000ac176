"""The fence around the acts of one term: each thing that they do is done only by the worker that leads.

A policy worker may be frozen in the middle of an act and go on when another has long taken over: what it
would do then undoes what that one did. So Redis is asked before each command. What cannot be asked that way,
a word of the hand that has begun, carries the term's number, and hosts refuse those of earlier terms.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from hybridsched.cluster.values import ClusterError
from hybridsched.store.leader import leads

FRESH_S = 0.5
"""An answer that took longer is asked for again: this process may have been frozen over it. Well within the
life of a leader's lease."""

T = TypeVar("T")
Leading = Callable[[], Awaitable[None]]


class Fence:
    """The fence of the term that `token` began."""

    def __init__(self, client: Redis, pool: str, token: str) -> None:
        self._client, self._pool, self._token = client, pool, token

    async def check(self) -> None:
        """Returns where the worker leads. Raises `ClusterError`: `fenced` where it does not, `unreachable`
        where nobody can say."""
        while True:
            asked_s = time.monotonic()
            try:
                leading = await leads(self._client, self._pool, self._token)
            except (RedisError, OSError) as error:
                raise ClusterError(
                    f"whether this policy worker still leads cannot be asked of Redis: {error}",
                    code="unreachable",
                    retryable=True,
                ) from error
            if not leading:
                raise ClusterError("another policy worker leads", code="fenced", retryable=True)
            if time.monotonic() - asked_s < FRESH_S:
                return


class _Fenced:
    def __init__(self, behind: Any, check: Leading) -> None:
        self._behind, self._check = behind, check

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._behind, name)

        async def checked(*given: Any, **named: Any) -> Any:
            await self._check()
            return await call(*given, **named)

        return checked


def fenced(behind: T, check: Leading) -> T:
    """The same, each of whose methods first runs `check`. All of them are coroutines."""
    return cast("T", _Fenced(behind, check))
