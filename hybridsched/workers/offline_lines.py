"""Run lines on one engine: admission, prompts by slices, the pause at an iteration, and going on from there.

Everything happens on one event loop. Lines wait in order; each admitted line is one task that sends one
request at a time. A pause ends the requests in the engine and keeps the lines here.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable

import msgspec

from hybridsched.core.values import NO_BUDGET, Budget
from hybridsched.engines.protocol import Engine, EngineError, EngineInfo
from hybridsched.engines.request_log import RequestLog
from hybridsched.log import get_logger
from hybridsched.workers.offline_proof import PROOF_TOKENS, Proof
from hybridsched.workers.offline_run import (
    LineResult,
    LineRun,
    LineSink,
    engine_failed,
    failure,
)
from hybridsched.workers.offline_steps import LineSteps, SuspendedError
from hybridsched.workers.offline_wire import LaneWire, LineSettings

_log = get_logger("offline")

KILLS = 3
"""A line in flight at this many engine failures is taken to be their cause: at the last one it ran alone, and
before each of them the engine had answered something else."""

LOSSES = 6
"""The same where the server itself was gone each time without a word: kill -9 of all of it, a lost node. What
a line brings down is what runs the model, and the server says so."""

STARTS_AT_ONCE = 4
STARTS_EVERY_S = 0.002
"""Lines started in one turn of the event loop, and the time to the next turn, seconds. A lane that resumes
has dozens of long bodies to build: the first ones are on their way before the others are begun, and an abort
waits behind a few at most."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What a pause did."""

    ended: int = 0
    """Requests that were in the engine."""
    kept_tokens: int = 0
    """Output tokens they brought back."""
    closed: int = 0
    """Those of them whose connection had to be closed."""


Admits = Callable[[int, int, int, Budget], bool]
"""(tokens of the line, lines running, tokens of those, budget) -> whether one more may run."""


class LineExecutor:
    """The lines of one lane on one engine."""

    def __init__(
        self,
        engine: Engine,
        *,
        admits: Admits,
        control: Engine | None = None,
        settings: LineSettings | None = None,
        on_change: Callable[[], None] = lambda: None,
        on_trouble: Callable[[EngineError], None] = lambda error: None,
        clock: Callable[[], float] = time.monotonic,
        log: RequestLog | None = None,
    ) -> None:
        """`control`: a client of its own for aborts, whose connection stays warm. `on_change` is told of
        every change of requests or lines, `on_trouble` of the engine's failures; `log` has every request."""
        self._admits = admits
        self._settings = settings or LineSettings()
        self._on_change = on_change
        self._on_trouble = on_trouble
        self.wire = LaneWire(
            engine, control or engine, self._settings, on_change=on_change, clock=clock, log=log
        )
        self._pacer = self.wire.pacer
        self.budget = NO_BUDGET
        self._admitting = False
        self._up = True
        self._waiting: list[tuple[tuple[int, ...], int, LineRun]] = []
        self._sequence = 0
        self._running: dict[LineRun, asyncio.Task[None]] = {}
        self._running_tokens = 0
        self._steps = LineSteps(self.wire, may_send=lambda: self._admitting and self._up, finish=self._finish)
        self.proof = Proof(ready=self._pump, back_off_s=self._settings.proof_back_off_s, clock=clock)
        self._busy_timer: asyncio.TimerHandle | None = None
        self._start_timer: asyncio.TimerHandle | None = None
        self.recomputed_tokens = 0
        """Tokens computed again so far, over all lines that have ended."""
        self.finished_tokens = 0
        """Prompt and output tokens of all lines that have ended."""

    @property
    def inflight(self) -> int:
        """Requests in the engine, or on their way to it."""
        return self.wire.inflight

    @property
    def quiet_s(self) -> float:
        """When the last request came back, on the executor's clock."""
        return self.wire.quiet_s

    @property
    def lines(self) -> int:
        """Lines in hand that have not ended."""
        return len(self._waiting) + len(self._running)

    @property
    def waiting(self) -> int:
        """Lines in hand that no request runs for."""
        return len(self._waiting)

    @property
    def info(self) -> EngineInfo | None:
        """What the engine says of itself; its limits are used where known."""
        return self._steps.info

    @info.setter
    def info(self, info: EngineInfo | None) -> None:
        self._steps.info = info

    @property
    def model(self) -> str | None:
        """The model that the engine has to serve, where that is known: to deny it is the engine's fault."""
        return self._steps.model

    @model.setter
    def model(self, model: str | None) -> None:
        self._steps.model = model

    @property
    def block(self) -> int:
        """Tokens of a KV block of the engine."""
        return self._steps.block

    def submit(self, runs: Iterable[LineRun]) -> None:
        """Take lines in hand; they start as the gate and the budget allow."""
        for run in runs:
            self._wait(run)
        self._pump()
        self._on_change()

    def withdraw(self, sink: LineSink) -> None:
        """Take a sink's lines out of hand, closing the connections of those that run; none gets a result."""
        self._waiting = [entry for entry in self._waiting if entry[2].sink is not sink]
        heapq.heapify(self._waiting)
        for run, task in self._running.items():
            if run.sink is sink:
                run.dropped = True
                task.cancel()
        self._on_change()

    def admit(self, budget: Budget) -> None:
        """The gate is open with `budget`: lines may start."""
        self.budget = budget
        self._pacer.slice_tokens = budget.slice_tokens
        self._admitting = True
        self._pump()

    def stop_admitting(self) -> None:
        """Nothing new is sent from here on. What is in the engine goes on."""
        self._admitting = False
        self._pacer.stop()

    def engine_up(self, up: bool, info: EngineInfo | None = None) -> None:
        """Whether the engine answers its health check; lines start only while it does."""
        self.info = info or self.info
        self._up = up
        if up:
            self._steps.tokenizes = self._steps.detokenizes = True
            self._pump()
        else:
            self._pacer.stop()

    def hold(self, held: bool) -> None:
        """The engine stands still with its requests, or goes on."""
        self.wire.hold(held)

    async def end_inflight(self) -> Ended:
        """End every request at the engine's next iteration, keeping tokens; returns when all have come back.

        The first abort is on its way when this first awaits. Answers that do not come within the bound are
        given up by closing their connections, and their lines run again from what was kept before.
        """
        self.stop_admitting()
        self._steps.ended_tokens = 0
        total, closed = await self.wire.end_all(self._hang_up)
        return Ended(ended=total, kept_tokens=self._steps.ended_tokens, closed=closed)

    def _hang_up(self, run: LineRun, young: bool) -> None:
        run.closed_young = young
        self._running[run].cancel()

    def drop_inflight(self) -> int:
        """Close every connection: the engine no longer answers. Its lines wait to run again."""
        runs = self.wire.runs()
        for run in runs:
            run.counts_as_death = True
            run.last_error = None
            self._running[run].cancel()
        return len(runs)

    async def close(self) -> None:
        """End what is in flight and every task."""
        await self.end_inflight()
        self.proof.close()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        for timer in (self._busy_timer, self._start_timer):
            if timer is not None:
                timer.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- waiting and starting

    def _wait(self, run: LineRun) -> None:
        self._sequence += 1
        # Suspects of having killed the engine go first: they are tried few at a time, and must not starve.
        heapq.heappush(self._waiting, ((-run.deaths, *run.order), self._sequence, run))

    def _pump(self) -> None:
        """Start lines as far as the gate, the engine and the budget allow, a few in each turn of the loop."""
        if self._start_timer is None and self._start_some():
            self._start_timer = asyncio.get_running_loop().call_later(STARTS_EVERY_S, self._pump_on)

    def _pump_on(self) -> None:
        self._start_timer = None
        self._pump()

    def _start_some(self) -> bool:
        """Start up to `STARTS_AT_ONCE` lines; returns whether there may be more to start."""
        for _ in range(STARTS_AT_ONCE):
            if not (self._admitting and self._up and self._waiting):
                return False
            if self.proof.wanted:
                self._start_proof()
                return False
            run = self._waiting[0][2]
            tokens = run.planned_tokens(self.info.max_model_len if self.info else None)
            deaths = max([run.deaths, *(other.deaths for other in self._running)])
            if deaths and len(self._running) >= self._suspect_limit(deaths):
                return False
            if not self._admits(tokens, len(self._running), self._running_tokens, self.budget):
                return False
            heapq.heappop(self._waiting)
            self._start(run, tokens)
        return True

    def _start(self, run: LineRun, tokens: int) -> None:
        self._running_tokens += tokens
        self._running[run] = asyncio.create_task(self._run(run, tokens))

    def _start_proof(self) -> None:
        if self._admits(PROOF_TOKENS, len(self._running), self._running_tokens, self.budget):
            run = self.proof.next()
            if run is not None:
                self._start(run, PROOF_TOKENS)

    def _suspect_limit(self, deaths: int) -> int:
        return 1 if deaths >= KILLS - 1 else max(1, self.budget.max_inflight // 4)

    async def _run(self, run: LineRun, tokens: int) -> None:
        again = True
        try:
            await self._steps.advance(run)
            again = False
        except SuspendedError:
            run.suspend(cache_trusted=self._steps.cache_trusted, block=self.block)
        except asyncio.CancelledError:
            # Only the executor cancels these: the connection was closed on purpose and the line stays.
            trusted = run.closed_young and self._steps.cache_trusted
            run.closed_young = False
            run.suspend(cache_trusted=trusted, block=self.block)
            if run.counts_as_death:
                run.counts_as_death = False
                run.deaths += 1
                run.blamed = True
        except EngineError as error:
            again = self._failed(run, error)
        except Exception as error:  # noqa: BLE001 - the task's edge: a line lost here would never end
            # Without a traceback: rendering one for each of thousands of lines would stop the loop.
            _log.error(
                "An answer of the engine makes no sense; its line is tried again.",
                key="answer_invalid",
                batch=run.batch,
                line=run.number,
                error=repr(error)[:300],
            )
            bad = EngineError(
                f"the answer makes no sense: {error!r}", code="engine_bad_answer", retryable=True
            )
            again = self._failed(run, bad)
        finally:
            del self._running[run]
            self._running_tokens -= tokens
        if run.dropped:
            again = False
        if again and self.proof.owns(run):
            self.proof.returned()
        elif again and run.deaths >= (KILLS if run.blamed else LOSSES):
            # At last it ran alone, see _suspect_limit.
            self._finish(run, engine_failed(run, run.last_error))
        elif again:
            self._wait(run)
        self._pump()
        self._on_change()

    def _failed(self, run: LineRun, error: EngineError) -> bool:
        """Take up an engine's error; returns whether the line is run again."""
        if not error.retryable:
            self._finish(run, failure(run, error.code, str(error), status=error.status))
            return False
        run.suspend(cache_trusted=False, block=self.block)
        if error.code == "engine_busy":
            self._pause_briefly()
            return True
        if error.code not in ("engine_unreachable", "engine_wrong_model"):
            run.deaths += 1
            run.blamed = run.blamed or not error.lost
            run.last_error = error
        self.proof.doubt(run, error, self.model)
        self._on_trouble(error)
        return True

    def _pause_briefly(self) -> None:
        if self._busy_timer is not None or not self._up:
            return
        self._up = False

        def over() -> None:
            self._busy_timer = None
            self._up = True
            self._pump()

        self._busy_timer = asyncio.get_running_loop().call_later(self._settings.busy_wait_s, over)

    def _finish(self, run: LineRun, result: LineResult) -> None:
        self.recomputed_tokens += run.recomputed
        self.finished_tokens += result.prompt_tokens + result.output_tokens
        run.sink.finished(run, result)
