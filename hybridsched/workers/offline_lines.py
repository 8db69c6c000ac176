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
from hybridsched.engines.protocol import Completion, Engine, EngineError, EngineInfo
from hybridsched.log import get_logger
from hybridsched.workers import offline_plan as plan
from hybridsched.workers.offline_pacer import Grant
from hybridsched.workers.offline_run import (
    DEFAULT_BLOCK,
    LineResult,
    LineRun,
    LineSink,
    engine_failed,
    failure,
)
from hybridsched.workers.offline_wire import LaneWire, LineSettings

_log = get_logger("offline")

KILLS = 3
"""A line in flight at this many engine failures is taken to be their cause: at the last one it ran alone."""

STARTS_AT_ONCE = 4
STARTS_EVERY_S = 0.002
"""Lines started in one turn of the event loop, and the time to the next turn, seconds. A lane that resumes
has dozens of long bodies to build: the first ones are on their way before the others are begun, and an abort
waits behind a few at most."""

_CACHE_TRUST = 0.5
"""Below this share of expected prefix hits after pauses, prompts are fed by slices again."""


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


class _Suspended(Exception):  # noqa: N818 - no error: the line waits for the gate
    """The line goes back to the waiting ones."""


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
    ) -> None:
        """`control`: a client of its own for aborts, whose connection stays warm. `on_change` is told of
        every change of requests or lines, `on_trouble` of the engine's failures."""
        self._admits = admits
        self._settings = settings or LineSettings()
        self._on_change = on_change
        self._on_trouble = on_trouble
        self._wire = LaneWire(engine, control or engine, self._settings, on_change=on_change, clock=clock)
        self._pacer = self._wire.pacer
        self.budget = NO_BUDGET
        self.info: EngineInfo | None = None
        """What the engine says of itself; its limits are used where known."""
        self._admitting = False
        self._up = True
        self._waiting: list[tuple[tuple[int, ...], int, LineRun]] = []
        self._sequence = 0
        self._running: dict[LineRun, asyncio.Task[None]] = {}
        self._running_tokens = 0
        self._cache_share = 1.0
        self._tokenizes = True
        self._ended_tokens = 0
        self._busy_timer: asyncio.TimerHandle | None = None
        self._start_timer: asyncio.TimerHandle | None = None
        self.recomputed_tokens = 0
        """Tokens computed again so far, over all lines that have ended."""
        self.finished_tokens = 0
        """Prompt and output tokens of all lines that have ended."""

    @property
    def inflight(self) -> int:
        """Requests in the engine, or on their way to it."""
        return self._wire.inflight

    @property
    def quiet_s(self) -> float:
        """When the last request came back, on the executor's clock."""
        return self._wire.quiet_s

    @property
    def lines(self) -> int:
        """Lines in hand that have not ended."""
        return len(self._waiting) + len(self._running)

    @property
    def waiting(self) -> int:
        """Lines in hand that no request runs for."""
        return len(self._waiting)

    @property
    def block(self) -> int:
        return (self.info.block_size if self.info else None) or DEFAULT_BLOCK

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
            self._tokenizes = True
            self._pump()
        else:
            self._pacer.stop()

    async def end_inflight(self) -> Ended:
        """End every request at the engine's next iteration, keeping tokens; returns when all have come back.

        The first abort is on its way when this first awaits. Answers that do not come within the bound are
        given up by closing their connections, and their lines run again from what was kept before.
        """
        self.stop_admitting()
        self._ended_tokens = 0
        total, closed = await self._wire.end_all(self._hang_up)
        return Ended(ended=total, kept_tokens=self._ended_tokens, closed=closed)

    def _hang_up(self, run: LineRun, young: bool) -> None:
        run.closed_young = young
        self._running[run].cancel()

    def drop_inflight(self) -> int:
        """Close every connection: the engine no longer answers. Its lines wait to run again."""
        runs = self._wire.runs()
        for run in runs:
            run.counts_as_death = True
            self._running[run].cancel()
        return len(runs)

    async def close(self) -> None:
        """End what is in flight and every task."""
        await self.end_inflight()
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
            run = self._waiting[0][2]
            tokens = run.planned_tokens(self.info.max_model_len if self.info else None)
            deaths = max([run.deaths, *(other.deaths for other in self._running)])
            if deaths and len(self._running) >= self._suspect_limit(deaths):
                return False
            if not self._admits(tokens, len(self._running), self._running_tokens, self.budget):
                return False
            heapq.heappop(self._waiting)
            self._running_tokens += tokens
            self._running[run] = asyncio.create_task(self._run(run, tokens))
        return True

    def _suspect_limit(self, deaths: int) -> int:
        return 1 if deaths >= KILLS - 1 else max(1, self.budget.max_inflight // 4)

    async def _run(self, run: LineRun, tokens: int) -> None:
        again = True
        try:
            await self._advance(run)
            again = False
        except _Suspended:
            run.suspend(cache_trusted=self._cache_share >= _CACHE_TRUST, block=self.block)
        except asyncio.CancelledError:
            # Only the executor cancels these: the connection was closed on purpose and the line stays.
            trusted = run.closed_young and self._cache_share >= _CACHE_TRUST
            run.closed_young = False
            run.suspend(cache_trusted=trusted, block=self.block)
            if run.counts_as_death:
                run.counts_as_death = False
                run.deaths += 1
        except EngineError as error:
            again = self._failed(run, error)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            _log.exception("An answer of the engine makes no sense; its line fails.", key="answer_invalid")
            again = False
            self._finish(
                run, failure(run, "answer_invalid", f"the engine's answer makes no sense: {error!r}")
            )
        finally:
            del self._running[run]
            self._running_tokens -= tokens
        if run.dropped:
            again = False
        elif again and run.deaths >= KILLS:  # at last it ran alone, see _suspect_limit
            self._finish(run, engine_failed(run))
            again = False
        if again:
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
        if error.code != "engine_unreachable":
            run.deaths += 1
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

    # -- one line

    async def _advance(self, run: LineRun) -> None:
        longest = self.info.max_model_len if self.info else None
        remaining = None
        if run.kept is not None:
            remaining = plan.remaining_tokens(run.shape, run.kept, longest)
            if remaining == 0:
                self._deliver(run, None)
                return
            if remaining is None:
                run.drop_kept()
        await self._feed(run, longest)
        known = run.prompt_now()
        cost = max(1, (len(known) if known is not None else run.prompt_estimate) - run.fed)
        if run.kept is not None and remaining is not None:
            path, body = plan.COMPLETIONS, plan.continuation_request(run.body, run.kept, remaining)
        else:
            path, body = run.path, plan.own_request(run.shape, run.body)
        grant = await self._grant(run, cost)
        answer = await self._wire.send(run, path, body, grant)
        if answer.status >= 400:
            self._refused(run, answer)
            return
        self._account(run, answer)
        if answer.aborted:
            before = len(run.kept.token_ids) if run.kept else 0
            run.kept = plan.keep(run.shape, answer.body, run.kept, run.prompt_ids)
            if run.kept is not None:
                run.prompt_ids = run.kept.prompt_ids
                self._ended_tokens += len(run.kept.token_ids) - before
            lost = plan.completion_tokens(answer.body) - (len(run.kept.token_ids) if run.kept else 0) + before
            run.recomputed += max(0, lost)
            run.computed -= max(0, lost)
            raise _Suspended
        self._deliver(run, answer)

    async def _feed(self, run: LineRun, longest: int | None) -> None:
        """Bring a long prompt into the prefix cache by slices, up to its last one."""
        most = self._pacer.slice_tokens
        if most <= 0 or not run.shape.sliceable:
            return
        if run.prompt_ids is None and run.prompt_estimate > most and self._tokenizes:
            await self._tokenize(run)
        prompt = run.prompt_now()
        if prompt is None or (longest is not None and len(prompt) >= longest):
            return  # too long: the engine says so at once, and nothing is computed for it
        step = max(self.block, most - most % self.block)
        while len(prompt) - run.fed > step:
            upto = run.fed + step
            grant = await self._grant(run, step)
            body = plan.slice_request(run.body, prompt, upto)
            answer = await self._wire.send(run, plan.COMPLETIONS, body, grant, is_slice=True)
            if answer.status >= 400:
                return  # the line's own request tells the user what is wrong
            self._account(run, answer)
            if answer.aborted:
                raise _Suspended
            run.fed = upto

    async def _tokenize(self, run: LineRun) -> None:
        try:
            run.learn_prompt(await self._wire.engine.tokenize(run.path, run.body))
        except EngineError as error:
            if error.retryable:
                raise
            if error.code == "not_found":
                self._tokenizes = False
                _log.warning(
                    "The engine has no /tokenize, so long text prompts go in whole.",
                    key="tokenize_missing",
                    url=self._wire.engine.url,
                )

    async def _grant(self, run: LineRun, tokens: int) -> Grant:
        grant = await self._pacer.acquire((-run.deaths, *run.order), tokens)
        if grant is None:
            raise _Suspended
        if not (self._admitting and self._up):
            self._pacer.answered(grant)
            raise _Suspended
        return grant

    def _account(self, run: LineRun, answer: Completion) -> None:
        share = run.account(answer.body, block=self.block)
        if share is not None:
            self._cache_share += 0.2 * (share - self._cache_share)
        if not answer.aborted:
            run.paused = False

    # -- ends

    def _refused(self, run: LineRun, answer: Completion) -> None:
        error = answer.body.get("error")
        details = error if isinstance(error, dict) else answer.body
        message = str(details.get("message") or error or f"HTTP {answer.status}")
        if answer.status in (401, 403):
            raise EngineError(
                f"the engine refused our access ({message}); give the worker its API key",
                code="engine_unreachable",
                retryable=True,
                status=answer.status,
            )
        if answer.status in (408, 429):
            raise EngineError(message, code="engine_busy", retryable=True, status=answer.status)
        if run.kept is not None:
            # The user's request was taken before: what is refused is our continuation of it.
            run.drop_kept()
            run.shape = msgspec.structs.replace(run.shape, continuable=False, why_not=message)
            raise _Suspended
        code = str(details.get("type") or details.get("code") or "bad_request")
        self._finish(run, failure(run, code, message, status=answer.status))

    def _deliver(self, run: LineRun, answer: Completion | None) -> None:
        body = plan.final_body(run.body, run.kept, answer.body if answer else None)
        usage = body.get("usage") or {}
        self._finish(
            run,
            LineResult(
                request_id=run.request_id,
                status_code=200,
                body=body,
                prompt_tokens=int(usage.get("prompt_tokens") or 0),
                output_tokens=int(usage.get("completion_tokens") or 0),
            ),
        )

    def _finish(self, run: LineRun, result: LineResult) -> None:
        self.recomputed_tokens += run.recomputed
        self.finished_tokens += result.prompt_tokens + result.output_tokens
        run.sink.finished(run, result)
