"""Batches in the store: who runs what next. The results themselves are on disk (`hybridsched.batches`).

A batch is a hash, its ledger a hash of chunks. A chunk goes queued -> leased -> done; a lease lives by the
server's clock and carries a fence, so that a worker that lost it cannot acknowledge. Chunks are planned only
a bounded number ahead; each also stands as a job in RQ (`rq_chunks`), which wakes a worker up and is never
the truth.

Everything here is synchronous, as RQ is, and may be called from several threads. Errors of redis-py pass.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import redis

from hybridsched.core.deadlines import turns, urgent
from hybridsched.store.batch_reader import WRONG_TYPE, BatchReader
from hybridsched.store.batch_values import (
    CANCELLED_CODE,
    FAILED_CODE,
    LONGEST_DEADLINE_MS,
    TRANSITIONS,
    BatchInfo,
    BatchStateError,
    BatchStatus,
    BatchUnknownError,
    Beat,
    Chunk,
    ClaimedChunk,
    ClaimRefused,
    NewBatch,
    PartInfo,
    SweepResult,
    work_of,
)
from hybridsched.store.rq_chunks import BATCH_ID, ChunkQueue, ChunkWorker
from hybridsched.store.scripts import SyncScripts

KEEP_ENDED_S = 30 * 24 * 3600
"""How long an ended batch can still be looked up."""
LOST_JOB_AFTER_MS = 3000
"""A chunk that has been queued this long is looked for in RQ; with no job there it gets a new one."""
SWEEP_EVERY_MS = 500
PACE_LIFE_MS = 60_000
"""A pace that nobody has noted for this long is not known any more."""
"""Sweeps of all workers together happen at most this often."""

_MOST_SAID = 500
_DAMAGED = (
    "its ledger in the store cannot be read any more; submit the same file with the same output again: it "
    "goes on from what is on the disk"
)
_chunk = msgspec.json.Decoder(Chunk)


def new_batch_id() -> str:
    """A fresh id."""
    return f"batch_{secrets.token_hex(8)}"


class BatchStore(BatchReader):
    """The batches of one pool."""

    def __init__(self, client: redis.Redis, pool: str) -> None:
        super().__init__(client, pool)
        self._scripts = SyncScripts(client)
        self._queues: dict[str, ChunkQueue] = {}

    # users

    def submit(self, new: NewBatch) -> BatchInfo:
        """Register a batch. One that is known and has not ended is left, and returned, as it is.

        Raises:
            ValueError: the id holds other than letters, digits, '-' and '_', or the deadline is not ahead or
                more than `LONGEST_DEADLINE_MS` ahead.
        """
        if not BATCH_ID.fullmatch(new.id):
            raise ValueError(f"batch id {new.id!r}: use 1 to 80 letters, digits, '-' and '_'")
        if new.deadline_in_ms is not None and new.deadline_in_ms <= 0:
            raise ValueError("the deadline is in the past; give one ahead or none")
        if new.deadline_in_ms is not None and not new.deadline_in_ms <= LONGEST_DEADLINE_MS:
            raise ValueError("the deadline is more than 366 days ahead; give one within these or none")
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
        if new.parts:
            fields["parts"] = msgspec.json.encode(new.parts).decode()
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

    def note_wait(self, batch_id: str, code: str, message: str) -> bool:
        """Say why a batch cannot go on now; a finished chunk takes the note away. False: it has ended."""
        keys = [self.keys.batch(batch_id)]
        return bool(self._scripts.call("batch_note", keys, [code, message[:_MOST_SAID]]))

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

    def to_feed(
        self,
        model: str | None,
        ahead: int,
        *,
        only: str | None = None,
        now_ms: float = 0.0,
        tokens_per_s: float | None = None,
    ) -> list[BatchInfo]:
        """Batches that may get another chunk while fewer than `ahead` are outstanding, the next one first.

        Those whose deadline is at risk first (`core.deadlines`, by the pace `tokens_per_s` at server time
        `now_ms`), and while there are any no others. Else those with the fewest outstanding chunks, then
        oldest: planning one chunk for the first and asking again shares the lanes in turn between batches.
        """
        open_ = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
        active = {batch.id: batch for batch in self.active(model, only=only)}
        # Those that take no more count as well: their work comes first where they are due first.
        works = [work_of(batch) for batch in active.values()]
        open_batches = {
            batch.id
            for batch in active.values()
            if batch.status in open_ and not batch.stop and not batch.at_end
        }
        order = turns(works, open_batches, now_ms, tokens_per_s)
        return [active[batch] for batch in order if active[batch].outstanding < ahead]

    def urgent(
        self, model: str | None, *, only: str | None = None, now_ms: float, tokens_per_s: float | None
    ) -> tuple[str, ...]:
        """Batches whose chunks go before those of all others, the earliest deadline first."""
        works = [work_of(batch) for batch in self.active(model, only=only)]
        return urgent(works, now_ms, tokens_per_s)

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
        skip: int = 0,
        hurry: Sequence[str] = (),
    ) -> int | None:
        """Plan the chunk from `batch.cursor` to byte `end` and enqueue it. Returns its number.

        Of a batch with parts `batch` is as `active` gives it, and the chunk is of that part.

        `hurry`: the urgent batches, earliest deadline first. A chunk of one of them is queued behind those
        of the batches that are due before it, and before all others that wait.
        None: another feeder has moved the cursor, `ahead` chunks are outstanding, or the batch takes no more.
        """
        keys = [self.keys.batch(batch.id), self.keys.batch_chunks(batch.id)]
        number = int(
            self._scripts.call(
                "batch_plan",
                keys,
                [
                    *(batch.cursor, ahead, end, first_line, lines, tokens, next_line, int(at_end), skip),
                    batch.part if isinstance(batch, PartInfo) else "",
                ],
            )
        )
        if number < 0:
            return None
        queue = self._queue_of(batch, number)
        job = queue.put(batch.id, number)
        if batch.id in hurry:
            before = hurry[: hurry.index(batch.id) + 1]
            self._scripts.call("batch_hurry", [queue.key], [job, *before])
        return number

    def note_pace(self, model: str | None, tokens_per_s: float) -> None:
        """Say at which pace the batches of a model are done, for whoever looks at their deadlines."""
        self._client.set(self.keys.batch_pace(model), f"{tokens_per_s:.3f}", px=PACE_LIFE_MS)

    # workers

    def worker(
        self, model: str | None, run: Callable[[str, int], object], *, name: str, only: str | None = None
    ) -> ChunkWorker:
        """An RQ worker on the queue of `model` and on that of batches without one, or of one batch only."""
        return ChunkWorker(self._client, self.queue_names(model, only=only), run, name=name)

    def queue_names(self, model: str | None, *, only: str | None = None) -> list[str]:
        """The RQ queues that such a worker serves."""
        if only is not None:
            names = (self.keys.rq_queue_of_batch(only), self.keys.rq_queue_of_batch(only, model))
            return list(dict.fromkeys(names))
        return list(dict.fromkeys((self.keys.rq_queue(model), self.keys.rq_queue(None))))

    def claim_chunk(
        self, batch_id: str, chunk_no: int, *, owner: str, lease_ms: float, model: str | None = None
    ) -> ClaimedChunk | ClaimRefused:
        """Take a chunk for `lease_ms`, or learn why not. `model`: that of the caller's engine; a chunk of
        another one's part is not given to it."""
        text = self._scripts.call(
            "batch_claim",
            [self.keys.batch(batch_id), self.keys.batch_chunks(batch_id)],
            [chunk_no, owner, int(lease_ms), model or ""],
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
        self,
        batch_id: str,
        chunk_no: int,
        fence: int,
        *,
        done: int = 0,
        failed: int = 0,
        again: bool = True,
    ) -> bool:
        """Give a chunk back unfinished; it is the next to be taken. False: the lease was lost before.

        Without `again` it gets no job now: a later sweep makes one, behind those of other batches.
        """
        beat = self._hold("release", batch_id, chunk_no, fence, 0, done, failed, 0)
        if beat.ok and not beat.stop and again:
            batch = self._find(batch_id)
            if batch is not None:
                self._queue_of(batch, chunk_no).put(batch_id, chunk_no, front=True)
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
        damaged: list[str] = []
        for batch in self.active(model, any_model=True):
            keys = [self.keys.batch(batch.id), self.keys.batch_chunks(batch.id)]
            try:
                ended, freed, waiting, unreadable = self._scripts.call(
                    "batch_sweep", keys, [int(lost_after_ms)]
                )
            except redis.ResponseError as error:
                if not str(error).startswith(WRONG_TYPE):
                    raise
                ended, freed, waiting, unreadable = 0, [], [], 1
            if unreadable:
                damaged.append(batch.id)
                with suppress(BatchStateError, BatchUnknownError):
                    self.set_status(batch.id, BatchStatus.FAILED, _DAMAGED)
                continue
            if ended:
                expired.append(batch.id)
            self._put_again(batch, freed)
            reclaimed += [(batch.id, number) for number in freed]
            if waiting:
                queues = {queue.name: queue for queue in (self._queue_of(batch, no) for no in waiting)}
                there = set[tuple[str, int]]().union(*(queue.waiting() for queue in queues.values()))
                gone = [number for number in waiting if (batch.id, number) not in there]
                self._put_again(batch, gone)
                requeued += [(batch.id, number) for number in gone]
        return SweepResult(tuple(reclaimed), tuple(requeued), tuple(expired), tuple(damaged))

    # ending

    def mark_assembled(self, batch_id: str, holds: Callable[[int], bool]) -> None:
        """Forget the acknowledged chunks that the output `holds`.

        A chunk can be in the output before its own worker has acknowledged it; that one stays until it has.
        """
        chunks = self._readable_chunks(batch_id)
        if old := [no for no, chunk in chunks if chunk.state == "done" and holds(no)]:
            self._client.hdel(self.keys.batch_chunks(batch_id), *old)

    def to_finalize(self, model: str | None, *, only: str | None = None) -> Sequence[BatchInfo]:
        """Batches that may be ready to be ended (`claim_finalize` says for certain)."""
        return [
            batch
            for batch in self._open_to(model, only=only)
            if batch.stop
            or batch.status is BatchStatus.FINALIZING
            or (batch.at_end and not batch.outstanding)
        ]

    def claim_finalize(self, batch_id: str, *, lease_ms: float) -> int | None:
        """Take the duty to end a batch. Returns a fence; None: work on it is left, or another has it."""
        fence = self._finalize(batch_id, "claim", int(lease_ms))
        return fence or None

    def finalized(
        self, batch_id: str, fence: int, status: BatchStatus, *, done: int, failed: int, cut: int = 0
    ) -> bool:
        """End a batch whose files are complete, with their exact counts. False: another has the duty now.

        `cut`: those of the failed lines that had not run, as the batch was cancelled or past its deadline.

        Raises:
            ValueError: `status` is no end.
        """
        if not status.ended:
            raise ValueError(f"{status} does not end a batch")
        return bool(self._finalize(batch_id, "end", fence, status, done, failed, KEEP_ENDED_S, cut))

    # inside

    def _queue_of(self, batch: BatchInfo, chunk_no: int) -> ChunkQueue:
        """The queue in which a chunk waits for a worker of its model."""
        model = batch.model_of(chunk_no)
        if batch.jobs_only:
            name = self.keys.rq_queue_of_batch(batch.id, model if batch.parts else None)
        else:
            name = self.keys.rq_queue(model)
        if name not in self._queues:
            self._queues[name] = ChunkQueue(self._client, name)
        return self._queues[name]

    def _put_again(self, batch: BatchInfo, numbers: Sequence[int]) -> None:
        """Jobs for chunks that have none any more: in front, as they were begun before. A batch that could
        not go on waits behind the others."""
        front = not batch.wait_code
        for number in reversed(numbers) if front else numbers:
            self._queue_of(batch, number).put(batch.id, number, front=front)

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
