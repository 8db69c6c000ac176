"""Whether the replica whose engine a lane shares is there: said in a log that would be silent otherwise."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from redis import RedisError
from redis.asyncio import Redis

from hybridsched.log import get_logger
from hybridsched.store.connection import StoreError
from hybridsched.store.telemetry import Telemetry, TelemetryStore
from hybridsched.workers.lane_alone import engine_place

FIRST_S = 5.0
"""From the start to the first look, seconds: replica and lane may come up together."""
LOOK_S = 15.0
"""Between two looks, seconds."""

_log = get_logger("offline")


def trouble(telemetry: Telemetry, *, replica: str, url: str) -> str:
    """Why no gate can be trusted to protect `replica` from the lane at `url`: a sentence, or empty."""
    record = telemetry.replicas.get(replica)
    if record is None:
        there = sorted(name for name, one in telemetry.replicas.items() if one is not None)
        known = f"those that do: {', '.join(there)}" if there else "no replica of this pool does"
        return (
            f"replica {replica} says nothing ({known}), and its lane stays closed until it does. Start "
            f"`hybridsched worker online --replica {replica}`, or give --replica another name"
        )
    if engine_place(record.url)[1] != engine_place(url)[1]:
        return (
            f"the engine of replica {replica} is {record.url}, and this lane's is {url}: the gate follows "
            "that replica's load, not that of this engine. Give --engine the replica's, or --replica the "
            "name of the one that has this engine"
        )
    return ""


async def watch_replica(client: Redis, pool: str, *, replica: str, url: str) -> None:
    """Log each new `trouble`, and its end, until cancelled."""
    store, known = TelemetryStore(client, pool), ""
    await asyncio.sleep(FIRST_S)
    while True:
        with suppress(RedisError, StoreError, OSError):  # others say that Redis is away
            found = trouble(await store.read_all(), replica=replica, url=url)
            if found and found != known:
                _log.warning("The lane has no replica to go by.", key="lane_replica", why=found)
            elif known and not found:
                _log.info("The lane's replica is there.", key="lane_replica", replica=replica)
            known = found
        await asyncio.sleep(LOOK_S)
