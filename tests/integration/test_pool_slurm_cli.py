"""What `pool status` and `why` say of Slurm, and lanes named as a word."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import msgspec
import pytest
import redis
from click.testing import CliRunner, Result

from hybridsched.cli.main import cli
from hybridsched.core.policy import PolicyKind, PoolPolicy, SlurmPolicy
from hybridsched.store.connection import async_client
from hybridsched.store.keys import Keys
from hybridsched.store.lane_holders import LaneHolders, Place
from hybridsched.store.policy import PolicyStore
from hybridsched.store.telemetry import LaneRecord, ReplicaRecord, TelemetryStore
from hybridsched.workers.policy_slurm_view import SlurmStatus

POOL, LANE = "p", "hs-llama-3"
PLACE = Place(lane=LANE, replica=LANE, model="m", url="http://e:1", node="n1")


def call(url: str, *words: str) -> Result:
    return CliRunner().invoke(cli, [*words, "--redis", url, "--pool", POOL])


def say(valkey: redis.Redis, **changes: Any) -> None:
    status = msgspec.structs.replace(
        SlurmStatus(
            at_ms=time.time() * 1000.0,
            reachable=True,
            fill={"n1": 1, "n2": None},
            pending=3,
            running=2,
            without_lane=(12,),
            replicas={"chat": {"wanted": 2, "jobs": 2, "serving": 1}},
            troubles={"node n2": "INVALID_REG: resume it"},
            waiting={"big": 2, "huge": 1, "": 1},
            serving={"big": ["n1", "n2"]},
            models={"12": "big", "7_3": "huge", "8": ""},
        ),
        **changes,
    )
    valkey.set(Keys(POOL).slurm_status, msgspec.json.encode(status))


@pytest.fixture
async def lane(valkey: redis.Redis, valkey_url: str) -> None:
    """A pool that steers Slurm, with one lane that job 11 has."""
    valkey.flushall()
    client = async_client(valkey_url)
    policy = PoolPolicy(name="x", kind=PolicyKind.IDLE_WINDOW, slurm=SlurmPolicy(enabled=True))
    await PolicyStore(client, POOL).set(policy, by="me")
    await TelemetryStore(client, POOL).publish(
        ReplicaRecord(replica=LANE, model="m", lane=LANE, url="http://e:1", node="n1")
    )
    holders = LaneHolders(client, POOL)
    assert await holders.claim([PLACE], owner="o", job="11", node="n1", open_only=False, lease_ms=600_000)
    await client.aclose()


@pytest.mark.usefixtures("lane")
def test_status_shows_slurm_and_the_job_of_each_lane(valkey: redis.Redis, valkey_url: str) -> None:
    assert "Slurm: nothing is known of it" in call(valkey_url, "pool", "status").output
    say(valkey)
    said = call(valkey_url, "pool", "status").output
    assert "Slurm: 2 offline jobs run, 3 wait; free open lanes (hsfill): n1 1, n2 ?" in said
    assert "started and without a lane: jobs 12" in said
    assert "replicas chat: 2 wanted, 2 jobs, 1 serving" in said
    assert "node n2: INVALID_REG: resume it" in said
    assert "2 jobs wait for a lane of big, served on n1, n2" in said
    assert "1 job waits for a lane of huge, which no node serves" in said
    assert "1 job waits for a lane (of which model is not known before it has run)" in said
    found = json.loads(call(valkey_url, "pool", "status", "--json").output)
    assert found["slurm"]["fill"] == {"n1": 1, "n2": None}
    assert [one["slurm_job"] for one in found["lanes"]] == [{"job": "11", "node": "n1"}]
    say(
        valkey,
        reachable=False,
        problem="squeue did not answer within 10 s",
        at_ms=time.time() * 1000 - 40_000,
    )
    said = call(valkey_url, "pool", "status").output
    assert "Slurm: cannot be reached: squeue did not answer within 10 s" in said
    assert "ago)" in said


@pytest.mark.usefixtures("lane")
def test_why_knows_nodes_and_jobs(valkey: redis.Redis, valkey_url: str) -> None:
    say(valkey)
    for name, says in {
        "n1": "n1 is a Slurm node with 1 free open lanes",
        "n2": "INVALID_REG: resume it",
        "11": f"has lane {LANE}",
        "12": "has no lane yet; it waits for a lane of big, served on n1, n2",
        "7_3": "7_3 is a Slurm job that waits for a lane of huge, which no node serves",
        "8": "8 is a Slurm job that waits for a lane (of which model is not known before it has run)",
    }.items():
        done = call(valkey_url, "why", name)
        assert done.exit_code == 0, done.output
        assert says in done.output
    assert call(valkey_url, "why", "n9").exit_code == 1


@pytest.mark.usefixtures("lane")
def test_a_lane_is_held_by_its_name_as_why_takes_it(valkey_url: str) -> None:
    held = call(valkey_url, "pool", "hold", LANE, "--why", "x").output
    assert held.startswith(f"Lane {LANE} is held until released, by hold ")
    assert call(valkey_url, "pool", "release", LANE).exit_code == 0
    assert call(valkey_url, "pool", "hold", LANE, "--lane", "b", "--why", "x").exit_code == 2


@pytest.mark.usefixtures("lane")
def test_a_task_of_an_array_is_named_by_its_address(valkey: redis.Redis, valkey_url: str) -> None:
    say(valkey, without_lane=(5, 6), tasks={"6": "4_1"}, models={})
    assert "started and without a lane: jobs 5, 4_1\n" in call(valkey_url, "pool", "status").output
    assert "has started and has no lane" in call(valkey_url, "why", "4_1").output


@pytest.mark.usefixtures("lane")
async def test_a_replica_that_signed_off_is_not_shown_and_not_named(valkey_url: str) -> None:
    """Each replica that the policy worker had replaced stayed as `gone` for ten minutes."""
    client = async_client(valkey_url)
    telemetry = TelemetryStore(client, POOL)
    for number in (9, 10):
        name = f"hs-llama-{number}"
        await telemetry.publish(
            ReplicaRecord(replica=name, model="m", lane=name, url="http://e:1", node="n1")
        )
        await telemetry.publish_lane(LaneRecord(lane=name, replica=name, offline_inflight=0, worker="w"))
        await telemetry.withdraw_lane(name)
    await telemetry.withdraw("hs-llama-9")
    await client.aclose()

    async def asked(*words: str) -> Result:
        return await asyncio.to_thread(call, valkey_url, *words)

    said = (await asked("pool", "status")).output
    assert [line.split()[0] for line in said.splitlines() if line.startswith("hs-")] == [LANE, "hs-llama-10"]
    refused = await asked("pool", "hold", "hs-llama-77", "--why", "x")
    assert refused.exit_code == 1
    assert f"its lanes: {LANE}, hs-llama-10;" in refused.output
    assert (await asked("pool", "hold", "hs-llama-9", "--why", "x")).exit_code == 0
