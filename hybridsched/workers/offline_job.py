"""The offline worker as a Slurm job: one user's batch file, on a lane of the node that Slurm chose.

The job registers the batch or takes it up, takes a free lane, and runs the offline worker there on that batch
alone. It moves on when its lane stays closed and another is open, goes back to Slurm's queue when none opens
for long, and leaves at a signal with its place kept. Several jobs may run one batch together.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import redis
from redis import RedisError

from hybridsched import notice
from hybridsched.batches.errors import BatchFileError, OutputBusyError, OutputExistsError
from hybridsched.batches.layout import plan_files
from hybridsched.batches.verify import check_files
from hybridsched.log import get_logger
from hybridsched.store.batch_values import BatchInfo, BatchProgress, BatchStatus, BatchUnknownError
from hybridsched.store.batches import BatchStore
from hybridsched.store.connection import async_client, explain, redact, sync_client
from hybridsched.store.lane_holders import HeldLane, LaneHolders, Models
from hybridsched.store.patience import hopeless
from hybridsched.store.tasks import end_tasks
from hybridsched.workers.lane_claim import Seeker, Tenure, owner_name
from hybridsched.workers.offline import SWITCH_S, OfflineWorker
from hybridsched.workers.offline_feed import end_batch
from hybridsched.workers.offline_folders import Folders
from hybridsched.workers.offline_job_end import Outcome, say_ended, say_left
from hybridsched.workers.offline_submit import submit_file
from hybridsched.workers.slurm_env import JobPlace

_log = get_logger("job")
_T = TypeVar("_T")

_LOOK_S = 0.5
_SAY_CLOSED_S = 5.0
"""A lane that has been closed for this long is said once in the job's log: Slurm may start more jobs than
lanes are open, and shows each as running."""

_BATCH_LOOK_S = 1.0
_PROGRESS_S = 60.0
_BUSY_S = 60.0
"""How long another process may have the batch to itself at the start: a job that registers it, or the end
of a local run."""

_BACK_OFF_S = (0.2, 5.0)


class JobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may want otherwise. Seconds."""

    give_back_s: float = 10.0
    """A lane that has been closed this long is changed for another one of the node that is open."""
    leave_after_s: float = 1800.0
    """With no open lane for this long the job goes back to Slurm's queue."""


class _StopError(Exception):
    """The job was told to leave while it read the input."""


class OfflineJob:
    """One run of the job."""

    def __init__(
        self,
        *,
        redis_url: str,
        pool: str,
        place: JobPlace,
        source: str | Path,
        output: str | Path | None = None,
        errors: str | Path | None = None,
        model: str | None = None,
        deadline_in_ms: float | None = None,
        speed: float = 1.0,
        options: JobOptions | None = None,
    ) -> None:
        self._url = redis_url
        self._pool = pool
        self._place = place
        self._source = source
        self._output = output
        self._errors = errors
        self._model = model
        self._models: Models = model
        """Which lanes the batch needs; None: any."""
        self._deadline_in_ms = deadline_in_ms
        self._speed = speed
        self._options = options or JobOptions()
        self._batch_id = ""
        self._over = asyncio.Event()
        """The batch has ended, or the job has been told to leave."""
        self._busy = False
        """Whether a worker stands on a lane: it ends the batch by itself then."""
        self._open_s = time.monotonic()
        """When a lane was last open."""
        self.told: int | None = None
        """The first signal that ended the run."""

    def tell(self, number: int, stop: asyncio.Event) -> None:
        """Signal `number` has come: leave."""
        self.told = self.told or number
        stop.set()

    async def run(self, stop: asyncio.Event) -> Outcome:
        """Run until the batch has ended or `stop` is set; waits for Redis, lanes and engines.

        Raises:
            BatchFileError: a file of the batch cannot be used.
            StoreUrlError: the URL cannot be understood.
            StoreRefused: Redis does not take the login, or its user lacks a right.
        """
        client = async_client(self._url, name="offline-job")
        self._client = sync_client(self._url, name="offline-job")
        self._store = BatchStore(self._client, self._pool)
        self._folders = Folders()
        _log.info(
            "The job starts.",
            key="job_start",
            job=self._place.job,
            node=self._place.node,
            restarts=self._place.restarts,
            input=str(self._source),
            redis=redact(self._url),
        )
        try:
            if await self._register(stop):
                return Outcome.COMPLETE
            return await self._work(client, stop)
        except _StopError:
            return Outcome.LEFT
        except RedisError as error:
            raise explain(error, self._url, "running the batch as a Slurm job") from error
        finally:
            self._folders.close()
            self._client.close()
            await client.aclose()

    # -- the batch

    async def _register(self, stop: asyncio.Event) -> bool:
        """Make the batch known, or take it up; whether it was complete already.

        A second job on the same file, or the same job in its next run, joins what is there.
        """
        patience_s = time.monotonic() + _BUSY_S
        while True:
            try:
                made = await self._patiently(stop, lambda: self._submit(stop))
            except (OutputBusyError, BatchUnknownError):  # the latter: the store was emptied meanwhile
                if time.monotonic() > patience_s:
                    raise
                await _sleep(stop, _BACK_OFF_S[1] / 10)
                if stop.is_set():
                    raise _StopError from None
            except OutputExistsError:
                if await asyncio.to_thread(self._complete_before):
                    _log.info("The batch is complete already; nothing to do.", key="job_complete")
                    return True
                raise
            else:
                self._batch_id = made
                return False

    def _submit(self, stop: asyncio.Event) -> str:
        def look(_bytes: int) -> None:
            if stop.is_set():
                raise _StopError

        made = submit_file(
            self._store,
            self._source,
            output=self._output,
            errors=self._errors,
            model=self._model,
            deadline_in_ms=self._deadline_in_ms,
            jobs_only=True,
            progress=look,
        )
        self._needs(made.batch)
        _log.info(
            "The batch goes on from where it was." if made.resumed else "The batch begins.",
            key="job_batch",
            batch=made.batch.id,
            lines=made.index.lines,
            invalid=made.index.invalid,
            model=", ".join(made.batch.models) or None,
            output=made.batch.output,
        )
        return made.batch.id

    def _needs(self, batch: BatchInfo) -> None:
        """Take up which models' lanes the batch needs: of one with parts, those of which lines are left."""
        models = batch.models
        self._models = self._model or (models[0] if len(models) == 1 else models or None)

    def _complete_before(self) -> bool:
        files = plan_files(self._source, "job", output=self._output, errors=self._errors)
        try:
            return check_files(files.input, files.output, files.errors).exact
        except BatchFileError:
            return False

    async def _watch_batch(self, stop: asyncio.Event) -> None:
        """Set `_over` when the batch has ended; end it where no worker is there to do that."""
        said_s = time.monotonic()
        while not self._over.is_set():
            found = await self._patiently(stop, self._look)
            if found is None or found.batch.status.ended:
                self._over.set()
                return
            if time.monotonic() - said_s >= _PROGRESS_S:
                said_s = time.monotonic()
                _log.info(
                    "Progress.",
                    key="job_progress",
                    batch=self._batch_id,
                    done=found.done,
                    failed=found.failed,
                    lines=found.batch.lines,
                )
            await _sleep(self._over, _BATCH_LOOK_S)

    def _look(self) -> BatchProgress | None:
        """The batch as it is; None when the store does not know it any more."""
        try:
            found = self._store.progress(self._batch_id)
            if found.batch.stop and not found.batch.status.ended and not self._busy:
                try:
                    end_batch(self._store, self._folders, found.batch)
                except BatchFileError as error:
                    self._store.set_status(self._batch_id, BatchStatus.FAILED, str(error))
                found = self._store.progress(self._batch_id)
        except BatchUnknownError:
            return None
        self._needs(found.batch)
        return found

    # -- lanes

    async def _work(self, client: redis.asyncio.Redis, stop: asyncio.Event) -> Outcome:
        holders = LaneHolders(client, self._pool)
        place = self._place
        seeker = Seeker(holders, owner=owner_name(), job=place.job, node=place.node)
        while True:
            watching = [
                asyncio.create_task(self._watch_batch(stop), name="batch"),
                asyncio.create_task(self._watch_stop(stop), name="stop"),
            ]
            for task in watching:
                task.add_done_callback(lambda _: self._over.set())
            try:
                await self._visit_lanes(holders, seeker)
            finally:
                await end_tasks(*watching)
            found = None if stop.is_set() else await self._patiently(stop, self._look)
            if stop.is_set() or (found is not None and not found.batch.status.ended):
                # Without a signal of its own it was the notice that had come before.
                told = (self.told or signal.SIGUSR2) if stop.is_set() else None
                return say_left(self._batch_id, told=told)
            if found is not None:
                return say_ended(found)
            _log.warning("The store has lost the batch; it is registered again.", key="batch_lost")
            self._over.clear()
            if await self._register(stop):
                return Outcome.COMPLETE

    async def _watch_stop(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._over.set()

    async def _visit_lanes(self, holders: LaneHolders, seeker: Seeker) -> None:
        """Work on one lane after the other, until the batch is over or no lane has been open for long."""
        held: HeldLane | None = None
        self._open_s = time.monotonic()
        while not self._over.is_set():
            patience_s = self._open_s + self._options.leave_after_s - time.monotonic()
            if held is None:
                seeker.model = self._models
                held = await seeker.find(self._over, within_s=max(0.0, patience_s))
            if held is None:
                return
            held = await self._stand(held, holders, seeker)

    async def _stand(self, held: HeldLane, holders: LaneHolders, seeker: Seeker) -> HeldLane | None:
        """Run the batch on one lane. Returns the next lane if there is one in hand."""
        place = held.place
        _log.info("The job has a lane.", key="job_lane", lane=place.lane, fence=held.fence, engine=place.url)
        worker = OfflineWorker(
            redis_url=self._url,
            pool=self._pool,
            lane=place.lane,
            replica=place.replica,
            model=place.model,
            engine_url=place.url,
            speed=self._speed,
            burst=True,
            only=self._batch_id,
        )
        tenure, leave = Tenure(holders, held), asyncio.Event()
        keeping = asyncio.create_task(tenure.run(), name="tenure")
        self._busy = True
        running = asyncio.create_task(worker.run(leave), name="lane")
        other: HeldLane | None = None
        said = False
        try:
            while not (running.done() or self._over.is_set() or tenure.lost.is_set()):
                closed_s = worker.closed_for_s
                if closed_s >= _SAY_CLOSED_S and not said:
                    said = True
                    _log.info(
                        "The lane is closed: the job waits, and runs nothing meanwhile.",
                        key="job_waits",
                        lane=place.lane,
                        closed_s=round(closed_s, 1),
                    )
                said = said and bool(closed_s)
                seeker.model = self._models
                if not closed_s:
                    self._open_s = time.monotonic()
                elif time.monotonic() - self._open_s > self._options.leave_after_s:
                    break
                elif closed_s > self._options.give_back_s and (other := await seeker.better(held)):
                    _log.info(
                        "The lane stays closed; the job moves to one that is open.",
                        key="job_moves",
                        lane=place.lane,
                        to=other.place.lane,
                    )
                    break
                await asyncio.wait([running, keeping], timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leave.set()
            ended_itself = running.done()
            await asyncio.wait([running])
            self._busy = False
            await end_tasks(keeping)
            await tenure.end()
        running.result()  # a worker that failed says so here
        if ended_itself:
            await _sleep(self._over, 2 * _BATCH_LOOK_S)  # it has ended the batch: no other lane is wanted
        return other

    async def _patiently(self, stop: asyncio.Event, act: Callable[[], _T]) -> _T:
        """Do it in a thread, again while Redis is away; what will not come right by itself is raised.
        Raises `_StopError` when told to leave meanwhile."""
        wait_s = _BACK_OFF_S[0]
        while True:
            try:
                return await asyncio.to_thread(act)
            except RedisError as error:
                if hopeless(error):
                    raise
                if wait_s >= 1.0:
                    _log.warning(
                        "Redis cannot be reached; trying again. Check that the server runs.",
                        key="job_outage",
                        error=str(error),
                    )
            await _sleep(stop, wait_s)
            if stop.is_set():
                raise _StopError
            wait_s = min(wait_s * 2, _BACK_OFF_S[1])


async def _sleep(until: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await until.wait()
    except TimeoutError:
        return


async def run_offline_job(job: OfflineJob) -> Outcome:
    """Run `job` until its batch has ended, or until SIGUSR2, SIGTERM or SIGINT.

    Raises:
        BatchFileError: see `OfflineJob.run`; the text says whose rights the job has.
    """
    sys.setswitchinterval(SWITCH_S)
    logging.getLogger("rq").setLevel(logging.WARNING)  # it writes six lines for each chunk
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, job.tell, number, stop)
    if notice.came():
        stop.set()
    try:
        return await job.run(stop)
    except BatchFileError as error:
        user = os.geteuid()
        raise type(error)(
            f"{error} (the job runs with the rights of user {user}, who submitted it)"
        ) from error
