"""Whether Redis takes writes at all. When it does not, nobody of the pool can say so in Redis.

Whoever looks at a pool sees then only what has run out: gates, records. So they try a write of their own.
"""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio

from hybridsched.store.keys import Keys

CODE = "redis_refuses_writes"

_LIFE_MS = 1_000
_WHY = {
    "OOM": "Redis is out of memory and refuses every write: raise its maxmemory (with policy noeviction), or "
    "free some of it",
    "READONLY": "the Redis of this address is a read-only replica: give the workers that of the primary, or "
    "promote it (REPLICAOF NO ONE)",
    "MISCONF": "Redis cannot save to its disk and refuses every write: see its log, and free space there",
    "NOREPLICAS": "Redis has fewer replicas than it must have and refuses every write: see its "
    "min-replicas-to-write",
}


async def write_problem(client: redis.asyncio.Redis, pool: str) -> str:
    """Why the server refuses every write, and what to do; empty when it takes them, or when that cannot be
    seen from here, as this user may not write.

    Raises:
        redis.RedisError: the server cannot be reached.
    """
    try:
        await client.set(Keys(pool).write_probe, b"1", px=_LIFE_MS)
    except redis.ResponseError as error:
        return why_refused(error)
    return ""


def sync_write_problem(client: redis.Redis, keys: Keys) -> str:
    """The same with a synchronous client."""
    try:
        client.set(keys.write_probe, b"1", px=_LIFE_MS)
    except redis.ResponseError as error:
        return why_refused(error)
    return ""


def why_refused(error: redis.RedisError) -> str:
    """What an error says of all writes; empty when it speaks of this one only."""
    code: Any = getattr(error, "status_code", None) or str(error).partition(" ")[0]
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        code = "OOM"
    elif isinstance(error, redis.exceptions.ReadOnlyError):
        code = "READONLY"
    return _WHY.get(str(code), "")
