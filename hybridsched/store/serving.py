"""Which models a pool serves: to tell a name that nobody serves from a worker that is only late."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from hybridsched.store.keys import Keys
from hybridsched.store.policy import PolicyError, PolicyStore
from hybridsched.store.telemetry import TelemetryStore

if TYPE_CHECKING:
    from redis.asyncio import Redis


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one model."""

    expected: bool
    """A worker of the model lives, has lately published telemetry, or is to be started by the policy."""
    models: tuple[str, ...]
    """The models of which telemetry is there, sorted."""


async def serving(client: Redis, pool: str, model: str) -> Serving:
    """Look whether `model` is served. Raises what the Redis client raises."""
    keys = Keys(pool)
    telemetry, policy, records = await asyncio.gather(
        TelemetryStore(client, pool).read_all(), _policy_models(client, pool), _live(client, keys, model)
    )
    models = {record.model for record in telemetry.replicas.values() if record is not None}
    return Serving(expected=records or model in models or model in policy, models=tuple(sorted(models)))


async def _policy_models(client: Redis, pool: str) -> set[str]:
    """Models of which the policy starts replicas."""
    try:
        policy = await PolicyStore(client, pool).current()
    except PolicyError:
        return set()
    return set() if policy is None else {kind.model for kind in policy.slurm.replicas}


async def _live(client: Redis, keys: Keys, model: str) -> bool:
    # accept.lua removes records past their time, and whoever asks here has just been told that none was live.
    return bool(await client.hlen(keys.replicas(model)))
