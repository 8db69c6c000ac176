"""Batches in the store: who runs what next. The results themselves are on disk (`hybridsched.batches`).

A batch is a hash, its ledger a hash of chunks. A chunk goes queued -> leased -> done; a lease lives by the
server's clock and carries a fence, so that a worker that lost it cannot acknowledge. Chunks are planned only
a bounded number ahead; each also stands as a job in RQ (`rq_chunks`), which wakes a worker up and is never
the truth.

Everything here is synchronous, as RQ is, and may be called from several threads. Errors of redis-py pass.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import redis

from hybridsched.store.batch_values import (
    CANCELLED_CODE,
    FAILED_CODE,
    TRANSITIONS,
    BatchInfo,
    BatchProgress,
    BatchStateError,
    BatchStatus,
    BatchUnknownError,
    Beat,
    Chunk,
    ClaimedChunk,
    ClaimRefused,
    NewBatch,
    SweepResult,
    info_of,
)
from hybridsched.store.keys import Keys
from hybridsched.store.rq_chunks import BATCH_ID, ChunkQueue, ChunkWorker
from hybridsched.store.scripts import SyncScripts

KEEP_ENDED_S = 30 * 24 * 3600
"""How long an ended batch can still be looked up."""
LOST_JOB_AFTER_MS = 3000
"""A chunk that has been queued this long is looked for in RQ; with no job there it gets a new one."""
SWEEP_EVERY_MS = 500
"""Sweeps of all workers together happen at most this often."""

_chunk = msgspec.json.Decoder(Chunk)


def new_batch_id() -> str:
    """A fresh id."""
    return f"batch_{secrets.token_hex(8)}"


class BatchStore:
    """The batches of one pool."""

    def __init__(self, client: redis.Redis, pool: str) -> None:
        self.keys = Keys(pool)
        self._client = client
        self._scripts = SyncScripts(client)
        self._queues: dict[str, ChunkQueue] = {}

    # users

    def submit(self, new: NewBatch) -> BatchInfo:
        """Register a batch. One that is known and has not ended is left, and returned, as it is.

        Raises:
            ValueError: the id holds other than letters, digits, '-' and '_', or the deadline is not ahead.
        """
        if not BATCH_ID.fullmatch(new.id):
            raise ValueError(f"batch id {new.id!r}: use 1 to 80 letters, digits, '-' and '_'")
        if new.deadline_in_ms is not None and new.deadline_in_ms <= 0:
            raise ValueError("the deadline is in the past; give one ahead or none")
        fields: dict[str, str | int] = {
            "id": new.id,
            "user": new.user,
            "uid": new.uid,
            "model": new.model or "",
            "input": new.input,
            "output": new.output,
            "errors": new.errors,
            "work": new.work,
            "bytes": new.bytes,
            "lines": new.lines,
            "tokens": new.tokens,
            "status": BatchStatus.VALIDATING,
            "stop": "",
            "message": "",
            "cursor": new.cursor,
            "cursor_line": new.cursor_line,
            "next_chunk": new.next_chunk,
            "at_end": int(new.at_end),
            "outstanding": 0,
            "done": new.done,
            "failed": new.failed,
            "output_tokens": 0,
            "fence": 0,
            "final_fence": 0,
            "final_lease_ms": 0,
            "jobs_only": int(new.jobs_only),
        }
        flat = [part for pair in fields.items() for part in pair]
        deadline = "" if new.deadline_in_ms is None else int(new.deadline_in_ms)
        self._scripts.call(
            "batch_submit",
            [
                self.keys.batch(new.id),
                self.keys.batches,
                self.keys.batches_active,
                self.keys.batch_chunks(new.id),
            ],
            [new.id, deadline, *flat],
        )
        return self.get(new.id)

    def get(self, batch_id: str) -> BatchInfo:
        """What is known of a batch.

        Raises:
            BatchUnknownError: naming ids that look alike.
        """
        info = self._find(batch_id)
        if info is None:
            raise BatchUnknownError(self._unknown(batch_id))
        return info

    def all(self) -> list[BatchInfo]:
        """Every batch that can be looked up, oldest first."""
        return self._read_all(self.keys.batches)

    def active(
        self, model: str | None = None, *, any_model: bool = False, only: str | None = None
    ) -> list[BatchInfo]:
        """Batches that have not ended and that a worker of `model` may run, oldest first.

        With `only` that batch, whatever its model; batches of Slurm jobs are found in no other way, except
        that `any_model` means all.
        """
        if only is not None:
            batch = self._find(only)
            return [] if batch is None or batch.status.ended else [batch]
        found = self._read_all(self.keys.batches_active)
        if any_model:
            return found
        return [batch for batch in found if not batch.jobs_only and batch.model in (None, model)]

    def progress(self, batch_id: str) -> BatchProgress:
        """A batch with what its running chunks have reported so far.

        Raises:
            BatchUnknownError: there is no such batch.
        """
        batch = self.get(batch_id)
        chunks = [_chunk.decode(text) for text in self._chunks(batch_id).values()]
        running = [chunk for chunk in chunks if chunk.state == "leased"]
        return BatchProgress(
            batch=batch,
            done=batch.done + sum(chunk.done for chunk in running),
            failed=batch.failed + sum(chunk.failed for chunk in running),
            running_chunks=len(running),
            queued_chunks=sum(chunk.state == "queued" for chunk in chunks),
        )

    def cancel(self, batch_id: str) -> BatchInfo:
        """End a batch: what is finished is kept, the rest will be reported `batch_cancelled`.

        Cancelling it again changes nothing.

        Raises:
            BatchUnknownError: there is no such batch.
            BatchStateError: it has ended, or is about to.
        """
        if self.get(batch_id).status is BatchStatus.CANCELLING:
            return self.get(batch_id)
        return self._change(batch_id, BatchStatus.CANCELLING, stop=CANCELLED_CODE)

    def set_status(self, batch_id: str, status: BatchStatus, message: str = "") -> BatchInfo:
        """Change the status by itself, such as to `failed` with the reason; workers on it learn to stop.

        Raises:
            BatchUnknownError: there is no such batch.
            BatchStateError: its present status does not allow it (see `TRANSITIONS`).
        """
        stop = FAILED_CODE if status is BatchStatus.FAILED else ""
        return self._change(batch_id, status, stop=stop, message=message)

    def leave_to_jobs(self, batch_id: str) -> BatchInfo:
        """From now on only Slurm jobs of the batch's user take it up; what a pool worker has in hand it ends.

        Chunks that stand in the pool's queue find the way to the batch's own with the next `sweep`.

        Raises:
            BatchUnknownError: there is no such batch.
        """
        if not self._scripts.call("batch_to_jobs", [self.keys.batch(batch_id)], [1]):
            raise BatchUnknownError(self._unknown(batch_id))
        return self.get(batch_id)

    # feeding

    def to_feed(self, model: str | None, ahead: int, *, only: str | None = None) -> list[BatchInfo]:
        """Batches that may get another chunk while fewer than `ahead` are outstanding, the next one first.

        Fewest outstanding chunks first, then oldest: planning one chunk for the first and asking again shares
        the lanes in turn between batches.
        """
        open_ = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
        found = [
            batch
            for batch in self.active(model, only=only)
            if batch.status in open_ and not batch.stop and not batch.at_end and batch.outstanding < ahead
        ]
        return sorted(found, key=lambda batch: (batch.outstanding, batch.submitted_ms, batch.id))

    def plan_chunk(
        self,
        batch: BatchInfo,
        *,
        end: int,
        first_line: int,
        lines: int,
        tokens: int,
        next_line: int,
        at_end: bool,
        ahead: int,
    ) -> int | None:
        """Plan the chunk from `batch.cursor` to byte `end` and enqueue it. Returns its number.

        None: another feeder has moved the cursor, `ahead` chunks are outstanding, or the batch takes no more.
        """
        keys = [self.keys.batch(batch.id), self.keys.batch_chunks(batch.id)]
        number = int(
            self._scripts.call(
                "batch_plan",
                keys,
                [batch.cursor, ahead, end, first_line, lines, tokens, next_line, int(at_end)],
            )
        )
        if number < 0:
            return None
        self._queue_of(batch).put(batch.id, number)
        return number

    # workers

    def worker(
        self, model: str | None, run: Callable[[str, int], object], *, name: str, only: str | None = None
    ) -> ChunkWorker:
        """An RQ worker on the queue of `model` and on that of batches without one, or of one batch only."""
        return ChunkWorker(self._client, self.queue_names(model, only=only), run, name=name)

    def queue_names(self, model: str | None, *, only: str | None = None) -> list[str]:
        """The RQ queues that such a worker serves."""
        if only is not None:
            return [self.keys.rq_queue_of_batch(only)]
        return list(dict.fromkeys((self.keys.rq_queue(model), self.keys.rq_queue(None))))

    def claim_chunk(
        self, batch_id: str, chunk_no: int, *, owner: str, lease_ms: float
    ) -> ClaimedChunk | ClaimRefused:
        """Take a chunk for `lease_ms`, or learn why not."""
        text = self._scripts.call(
            "batch_claim",
            [self.keys.batch(batch_id), self.keys.batch_chunks(batch_id)],
            [chunk_no, owner, int(lease_ms)],
        )
        if not text.startswith(b"{"):
            return ClaimRefused(text.decode())
        batch = self._find(batch_id)
        if batch is None:
            return ClaimRefused("unknown")
        return ClaimedChunk(batch=batch, no=chunk_no, chunk=_chunk.decode(text))

    def heartbeat_chunk(
        self, batch_id: str, chunk_no: int, fence: int, *, lease_ms: float, done: int = 0, failed: int = 0
    ) -> Beat:
        """Renew a lease and report how many lines of the chunk are finished."""
        return self._hold("beat", batch_id, chunk_no, fence, int(lease_ms), done, failed, 0)

    def complete_chunk(
        self, batch_id: str, chunk_no: int, fence: int, *, done: int, failed: int, output_tokens: int = 0
    ) -> bool:
        """Acknowledge a chunk, after its results are on disk. False: the lease was lost to another worker."""
        return self._hold("complete", batch_id, chunk_no, fence, 0, done, failed, output_tokens).ok

    def release_chunk(
        self, batch_id: str, chunk_no: int, fence: int, *, done: int = 0, failed: int = 0
    ) -> bool:
        """Give a chunk back unfinished; it is the next to be taken. False: the lease was lost before."""
        beat = self._hold("release", batch_id, chunk_no, fence, 0, done, failed, 0)
        if beat.ok and not beat.stop:
            batch = self._find(batch_id)
            if batch is not None:
                self._queue_of(batch).put(batch_id, chunk_no, front=True)
        return beat.ok

    def sweep(
        self, model: str | None = None, *, lost_after_ms: float = LOST_JOB_AFTER_MS, now: bool = False
    ) -> SweepResult:
        """Find what got lost: leases that have ended, chunks whose job is gone, deadlines that have passed.

        Every worker calls it about once a second; unless `now`, it does nothing when another just did it.
        """
        if not now and not self._client.set(self.keys.batches_sweep, b"1", nx=True, px=SWEEP_EVERY_MS):
            return SweepResult()
        reclaimed: list[tuple[str, int]] = []
        requeued: list[tuple[str, int]] = []
        expired: list[str] = []
        for batch in self.active(model, any_model=True):
            queue = self._queue_of(batch)
            keys = [self.keys.batch(batch.id), self.keys.batch_chunks(batch.id)]
            ended, freed, waiting = self._scripts.call("batch_sweep", keys, [int(lost_after_ms)])
            if ended:
                expired.append(batch.id)
            for number in reversed(freed):
                queue.put(batch.id, number, front=True)
            reclaimed += [(batch.id, number) for number in freed]
            if waiting:
                there = queue.waiting()
                gone = [number for number in waiting if (batch.id, number) not in there]
                for number in reversed(gone):
                    queue.put(batch.id, number, front=True)
                requeued += [(batch.id, number) for number in gone]
        return SweepResult(tuple(reclaimed), tuple(requeued), tuple(expired))

    # ending

    def mark_assembled(self, batch_id: str, next_chunk: int) -> None:
        """Forget the acknowledged chunks before `next_chunk`: they are in the output.

        A chunk can be in the output before its own worker has acknowledged it; that one stays until it has.
        """
        chunks = self._chunks(batch_id).items()
        if old := [no for no, text in chunks if int(no) < next_chunk and _chunk.decode(text).state == "done"]:
            self._client.hdel(self.keys.batch_chunks(batch_id), *old)

    def to_finalize(self, model: str | None, *, only: str | None = None) -> Sequence[BatchInfo]:
        """Batches that may be ready to be ended (`claim_finalize` says for certain)."""
        return [
            batch
            for batch in self.active(model, only=only)
            if batch.stop
            or batch.status is BatchStatus.FINALIZING
            or (batch.at_end and not batch.outstanding)
        ]

    def claim_finalize(self, batch_id: str, *, lease_ms: float) -> int | None:
        """Take the duty to end a batch. Returns a fence; None: work on it is left, or another has it."""
        fence = self._finalize(batch_id, "claim", int(lease_ms))
        return fence or None

    def finalized(self, batch_id: str, fence: int, status: BatchStatus, *, done: int, failed: int) -> bool:
        """End a batch whose files are complete, with their exact counts. False: another has the duty now.

        Raises:
            ValueError: `status` is no end.
        """
        if not status.ended:
            raise ValueError(f"{status} does not end a batch")
        return bool(self._finalize(batch_id, "end", fence, status, done, failed, KEEP_ENDED_S))

    # inside

    def _queue_of(self, batch: BatchInfo) -> ChunkQueue:
        return self._queue(batch.model, only=batch.id if batch.jobs_only else None)

    def _queue(self, model: str | None, *, only: str | None = None) -> ChunkQueue:
        name = self.keys.rq_queue(model) if only is None else self.keys.rq_queue_of_batch(only)
        if name not in self._queues:
            self._queues[name] = ChunkQueue(self._client, name)
        return self._queues[name]

    def _hold(self, what: str, batch_id: str, *args: int) -> Beat:
        keys = [self.keys.batch(batch_id), self.keys.batch_chunks(batch_id)]
        ok, stop = self._scripts.call("batch_hold", keys, [what, *args])
        return Beat(bool(ok), stop.decode())

    def _finalize(self, batch_id: str, what: str, *args: str | int) -> int:
        keys = [self.keys.batch(batch_id), self.keys.batch_chunks(batch_id), self.keys.batches_active]
        return int(self._scripts.call("batch_finalize", keys, [what, batch_id, *args]))

    def _change(self, batch_id: str, status: BatchStatus, *, stop: str = "", message: str = "") -> BatchInfo:
        allowed = [str(before) for before, after in TRANSITIONS.items() if status in after]
        kept = KEEP_ENDED_S if status.ended else 0
        ok, present = self._scripts.call(
            "batch_status",
            [self.keys.batch(batch_id), self.keys.batches_active, self.keys.batch_chunks(batch_id)],
            [batch_id, status, stop, message, kept, *allowed],
        )
        if ok:
            return self.get(batch_id)
        if not present:
            raise BatchUnknownError(self._unknown(batch_id))
        raise BatchStateError(
            f"batch {batch_id} is {present.decode()} and cannot become {status}; "
            f"that is possible from {', '.join(allowed)}"
        )

    def _chunks(self, batch_id: str) -> dict[bytes, bytes]:
        found: Any = self._client.hgetall(self.keys.batch_chunks(batch_id))
        return dict(found)

    def _find(self, batch_id: str) -> BatchInfo | None:
        fields: Any = self._client.hgetall(self.keys.batch(batch_id))
        return info_of(fields) if fields else None

    def _read_all(self, index: str) -> list[BatchInfo]:
        ids: Any = self._client.zrange(index, 0, -1)
        if not ids:
            return []
        pipe = self._client.pipeline(transaction=False)
        for batch_id in ids:
            pipe.hgetall(self.keys.batch(batch_id.decode()))
        hashes = pipe.execute()
        if gone := [batch_id for batch_id, fields in zip(ids, hashes, strict=True) if not fields]:
            self._client.zrem(index, *gone)
        return [info_of(fields) for fields in hashes if fields]

    def _unknown(self, batch_id: str) -> str:
        known = [batch.id for batch in self.all()]
        near = difflib.get_close_matches(batch_id, known, n=3, cutoff=0.5)
        near = near or [other for other in known if batch_id and batch_id in other][:3]
        hint = f"did you mean {', '.join(near)}?" if near else "see `hybridsched batch list`"
        return f"no batch {batch_id!r} in pool {self.keys.pool!r}; {hint}"
