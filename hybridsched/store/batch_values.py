"""Values of the batch ledger: statuses, what is known of a batch and of a chunk, and what can go wrong."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import msgspec

from hybridsched.core.deadlines import Work
from hybridsched.store.errors import StoreError
from hybridsched.store.found import answer_or, name_bad


class BatchStatus(StrEnum):
    """OpenAI's names. `validating`: submitted, no worker has opened its files yet."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether nothing follows."""
        return not TRANSITIONS[self]


TRANSITIONS: dict[BatchStatus, frozenset[BatchStatus]] = {
    BatchStatus.VALIDATING: frozenset(
        {BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING, BatchStatus.FAILED}
    ),
    BatchStatus.IN_PROGRESS: frozenset({BatchStatus.FINALIZING, BatchStatus.CANCELLING, BatchStatus.FAILED}),
    BatchStatus.FINALIZING: frozenset({BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.FAILED}),
    BatchStatus.CANCELLING: frozenset({BatchStatus.CANCELLED, BatchStatus.FAILED}),
    BatchStatus.COMPLETED: frozenset(),
    BatchStatus.FAILED: frozenset(),
    BatchStatus.EXPIRED: frozenset(),
    BatchStatus.CANCELLED: frozenset(),
}
"""What may follow each status."""

LAST_MOMENT_MS = 253_370_764_800_000.0
"""The year 9999 begins then, and with it what no calendar here can show."""

LONGEST_DEADLINE_MS = 366 * 86_400_000.0
"""A deadline may be a year ahead: beyond that it is a slip of the pen, and whoever needs none gives none."""

EXPIRED_CODE = "batch_expired"
CANCELLED_CODE = "batch_cancelled"
FAILED_CODE = "batch_failed"


class BatchPart(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of one model, of a batch whose lines name several (see `batches.parts`)."""

    model: str
    """Whose workers run them."""
    lines: int
    tokens: int
    """Estimated prompt and output tokens of its lines."""
    cursor: int
    """Byte offset up to which its chunks are planned."""
    cursor_line: int
    next_chunk: int
    """Number of its next chunk: modulo the number of parts its own place."""
    at_end: bool
    outstanding: int = 0
    """Its chunks planned and not done."""
    ended: int = 0
    """Its lines that have ended, of acknowledged chunks; about, once the batch was taken up anew."""

    @property
    def over(self) -> bool:
        """Whether all of it has run."""
        return self.at_end and self.outstanding == 0


class NewBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch to register. Paths are for people; workers take theirs from the work folder's manifest."""

    id: str
    """Letters, digits, '-' and '_'."""
    user: str
    uid: int
    model: str | None = None
    """Which workers run it; None: any. With parts, that of the first."""
    input: str
    output: str
    errors: str
    work: str
    """The work folder."""
    bytes: int
    """Size of the input."""
    lines: int
    """Lines that are not blank."""
    tokens: int = 0
    """Estimated prompt and output tokens of all lines."""
    cursor: int = 0
    """Byte to go on from, when a part is done already."""
    cursor_line: int = 1
    next_chunk: int = 0
    done: int = 0
    failed: int = 0
    at_end: bool = False
    deadline_in_ms: float | None = None
    """From now; after it the rest is reported `batch_expired`."""
    jobs_only: bool = False
    """Run by Slurm jobs of its user, each with that user's rights, and never by the pool's own workers."""
    parts: tuple[BatchPart, ...] = ()
    """Two or more where its lines name several models."""


class BatchInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the store knows of a batch. Times are server milliseconds."""

    id: str
    user: str
    uid: int
    model: str | None
    input: str
    output: str
    errors: str
    work: str
    bytes: int
    lines: int
    tokens: int
    status: BatchStatus
    stop: str
    """Empty, or why it is being ended: batch_expired, batch_cancelled or batch_failed."""
    message: str
    """Why it failed."""
    cursor: int
    """Byte offset up to which chunks are planned."""
    cursor_line: int
    next_chunk: int
    at_end: bool
    """Whether chunks are planned up to the end of the input."""
    outstanding: int
    """Chunks planned and not done."""
    done: int
    """Lines that ended in the output file, of acknowledged chunks."""
    failed: int
    """Lines that ended in the error file, of acknowledged chunks."""
    output_tokens: int
    submitted_ms: float
    deadline_ms: float | None
    started_ms: float | None
    finished_ms: float | None
    jobs_only: bool = False
    """Run by Slurm jobs of its user only."""
    cut: int = 0
    """Of an ended batch: lines of `failed` that had not run when it was cancelled or its deadline passed."""
    wait_code: str = ""
    """Empty, or why it cannot go on now although it has work: disk_full or files_unusable."""
    wait_message: str = ""
    wait_ms: float | None = None
    """Since when."""
    parts: tuple[BatchPart, ...] = ()
    """Empty, or what each model's workers have of it."""

    @property
    def models(self) -> tuple[str, ...]:
        """The models whose workers it still needs; empty: any worker will do."""
        if not self.parts:
            return (self.model,) if self.model else ()
        left = tuple(part.model for part in self.parts if not part.over)
        return left or tuple(part.model for part in self.parts)  # any of them ends the batch

    def model_of(self, chunk_no: int) -> str | None:
        """Whose workers run a chunk."""
        return self.parts[chunk_no % len(self.parts)].model if self.parts else self.model


class PartInfo(BatchInfo, frozen=True, kw_only=True):
    """A batch as the workers of one of its parts see it: what is counted and planned is that part's."""

    part: int
    """The place of the part."""
    over: bool
    """All of the part has run, and other parts have not."""


def seen_by(batch: BatchInfo, model: str | None) -> BatchInfo | None:
    """A batch as the workers of `model` see it; None: they have nothing of it."""
    if not batch.parts:
        return batch if batch.model in (None, model) else None
    place = next((place for place, part in enumerate(batch.parts) if part.model == model), None)
    return None if place is None else part_info(batch, place)


def part_info(batch: BatchInfo, place: int) -> PartInfo:
    """A batch as the workers of the part at `place` see it."""
    part = batch.parts[place]
    fields: dict[str, Any] = {name: getattr(batch, name) for name in batch.__struct_fields__}
    fields |= {
        "model": part.model,
        "lines": part.lines,
        "tokens": part.tokens,
        "cursor": part.cursor,
        "cursor_line": part.cursor_line,
        "next_chunk": part.next_chunk,
        "at_end": part.at_end,
        "outstanding": part.outstanding,
        "done": part.ended,
        "failed": 0,
    }
    return PartInfo(**fields, part=place, over=part.over and not all(one.over for one in batch.parts))


def work_of(batch: BatchInfo, *, ended: int | None = None) -> Work:
    """What a batch has left, as deadlines are reckoned; `ended`: lines that have ended, if more is known."""
    lines = max(1, batch.lines)
    left = max(0, batch.lines - (batch.done + batch.failed if ended is None else ended))
    return Work(
        batch=batch.id,
        tokens=batch.tokens * left / lines,
        submitted_ms=batch.submitted_ms,
        outstanding=batch.outstanding,
        deadline_ms=batch.deadline_ms,
    )


class BatchProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A batch with what its running chunks have reported."""

    batch: BatchInfo
    done: int
    failed: int
    running_chunks: int
    queued_chunks: int


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk in the ledger."""

    start: int
    end: int
    first_line: int
    lines: int
    tokens: int
    next_line: int
    at_end: bool
    state: str
    """queued, leased or done."""
    owner: str
    lease_ms: float
    """Server time at which the lease ends."""
    fence: int
    done: int
    failed: int
    attempts: int
    """How often a lease ended without the holder's word: its worker died or was cut off."""
    queued_ms: float
    skip: int = 0
    """Bytes from `start` to its first line."""


class ClaimedChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk under the caller's lease."""

    batch: BatchInfo
    no: int
    chunk: Chunk

    @property
    def fence(self) -> int:
        """Tells this claim from every other one of the batch."""
        return self.chunk.fence


class ClaimRefused(msgspec.Struct, frozen=True):
    """Why a chunk was not given: taken, done, stopped, unknown, damaged, or that it is another model's. All
    are harmless."""

    reason: str


class Beat(msgspec.Struct, frozen=True):
    """Answer to a holder of a chunk."""

    ok: bool
    """False: the lease was lost; drop the chunk and write nothing more."""
    stop: str = ""
    """Not empty: the batch is being ended for this reason; put down what is finished, give the chunk back."""


class SweepResult(msgspec.Struct, frozen=True):
    """What a sweep did: (batch, chunk) pairs, and batch ids."""

    reclaimed: tuple[tuple[str, int], ...] = ()
    """Queued again after their lease had ended."""
    requeued: tuple[tuple[str, int], ...] = ()
    """Given a new job, as theirs was lost."""
    expired: tuple[str, ...] = ()
    """Batches whose deadline has just passed."""
    damaged: tuple[str, ...] = ()
    """Batches that were failed because their ledger cannot be read any more."""


class BatchUnknownError(StoreError, LookupError):
    """There is no batch with this id."""


class BatchStateError(StoreError, ValueError):
    """The batch's status does not allow what was asked."""


_parts = msgspec.json.Decoder(tuple[BatchPart, ...])


def read_info(batch_id: str, answer: Any) -> BatchInfo | None:
    """A batch from the answer of HGETALL; None when there is none, or what stands there is no batch of ours.

    The latter is named in the log and passed over: it must not keep others from being read.
    """
    nothing: dict[bytes, bytes] = {}
    fields = answer_or(answer, nothing, f"batch {batch_id}")
    if not fields:
        return None
    try:
        info = info_of(fields)
    except (KeyError, ValueError) as error:
        name_bad(f"batch {batch_id}", f"its record is not whole: {error!r}")
        return None
    if info.id != batch_id:
        name_bad(f"batch {batch_id}", f"its record speaks of {info.id[:80]!r}")
        return None
    return info


def info_of(fields: dict[bytes, bytes]) -> BatchInfo:
    """A batch from its hash.

    Raises:
        KeyError: a field is missing.
        ValueError: a field cannot be what it should.
    """
    text = {key.decode(): value.decode() for key, value in fields.items()}

    def time(name: str) -> float | None:
        return moment(text[name]) if text.get(name) else None

    def moment(given: str) -> float:
        ms = float(given)
        if not (math.isfinite(ms) and 0.0 <= ms < LAST_MOMENT_MS):
            raise ValueError(f"{given[:40]!r} is no time")
        return ms

    return BatchInfo(
        id=text["id"],
        user=text["user"],
        uid=int(text["uid"]),
        model=text["model"] or None,
        input=text["input"],
        output=text["output"],
        errors=text["errors"],
        work=text["work"],
        bytes=int(text["bytes"]),
        lines=int(text["lines"]),
        tokens=int(text["tokens"]),
        status=BatchStatus(text["status"]),
        stop=text["stop"],
        message=text["message"],
        cursor=int(text["cursor"]),
        cursor_line=int(text["cursor_line"]),
        next_chunk=int(text["next_chunk"]),
        at_end=text["at_end"] == "1",
        outstanding=int(text["outstanding"]),
        done=int(text["done"]),
        failed=int(text["failed"]),
        output_tokens=int(text["output_tokens"]),
        submitted_ms=moment(text["submitted_ms"]),
        deadline_ms=time("deadline_ms"),
        started_ms=time("started_ms"),
        finished_ms=time("finished_ms"),
        jobs_only=text.get("jobs_only") == "1",
        cut=int(text.get("cut") or 0),
        wait_code=text.get("wait_code", ""),
        wait_message=text.get("wait_message", ""),
        wait_ms=time("wait_ms"),
        parts=_parts.decode(text["parts"]) if text.get("parts") else (),
    )
