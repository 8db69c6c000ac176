"""Profiles of engines in Redis: kept, replaced, and what cannot be read passed over."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
import redis
import redis.asyncio

from hybridsched.store.connection import async_client
from hybridsched.store.engine_profiles import SCHEMA, EngineProfile, EngineProfiles, Throughput
from hybridsched.store.keys import Keys

POOL = "p"
PROFILE = EngineProfile(
    model="org/llama",
    device="3g.40gb@a100-80gb",
    tensor_parallel=1,
    dtype="bfloat16",
    kv_dtype="fp8",
    max_model_len=4096,
    max_num_seqs=64,
    weights_bytes=16 * 2**30,
    kv_bytes_per_token=65_536,
    kv_tokens_planned=100_000,
    kv_tokens=99_000,
    block_tokens=16,
    load_s=31.5,
    at_ms=1e12,
)


@pytest.fixture
async def profiles(valkey: redis.Redis, valkey_url: str) -> AsyncIterator[EngineProfiles]:
    client = async_client(valkey_url)
    yield EngineProfiles(client, POOL)
    await client.aclose()


async def test_a_profile_comes_back_as_it_was(profiles: EngineProfiles) -> None:
    assert await profiles.list() == ()
    assert await profiles.get("org/llama", PROFILE.device, 1) is None
    await profiles.put(PROFILE)
    assert await profiles.get("org/llama", PROFILE.device, 1) == PROFILE
    assert await profiles.get("org/llama", PROFILE.device, 2) is None
    measured = msgspec.structs.replace(
        PROFILE,
        load_s=20.0,
        throughput=Throughput(
            requests=32,
            prompt_tokens=128,
            output_tokens=64,
            seconds=2.0,
            output_tokens_per_s=1024.0,
            at_ms=1e12,
        ),
    )
    await profiles.put(measured)
    assert await profiles.list() == (measured,)


async def test_models_devices_and_gpus_stand_beside_each_other(profiles: EngineProfiles) -> None:
    change = msgspec.structs.replace
    several = (
        change(PROFILE, model="a"),
        change(PROFILE, device="h200"),
        change(PROFILE, device="h200", tensor_parallel=2),
    )
    for one in several:
        await profiles.put(one)
    assert await profiles.list() == several


async def test_what_is_none_of_ours_is_passed_over(profiles: EngineProfiles, valkey: redis.Redis) -> None:
    await profiles.put(PROFILE)
    key = Keys(POOL).engine_profiles
    valkey.hset(key, "x h200 1", b"{")
    valkey.hset(key, b"\xff", b"[]")
    valkey.hset(key, "moved h200 1", msgspec.json.encode(PROFILE))
    newer = msgspec.structs.replace(PROFILE, model="newer", schema=SCHEMA + 1)
    valkey.hset(key, newer.name, msgspec.json.encode(newer))
    assert await profiles.list() == (PROFILE,)
    assert await profiles.get("newer", PROFILE.device, 1) is None


async def test_a_name_with_a_space_is_refused(profiles: EngineProfiles) -> None:
    with pytest.raises(ValueError, match="cannot be used"):
        await profiles.put(msgspec.structs.replace(PROFILE, model="two words"))
