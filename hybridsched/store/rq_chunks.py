"""Chunks as RQ jobs: data only, and one function only.

Whoever can write to Redis must not be able to run code in a worker. RQ by itself pickles, imports the
function that a job names, and imports its callbacks. Here jobs are JSON, hold a batch id and a chunk number
and nothing else, and the worker calls its own function whatever a job says; other jobs are refused.

A job is a wake-up: the ledger (`store.batches`) says what is to be done. So a job that is lost is made again,
and one too many does no harm.

RQ keeps its own keys, which begin with `rq:`.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import redis
from rq import Queue, SimpleWorker
from rq.exceptions import DequeueTimeout, NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.timeouts import BaseDeathPenalty

from hybridsched.log import get_logger

FUNCTION = "hybridsched.run_chunk"
"""The function name that every job carries. It is compared, never imported."""

BATCH_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
"""Ids that RQ and the file system both take."""

_JOB_ID = re.compile(r"([A-Za-z0-9_-]{1,80})-c(\d+)-[0-9a-f]{8}")
_FAILED_JOB_KEPT_S = 3600
_MAINTENANCE_EVERY_S = 600.0

log = get_logger("rq_chunks")


class RefusedJobError(NoSuchJobError):  # type: ignore[misc]
    """A job that this package did not make. RQ passes over it, as over a job that is gone."""


class ChunkJob(Job):  # type: ignore[misc]
    """A job that can only be a chunk."""

    runner: ClassVar[Callable[[str, int], object] | None] = None

    def restore(self, raw_data: Any) -> None:
        """Read the job's hash.

        Raises:
            RefusedJobError: it is not exactly one of our own.
        """
        try:
            super().restore(raw_data)
            problem = self._problem()
        except NoSuchJobError:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever a forged job breaks, it must not stop the worker
            problem = f"it cannot be read ({type(exc).__name__})"
        if problem:
            raise RefusedJobError(problem)

    def _problem(self) -> str:
        if self.func_name != FUNCTION or self.instance is not None:
            return "it names another function"
        if self.kwargs or not _is_address(self.args):
            return "its arguments are not a batch id and a chunk number"
        callbacks = (self._success_callback_name, self._failure_callback_name, self._stopped_callback_name)
        if any(callbacks) or self.webhooks or self.repeats_left or self.retries_left:
            return "it has callbacks, webhooks, repeats or retries"
        if self._dependency_ids:
            return "it depends on other jobs"
        return ""

    @property
    def func(self) -> Callable[[str, int], object]:
        """The worker's own function, never one that the job names."""
        runner = type(self).runner
        if runner is None:
            raise RefusedJobError("this process does not run chunks")
        return runner


class ChunkQueue:
    """The RQ queue of one model."""

    def __init__(self, client: redis.Redis, name: str) -> None:
        self.name = name
        self._client = client
        self._queue = Queue(
            name, connection=client, job_class=ChunkJob, serializer=JSONSerializer, default_timeout=-1
        )

    @property
    def key(self) -> str:
        """Of the list of job ids, the next one first."""
        return str(self._queue.key)

    def put(self, batch_id: str, chunk_no: int, *, front: bool = False) -> str:
        """Enqueue a chunk; at the front if it had been begun, so that it keeps its place. Returns the job."""
        job = ChunkJob.create(
            FUNCTION,
            args=[batch_id, chunk_no],
            connection=self._client,
            serializer=JSONSerializer,
            id=f"{batch_id}-c{chunk_no}-{secrets.token_hex(4)}",
            origin=self.name,
            description=f"chunk {chunk_no} of {batch_id}",
            timeout=-1,
            result_ttl=0,
            failure_ttl=_FAILED_JOB_KEPT_S,
        )
        self._queue.enqueue_job(job, at_front=front)
        return str(job.id)

    def waiting(self) -> set[tuple[str, int]]:
        """The chunks that stand in the queue."""
        matches = (_JOB_ID.fullmatch(job_id) for job_id in self._queue.get_job_ids())
        return {(match[1], int(match[2])) for match in matches if match}


class _NoDeathPenalty(BaseDeathPenalty):  # type: ignore[misc]
    """Chunks have leases instead of alarms, which only work in a main thread."""

    def setup_death_penalty(self) -> None:
        return

    def cancel_death_penalty(self) -> None:
        return


class ChunkWorker(SimpleWorker):  # type: ignore[misc]
    """RQ's in-process worker, one job at a time at the caller's word, in the caller's thread.

    It installs no signal handlers and obeys no commands by Redis. Use it from one thread at a time.
    """

    death_penalty_class = _NoDeathPenalty

    def __init__(
        self,
        client: redis.Redis,
        queues: Sequence[str],
        run: Callable[[str, int], object],
        *,
        name: str,
    ) -> None:
        """`run(batch_id, chunk_no)` is called for each job. `queues`: names, served in turn."""
        job_class = type("BoundChunkJob", (ChunkJob,), {"runner": staticmethod(run)})
        super().__init__(
            list(queues),
            connection=client,
            name=f"{name}-{secrets.token_hex(4)}",
            job_class=job_class,
            serializer=JSONSerializer,
            prepare_for_work=False,
            log_job_description=False,
        )
        self.hostname = socket.gethostname()
        self.pid = os.getpid()
        self._turn: list[Queue] = list(self.queues)
        self._born = False
        self._cleaned_s = time.monotonic()

    def _set_connection(self, connection: redis.Redis) -> redis.Redis:
        """Leave the timeouts of the shared client alone; `take` blocks shorter than they are."""
        return connection

    def take(self, timeout_s: int | None = None) -> bool:
        """Pop one job, run it, and return True; False when none came within `timeout_s` (None: look once).

        An exception of `run` is logged, the job counts as failed, and True is returned.

        Raises:
            ValueError: `timeout_s` is 0 or longer than 5 s.
            redis.RedisError: the server cannot be reached.
        """
        if timeout_s is not None and not 1 <= timeout_s <= 5:
            raise ValueError(f"timeout_s must be None or 1 to 5, not {timeout_s}")
        if not self._born:
            self.register_birth()
            self._born = True
        self.heartbeat()
        if time.monotonic() - self._cleaned_s > _MAINTENANCE_EVERY_S:
            self._cleaned_s = time.monotonic()
            self.clean_registries()
        while True:
            try:
                popped = Queue.lpop([queue.key for queue in self._turn], timeout_s, self.connection)
            except DequeueTimeout:
                return False
            if popped is None:
                return False
            key, job_id = (
                part.decode(errors="replace") if isinstance(part, bytes) else part for part in popped
            )
            queue = next(queue for queue in self.queues if queue.key == key)
            place = self._turn.index(queue)
            self._turn = self._turn[place + 1 :] + self._turn[: place + 1]
            job = self._fetch(job_id)
            if job is not None:
                self.execute_job(job, queue)
                return True

    def _fetch(self, job_id: str) -> ChunkJob | None:
        """The job, or None: it is gone, or it is none of ours and has been dropped."""
        if not _JOB_ID.fullmatch(job_id):
            # Its hash, if there is one, may belong to another program that uses RQ: it stays.
            self._refused(job_id, "its id is not one of ours")
            return None
        try:
            job: ChunkJob = self.job_class.fetch(
                job_id, connection=self.connection, serializer=JSONSerializer
            )
        except (RefusedJobError, redis.ResponseError, ValueError) as exc:
            self._refused(job_id, str(exc))
            self.connection.delete(ChunkJob.key_for(job_id))
            return None
        except NoSuchJobError:
            return None
        return job

    def _refused(self, job_id: str, why: str) -> None:
        log.error(
            "A job in the queue was not made by hybridsched and was dropped; somebody else can write to "
            "this Redis: check its ACL",
            key="job_refused",
            job=job_id[:100],
            why=why[:300],
        )

    def close(self) -> None:
        """Sign off."""
        if self._born:
            self.register_death()
            self._born = False


def _is_address(args: Any) -> bool:
    return (
        isinstance(args, list)
        and len(args) == 2
        and isinstance(args[0], str)
        and BATCH_ID.fullmatch(args[0]) is not None
        and type(args[1]) is int
        and args[1] >= 0
    )
