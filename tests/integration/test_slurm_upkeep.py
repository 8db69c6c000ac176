"""The policy worker's Slurm part on real daemons: arrays, requeued jobs, the parked node that was resumed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import redis
from redis.asyncio import Redis

from hybridsched.cluster.commands import CommandCluster
from hybridsched.cluster.values import JobChange
from hybridsched.core.policy import SlurmPolicy
from hybridsched.store.events import EventLog
from hybridsched.workers.policy_slurm import SlurmSide, SlurmTask
from tests.helpers import await_until
from tests.integration.policy_pool import POOL, policy, replica, scripted
from tests.integration.test_policy_slurm import _NoThread
from tests.slurm import Testbed

QUICK = SlurmPolicy(enabled=True, observe_ms=300.0, reassert_ms=1000.0, fill_hysteresis_ms=0.0)
LANES = ("a", "b", "c", "d")

JOB = """#!/bin/bash
#SBATCH --partition=offline --gres=hsfill:1,hslane:1
#SBATCH --requeue --signal=B:USR2@60 --open-mode=append --time=30
echo "run ${SLURM_RESTART_COUNT:-0} of ${SLURM_ARRAY_TASK_ID:-no task}"
trap 'echo "told ${SLURM_ARRAY_TASK_ID:-}"' USR2
while :; do sleep 0.2; done
"""


class Part:
    """The loop's turns, one by one, as its policy worker would let it."""

    def __init__(self, slurm: Testbed, url: str, client: Redis, policy_of_it: SlurmPolicy) -> None:
        self.side = SlurmSide(url, POOL)
        self.side._thread = _NoThread()  # type: ignore[assignment]
        self.cluster = CommandCluster(environment=slurm.env)
        self.events = EventLog(client, POOL)
        self.task = SlurmTask(self.side, self.cluster, client, self.events)
        self.policy = policy(slurm=policy_of_it)

    async def turn(self) -> None:
        self.side.offer(self.policy, "leader")
        await self.task.turn()

    async def until(self, check: Callable[[], bool], *, timeout_s: float, what: str) -> None:
        async def there() -> bool:
            await self.turn()
            return check()

        await await_until(there, timeout_s=timeout_s, what=what)


@asynccontextmanager
async def part(slurm: Testbed, url: str, given: SlurmPolicy = QUICK) -> AsyncIterator[Part]:
    async with scripted(url) as pool:
        await pool.say(*(replica(name, node="n1") for name in LANES))
        made = Part(slurm, url, pool.client, given)
        await made.turn()
        try:
            yield made
        finally:
            await made.events.close()
            await made.cluster.close()


async def test_one_task_of_an_array_is_meant(clean_slurm: Testbed) -> None:
    slurm = clean_slurm
    cluster = CommandCluster(environment=slurm.env)
    array = slurm.sbatch("--array=0-1", f"--output={slurm.state}/out/%A_%a.out", script=JOB)

    def said(task: int) -> str:
        return slurm.output(f"{array}_{task}")

    await await_until(lambda: all("run 0" in said(t) for t in (0, 1)), timeout_s=30, what="both tasks")
    jobs = {job.array_task: job for job in await cluster.jobs(partitions=["offline"]) if job.running}
    assert array in {job.id for job in jobs.values()}, "the array's number is that of one task"
    mine = next(job for job in jobs.values() if job.id == array)
    number, task = mine.address
    assert task is not None
    other = 1 - task
    await cluster.signal(number, "USR2", task=task)
    await await_until(lambda: f"told {task}" in said(task), timeout_s=10, what="the signal")
    await cluster.requeue(number, task=task)

    async def waits() -> bool:
        found = {j.array_task: j for j in await cluster.jobs(partitions=["offline"]) if j.array_job == array}
        return found[task].pending and found[other].running

    await await_until(waits, timeout_s=30, what="one task in the queue")
    await cluster.update_job(number, JobChange(comment="mine"), task=task)
    comments = {j.array_task: j.comment for j in await cluster.jobs() if j.array_job == array}
    assert comments == {task: "mine", other: ""}
    assert f"told {other}" not in said(other)
    await cluster.close()


@pytest.mark.timeout(240)
async def test_a_requeued_job_is_started_soon_and_never_in_the_second_of_its_end(
    clean_slurm: Testbed, valkey: redis.Redis, valkey_url: str
) -> None:
    """slurmd refuses a run with a credential of the second of the last one's end; slurmctld fails the job."""
    slurm = clean_slurm
    async with part(slurm, valkey_url) as made:
        for name in LANES:
            made.side.gate(name, is_open=True)
        jobs = [slurm.sbatch(script=JOB, name=f"j{i}") for i in range(4)]
        for run in range(3):
            for job in jobs:
                await made.until(
                    lambda job=job, run=run: f"run {run} " in slurm.output(job),  # type: ignore[misc]
                    timeout_s=40,
                    what=f"run {run} of job {job}",
                )
            if run < 2:
                for job in jobs:
                    slurm.run("scontrol", "requeue", str(job))
        await made.events.flush()
        acts = await made.events.read_all(kinds=["slurm"])
        assert any(act["act"] == "hasten_job" for act in acts), "nobody had to wait for the credential's life"
        assert "non-startable" not in slurm.log()
        assert {slurm.job(job)["Restarts"] for job in jobs} == {"2"}


@pytest.mark.timeout(120)
async def test_a_parked_node_that_was_resumed_costs_no_job(
    clean_slurm: Testbed, valkey: redis.Redis, valkey_url: str
) -> None:
    slurm = clean_slurm
    async with part(slurm, valkey_url) as made:
        await made.until(
            lambda: all(slurm.fill(n) == 0 for n in slurm.nodes), timeout_s=20, what="closed counts"
        )
        job = slurm.sbatch(script=JOB)
        # It says that the nodes which are up cannot be resumed, and resumes the parked one.
        slurm.attempt("scontrol", "update", "nodename=ALL", "state=resume")
        await made.until(
            lambda: "DRAIN" in slurm.node("hspark")["State"], timeout_s=20, what="the parked node out again"
        )
        assert slurm.fill("hspark") == slurm.gpus
        assert slurm.job(job)["JobState"] == "PENDING"
        # What the policy worker of an older release did: no node could run the job, and Slurm held it.
        slurm.set_fill("hspark", 0)
        await await_until(
            lambda: slurm.job(job)["Reason"].startswith("BadConstraints"), timeout_s=30, what="the hold"
        )
        assert slurm.attempt("sbatch", "--test-only", stdin=JOB).returncode != 0
        made.side.gate("a", is_open=True)
        await made.until(
            lambda: slurm.job(job)["JobState"] == "RUNNING", timeout_s=40, what="the job that was held"
        )
        assert slurm.fill("hspark") == slurm.gpus
        slurm.run("scancel", str(job))
    for state in ("resume", "down"):
        slurm.run("scontrol", "update", "nodename=hspark", f"state={state}", "reason=hybridsched-parked")
