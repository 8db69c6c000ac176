"""What a job's log says at its end: whether, and how, it goes on."""

from __future__ import annotations

import asyncio
import signal

import pytest
import structlog

from hybridsched.workers.offline_job import OfflineJob
from hybridsched.workers.offline_job_end import Outcome, say_left
from hybridsched.workers.slurm_env import JobPlace


@pytest.mark.parametrize(
    ("number", "says", "why"),
    [
        (signal.SIGUSR2, "its next run goes on", "wants the GPU back"),
        (signal.SIGTERM, "submit the same file again", "scancel"),
        (None, "its next run goes on", "no lane"),
    ],
)
def test_a_cancelled_job_does_not_promise_a_next_run(
    number: signal.Signals | None, says: str, why: str
) -> None:
    with structlog.testing.capture_logs() as said:
        assert say_left("batch_a", told=number) is Outcome.LEFT
    (entry,) = said
    assert says in entry["event"]
    assert why in entry["why"]


def test_the_first_signal_counts() -> None:
    """SIGTERM follows at the end of the notice; the job has asked for its next run by then."""
    job = OfflineJob(redis_url="redis://r", pool="p", place=JobPlace(job="7", node="n1"), source="a.jsonl")
    stop = asyncio.Event()
    job.tell(signal.SIGUSR2, stop)
    job.tell(signal.SIGTERM, stop)
    assert job.told == signal.SIGUSR2
