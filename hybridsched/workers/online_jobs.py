"""The requests that a worker holds: started, watched, ended, each exactly once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from hybridsched.engines.protocol import Engine, EngineError
from hybridsched.engines.request_log import RequestLog, RequestRow, tokens_of
from hybridsched.log import get_logger
from hybridsched.store.online import OnlineQueue
from hybridsched.store.online_values import Claimed, End, EndStatus
from hybridsched.store.tasks import end_tasks
from hybridsched.workers.online_engine import EngineWatch
from hybridsched.workers.online_outbox import Outbox, UndeliveredError, deliver
from hybridsched.workers.online_serve import (
    IDLE_TIMEOUT_S,
    Ending,
    Request,
    Running,
    Stop,
    engine_failed,
    internal_error,
)
from hybridsched.workers.online_telemetry import OnlineCounts

_REMEMBER_CANCEL_S = 10.0
_MAX_CANCELS = 4096
"""Cancellations remembered for requests that have not arrived: anybody can publish any number of them."""

_log = get_logger("online")


class JobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are run."""

    idle_timeout_s: float = IDLE_TIMEOUT_S
    engine_priority: bool = False
    """The engine was started with `--scheduling-policy priority`: it is told each request's class."""
    give_up_s: float = 30.0
    """How long an answer is kept for a store that is away."""
    request_log: RequestLog | None = None
    """Has every request that ended in the engine."""


class Job:
    """One held request."""

    def __init__(self, claimed: Claimed, running: Running, outbox: Outbox) -> None:
        self.claimed = claimed
        self.running = running
        self.outbox = outbox
        self.load = claimed.load


class Jobs:
    """All requests of one worker.

    `lighter` is called when the load fell or a request ended. `others` tells whether another live replica
    could take a request that failed here.
    """

    def __init__(
        self,
        engine: Engine,
        queue: OnlineQueue,
        *,
        replica: str,
        counts: OnlineCounts,
        watch: EngineWatch,
        lighter: Callable[[], None],
        others: Callable[[], bool],
        options: JobOptions,
    ) -> None:
        self._engine = engine
        self._queue = queue
        self._replica = replica
        self._counts = counts
        self._watch = watch
        self._lighter = lighter
        self._others = others
        self._options = options
        self._jobs: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._cancelled: dict[str, float] = {}

    @property
    def load(self) -> float:
        """Outstanding tokens as the replicas hash counts them: prompts to work off, and some for decode."""
        return self._counts.load

    def held(self) -> list[Claimed]:
        """Everything whose lease must be renewed, unanswered ends included."""
        return [job.claimed for job in self._jobs.values()]

    def start(self, claimed: Claimed, claimed_at: float) -> None:
        """Run a claimed request. `claimed_at`: monotonic seconds at which the claim came back."""
        request = Request(
            id=claimed.id,
            attempt=claimed.attempt,
            path=claimed.path,
            body=claimed.body,
            stream=claimed.stream,
            priority=claimed.priority,
            deadline_at=claimed_at + claimed.left_ms / 1000.0,
            accepted_at=claimed_at - claimed.age_ms / 1000.0,
        )
        outbox = Outbox(
            self._queue,
            claimed,
            lost=lambda lease: running.stop(Stop.LEASE_LOST if lease else Stop.STORE_LOST),
            give_up_s=self._options.give_up_s,
        )

        def tokens(data: bytes) -> None:
            self._watch.answered()
            outbox.put(data)

        running = Running(
            request,
            tokens=tokens,
            first=lambda ttft_ms: self._first(job, ttft_ms),
            widened=self._counts.widen,
        )
        job = Job(claimed, running, outbox)
        self._jobs[claimed.entry] = job
        self._counts.begin(claimed.cost, claimed.prompt_tokens)
        self._counts.load += job.load
        if self._cancelled.pop(claimed.id, None) is not None:
            running.stop(Stop.CANCELLED)
        task = asyncio.get_running_loop().create_task(self._run(job), name=f"online-{claimed.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, request_id: str) -> None:
        """A client gave a request up. One that is about to arrive with a claim is remembered."""
        for job in self._jobs.values():
            if job.claimed.id == request_id:
                job.running.stop(Stop.CANCELLED)
                return
        now = time.monotonic()
        while self._cancelled:
            oldest = next(iter(self._cancelled))
            if len(self._cancelled) < _MAX_CANCELS and now - self._cancelled[oldest] < _REMEMBER_CANCEL_S:
                break
            del self._cancelled[oldest]
        self._cancelled.setdefault(request_id, now)

    def lost(self, claimed: Claimed) -> None:
        """Another worker has it now."""
        job = self._jobs.get(claimed.entry)
        if job is not None:
            job.outbox.closed = True
            job.running.stop(Stop.LEASE_LOST)

    def stop_all(self, why: Stop) -> None:
        """End everything that still runs."""
        for job in list(self._jobs.values()):
            job.running.stop(why)

    async def drain(self, seconds: float) -> bool:
        """Wait until nothing is held any more, at most `seconds`. Returns whether that came."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        return not self._tasks

    async def abandon(self) -> None:
        """Cancel what is left; its leases run out and others take it."""
        await end_tasks(*self._tasks)

    def _first(self, job: Job, ttft_ms: float) -> None:
        # The prompt is worked off: from here on the request only decodes.
        self._counts.first_token(ttft_ms)
        self._lower(job, job.load - job.claimed.prompt_tokens)

    def _lower(self, job: Job, to: float) -> None:
        self._counts.load = max(0.0, self._counts.load - (job.load - to))
        job.load = to
        self._lighter()

    async def _run(self, job: Job) -> None:
        running = job.running
        began_s = time.monotonic()
        ending: Ending | None = None
        try:
            ending = await running.run(
                self._engine,
                idle_timeout_s=self._options.idle_timeout_s,
                engine_priority=self._options.engine_priority,
            )
        finally:
            self._note(job, began_s, ending)
            # The engine has let it go: the replica is as idle as this, however long the reply takes.
            if self._counts.end(job.claimed.cost, running.sequences):
                self._watch.scrape_now()
            self._lower(job, 0.0)
        try:
            if ending.not_there:
                ending = await self._whose_fault(job, ending)
            await self._answer(job, ending)
        except UndeliveredError:
            pass  # said in the log; its lease ends and another worker answers it
        except Exception as error:  # noqa: BLE001 - the request's edge: it must end in an answer
            _log.exception(
                "An answer could not be made; the request is answered as failed.",
                key="answer_broke",
                id=job.claimed.id,
            )
            await self._last_word(job, error)
        finally:
            del self._jobs[job.claimed.entry]

    def _note(self, job: Job, began_s: float, ending: Ending | None) -> None:
        log = self._options.request_log
        if log is None:
            return
        log.add(
            RequestRow(
                s=began_s,
                e=time.monotonic(),
                offline=False,
                id=job.claimed.id,
                **tokens_of(None if ending is None else ending.usage),
                end="closed" if ending is None else "ok" if ending.status == "ok" else "error",
            )
        )

    async def _whose_fault(self, job: Job, ending: Ending) -> Ending:
        """The engine says that there is no such thing. Where it does not serve this replica's model, that is
        no answer to the request, and another replica may have one."""
        try:
            await self._watch.confirm()
        except EngineError as error:
            return engine_failed(error, sent=job.running.sent)
        return ending

    async def _last_word(self, job: Job, error: Exception) -> None:
        """Without it the request would be held until its lease ends, and then be tried again in vain."""
        try:
            await deliver(
                lambda: self._queue.finish(job.claimed, self._end_of(internal_error(error))),
                self._options.give_up_s,
            )
        except UndeliveredError:
            pass  # said in the log
        except Exception:  # noqa: BLE001 - the last edge; its lease ends
            _log.exception("That failed too; its lease ends.", key="answer_dropped", id=job.claimed.id)

    def _end_of(self, ending: Ending) -> End:
        return End(
            status=EndStatus(ending.status),
            code=ending.code,
            message=ending.message,
            finish_reason=ending.finish_reason,
            usage=ending.usage,
            body=msgspec.Raw(b"null" if ending.body is None else msgspec.json.encode(ending.body)),
            http_status=ending.http_status,
            replica=self._replica,
        )

    async def _answer(self, job: Job, ending: Ending) -> None:
        running, claimed = job.running, job.claimed
        if ending.suspect:
            self._watch.suspect()
        elif ending.status == "ok":
            self._watch.answered()
        if running.tpot_ms is not None:
            self._counts.decoded(running.tpot_ms)
        if running.stopped in (Stop.LEASE_LOST, Stop.STORE_LOST):
            _log.warning(
                "A request is no longer this worker's; it stopped working on it.",
                key="request_lost",
                id=claimed.id,
                why=running.stopped.value,
            )
            return
        if ending.give_back and await self._give_back(job, ending):
            return
        if not await job.outbox.finish(self._end_of(ending)):
            _log.warning(
                "An answer was not sent because another worker has the request.",
                key="answer_fenced",
                id=claimed.id,
            )

    async def _give_back(self, job: Job, ending: Ending) -> bool:
        """Let another replica try. False: this worker must answer."""
        claimed = job.claimed
        stopping = job.running.stopped is Stop.STOPPING
        last = claimed.attempt >= self._queue.limits.max_attempts
        if not stopping and (last or not (ending.again or self._others())):
            return False
        # A worker that stops has not tried; an engine that failed has.
        outcome = await deliver(
            lambda: self._queue.release(claimed, count=not stopping), self._options.give_up_s
        )
        _log.info(
            "A request was given back to the queue; another replica may run it.",
            key="request_released",
            id=claimed.id,
            code=ending.code,
            outcome=outcome,
        )
        return True
