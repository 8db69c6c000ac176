"""What a process learns from Slurm about its own job, and how it asks for another run."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from hybridsched.log import get_logger

if TYPE_CHECKING:
    from hybridsched.store.lane_holders import Place

LEAVE_STATUS = 75
"""Exit status of a program that has kept its place and wants another run: EX_TEMPFAIL of sysexits.h."""

HELD_VARIABLE = "HYBRIDSCHED_LANE_HELD"
"""Set by `hybridsched lane run` for its command: it keeps the lane, and the place in Slurm (`HeldMark`)."""

_ATTEMPTS = 6
_ATTEMPT_S = 10.0
"""Limit of one `scontrol requeue`; with the pauses in between, all attempts fit into a notice of 60 s."""

_log = get_logger("slurm")


class JobPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The Slurm job that a process belongs to."""

    job: str
    """As scontrol takes it: `12`, or `12_3` for a task of an array. The bare id of an array's first task
    would mean the whole array."""
    node: str
    """Name of the node in Slurm, which need not be the host's."""
    restarts: int = 0
    """How often Slurm has requeued it."""


class HeldMark(msgspec.Struct, frozen=True, kw_only=True):
    """Who keeps the lane for a process, as it stands in `HELD_VARIABLE`.

    Environments are handed on, from a job to those that it submits too: a mark holds only within the run of
    the job that it names, and while Redis has that owner as the lane's holder.
    """

    job: str = ""
    """As in `JobPlace`; empty outside Slurm."""
    restarts: int = 0
    owner: str = ""
    """As in the lane's holder record."""
    lane: str = ""
    model: str = ""
    url: str = ""

    def text(self) -> str:
        """As it stands in the environment."""
        return msgspec.json.encode(self).decode()

    def holds_in(self, place: JobPlace | None) -> bool:
        """Whether it was made in this run of this job."""
        job, restarts = ("", 0) if place is None else (place.job, place.restarts)
        return bool(self.owner and self.lane) and (self.job, self.restarts) == (job, restarts)


def held_by(job: JobPlace | None, owner: str, place: Place) -> HeldMark:
    """The mark of a lane that this job's process `owner` keeps."""
    return HeldMark(
        job=job.job if job else "",
        restarts=job.restarts if job else 0,
        owner=owner,
        lane=place.lane,
        model=place.model,
        url=place.url,
    )


def held_mark(environ: Mapping[str, str] | None = None) -> HeldMark | None:
    """The mark in the environment, whether it holds here or not; None: there is none that can be read."""
    raw = (os.environ if environ is None else environ).get(HELD_VARIABLE)
    if not raw:
        return None
    try:
        return msgspec.json.decode(raw, type=HeldMark)
    except (msgspec.DecodeError, UnicodeError):
        return HeldMark()


def job_place(environ: Mapping[str, str] | None = None) -> JobPlace | None:
    """The job of this process; None outside Slurm."""
    env = os.environ if environ is None else environ
    job, node = env.get("SLURM_JOB_ID", ""), env.get("SLURMD_NODENAME", "")
    if not job or not node:
        return None
    array, task = env.get("SLURM_ARRAY_JOB_ID", ""), env.get("SLURM_ARRAY_TASK_ID", "")
    restarts = env.get("SLURM_RESTART_COUNT", "0")
    return JobPlace(
        job=f"{array}_{task}" if array and task else job,
        node=node,
        restarts=int(restarts) if restarts.isdigit() else 0,
    )


def own_gpus(environ: Mapping[str, str] | None = None) -> str | None:
    """The GPUs that Slurm gave to this job alone; None: it has none, as a job on a lane should."""
    return (os.environ if environ is None else environ).get("SLURM_JOB_GPUS") or None


def requeue(place: JobPlace, *, attempts: int = _ATTEMPTS, pause_s: float = 1.0) -> bool:
    """Put the own job back in Slurm's queue; then exit soon, for Slurm ends what is left of it.

    Needed because a job that exits within its notice counts as ended, whatever its exit status. False: Slurm
    could not be told; the job ends, and submitting it again goes on where it was.
    """
    said = ""
    for attempt in range(attempts):
        if attempt:
            time.sleep(pause_s)
        try:
            done = subprocess.run(  # noqa: S603 - an argument list, of Slurm's own words
                ["scontrol", "requeue", place.job],  # noqa: S607 - the site's scontrol is where PATH says
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_ATTEMPT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
            continue
        if done.returncode == 0:
            return True
        said = (done.stderr or done.stdout).strip()
    _log.error(
        "Slurm could not be told to run this job again. Submit it once more: it goes on where it was.",
        key="requeue_failed",
        job=place.job,
        said=said,
    )
    return False
