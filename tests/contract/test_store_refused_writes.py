"""A Redis that takes no writes: whoever looks at the pool is told so, and not that some worker is dead."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner

from hybridsched.cli.main import cli
from hybridsched.store.batch_values import NewBatch
from hybridsched.store.batches import BatchStore
from hybridsched.store.connection import EmbeddedValkey, async_client, explain, sync_client
from hybridsched.store.telemetry import LaneRecord, ReplicaRecord, TelemetryStore
from hybridsched.store.write_probe import write_problem

POOL = "p"
SAID = {"full": "out of memory", "replica": "read-only replica"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(tmp_path / "data") as started:
        yield started


def refuse(server: EmbeddedValkey, how: str) -> None:
    with sync_client(server.url) as client:
        if how == "full":
            client.config_set("maxmemory", 1)
        else:
            client.replicaof("127.0.0.1", 1)  # type: ignore[no-untyped-call]


def command(server: EmbeddedValkey, *words: str) -> tuple[int, str]:
    answer = CliRunner().invoke(cli, [*words, "--redis", server.url, "--pool", POOL])
    return answer.exit_code, answer.output


@pytest.mark.parametrize("how", SAID)
async def test_the_probe_says_why(server: EmbeddedValkey, how: str) -> None:
    async with async_client(server.url) as client:
        assert await write_problem(client, POOL) == ""
        refuse(server, how)
        assert SAID[how] in await write_problem(client, POOL)


async def test_a_user_who_may_not_write_learns_nothing(server: EmbeddedValkey) -> None:
    with sync_client(server.url) as client:
        client.acl_setuser("eye", enabled=True, passwords=["+p"], categories=["+@read", "+@connection"])
    async with async_client(server.url.replace("unix://", "unix://eye:p@")) as client:
        assert await write_problem(client, POOL) == ""


@pytest.mark.parametrize("how", SAID)
async def test_the_records_of_a_pool_are_there_and_why_names_the_cause(
    server: EmbeddedValkey, how: str
) -> None:
    async with async_client(server.url) as client:
        telemetry = TelemetryStore(client, POOL)
        await telemetry.publish(ReplicaRecord(replica="r0", model="m", lane="r0"))
        await telemetry.publish_lane(LaneRecord(lane="r0", replica="r0", worker="w", model="m"))
    refuse(server, how)
    code, said = await asyncio.to_thread(command, server, "why", "r0")
    assert code == 0
    assert SAID[how] in said
    assert "policy worker is dead" not in said


@pytest.mark.parametrize("how", SAID)
def test_a_batch_says_what_it_waits_for(server: EmbeddedValkey, how: str) -> None:
    with sync_client(server.url) as client:
        paths = {"input": "/i", "output": "/o", "errors": "/e", "work": "/w"}
        BatchStore(client, POOL).submit(
            NewBatch(id="batch_1", user="u", uid=1, model="m", bytes=1, lines=1, **paths)
        )
    assert "no_worker" in command(server, "batch", "status", "batch_1")[1]
    refuse(server, how)
    code, said = command(server, "batch", "status", "batch_1", "--json")
    assert code == 0
    waits = json.loads(said)["waits"]
    assert waits["code"] == "redis_refuses_writes"
    assert SAID[how] in waits["message"]


def test_a_refused_write_is_not_an_unreachable_server(server: EmbeddedValkey) -> None:
    refuse(server, "replica")
    with sync_client(server.url) as client, pytest.raises(redis.exceptions.ReadOnlyError) as caught:
        client.set("a", 1)
    assert "read-only replica" in str(explain(caught.value, server.url, "writing"))
