"""The reservation ahead of a switch on real Slurm: whom it keeps off, and whom not."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from hybridsched.cluster.commands import CommandCluster
from hybridsched.cluster.values import ClusterError
from tests.helpers import await_until
from tests.slurm import Testbed, clean_slurm, slurm

__all__ = ["clean_slurm", "slurm"]

LONG = ("--partition=online", "--nodelist=n1", "--time=600")
"""It would still run when the reservation begins."""


@pytest.mark.timeout(120)
async def test_long_jobs_of_others_are_kept_off_and_replicas_are_not(clean_slurm: Testbed) -> None:
    """A replica that dies in the hours before a switch has to be replaced: the floor holds then as well."""
    cluster = CommandCluster(environment=clean_slurm.env)

    async def gone() -> bool:
        try:
            await cluster.unreserve("hs-try-night-1")
        except ClusterError:
            return False
        return True

    await cluster.reserve("hs-try-night-1", ["n1"], (time.time() + 3600) * 1000.0, 120)
    try:
        if os.geteuid() == 0:
            other = clean_slurm.sbatch(*LONG, "--uid=nobody", script="#!/bin/bash\nsleep 60\n")

            async def kept_off() -> bool:
                job = await asyncio.to_thread(clean_slurm.job, other)
                return job.get("JobState") == "PENDING" and "reserved" in job.get("Reason", "").lower()

            await await_until(kept_off, timeout_s=40, what="a job that the reservation keeps off")
        replica = clean_slurm.sbatch(*LONG, script="#!/bin/bash\nsleep 60\n")
        await asyncio.to_thread(clean_slurm.wait_job, replica, "RUNNING")
        # One that runs there keeps it in use: it goes when the host has emptied.
        with pytest.raises(ClusterError):
            await cluster.unreserve("hs-try-night-1")
    finally:
        await asyncio.to_thread(clean_slurm.clear)
        await await_until(gone, timeout_s=30, what="the end of the reservation")
        await cluster.close()
