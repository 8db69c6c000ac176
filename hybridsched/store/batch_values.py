"""Values of the batch ledger: statuses, what is known of a batch and of a chunk, and what can go wrong."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from hybridsched.store.errors import StoreError


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

EXPIRED_CODE = "batch_expired"
CANCELLED_CODE = "batch_cancelled"
FAILED_CODE = "batch_failed"


class NewBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch to register. Paths are for people; workers take theirs from the work folder's manifest."""

    id: str
    """Letters, digits, '-' and '_'."""
    user: str
    uid: int
    model: str | None = None
    """Which workers run it; None: any."""
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
    """Why a chunk was not given: taken, done, stopped or unknown. All are harmless."""

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


class BatchUnknownError(StoreError, LookupError):
    """There is no batch with this id."""


class BatchStateError(StoreError, ValueError):
    """The batch's status does not allow what was asked."""


def info_of(fields: dict[bytes, bytes]) -> BatchInfo:
    """A batch from its hash."""
    text = {key.decode(): value.decode() for key, value in fields.items()}

    def time(name: str) -> float | None:
        return float(text[name]) if text.get(name) else None

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
        submitted_ms=float(text["submitted_ms"]),
        deadline_ms=time("deadline_ms"),
        started_ms=time("started_ms"),
        finished_ms=time("finished_ms"),
        jobs_only=text.get("jobs_only") == "1",
    )
