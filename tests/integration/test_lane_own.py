"""A lane has one worker: a second one is refused in a sentence, and one that was killed is not waited for."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from redis.asyncio import Redis

from hybridsched.store.keys import Keys
from hybridsched.store.lane_holders import LaneHolders, Place
from hybridsched.workers.lane_own import PACE, LaneTakenError, OwnLane, is_dead, owner_here
from tests.helpers import wait_until
from tests.integration.offline_rig import LANE, MODEL, POOL, worker_process

PLACE = Place(lane=LANE, replica=LANE, model=MODEL, url="http://127.0.0.1:1")


def own(client: Redis, owner: str) -> OwnLane:
    return OwnLane(LaneHolders(client, POOL), PLACE, owner=owner)


def dead_owner() -> str:
    """The name of a process of this machine that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(20)
    parts = owner_here().split(":")
    return ":".join([parts[0], str(process.pid), parts[2], parts[3]])


def test_a_process_is_called_dead_only_where_that_is_seen() -> None:
    host, pid, space, rest = owner_here().split(":")
    assert (host, pid) == (socket.gethostname(), str(os.getpid()))
    assert not is_dead(owner_here())
    dead = dead_owner()
    assert is_dead(dead)
    gone = dead.split(":")[1]
    for unknown in (
        f"elsewhere:{gone}:{space}:{rest}",
        f"{host}:{gone}:1:{rest}",
        f"{host}:{gone}:{rest}",
        f"{host}:x:{space}:{rest}",
        "",
    ):
        assert not is_dead(unknown)


async def test_the_hold_of_a_dead_process_of_this_machine_is_taken_over_at_once(client: Redis) -> None:
    held = await LaneHolders(client, POOL).claim(
        [PLACE], owner=dead_owner(), open_only=False, lease_ms=3_600_000
    )
    assert held is not None
    tenure = await own(client, owner_here()).take(asyncio.Event())
    assert tenure is not None
    assert tenure.held.fence > held.fence
    await tenure.end()


async def test_a_hold_from_elsewhere_is_waited_for_as_long_as_it_can_last(client: Redis) -> None:
    await LaneHolders(client, POOL).claim([PLACE], owner="other:1:2:3", open_only=False, lease_ms=300)
    tenure = await own(client, owner_here()).take(asyncio.Event())
    assert tenure is not None
    await tenure.end()
    assert await client.get(Keys(POOL).lane_holder(LANE)) is None


@pytest.mark.parametrize(
    ("job", "said"), [("", "held by another worker"), ("41", "held by Slurm job 41 on an unknown node")]
)
async def test_a_living_holder_keeps_its_lane(client: Redis, job: str, said: str) -> None:
    holders = LaneHolders(client, POOL)
    held = await holders.claim([PLACE], owner="other:1:2:3", job=job, open_only=False, lease_ms=400)
    assert held is not None

    async def renew() -> None:
        while True:
            await holders.renew(held, lease_ms=400)
            await asyncio.sleep(0.05)

    renewing = asyncio.create_task(renew())
    with pytest.raises(LaneTakenError, match=said):
        await own(client, owner_here()).take(asyncio.Event())
    renewing.cancel()
    await asyncio.gather(renewing, return_exceptions=True)


@pytest.mark.parametrize("kind", ["text", "list"])
async def test_what_no_worker_wrote_is_waited_for_and_then_taken_over(
    client: Redis, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("hybridsched.workers.lane_own.PACE", PACE._replace(lease_ms=200))
    key = Keys(POOL).lane_holder(LANE)
    if kind == "text":
        await client.set(key, "garbage")
    else:
        await client.rpush(key, "x")
    tenure = await own(client, owner_here()).take(asyncio.Event())
    assert tenure is not None
    await tenure.end()


async def test_a_stop_ends_the_wait(client: Redis) -> None:
    await LaneHolders(client, POOL).claim([PLACE], owner="other:1:2:3", open_only=False, lease_ms=60_000)
    stop = asyncio.Event()
    taking = asyncio.create_task(own(client, owner_here()).take(stop))
    await asyncio.sleep(0)
    stop.set()
    assert await taking is None


def test_a_second_worker_is_refused_and_the_first_goes_on(
    tmp_path: Path, engine: str, valkey: redis.Redis, valkey_url: str
) -> None:
    key = Keys(POOL).lane_holder(LANE)
    first = worker_process(valkey_url, engine, tmp_path / "first.log")
    try:
        wait_until(lambda: valkey.get(key), timeout_s=30, what="the first worker's hold")
        token = valkey.get(key)
        second = worker_process(valkey_url, engine, tmp_path / "second.log")
        assert second.wait(30 + PACE.lease_ms / 1000) == 1
        said = (tmp_path / "second.log").read_text()
        assert f"lane {LANE} is held by another worker" in said
        assert "stop that one first, or give this one another --replica" in said
        assert "Traceback" not in said
        assert first.poll() is None
        assert valkey.get(key) == token
        first.kill()
        first.wait(10)
        third = worker_process(valkey_url, engine, tmp_path / "third.log")
        try:
            wait_until(lambda: valkey.get(key) not in (None, token), timeout_s=30, what="the next hold")
        finally:
            third.terminate()
            third.wait(20)
        assert valkey.get(key) is None, "a worker that is told to stop gives its lane back"
    finally:
        first.kill()
        first.wait(10)
