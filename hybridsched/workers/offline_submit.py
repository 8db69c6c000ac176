"""Submit a batch file to a pool: judge it, make its work folder, register it.

Runs with the rights of the batch's user, in the command line or in a program of theirs.
"""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from hybridsched.batches.assemble import Assembler
from hybridsched.batches.errors import BatchGoneError, OutputBusyError, OutputExistsError
from hybridsched.batches.layout import BatchFiles, local_batch_id, plan_files, same_file
from hybridsched.batches.parts import main_model, models_apart
from hybridsched.batches.progress import Progress
from hybridsched.batches.scan import InputIndex
from hybridsched.batches.work import WorkFolder
from hybridsched.store.batch_values import BatchInfo, BatchPart, BatchUnknownError, NewBatch
from hybridsched.store.batches import BatchStore, new_batch_id

_TRIES = 40
_PAUSE_S = 0.05
"""While another start registers the same batch, or it ends, this one looks again after this: so often."""

_pause = time.sleep


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

    Without `model` the workers of each model run the lines that name it; with it those of that model run all
    of them, whatever they name. Submitting the same file with
    the same output again changes nothing while the batch runs; when the pool has lost it (its Redis was
    emptied), or it had failed, it goes on from what is on disk. With `jobs_only` only Slurm jobs of its user
    run it, also when the pool's workers did so far. `progress` is told the bytes read so far.

    Raises:
        BatchFileError: a file cannot be used as asked (see its subclasses).
        ValueError: the deadline is not ahead.
        redis.RedisError: the store cannot be reached; run it again, the work folder is taken up.
    """
    files = plan_files(source, new_batch_id(), output=output, errors=errors)
    for left in reversed(range(_TRIES)):
        try:
            work = WorkFolder.create(files, progress=progress)
        except OutputExistsError as error:
            raise OutputExistsError(f"{error}{_writer(store, files)}") from error
        try:
            return _submit(store, work, model, deadline_in_ms, jobs_only=jobs_only)
        except _AtWorkError:
            if not left:
                raise
        except BatchGoneError as error:  # it ended, or its start was taken back, since it was found
            if not left:
                raise OutputBusyError(f"{files.output}: batches with this output come and go") from error
        finally:
            work.close()
        _pause(_PAUSE_S)
    raise AssertionError("the last try returns or raises")


class _AtWorkError(OutputBusyError):
    """Another process has the batch to itself, and the pool does not know it (yet)."""


def _submit(
    store: BatchStore,
    work: WorkFolder,
    model: str | None,
    deadline_in_ms: float | None,
    *,
    jobs_only: bool,
) -> Submitted:
    if work.files.batch_id == local_batch_id(work.files.output):
        raise OutputBusyError(
            f"{work.files.output} is the output of an unfinished `hybridsched batch run`; run it to its "
            "end, or choose another --output"
        )
    known = _active(store, work.files.batch_id)
    if known is None:
        try:
            work.lock_exclusive()
        except OutputBusyError as error:
            raise _AtWorkError(str(error)) from error
        known = _active(store, work.files.batch_id)  # who had the lock before may have registered it
    if known is not None:
        if jobs_only and not known.jobs_only:
            known = store.leave_to_jobs(known.id)
        return Submitted(batch=known, index=work.index, known=True, resumed=True)
    try:
        batch = _register(store, work, model, deadline_in_ms, jobs_only=jobs_only)
    except ValueError:
        if not work.resumed:
            work.discard()
        raise
    return Submitted(batch=batch, index=work.index, known=False, resumed=work.resumed)


def _writer(store: BatchStore, files: BatchFiles) -> str:
    """Which batch of the pool has made the files that stand in the way, as the end of a sentence."""
    mine = (files.output, files.errors)
    for batch in reversed(store.all()):
        if any(same_file(name, other) for name in mine for other in (batch.output, batch.errors)):
            return (
                f". Batch {batch.id}, which is {batch.status}, has written it: `hybridsched batch status "
                f"{batch.id}` shows that one"
            )
    return ""


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
    """Only for the holder of the folder's exclusive lock."""
    index = work.index
    models = () if model is not None else models_apart(index)
    place = Assembler(work).restart(models)
    return store.submit(
        NewBatch(
            id=work.files.batch_id,
            user=_user(),
            uid=work.uid,
            model=model or main_model(index),
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
            parts=_parts(index, place),
        )
    )


def _parts(index: InputIndex, place: Progress) -> tuple[BatchPart, ...]:
    """The parts as the files are now. The first has the lines, and the tokens, that are nobody else's."""
    others = place.models[1:]
    lines, tokens = index.models, {name: _tokens_of(index, name) for name in others}
    first = (index.lines - sum(lines[name] for name in others), index.tokens - sum(tokens.values()))
    found = []
    for part in place.parts:
        mine = (lines[part.model], tokens[part.model]) if part.model in tokens else first
        found.append(
            BatchPart(
                model=part.model,
                lines=mine[0],
                tokens=mine[1],
                cursor=place.offset,
                cursor_line=place.line,
                next_chunk=part.next_chunk,
                at_end=place.at_end,
                ended=mine[0] * (place.done + place.failed) // max(1, index.lines),
            )
        )
    return tuple(found)


def _tokens_of(index: InputIndex, model: str) -> int:
    known = index.model_tokens.get(model)
    return index.tokens * index.models[model] // max(1, index.valid) if known is None else known


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())  # a container user without a name
