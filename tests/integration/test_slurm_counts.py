"""Counts that move under running jobs, on real daemons that register every few seconds."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator

import pytest

from hybridsched.cluster.commands import CommandCluster
from hybridsched.cluster.values import total
from tests.helpers import await_until, wait_until
from tests.slurm import Testbed, new_state, require_slurm, sweep

JOB = """#!/bin/bash
#SBATCH --partition=offline --gres=hsfill:1,hslane:1
#SBATCH --requeue --signal=B:USR2@60 --open-mode=append --time=30
echo run ${SLURM_RESTART_COUNT:-0}
sleep 600
"""

SLURMD_TIMEOUT_S = 3
"""slurmctld pings every third of it, and asks a node to register at every twentieth ping: every 20 s."""


def prepared(testbed: Testbed, *edits: tuple[str, str]) -> None:
    """Write the testbed's files and change slurm.conf before anything runs."""
    testbed.up("--prepare")
    text = testbed.conf.read_text()
    for old, new in (("SlurmdTimeout=30", f"SlurmdTimeout={SLURMD_TIMEOUT_S}"), *edits):
        changed = re.sub(old, new, text)
        assert changed != text, f"{old} is not in slurm.conf"
        text = changed
    testbed.conf.write_text(text)


@pytest.fixture
def bed() -> Iterator[Testbed]:
    require_slurm()
    sweep()
    testbed = Testbed(new_state(), "--no-hooks", nodes=1)
    try:
        yield testbed
    finally:
        testbed.down()


def registrations(bed: Testbed) -> int:
    """How often n1 has registered, by slurmctld's log at debug2."""
    return bed.log().count("_slurm_rpc_node_registration complete for n1")


@pytest.mark.timeout(180)
async def test_no_node_leaves_service_while_counts_move_under_its_jobs(bed: Testbed) -> None:
    """Registrations by themselves, by reconfigure, by a new slurmd; the site's own GRES stay as they are."""
    prepared(
        bed,
        ("GresTypes=gpu,", "GresTypes=gpu,nic,"),
        (r"(NodeName=n1 .*Gres=\S+)", r"\1,nic:no_consume:2"),
        # A ping waits for a node that never answers: without the parked one they come as fast as they may.
        ("NodeName=hspark.*\n", ""),
        (",hspark", ""),
        ("SlurmctldDebug=verbose", "SlurmctldDebug=debug2"),
    )
    with (bed.state / "etc" / "gres.conf").open("a") as file:
        file.write("NodeName=n1 Name=nic Count=2\n")
    bed.up()
    cluster = CommandCluster(environment=bed.env)
    jobs = [bed.sbatch("--gres=hsfill:1,hslane:1,nic:1", script=JOB) for _ in range(3)]
    for job in jobs:
        bed.wait_job(job, "RUNNING")

    async def steer(*counts: int) -> None:
        for count in counts:
            await cluster.set_gres_count("n1", "hsfill", count)
            (node,) = await cluster.nodes(["n1"])
            assert node.states[0] in ("IDLE", "MIXED", "ALLOCATED"), (node.states, node.reason)
            assert node.usable, (node.states, node.reason)
            assert (total(node.gres, "hslane"), total(node.gres, "nic")) == (4, 2)
            assert total(node.gres_used, "hslane") == 3

    await steer(0, 2, 1, 3, 1)
    seen = registrations(bed)
    deadline = time.monotonic() + 90
    while registrations(bed) == seen:
        assert time.monotonic() < deadline, "no registration by itself"
        await steer(2, 1)
        await asyncio.sleep(0.5)
    bed.run("scontrol", "reconfigure")
    await steer(0, 1)
    seen = registrations(bed)
    bed.kill("slurmd-n1", 15)
    bed.up()
    await await_until(
        lambda: registrations(bed) > seen, timeout_s=60, what="the registration of a new slurmd"
    )
    await steer(0, 1, 0)
    assert all(bed.job(job)["JobState"] == "RUNNING" for job in jobs)
    # Three jobs hold one each of two: the site's own GRES is still one that nobody consumes.
    await cluster.set_gres_count("n1", "hsfill", 1)
    fourth = bed.sbatch("--gres=hsfill:1,hslane:1,nic:2", script=JOB)
    bed.wait_job(fourth, "RUNNING")
    await cluster.close()


@pytest.mark.timeout(120)
def test_a_consumed_count_takes_the_node_out_of_service_and_the_remedy_brings_it_back(bed: Testbed) -> None:
    """What the check warns of, and what it says to do then (`node_state` of `hybridsched slurm check`)."""
    prepared(bed, ("hsfill:no_consume:4", "hsfill:4"))
    bed.up()
    job = bed.sbatch(script=JOB)
    bed.wait_job(job, "RUNNING")
    bed.run("scontrol", "update", "nodename=n1", "gres=gpu:a100:4,hsfill:1,hslane:4")
    bed.kill("slurmd-n1", 15)
    bed.up()
    wait_until(lambda: "INVAL" in bed.node("n1")["State"], timeout_s=30, what="node n1 INVAL")
    assert "count changed and jobs are using them" in bed.node("n1")["Reason"]
    resume = ("scontrol", "update", "nodename=n1", "state=resume")
    assert bed.attempt(*resume).returncode != 0, "refused while the job is there"

    bed.run("scontrol", "requeue", str(job))
    bed.wait_job(job, "PENDING")
    bed.conf.write_text(bed.conf.read_text().replace("hsfill:4", "hsfill:no_consume:4"))
    bed.restart_controller()

    def resumed() -> bool:
        bed.attempt(*resume)
        return bed.node("n1")["State"] in ("IDLE", "MIXED")

    wait_until(resumed, timeout_s=40, what="node n1 back in service")
