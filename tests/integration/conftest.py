"""Fixtures of the integration tests: engines and batches that several files use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.integration.offline_rig import publish_policy, simulated_engine, undisturbed, write_batch
from tests.integration.slurm_jobs_rig import BATCH_LINES, CASE_SPEED, BatchCase
from tests.slurm import Testbed


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    """URL of a fast simulated engine."""
    with simulated_engine(tmp_path) as url:
        yield url


@pytest.fixture
def pool_url(valkey: redis.Redis, valkey_url: str) -> str:
    """A store with the policy of the pool of offline_rig."""
    asyncio.run(publish_policy(valkey_url))
    return valkey_url


@pytest.fixture
def case(
    request: pytest.FixtureRequest, tmp_path: Path, clean_slurm: Testbed, pool_url: str, engine: str
) -> Iterator[BatchCase]:
    """A batch for real Slurm jobs (parameter: its lines), and a slow engine."""
    source = tmp_path / "batch.jsonl"
    write_batch(source, getattr(request, "param", BATCH_LINES), seed=2)
    expected = asyncio.run(undisturbed(tmp_path, source, engine))
    (tmp_path / "slow").mkdir()
    with simulated_engine(tmp_path / "slow", speed=CASE_SPEED) as url:
        yield BatchCase(source, expected, clean_slurm, pool_url, url)
