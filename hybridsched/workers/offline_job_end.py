"""How a run of an offline job ended: its exit status, and what its log says."""

from __future__ import annotations

import signal
from enum import IntEnum

from hybridsched.log import get_logger
from hybridsched.store.batch_values import BatchProgress, BatchStatus
from hybridsched.workers.slurm_env import LEAVE_STATUS

_log = get_logger("job")


class Outcome(IntEnum):
    """How a run of the job ended, as its exit status."""

    COMPLETE = 0
    ENDED = 1
    """The batch ended otherwise: failed, cancelled or past its deadline."""
    LEFT = LEAVE_STATUS
    """Its place is kept; another run goes on from there."""


def say_left(batch_id: str, *, told: int | None) -> Outcome:
    """It leaves before the end of its batch. `told`: the signal by which it was told to; None: it was not."""
    # scancel and the end of the notice come as SIGTERM: nothing runs again by itself then.
    ended = told in (signal.SIGTERM, signal.SIGINT)
    if ended:
        why = "it was ended: by scancel or scontrol requeue, or at the end of its notice"
    elif told is not None:
        why = "Slurm or the policy wants the GPU back, or the time limit is near"
    else:
        why = "no lane of this node has been open for long"
    _log.info(
        "The job ends with its place kept. Slurm runs it again if it was requeued; else submit the same "
        "file again to go on from here."
        if ended
        else "The job leaves with its place kept; its next run goes on from here.",
        key="job_leaves",
        batch=batch_id,
        why=why,
    )
    return Outcome.LEFT


def say_ended(found: BatchProgress) -> Outcome:
    """The batch has ended."""
    batch = found.batch
    complete = batch.status is BatchStatus.COMPLETED
    text = "The batch is complete." if complete else "The batch has ended before all of it had run."
    if complete and found.failed:
        text = "The batch is complete; lines of it failed, and stand in the errors file."
        if not found.done:
            text = "The batch has ended, and not one of its lines could run; see the errors file."
    (_log.info if complete else _log.error)(
        text,
        key="job_complete" if complete else "job_ended",
        batch=batch.id,
        status=batch.status.value,
        why=batch.message or batch.stop,
        done=found.done,
        failed=found.failed,
        output=batch.output,
        errors=batch.errors,
    )
    return Outcome.COMPLETE if complete else Outcome.ENDED
