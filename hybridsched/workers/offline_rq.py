"""Chunks from RQ: threads that take one at a time, hand it to the lane's event loop and wait for its end.

Two of them keep two chunks in hand, so that the engine does not run dry where one ends. The lease of a chunk
in the ledger is what counts; the RQ job only woke a thread up.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from redis import RedisError

from hybridsched.batches.assemble import Assembler
from hybridsched.batches.cut import ChunkSpan
from hybridsched.batches.errors import BatchFileError, DiskFullError
from hybridsched.batches.parts import owner_of_chunk
from hybridsched.batches.progress import Progress
from hybridsched.batches.work import WorkFolder
from hybridsched.log import get_logger
from hybridsched.store.batch_values import BatchStatus, ClaimedChunk, ClaimRefused
from hybridsched.store.batches import BatchStore
from hybridsched.store.errors import StoreError
from hybridsched.workers.offline_aside import Aside
from hybridsched.workers.offline_chunks import ChunkInHand
from hybridsched.workers.offline_folders import FINAL_ERRORS, Folders
from hybridsched.workers.offline_link import LaneLink

_log = get_logger("offline")

LEASE_MS = 8_000.0
"""Life of a chunk's lease without a heartbeat: how long a killed worker's chunk waits for another one."""

_LOOK_S = 0.1
"""Between two looks whether another chunk is wanted: far less than the lines in hand take."""

BEAT_S = 2.0
_RQ_BEAT_S = 60.0
"""RQ forgets a job that is silent for 420 s; a chunk may be paused for longer."""

HOLD_S = 30.0
"""How long a lane that is paused keeps a chunk that another lane could run."""

_BACK_OFF_S = (0.2, 5.0)


class ChunkThread(threading.Thread):
    """Takes chunks one at a time while the lane is open."""

    _sequence = itertools.count()

    def __init__(
        self,
        store: BatchStore,
        link: LaneLink,
        folders: Folders,
        aside: Aside,
        *,
        model: str,
        name: str,
        relieve: Callable[[], bool],
        only: str | None = None,
    ) -> None:
        """`relieve` starts another thread in the place of this one, or says that there are too many. `only`:
        take chunks of that batch alone."""
        super().__init__(name=name, daemon=True)
        self._store = store
        self._model = model
        self._link = link
        self._folders = folders
        self._aside = aside
        self._relieve = relieve
        self._relieved = False
        self._stuck = False
        """Whether the chunk in hand waits for space on its disk."""
        self._wake = threading.Event()
        self._rq = store.worker(model, self._run_chunk, name=name, only=only)
        self._back_off_s = _BACK_OFF_S[0]

    def wake(self) -> None:
        """Look at the lane's state at once."""
        self._wake.set()

    def run(self) -> None:
        """Until `LaneLink.stopping` is set, or another thread has taken its place."""
        link = self._link
        try:
            while not (link.stopping.is_set() or self._relieved):
                # The gate is checked before every chunk; a chunk taken just before it closes waits in hand.
                if not link.gate.wait(0.2):
                    continue
                if not link.may_take():
                    link.stopping.wait(_LOOK_S)
                    continue
                try:
                    self._rq.take(1)
                    self._back_off_s = _BACK_OFF_S[0]
                except (RedisError, OSError) as error:
                    self._outage(error)
                except Exception:  # noqa: BLE001 - the loop's outer edge: a lane without it takes fewer chunks
                    _log.exception("A chunk could not be taken; the next one is tried.", key="take_failed")
                    link.stopping.wait(_BACK_OFF_S[1])
                finally:
                    link.taken(threading.get_ident())
        finally:
            try:
                self._rq.close()
            except (RedisError, OSError) as error:
                _log.debug("RQ could not be told of the end; it forgets us by itself.", error=str(error))

    def _outage(self, error: Exception) -> None:
        if self._back_off_s >= 1.0:
            _log.warning(
                "Redis cannot be reached to take chunks; trying again. Check that the server runs.",
                key="chunks_outage",
                error=str(error),
            )
        self._link.stopping.wait(self._back_off_s)
        self._back_off_s = min(self._back_off_s * 2, _BACK_OFF_S[1])

    def _run_chunk(self, batch_id: str, chunk_no: int) -> None:
        """One RQ job (see `store.rq_chunks`)."""
        if self._aside.holds(batch_id):
            return  # the sweep makes it a new job; a worker that can use its files may have that one
        claimed = self._store.claim_chunk(
            batch_id, chunk_no, owner=self.name, lease_ms=LEASE_MS, model=self._model
        )
        if isinstance(claimed, ClaimRefused):
            return
        self._link.fed.set()
        try:
            work = self._folders.get(claimed.batch)
            state = Assembler(work).state()
            if state.holds(chunk_no):
                # Its results are in the output already; only the acknowledgement was lost.
                self._acknowledge(claimed, done=claimed.chunk.lines, failed=0, output_tokens=0)
                return
            chunk = ChunkInHand.load(
                work,
                chunk_no,
                claimed.fence,
                _span(claimed),
                sequence=next(self._sequence),
                owns=owner_of_chunk(state, chunk_no),
            )
        except BatchFileError as error:
            self._unusable(claimed, error)
            return
        try:
            self._hold(claimed, chunk, work)
        finally:
            chunk.close()
            if self._stuck:
                self._stuck = False
                self._aside.unstuck(batch_id)

    def _wait_for_space(self, claimed: ClaimedChunk, error: DiskFullError) -> bool:
        """The chunk's disk is full: its batch waits, and its place in the lane goes to another thread.

        False: so many wait already that this chunk must be given back, and what is not on the disk run again.
        """
        if self._stuck:
            return True
        self._stuck = True
        self._aside.stuck(claimed.batch.id, error)
        self._relieved = self._relieved or self._relieve()
        return self._relieved

    def _hold(self, claimed: ClaimedChunk, chunk: ChunkInHand, work: WorkFolder) -> None:
        """Wait until the chunk is settled, renewing its lease; then put it down for good, or give it back."""
        link = self._link
        self._wake.clear()
        chunk.on_settled = chunk.on_full = self._wake.set
        link.begin(chunk)
        rq_beat_s = beat_s = time.monotonic()
        while True:
            if chunk.settled:
                break
            self._wake.wait(max(0.0, beat_s + BEAT_S - time.monotonic()))
            self._wake.clear()
            now_s = time.monotonic()
            if chunk.full is not None and not self._wait_for_space(claimed, chunk.full):
                self._leave(claimed, chunk, again=False)
                return
            if not chunk.settled and (link.stopping.is_set() or self._better_elsewhere(chunk, now_s)):
                self._leave(claimed, chunk)
                return
            if now_s - beat_s < BEAT_S:
                continue
            beat_s = now_s
            if chunk.disk_full:
                link.write(chunk)
            if not self._beat(claimed, chunk):
                return
            if now_s - rq_beat_s > _RQ_BEAT_S:
                rq_beat_s = now_s
                self._beat_rq()
        if chunk.failure is not None:
            link.withdraw(chunk, keep=False)
            self._unusable(claimed, chunk.failure)
            return
        self._settle(claimed, chunk, work)

    def _better_elsewhere(self, chunk: ChunkInHand, now_s: float) -> bool:
        """Whether the lane has been closed for so long that another one should have the chunk."""
        link = self._link
        return not link.gate.is_set() and now_s - link.closed_since_s > HOLD_S and not chunk.disk_full

    def _beat(self, claimed: ClaimedChunk, chunk: ChunkInHand) -> bool:
        """Renew the lease; False when the chunk is not ours to run any more."""
        done, failed = chunk.counts
        try:
            beat = self._store.heartbeat_chunk(
                claimed.batch.id, claimed.no, claimed.fence, lease_ms=LEASE_MS, done=done, failed=failed
            )
        except (RedisError, OSError):
            return True  # the fence keeps us from harm if the lease ends meanwhile
        if not beat.ok:
            _log.warning(
                "The lease of a chunk was lost (this worker was cut off from Redis for too long); another "
                "worker goes on from what is on the disk.",
                key="chunk_lost",
                batch=claimed.batch.id,
                chunk=claimed.no,
            )
            self._link.withdraw(chunk, keep=False)
            return False
        if beat.stop:
            self._leave(claimed, chunk)
            return False
        return True

    def _beat_rq(self) -> None:
        try:
            for execution in list(self._rq.executions.values()):
                self._rq.maintain_heartbeats(execution.job, execution)
        except (RedisError, OSError) as error:
            _log.debug("RQ could not be told that a chunk still runs; the ledger knows.", error=str(error))

    def _settle(self, claimed: ClaimedChunk, chunk: ChunkInHand, work: WorkFolder) -> None:
        """Results to the disk, then to the output as far as it goes, then the acknowledgement.

        In this order nobody can end the batch and remove its folder while it is still written to.
        """
        if not self._on_disk(claimed, chunk):
            return
        done, failed = chunk.counts
        took_s = time.monotonic() - chunk.started_s
        progress, full = Progress(), None
        try:
            progress = Assembler(work).advance()
        except DiskFullError as error:
            full = error  # the chunk itself is on the disk; whoever comes next appends it
        except BatchFileError as error:
            self._link.withdraw(chunk, keep=False)
            self._unusable(claimed, error)
            return
        tokens = chunk.totals.output_tokens
        if not self._acknowledge(claimed, done=done, failed=failed, output_tokens=tokens):
            self._link.withdraw(chunk, keep=False)
            return
        self._link.finish(chunk, took_s)
        if full is None:
            self._aside.went_on(claimed.batch.id)
        else:
            self._aside.put(claimed.batch.id, full)
        self._link.fed.set()
        try:
            self._store.mark_assembled(claimed.batch.id, progress.holds)
        except (RedisError, OSError) as error:
            _log.debug("Chunks in the output stay in the ledger for now.", error=str(error))

    def _on_disk(self, claimed: ClaimedChunk, chunk: ChunkInHand) -> bool:
        """Seal the chunk, waiting for space while the disk is full; False when it was given back instead."""
        while True:
            try:
                chunk.seal()
            except DiskFullError as error:
                if not self._wait_for_space(claimed, error):
                    self._leave(claimed, chunk, again=False)
                    return False
                if self._link.stopping.wait(BEAT_S):
                    self._leave(claimed, chunk)
                    return False
                if not self._beat(claimed, chunk):
                    return False
            except BatchFileError as error:
                self._link.withdraw(chunk, keep=False)
                self._unusable(claimed, error)
                return False
            else:
                return True

    def _acknowledge(self, claimed: ClaimedChunk, *, done: int, failed: int, output_tokens: int) -> bool:
        wait_s = _BACK_OFF_S[0]
        while True:
            try:
                return self._store.complete_chunk(
                    claimed.batch.id,
                    claimed.no,
                    claimed.fence,
                    done=done,
                    failed=failed,
                    output_tokens=output_tokens,
                )
            except (RedisError, OSError):
                if self._link.stopping.wait(wait_s):
                    return False  # it is on the disk: whoever claims it next only acknowledges
                wait_s = min(wait_s * 2, _BACK_OFF_S[1])

    def _leave(self, claimed: ClaimedChunk, chunk: ChunkInHand, *, again: bool = True) -> None:
        """Give the chunk back with all that is known of its lines."""
        self._link.withdraw(chunk, keep=True)
        chunk.leave()
        done, failed = chunk.counts
        self._give_back(claimed, done=done, failed=failed, again=again)

    def _give_back(
        self, claimed: ClaimedChunk, *, done: int = 0, failed: int = 0, again: bool = True
    ) -> None:
        """Release the chunk. Without `again` it is not the next to be taken."""
        try:
            self._store.release_chunk(
                claimed.batch.id, claimed.no, claimed.fence, done=done, failed=failed, again=again
            )
        except (RedisError, OSError) as error:
            _log.warning(
                "A chunk could not be given back; it comes free when its lease ends.",
                key="release_failed",
                batch=claimed.batch.id,
                error=str(error),
            )

    def _unusable(self, claimed: ClaimedChunk, error: BatchFileError, *, acknowledged: bool = False) -> None:
        """The batch's files cannot be used: for ever, or from here, or for now."""
        batch_id = claimed.batch.id
        if not isinstance(error, DiskFullError):
            self._folders.forget(batch_id)
        if isinstance(error, FINAL_ERRORS):
            _log.error(
                "A batch cannot go on and is failed; what is finished stays in its work folder.",
                key="batch_failed",
                batch=batch_id,
                error=str(error),
            )
            try:
                self._store.set_status(batch_id, BatchStatus.FAILED, str(error))
            except (StoreError, RedisError, OSError) as refused:
                _log.warning("The batch's end could not be noted.", key="fail_failed", error=str(refused))
            return
        self._aside.put(batch_id, error)
        self._give_back(claimed, again=False)


def _span(claimed: ClaimedChunk) -> ChunkSpan:
    chunk = claimed.chunk
    return ChunkSpan(
        start=chunk.start,
        end=chunk.end,
        first_line=chunk.first_line,
        lines=chunk.lines,
        tokens=chunk.tokens,
        next_line=chunk.next_line,
        at_end=chunk.at_end,
        skip=chunk.skip,
    )
