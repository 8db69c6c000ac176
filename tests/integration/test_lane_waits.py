"""A loop of a user's own that waits: it moves, it leaves, and it takes nobody else's lane for its own."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import redis

from hybridsched.core.values import GateState
from hybridsched.store.connection import async_client
from hybridsched.store.lane_holders import LaneHolders, Place
from hybridsched.store.tasks import end_tasks
from hybridsched.store.telemetry import ReplicaRecord, TelemetryStore
from hybridsched.workers.slurm_env import HELD_VARIABLE, JobPlace, held_by
from tests.integration.offline_rig import LANE, MODEL, POOL, door
from tests.integration.test_lane_programs import KEYS, Program, environment, pool

JOB = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
QUICK = "from hybridsched import lane\nlane._MOVE_AFTER_S, lane._LEAVE_AFTER_S, lane._MIND_S = {}, {}, 0.05\n"
OTHER = "zz-other"


@asynccontextmanager
async def second_lane(url: str) -> AsyncIterator[None]:
    client = async_client(url)
    store = TelemetryStore(client, POOL)

    async def replica() -> None:
        while True:
            record = ReplicaRecord(replica=OTHER, model=MODEL, lane=OTHER, url="http://e:2", node="n1")
            await store.publish(record)
            await asyncio.sleep(0.5)

    publishing = asyncio.create_task(replica())
    try:
        yield
    finally:
        await end_tasks(publishing)
        await client.aclose()


async def test_a_loop_that_waits_changes_to_a_lane_that_opens(
    tmp_path: Path, valkey: redis.Redis, valkey_url: str
) -> None:
    script = QUICK.format(0.2, 1000) + "lane.checkpoint()\nprint('at', lane.engine_url(), flush=True)\n"
    async with pool(valkey_url), second_lane(valkey_url):
        program = Program(tmp_path, sys.executable, "-c", script, **environment(valkey_url, **JOB))
        try:
            await program.until(lambda: valkey.get(KEYS.lane_holder(LANE)))
            async with door(valkey_url, lane=OTHER) as other:
                await other.set(GateState.OPEN)
                assert await program.ended() == 0
        finally:
            program.close()
    assert "at http://e:2\n" in program.said
    assert valkey.get(KEYS.lane_holder(LANE)) is None


async def test_a_loop_whose_lane_never_opens_goes_back_to_the_queue(
    tmp_path: Path, valkey: redis.Redis, valkey_url: str
) -> None:
    asked, scontrol = tmp_path / "asked", tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/bash\necho "$*" >> {asked}\n')
    scontrol.chmod(0o755)
    script = QUICK.format(1000, 0.5) + "lane.checkpoint(lambda: print('saved', flush=True))\n"
    async with pool(valkey_url):
        env = environment(valkey_url, PATH=f"{scontrol.parent}:/usr/bin:/bin", **JOB)
        program = Program(tmp_path, sys.executable, "-c", script, **env)
        try:
            assert await program.ended() == 75
        finally:
            program.close()
    assert "saved\n" in program.said
    assert asked.read_text() == "requeue 7\n"


async def test_told_to_leave_before_it_begins_it_loads_nothing(
    tmp_path: Path, valkey: redis.Redis, valkey_url: str
) -> None:
    script = "from hybridsched import lane\nlane.wait_open()\nprint('loads its model', flush=True)\n"
    async with pool(valkey_url):
        env = environment(valkey_url, HYBRIDSCHED_LANE=LANE)
        program = Program(tmp_path, sys.executable, "-c", script, **env)
        try:
            await program.until(lambda: valkey.get(KEYS.lane_holder(LANE)))
            program.process.send_signal(signal.SIGUSR2)
            assert await program.ended() == 75
        finally:
            program.close()
    assert program.said == ""


async def test_a_lane_that_is_kept_counts_as_long_as_its_keeper_has_it(
    tmp_path: Path, valkey: redis.Redis, valkey_url: str
) -> None:
    """The gate alone says nothing of whose the lane is."""
    script = (
        "import time\nfrom hybridsched import lane\nprint('first', lane.wait_open(20), flush=True)\n"
        "while lane.is_open(): time.sleep(0.01)\n"
        "print('closed', flush=True)\nprint('again', lane.wait_open(1.0), flush=True)\n"
    )
    place = Place(lane=LANE, replica=LANE, model=MODEL, url="http://e:1", node="n1")
    client = async_client(valkey_url)
    holders = LaneHolders(client, POOL)
    try:
        async with pool(valkey_url) as gate:
            await gate.set(GateState.OPEN)
            held = await holders.claim([place], owner="me", job="7", open_only=False, lease_ms=60_000)
            assert held is not None
            mark = held_by(JobPlace(job="7", node="n1"), "me", place)
            env = environment(valkey_url, HYBRIDSCHED_LANE=LANE, **{HELD_VARIABLE: mark.text()}, **JOB)
            program = Program(tmp_path, sys.executable, "-c", script, **env)
            try:
                await program.until("first True\n")
                await holders.release(held)
                assert await holders.claim([place], owner="another", job="8", open_only=False)
                assert await program.ended() == 0
            finally:
                program.close()
    finally:
        await client.aclose()
    assert "closed\nagain False\n" in program.said
