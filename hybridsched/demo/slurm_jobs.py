"""Slurm's jobs as the demo sees them: looked at again and again, with each run of each job kept."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from hybridsched.cluster.protocol import Cluster
from hybridsched.cluster.values import ClusterError, Job
from hybridsched.report.record import JobRun

_DONE = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"})


class Timeline:
    """The runs of all jobs, built from looks at them. Slurm's own are whole seconds, these are finer."""

    def __init__(self) -> None:
        self._runs: dict[int, list[JobRun]] = {}
        self._submitted: dict[int, float] = {}
        self._epoch_s = time.time() - time.monotonic()

    def submitted(self, job: int, at_s: float) -> None:
        """The demo itself has submitted a job."""
        self._submitted[job] = at_s

    def look(self, jobs: Iterable[Job], at_s: float) -> None:
        """Take up what Slurm shows at `at_s` (monotonic)."""
        for job in jobs:
            self._take(job, at_s)

    def runs(self) -> tuple[JobRun, ...]:
        """By the time of submission, the runs of a job together."""
        ordered = sorted(self._runs.values(), key=lambda runs: (runs[0].submit_s, runs[0].id))
        return tuple(run for runs in ordered for run in runs)

    def last(self, job: int) -> JobRun | None:
        """A job's latest run; None before it was seen."""
        runs = self._runs.get(job)
        return runs[-1] if runs else None

    def _take(self, job: Job, at_s: float) -> None:
        runs = self._runs.setdefault(job.id, [])
        number = (job.restarts or 0) + 1
        if not runs:
            runs.append(self._new(job, number, self._submit_s(job, at_s)))
        elif number > runs[-1].run and job.leaving:
            # Slurm counts the next run already, and the one before is still being ended.
            if runs[-1].end_s is None:
                runs[-1] = msgspec.structs.replace(runs[-1], end_s=at_s, state="REQUEUED")
            return
        elif number > runs[-1].run:
            # The run before has ended, at the latest now, and the job is back in the queue.
            runs[-1] = msgspec.structs.replace(runs[-1], end_s=runs[-1].end_s or at_s, state="REQUEUED")
            runs.append(self._new(job, number, at_s))
        run = runs[-1]
        started = run.start_s
        if started is None and (job.running or job.leaving):
            started = at_s
        ended = run.end_s
        if ended is None and (job.leaving or job.ended) and started is not None:
            ended = at_s
        if ended is None and job.ended:
            ended = at_s
        node = job.nodes[0] if job.nodes else run.node
        runs[-1] = msgspec.structs.replace(
            run, start_s=started, end_s=ended, node=node, state=job.state or run.state
        )

    @staticmethod
    def _new(job: Job, number: int, submit_s: float) -> JobRun:
        return JobRun(id=job.id, name=job.name, partition=job.partition, run=number, submit_s=submit_s)

    def _submit_s(self, job: Job, at_s: float) -> float:
        known = self._submitted.get(job.id)
        if known is not None or job.submit_ms is None:
            return at_s if known is None else known
        return min(at_s, job.submit_ms / 1000 - self._epoch_s)


def over(jobs: Iterable[Job]) -> bool:
    """Whether none waits, runs or is being ended."""
    return all(job.state in _DONE and not job.leaving for job in jobs)


async def tell_to_leave(cluster: Cluster, job: int) -> None:
    """Send a job the signal after which it leaves; one that has ended since Slurm was read is no error.

    Raises:
        ClusterError: Slurm did not do it.
    """
    try:
        await cluster.signal(job, "USR2")
    except ClusterError as error:
        if error.code != "not_found":
            raise
