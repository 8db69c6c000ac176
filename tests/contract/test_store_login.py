"""A Redis that wants a password: refused at once, in a sentence, and well when the password is right."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from hybridsched.cli.main import cli
from hybridsched.store.connection import EmbeddedValkey, StoreRefused, async_client, store_errors
from hybridsched.store.wire import Wire

_ENOUGH = 12
"""Connections that one refused command may make; the recursion made hundreds."""


class Locked:
    """A server whose password can be changed."""

    def __init__(self, server: EmbeddedValkey) -> None:
        self.url = server.url
        self.master = redis.Redis.from_url(server.url, username="master", password="m")
        self._plain = redis.Redis.from_url(server.url)
        self._plain.acl_setuser("master", enabled=True, passwords=["+m"], commands=["+@all"], keys=["*"])

    def wants(self, password: str) -> None:
        self.master.config_set("requirepass", password)
        for kind in ("normal", "pubsub"):
            self.master.client_kill_filter(_type=kind, skipme=True)

    def connections(self) -> int:
        info: dict[str, Any] = self.master.info("stats")
        return int(info["total_connections_received"])

    def close(self) -> None:
        self.master.close()
        self._plain.close()


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Locked]:
    with EmbeddedValkey(tmp_path / "data") as server:
        held = Locked(server)
        yield held
        held.close()


async def test_a_password_that_is_wanted_is_refused_at_once_and_taken_later(locked: Locked) -> None:
    client = async_client(locked.url, name="test")
    wire = Wire(client)
    assert await client.ping()
    assert await wire.call("PING") == b"PONG"
    locked.wants("zz")
    before = locked.connections()
    with pytest.raises(StoreRefused, match="refused the login"), store_errors(locked.url, "asking"):
        await client.ping()
    for _ in range(2):  # the first one may only find the connection lost
        with pytest.raises(redis.ConnectionError):
            await wire.call("PING")
    assert locked.connections() - before <= _ENOUGH
    locked.wants("")
    assert await client.ping()
    assert await wire.call("PING") == b"PONG"
    await wire.aclose()
    await client.aclose()


async def test_the_password_in_the_url_opens_it(locked: Locked) -> None:
    locked.wants("zz")
    url = locked.url.replace("unix://", "unix://:zz@")
    async with async_client(url, name="test") as client:
        assert await client.ping()
    wrong = url.replace("zz", "yy")
    async with async_client(wrong, name="test") as client:
        with pytest.raises(StoreRefused, match=r"login .*check user and password"), store_errors(wrong, "x"):
            await client.ping()


@pytest.mark.parametrize(
    "command",
    ["why r0", "pool status", "decisions", "pool policy show", "batch list"],
)
def test_a_command_says_so_in_one_sentence(locked: Locked, command: str) -> None:
    locked.wants("zz")
    before = locked.connections()
    answer = CliRunner().invoke(cli, [*command.split(), "--redis", locked.url])
    assert answer.exit_code == 1
    assert answer.output.count("\n") == 1
    assert "refused the login" in answer.output
    assert "check user and password in the URL" in answer.output
    assert locked.connections() - before <= _ENOUGH


IN_A_JOB = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ("-m hybridsched worker offline --slurm-job b.jsonl", 2, "Error: running the batch as a Slurm job: "),
        ("-m hybridsched lane run -- true", 2, "Error: looking for a lane: "),
        ("own.py", 1, "LaneError: looking for a lane: "),
    ],
)
def test_a_slurm_job_ends_at_once_instead_of_holding_its_place(
    locked: Locked, words: str, status: int, says: str, tmp_path: Path
) -> None:
    """It said for hours that Redis could not be reached."""
    body = '{"model": "m", "prompt": "a"}'
    line = f'{{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {body}}}\n'
    (tmp_path / "b.jsonl").write_text(line)
    (tmp_path / "own.py").write_text("from hybridsched import lane\nlane.wait_open()\n")
    locked.wants("zz")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "HYBRIDSCHED"))}
    done = subprocess.run(
        [sys.executable, *words.split()],
        capture_output=True,
        text=True,
        env=clean | IN_A_JOB | {"HYBRIDSCHED_REDIS_URL": locked.url},
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.returncode == status
    assert says in done.stderr
    assert done.stderr.count("check user and password in the URL") == 1
    assert "cannot be reached" not in done.stderr


def test_a_batch_in_a_job_with_gpus_of_its_own_is_refused(locked: Locked, tmp_path: Path) -> None:
    """It held the GPU while it waited for a lane."""
    env = IN_A_JOB | {"HYBRIDSCHED_REDIS_URL": locked.url, "SLURM_JOB_GPUS": "0"}
    answer = CliRunner().invoke(cli, ["worker", "offline", "--slurm-job", "b.jsonl"], env=env)
    assert answer.exit_code == 2
    assert "has GPUs of its own (0)" in answer.output
    source = tmp_path / "b.jsonl"
    source.write_text("{}\n")
    words = ["batch", "submit", "--sbatch", "--gres", "gpu:a100:1", str(source), "--redis", locked.url]
    answer = CliRunner().invoke(cli, words)
    assert answer.exit_code == 2
    assert "takes no GPU of its own" in answer.output
