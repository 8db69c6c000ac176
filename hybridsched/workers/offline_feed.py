"""The feeder of a worker: plans chunks a bounded number ahead, finds lost ones, and ends complete batches.

Every worker of a pool has one; the store's scripts decide between them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import redis
from redis import RedisError
from rq import Queue

from hybridsched.batches.assemble import Assembler
from hybridsched.batches.cut import Cursor, cut_chunk
from hybridsched.batches.errors import RESUME, BatchFileError, DiskFullError, ResultsLostError
from hybridsched.batches.parts import owner_of_chunk
from hybridsched.batches.progress import Progress
from hybridsched.batches.work import WorkFolder
from hybridsched.core.deadlines import Pace
from hybridsched.log import get_logger
from hybridsched.store.batch_values import (
    EXPIRED_CODE,
    BatchInfo,
    BatchStateError,
    BatchStatus,
    PartInfo,
    work_of,
)
from hybridsched.store.batches import BatchStore
from hybridsched.store.errors import StoreError
from hybridsched.workers.offline_aside import Aside
from hybridsched.workers.offline_folders import FINAL_ERRORS, Folders
from hybridsched.workers.offline_link import LaneLink

_log = get_logger("offline")

CYCLE_S = 0.5
"""Between two looks at the store, seconds; a chunk that is taken or finished brings one forward."""

FINAL_LEASE_MS = 30_000.0
"""How long the duty to end a batch holds: appending its last chunks and flushing them."""

_FAILED_S = 5.0
_PACE_S = 5.0
_PLANS_A_CYCLE = 32
_LANE_ALIVE_MS = 10_000.0
_MESSAGES = {
    EXPIRED_CODE: "the batch's deadline passed before this line had run",
}
_ENDS = {"": BatchStatus.COMPLETED, EXPIRED_CODE: BatchStatus.EXPIRED}


class ChunkSize(msgspec.Struct, frozen=True, kw_only=True):
    """What the next chunk may hold."""

    max_tokens: int
    max_lines: int
    min_lines: int
    ahead: int
    """Chunks ahead for each lane."""


class Feeder(threading.Thread):
    """Plans, sweeps and finalises for the batches of one model."""

    def __init__(
        self,
        store: BatchStore,
        client: redis.Redis,
        link: LaneLink,
        folders: Folders,
        aside: Aside,
        *,
        model: str,
        size: Callable[[float | None], ChunkSize],
        name: str,
        only: str | None = None,
    ) -> None:
        """`size(tokens per line)` says how large the next chunk may be; `only`: care for that batch alone."""
        super().__init__(name=name, daemon=True)
        self._store = store
        self._client = client
        self._link = link
        self._folders = folders
        self._model = model
        self._only = only
        self._size = size
        self._aside = aside
        self._chunk_lines = 1
        self._now_ms = 0.0
        self._in_hand = 0
        """Chunks that workers hold, about. Those waiting for their last long lines must not keep the queue
        empty: only what stands in it counts as planned ahead."""
        self._pace = Pace()
        self._noted_s = -_PACE_S
        self.backlog = 0
        """Lines that stand in the queue or are not planned yet, about; 0 when there is nothing to take."""
        self.cycles = 0
        """Looks at the store so far."""
        self.batches_left = True
        """Whether any batch has not ended."""

    def run(self) -> None:
        """Until `LaneLink.stopping` is set."""
        said_s = 0.0
        while not self._link.stopping.is_set():
            try:
                self.cycle()
            except (RedisError, StoreError, OSError) as error:
                if time.monotonic() - said_s > 30:
                    said_s = time.monotonic()
                    _log.warning(
                        "Redis cannot be reached to plan chunks; trying again. Check that the server runs.",
                        key="feeder_outage",
                        error=str(error),
                    )
            except Exception:  # noqa: BLE001 - the loop's outer edge: without it no batch goes on
                _log.exception("Planning failed; it is tried again.", key="feeder_failed")
                self._link.stopping.wait(_FAILED_S)
            self._link.fed.wait(CYCLE_S)
            self._link.fed.clear()

    def cycle(self) -> None:
        """One look: sweep, plan, finalise, count. Raises what the Redis client raises."""
        swept = self._store.sweep(self._model)
        for batch_id, chunk in swept.reclaimed:
            _log.warning(
                "A worker lost a chunk (it died or was cut off); it is queued again.",
                key="chunk_reclaimed",
                batch=batch_id,
                chunk=chunk,
            )
        for batch_id in swept.damaged:
            _log.error(
                "What the store holds of a batch's chunks cannot be read; the batch is failed, and goes on "
                "from the disk when it is submitted again. Check who can write to this Redis.",
                key="ledger_damaged",
                batch=batch_id,
            )
        self._plan()
        for batch in self._store.to_finalize(self._model, only=self._only):
            if not self._aside.holds(batch.id):
                self._finalize(batch)
        self._count()
        self.cycles += 1

    def _plan(self) -> None:
        lanes = self._lanes()
        pace = self._pace.tokens_per_s()
        hurry = self._store.urgent(self._model, only=self._only, now_ms=self._now_ms, tokens_per_s=pace)
        for _ in range(_PLANS_A_CYCLE):
            ahead = self._size(None).ahead * lanes + self._in_hand
            waiting = self._store.to_feed(
                self._model,
                ahead,
                only=self._only,
                now_ms=self._now_ms,
                tokens_per_s=pace,
            )
            batch = next((b for b in waiting if not self._aside.holds(b.id)), None)
            if batch is None:
                return
            try:
                self._plan_one(batch, ahead, hurry)
            except BatchFileError as error:
                self._unusable(batch, error)

    def _plan_one(self, batch: BatchInfo, ahead: int, hurry: tuple[str, ...]) -> None:
        work = self._folders.get(batch)
        index = work.index
        per_line = index.tokens / index.valid if index.valid else None
        if isinstance(batch, PartInfo) and batch.lines:
            per_line = batch.tokens / batch.lines
        size = self._size(per_line)
        owns = None
        if isinstance(batch, PartInfo):
            owns = owner_of_chunk(Assembler(work).state(), batch.part)
        with work.open_input() as file:
            span = cut_chunk(
                file,
                Cursor(batch.cursor, batch.cursor_line),
                max_tokens=size.max_tokens,
                max_lines=size.max_lines,
                min_lines=size.min_lines,
                duplicates=index.duplicates,
                owns=owns,
            )
        if span is None:
            raise BatchFileError(f"{work.files.input} has no line after byte {batch.cursor}")
        self._chunk_lines = span.lines
        self._store.plan_chunk(
            batch,
            end=span.end,
            first_line=span.first_line,
            lines=span.lines,
            tokens=span.tokens,
            next_line=span.next_line,
            at_end=span.at_end,
            skip=span.skip,
            ahead=ahead,
            hurry=hurry,
        )

    def _lanes(self) -> int:
        """Lanes at the pool whose workers are alive."""
        seconds, micros = self._client.time()
        self._now_ms = seconds * 1000.0 + micros / 1000.0
        since = self._now_ms - _LANE_ALIVE_MS
        return max(1, int(self._client.zcount(self._store.keys.lane_index, since, "+inf")))

    def _note_pace(self, active: list[BatchInfo]) -> None:
        """At which pace batches are done: it decides which deadlines are at risk."""
        self._pace.observe(self._now_ms, {batch.id: work_of(batch).tokens for batch in active})
        pace, now_s = self._pace.tokens_per_s(), time.monotonic()
        if pace is not None and now_s - self._noted_s >= _PACE_S:
            self._noted_s = now_s
            self._store.note_pace(self._model, pace)

    def _finalize(self, batch: BatchInfo) -> None:
        try:
            end_batch(self._store, self._folders, batch)
        except BatchFileError as error:
            self._unusable(batch, error)

    def _unusable(self, batch: BatchInfo, error: BatchFileError) -> None:
        if not isinstance(error, DiskFullError):
            self._folders.forget(batch.id)
        if isinstance(error, FINAL_ERRORS):
            _log.error(
                "A batch cannot go on and is failed; what is finished stays in its work folder.",
                key="batch_failed",
                batch=batch.id,
                error=str(error),
            )
            with suppress(BatchStateError):  # it has just ended: its folder went with that
                self._store.set_status(batch.id, BatchStatus.FAILED, str(error))
            return
        self._aside.put(batch.id, error)

    def _count(self) -> None:
        active = self._store.active(self._model, only=self._only)
        batches = [batch for batch in active if not self._aside.holds(batch.id)]
        ids = {batch.id for batch in active}
        if self._only is None:
            self._note_pace(active)
        self._folders.keep_only(ids)
        self._aside.keep_only(ids)
        # A job waits with its batch; a worker that is to end without work does not wait for others' disks.
        # Nor for other workers' parts.
        left = active if self._only else batches
        self.batches_left = any(not (isinstance(batch, PartInfo) and batch.over) for batch in left)
        pipe = self._client.pipeline(transaction=False)
        for name in self._store.queue_names(self._model, only=self._only):
            pipe.llen(f"{Queue.redis_queue_namespace_prefix}{name}")
        queued = sum(int(count) for count in pipe.execute())
        self._in_hand = max(0, sum(batch.outstanding for batch in batches) - queued)
        unplanned = sum(
            max(1, round(batch.lines * (1 - batch.cursor / max(1, batch.bytes))))
            for batch in batches
            if not batch.at_end and not batch.stop
        )
        self.backlog = queued * self._chunk_lines + unplanned


def end_batch(store: BatchStore, folders: Folders, batch: BatchInfo) -> bool:
    """Bring a batch to its end if all of it has run, or if it is to stop. Whether it has ended by this call.

    Raises:
        BatchFileError: its files cannot be used; its end stays to be done.
        redis.RedisError: the store cannot be reached.
    """
    fence = store.claim_finalize(batch.id, lease_ms=FINAL_LEASE_MS)
    if fence is None:
        return False
    batch = store.get(batch.id)
    work = folders.get(batch)
    progress = _complete(work, batch.stop)
    status = _ENDS.get(batch.stop, BatchStatus.CANCELLED)
    if not store.finalized(
        batch.id, fence, status, done=progress.done, failed=progress.failed, cut=progress.cut
    ):
        return False
    _log.info(
        "A batch has ended.",
        key="batch_ended",
        batch=batch.id,
        status=status.value,
        done=progress.done,
        failed=progress.failed,
    )
    work.remove()
    folders.forget(batch.id)
    return True


def _complete(work: WorkFolder, stop: str) -> Progress:
    """Append all that is finished and, with `stop`, report the rest as that."""
    assembler = Assembler(work)
    if stop:
        message = _MESSAGES.get(stop, "the batch was cancelled before this line had run")
        return assembler.close_out(stop, message)
    progress = assembler.advance()
    if not progress.at_end:
        raise ResultsLostError(
            f"{work.path}: every line has run, but the journal of line {progress.line} is gone, cut or "
            f"damaged. {RESUME}"
        )
    return progress
