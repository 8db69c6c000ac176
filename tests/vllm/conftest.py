"""Fixtures of the contract suites."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from hybridsched.engines.protocol import Engine
from tests.vllm.engine_rigs import KINDS, Host, host


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=KINDS)
async def engine_host(request: pytest.FixtureRequest) -> AsyncIterator[Host]:
    """One engine of each kind for all tests of the contract: the session's scope puts those of a kind
    together."""
    async with host(request.param, request) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def engine(engine_host: Host) -> AsyncIterator[Engine]:
    """A client of the engine, for one test."""
    client = engine_host.connect()
    yield client
    await client.close()
