"""What was learnt of engines that were started: a profile for each model, device and number of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from hybridsched.store.found import read_json
from hybridsched.store.keys import Keys, check_name

if TYPE_CHECKING:
    from redis.asyncio import Redis

SCHEMA = 1
"""Raised when a field changes its meaning; profiles of another are passed over, the next start writes one."""


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """A short load on the engine alone: `requests` at once, each of so many tokens."""

    requests: int
    prompt_tokens: int
    """Of each request."""
    output_tokens: int
    """Of each request."""
    seconds: float
    output_tokens_per_s: float
    at_ms: float
    """Server time."""


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as it was last started."""

    schema: int = SCHEMA
    model: str
    """Under which name it was served."""
    device: str
    """As `core.gpus` calls it; `cpu`; `simulated`."""
    tensor_parallel: int
    dtype: str
    kv_dtype: str
    max_model_len: int
    max_num_seqs: int
    weights_bytes: int
    """On each GPU, as planned."""
    kv_bytes_per_token: int
    """On each GPU, as planned."""
    kv_tokens_planned: int
    kv_tokens: int | None
    """As the engine says; None: it did not."""
    block_tokens: int | None
    load_s: float
    """From the start of the process until it was healthy."""
    at_ms: float
    """Server time of that start."""
    throughput: Throughput | None = None
    """None: not measured yet."""

    @property
    def name(self) -> str:
        """Model, device and GPUs: no two profiles have the same."""
        return profile_name(self.model, self.device, self.tensor_parallel)


_PROFILE = msgspec.json.Decoder(EngineProfile)


def profile_name(model: str, device: str, tensor_parallel: int) -> str:
    """The profile's field in the hash. Raises ValueError when the model's name cannot stand there."""
    return f"{check_name('model', model)} {device} {tensor_parallel}"


class EngineProfiles:
    """The profiles of one pool. Raises what the Redis client raises."""

    def __init__(self, client: Redis, pool: str) -> None:
        self._client: Any = client
        self._key = Keys(pool).engine_profiles

    async def put(self, profile: EngineProfile) -> None:
        """Keep a profile, in place of the one before."""
        await self._client.hset(self._key, profile.name, msgspec.json.encode(profile))

    async def get(self, model: str, device: str, tensor_parallel: int) -> EngineProfile | None:
        """One profile; None: there is none that can be read."""
        name = profile_name(model, device, tensor_parallel)
        return _read(await self._client.hget(self._key, name), name)

    async def list(self) -> tuple[EngineProfile, ...]:
        """All of them, by model, device and GPUs."""
        raw: dict[bytes, bytes] = await self._client.hgetall(self._key)
        found = (_read(data, field.decode("utf-8", "replace")) for field, data in raw.items())
        return tuple(sorted((one for one in found if one is not None), key=lambda one: one.name))


def _read(data: bytes | None, name: str) -> EngineProfile | None:
    profile = read_json(_PROFILE, data, "the engine profile", name)
    return profile if profile is not None and profile.schema == SCHEMA and profile.name == name else None
