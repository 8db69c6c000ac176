"""Taking a run's keys out of a Redis that is not the demo's own."""

from __future__ import annotations

from typing import Any

import redis

from hybridsched.log import get_logger
from hybridsched.store.connection import sync_client
from hybridsched.store.keys import Keys

_log = get_logger("demo")
_AT_ONCE = 500


def remove_pools(url: str, pools: list[str]) -> int:
    """Remove every key of these pools, those that RQ keeps for their batches included; returns how many.

    The pools' names must be the run's own. An outage leaves the rest, with a line in the log.
    """
    client = sync_client(url)
    removed = 0
    try:
        for pool in pools:
            keys = Keys(pool)
            batches = [name.decode("utf-8", "replace") for name in _members(client, keys.batches)]
            patterns = [f"*{keys.prefix}*", *(f"rq:job:{batch}-c*" for batch in batches)]
            for pattern in patterns:
                removed += _remove(client, pattern)
            removed += _remove_workers(client, keys)
            queues = [name for name in _members(client, "rq:queues") if keys.prefix.encode() in name]
            if queues:
                client.srem("rq:queues", *queues)
    except (redis.RedisError, OSError) as error:
        _log.warning(
            "The keys of this run could not all be removed; those that are left begin with hs:{demo-.",
            key="demo_keys_left",
            pools=pools,
            error=str(error),
        )
    finally:
        client.close()
    return removed


def _remove_workers(client: redis.Redis, keys: Keys) -> int:
    """What RQ keeps of the pool's workers: a minute after they ended, longer when they were killed."""
    names: list[str] = []
    for key in client.scan_iter(match="rq:worker:*", count=_AT_ONCE, _type="hash"):
        served: Any = client.hget(key, "queues")
        if served is not None and keys.prefix.encode() in served:
            names.append(key)
    if names:
        client.srem("rq:workers", *names)
        client.unlink(*names)
    return len(names)


def _members(client: redis.Redis, key: str) -> list[bytes]:
    """The members of a set or a sorted set; none of anything else."""
    kind: Any = client.type(key)
    found: Any = []
    if kind == b"zset":
        found = client.zrange(key, 0, -1)
    elif kind == b"set":
        found = client.smembers(key)
    return list(found)


def _remove(client: redis.Redis, pattern: str) -> int:
    removed: Any = 0
    batch: list[bytes] = []
    for key in client.scan_iter(match=pattern, count=_AT_ONCE):
        batch.append(key)
        if len(batch) >= _AT_ONCE:
            removed += client.unlink(*batch)
            batch = []
    return int(removed + (client.unlink(*batch) if batch else 0))
