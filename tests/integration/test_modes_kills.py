"""A change of mode on real Slurm daemons: the policy worker killed, or slurmctld restarted, at every step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import redis

from hybridsched.core.modes import ModesPolicy
from hybridsched.core.switch_values import Step
from tests.helpers import alive, await_until
from tests.integration.modes_faults import POINTS, draining, held_pool, nothing_invalid, other_mode
from tests.integration.modes_rig import ModesPool, ModesTestbed, day_slurm, modes_pool, modes_slurm, two_modes

__all__ = ["day_slurm", "modes_slurm"]


@pytest.mark.timeout(240)
async def test_a_policy_worker_killed_at_every_step_is_followed_by_one_that_completes(
    day_slurm: ModesTestbed, valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    async with held_pool(day_slurm, valkey_url, tmp_path) as (pool, faults):
        pool.start()  # a standby

        job, mode = await draining(pool)
        await pool.kill_leader()
        day_slurm.run("scancel", str(job))
        await pool.at_rest(mode, 1)

        for n, (word, step) in enumerate(POINTS, start=1):
            faults.hold(word)
            mode = await other_mode(pool, n)
            held = await faults.at(word)
            assert (await pool.state()).hosts["n1"].step is step
            await pool.kill_leader()
            if "-" in word:
                # What the dead worker had asked of the hand dies with it: late, it would undo what its
                # successor did.
                await await_until(lambda pid=held: not alive(pid), what=f"the end of the hand at {word}")
            faults.release(word)
            await pool.at_rest(mode, 1)
        nothing_invalid(day_slurm)


@pytest.mark.timeout(240)
async def test_slurmctld_restarted_at_every_step_changes_nothing(
    day_slurm: ModesTestbed, valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    async with held_pool(day_slurm, valkey_url, tmp_path) as (pool, faults):
        job, mode = await draining(pool)
        await asyncio.to_thread(day_slurm.hand, "-", "slurmctld-restart")
        day_slurm.run("scancel", str(job))
        await pool.at_rest(mode, 1)
        points = [("slurmd-stop", 1), ("mig-apply", 1), ("slurmd-start", 1), ("mig-assert", 2)]
        for n, (word, call) in enumerate(points, start=1):
            faults.hold(word, call)
            mode = await other_mode(pool, n)
            await faults.at(word)
            await asyncio.to_thread(day_slurm.hand, "-", "slurmctld-restart")
            faults.release(word)
            await pool.at_rest(mode, 1)
        nothing_invalid(day_slurm)


# -- warming ---------------------------------------------------------------------------------------------


def one_host() -> ModesPolicy:
    """With an engine by day and one at night; alone, it can keep no floor."""
    modes = two_modes(1)
    return msgspec.structs.replace(
        modes,
        mode=tuple(
            msgspec.structs.replace(
                mode,
                engines=tuple(msgspec.structs.replace(e, floor=0, warm_ms=60_000.0) for e in mode.engines),
            )
            for mode in modes.mode
        ),
    )


async def warming(pool: ModesPool) -> str:
    """Into the night, as far as warming and no further: Slurm starts no job in the partition. The replica's
    job."""
    slurm = pool.slurm
    await pool.at_rest("day", 1)
    slurm.run("scontrol", "update", "partitionname=online", "state=down")
    await pool.store.order("night", (), by="the test")
    await pool.until(lambda hosts: hosts["n1"].step is Step.WARMING, "a host that warms up")
    jobs: list[str] = []

    async def asked() -> bool:
        said = await asyncio.to_thread(slurm.run, "squeue", "-h", "-t", "PENDING", "-o", "%i")
        jobs[:] = said.split()
        return len(jobs) == 1

    await await_until(asked, timeout_s=30, what="a replica that waits")
    return jobs[0]


async def warm(pool: ModesPool, job: str) -> None:
    """Slurm starts jobs again: one replica comes, the one that waited."""
    pool.slurm.run("scontrol", "update", "partitionname=online", "state=up")
    await pool.at_rest("night", 1)

    async def alone() -> bool:
        return set(await pool.serving()) == {job}

    # A replica of the day may have started before the order came; its record outlives it for a while.
    try:
        await await_until(alone, timeout_s=60, what="one replica that serves")
    except AssertionError as error:
        jobs = pool.slurm.run("squeue", "-h", "-o", "%i %T %r")
        raise AssertionError(f"{error}: not {job} but {await pool.serving()}; {jobs}") from None
    assert pool.slurm.run("squeue", "-h", "-o", "%i").split() == [job]
    nothing_invalid(pool.slurm)


@pytest.mark.timeout(180)
async def test_a_policy_worker_killed_while_a_host_warms_up_is_followed_by_one_that_waits_for_it(
    day_slurm: ModesTestbed, valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    async with modes_pool(day_slurm, valkey_url, tmp_path, one_host()) as pool:
        job = await warming(pool)
        pool.start()  # a standby
        before = await pool.leader()
        await pool.kill_leader()

        async def led() -> bool:
            return await pool.leader() not in ("", before)

        await await_until(led, timeout_s=20, what="a successor")
        assert (await pool.state()).hosts["n1"].step is Step.WARMING
        await warm(pool, job)


@pytest.mark.timeout(180)
async def test_slurmctld_restarted_while_a_host_warms_up_changes_nothing(
    day_slurm: ModesTestbed, valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    async with modes_pool(day_slurm, valkey_url, tmp_path, one_host()) as pool:
        job = await warming(pool)
        await asyncio.to_thread(day_slurm.hand, "-", "slurmctld-restart")
        await warm(pool, job)
