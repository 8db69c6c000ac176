"""Whether an engine is a lane's alone: pausing it must stop nobody else."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from redis import RedisError
from redis.asyncio import Redis

from hybridsched.store.connection import StoreError
from hybridsched.store.telemetry import Telemetry, TelemetryStore
from hybridsched.workers.slurm_env import job_place

LOOK_S = 15.0
"""Between two looks at what other workers say of their engines."""

_HERE = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})  # noqa: S104 - compared, not listened on


class EngineSharedError(StoreError):
    """The engine that was given as a lane's own serves somebody else too."""


def engine_place(url: str) -> tuple[str, int | None]:
    """Host and port of an engine; this machine has one name."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    here = host in _HERE or host in (socket.gethostname().lower(), socket.getfqdn().lower())
    return "" if here else host, parts.port or (443 if parts.scheme == "https" else 80)


def shared_with(telemetry: Telemetry, *, lane: str, url: str, node: str = "") -> str:
    """Who else uses the engine at `url`, as far as the pool knows: a sentence, empty when nobody does.

    Addresses of the loopback count as this machine's, unless a replica says that it is on another node, or a
    lane's worker that it is on another machine.
    """
    wanted = engine_place(url)
    for replica in telemetry.replicas.values():
        if replica is None or engine_place(replica.url) != wanted:
            continue
        if not wanted[0] and node and replica.node and replica.node != node:
            continue
        return (
            f"engine {url} is the one of replica {replica.replica}, which serves online requests: a pause "
            "would stop those too. Leave --own-engine out to share it, or give the lane one of its own. "
            "Where that replica is on another machine, start both workers with --engine http://HOST:PORT, "
            "not with the loopback's address"
        )
    for other in telemetry.lanes.values():
        if other is None or other.lane == lane or not other.engine:
            continue
        if engine_place(other.engine) == wanted and (wanted[0] or not _elsewhere(other.worker)):
            return f"engine {url} is the own engine of lane {other.lane} already; give each lane its own"
    return ""


def _elsewhere(worker: str) -> bool:
    """Whether an offline worker, by its name in its lane's record, is on another machine."""
    host = worker.rpartition("@")[2].rpartition(":")[0]
    return bool(host) and host != socket.gethostname()


async def check_alone(client: Redis, pool: str, *, lane: str, url: str) -> None:
    """Look at the pool once.

    Raises:
        EngineSharedError: another worker says that it uses the engine.
        redis.RedisError: the pool cannot be read.
    """
    place = job_place()
    telemetry = await TelemetryStore(client, pool).read_all()
    said = shared_with(telemetry, lane=lane, url=url, node="" if place is None else place.node)
    if said:
        raise EngineSharedError(said)


async def watch_alone(client: Redis, pool: str, *, lane: str, url: str) -> None:
    """Go on looking, through outages of Redis. Raises `EngineSharedError` as soon as it is not alone."""
    while True:
        with suppress(RedisError, OSError):  # without Redis no gate is open, and the next look comes
            await check_alone(client, pool, lane=lane, url=url)
        await asyncio.sleep(LOOK_S)
