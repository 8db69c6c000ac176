"""Submit a batch file to a pool: judge it, make its work folder, register it.

Runs with the rights of the batch's user, in the command line or in a program of theirs.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from hybridsched.batches.assemble import Assembler
from hybridsched.batches.files import OutputBusyError
from hybridsched.batches.layout import local_batch_id, plan_files
from hybridsched.batches.scan import InputIndex
from hybridsched.batches.work import WorkFolder
from hybridsched.store.batch_values import BatchInfo, BatchUnknownError, NewBatch
from hybridsched.store.batches import BatchStore, new_batch_id


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that the pool knows now."""

    batch: BatchInfo
    index: InputIndex
    """What was found in the input."""
    known: bool
    """The pool knew it before: the same input was submitted with the same output and has not ended."""
    resumed: bool
    """It had been started before, and goes on from there."""


def submit_file(
    store: BatchStore,
    source: str | Path,
    *,
    output: str | Path | None = None,
    errors: str | Path | None = None,
    model: str | None = None,
    deadline_in_ms: float | None = None,
    jobs_only: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Submitted:
    """Submit `source` to the pool of `store`.

    Without `model` the one that most lines name decides which workers run it. Submitting the same file with
    the same output again changes nothing while the batch runs; when the pool has lost it (its Redis was
    emptied), or it had failed, it goes on from what is on disk. With `jobs_only` only Slurm jobs of its user
    run it, also when the pool's workers did so far. `progress` is told the bytes read so far.

    Raises:
        BatchFileError: a file cannot be used as asked (see its subclasses).
        ValueError: the deadline is not ahead.
        redis.RedisError: the store cannot be reached; run it again, the work folder is taken up.
    """
    work = WorkFolder.create(
        plan_files(source, new_batch_id(), output=output, errors=errors), progress=progress
    )
    try:
        if work.files.batch_id == local_batch_id(work.files.output):
            raise OutputBusyError(
                f"{work.files.output} is the output of an unfinished `hybridsched batch run`; run it to its "
                "end, or choose another --output"
            )
        known = _active(store, work.files.batch_id)
        if known is not None:
            if jobs_only and not known.jobs_only:
                known = store.leave_to_jobs(known.id)
            return Submitted(batch=known, index=work.index, known=True, resumed=True)
        batch = _register(store, work, model, deadline_in_ms, jobs_only=jobs_only)
        return Submitted(batch=batch, index=work.index, known=False, resumed=work.resumed)
    except ValueError:
        if not work.resumed:
            work.discard()
        raise
    finally:
        work.close()


def _active(store: BatchStore, batch_id: str) -> BatchInfo | None:
    try:
        batch = store.get(batch_id)
    except BatchUnknownError:
        return None
    return None if batch.status.ended else batch


def _register(
    store: BatchStore,
    work: WorkFolder,
    model: str | None,
    deadline_in_ms: float | None,
    *,
    jobs_only: bool,
) -> BatchInfo:
    work.lock_exclusive()
    place = Assembler(work).restart()
    index = work.index
    named = max(index.models, key=lambda name: index.models[name]) if index.models else None
    return store.submit(
        NewBatch(
            id=work.files.batch_id,
            user=_user(),
            uid=work.uid,
            model=model or named,
            input=work.files.input,
            output=work.files.output,
            errors=work.files.errors,
            work=str(work.path),
            bytes=index.size,
            lines=index.lines,
            tokens=index.tokens,
            cursor=place.offset,
            cursor_line=place.line,
            next_chunk=place.next_chunk,
            done=place.done,
            failed=place.failed,
            at_end=place.at_end,
            deadline_in_ms=deadline_in_ms,
            jobs_only=jobs_only,
        )
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())  # a container user without a name
