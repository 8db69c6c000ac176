"""The runs of Slurm's jobs, from what is seen of them."""

from __future__ import annotations

from typing import Any

import pytest

from hybridsched.cluster.fake import FakeCluster
from hybridsched.cluster.values import ClusterError, Job, JobSpec
from hybridsched.demo.slurm_jobs import Timeline, over, tell_to_leave


def job(state: str, *flags: str, restarts: int = 0, **more: Any) -> Job:
    nodes = ("n1",) if state in ("RUNNING", "COMPLETING") else ()
    return Job(
        id=7,
        name="offline",
        partition="offline",
        state=state,
        flags=flags,
        nodes=nodes,
        restarts=restarts,
        **more,
    )


def test_a_job_that_waits_runs_and_ends() -> None:
    seen = Timeline()
    seen.submitted(7, 10.0)
    for at_s, one in (
        (10.5, job("PENDING")),
        (11.0, job("PENDING")),
        (11.5, job("RUNNING")),
        (12.0, job("RUNNING")),
        (12.5, job("COMPLETING")),
        (13.0, job("COMPLETED")),
    ):
        seen.look([one], at_s)
    (run,) = seen.runs()
    assert (run.run, run.submit_s, run.start_s, run.end_s) == (1, 10.0, 11.5, 12.5)
    assert (run.node, run.state) == ("n1", "COMPLETED")


def test_a_requeued_job_has_a_second_run() -> None:
    seen = Timeline()
    seen.submitted(7, 1.0)
    for at_s, one in (
        (1.0, job("RUNNING")),
        # Slurm counts the restart while it still ends the first run.
        (2.0, job("COMPLETING", restarts=1)),
        (3.0, job("PENDING", "COMPLETING", restarts=1)),
        (4.0, job("PENDING", restarts=1)),
        (5.0, job("RUNNING", restarts=1)),
        (6.0, job("CANCELLED", restarts=1)),
    ):
        seen.look([one], at_s)
    first, second = seen.runs()
    assert (first.start_s, first.end_s, first.state) == (1.0, 2.0, "REQUEUED")
    assert (second.run, second.submit_s, second.start_s, second.end_s) == (2, 4.0, 5.0, 6.0)
    assert second.state == "CANCELLED"
    assert seen.last(7) == second
    assert seen.last(8) is None


def test_a_job_that_never_ran_has_no_start() -> None:
    seen = Timeline()
    seen.look([job("PENDING")], 1.0)
    seen.look([job("CANCELLED")], 2.0)
    (run,) = seen.runs()
    assert (run.start_s, run.end_s, run.state) == (None, 2.0, "CANCELLED")


def test_the_time_of_submission_is_slurms_where_another_submitted() -> None:
    import time

    seen, now_s = Timeline(), time.monotonic()
    seen.look([job("PENDING", submit_ms=(time.time() - 5) * 1000)], now_s)
    (run,) = seen.runs()
    assert now_s - 7 < run.submit_s < now_s - 3


def test_over_means_that_nothing_waits_or_is_being_ended() -> None:
    assert over([])
    assert over([job("COMPLETED"), job("CANCELLED")])
    assert not over([job("COMPLETED"), job("PENDING")])
    assert not over([job("CANCELLED", "COMPLETING")])


async def test_a_job_that_ended_since_slurm_was_read_needs_no_telling() -> None:
    """The end of a demo failed over a replica that had ended by itself a moment before."""
    cluster = FakeCluster()
    number = await cluster.submit(JobSpec(name="r", script="#!/bin/bash", partition="online"))
    await cluster.cancel(number)
    with pytest.raises(ClusterError) as error:
        await cluster.signal(number, "USR2")
    assert error.value.code == "not_found"
    await tell_to_leave(cluster, number)


async def test_a_job_that_cannot_be_told_is_an_error() -> None:
    cluster = FakeCluster()
    with pytest.raises(ClusterError):
        await tell_to_leave(cluster, -1)
