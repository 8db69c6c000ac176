"""The requests that one lane has in its engine: sent at the right pace, ended all at once."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from hybridsched.core.orphans import request_id as make_id
from hybridsched.core.pacing import Grant
from hybridsched.engines.protocol import Completion, Engine, EngineError
from hybridsched.engines.request_log import RequestLog, RequestRow, tokens_of
from hybridsched.log import get_logger
from hybridsched.workers.offline_pacer import PrefillPacer
from hybridsched.workers.offline_run import LineRun

MOST_HELD_S = 86_400.0
"""Longest time for which an engine that stands still is taken to hold requests. A policy takes them out of it
long before."""

_log = get_logger("offline")
_encode = msgspec.json.Encoder().encode


class LineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits, seconds of wall time."""

    line_timeout_s: float = 600.0
    """Longest time for one request of a line; then the connection is closed and the line is run again."""
    slice_timeout_s: float = 120.0
    abort_again_s: float = 0.002
    """An abort is sent a second time after this, while answers are missing: the first may have overtaken
    requests on their way, and vLLM does not say which of the ids it knew."""
    abort_repeat_s: float = 0.02
    """Longest time between two of them: they are sent at twice the distance each time."""
    young_s: float = 0.01
    """A request sent less than this before a pause may still be on its way, where no abort finds it. Its
    connection is closed instead: it has produced a token at most, and a server drops what it has not read."""
    abort_bound_s: float = 3.0
    """After this the connections are closed, which ends the requests too, without their tokens."""
    busy_wait_s: float = 0.25
    """Wait after the engine refused a request because it was full."""
    proof_back_off_s: tuple[float, float] = (0.1, 10.0)
    """First and longest wait between two small requests that have to prove that a failing engine works."""


class RequestClock:
    """The time limit of one request; it does not run while the engine stands still."""

    def __init__(self, limit_s: float, *, held: bool) -> None:
        self._limit_s = self._left_s = limit_s
        self._held = held
        self._timeout: asyncio.Timeout | None = None
        self.outer_s = limit_s + MOST_HELD_S
        """Limit for the client, which knows of no pauses."""

    @contextlib.asynccontextmanager
    async def running(self, url: str, path: str) -> AsyncIterator[None]:
        """Raises `EngineError` engine_timeout within it when the time is over."""
        try:
            async with asyncio.timeout(None if self._held else self._limit_s) as self._timeout:
                yield
        except TimeoutError as error:
            raise EngineError(
                f"engine {url} said nothing on {path} within {self._limit_s:g} s",
                code="engine_timeout",
                retryable=True,
            ) from error

    def hold(self, held: bool) -> None:
        """Stop the clock, or let it go on."""
        if held is self._held:
            return
        self._held = held
        timeout = self._timeout
        if timeout is None or timeout.expired():
            return
        now_s = asyncio.get_running_loop().time()
        if held:
            self._left_s = max(0.0, (timeout.when() or now_s) - now_s)
            timeout.reschedule(None)
        else:
            timeout.reschedule(now_s + self._left_s)


class LaneWire:
    """Requests in flight between one lane and one engine."""

    def __init__(
        self,
        engine: Engine,
        control: Engine,
        settings: LineSettings,
        *,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        log: RequestLog | None = None,
    ) -> None:
        self.engine = engine
        self._log = log
        self._control = control
        self._settings = settings
        self._on_change = on_change
        self._clock = clock
        self.pacer = PrefillPacer(engine.healthy, clock=clock)
        self.tag = secrets.token_hex(6)
        """Tells this lane's requests from those of every other worker, before and after it."""
        self.next_number = 0
        """Number of the next request; they are given out once, in order."""
        self._sent: dict[str, tuple[str, LineRun, float]] = {}
        self._clocks: dict[str, RequestClock] = {}
        self._held = False
        self._holds = 0
        self.quiet_s = clock()
        """When the last request came back, on the clock given."""
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def inflight(self) -> int:
        """Requests in the engine, or on their way to it."""
        return len(self._sent)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the requests in flight."""
        return tuple(int(one.rpartition("-")[2]) for one in self._sent)

    def runs(self) -> set[LineRun]:
        """The lines that have a request in flight."""
        return {run for _, run, _ in self._sent.values()}

    async def send(
        self, run: LineRun, path: str, body: dict[str, Any], grant: Grant, *, is_slice: bool = False
    ) -> Completion:
        """One request and its answer. Raises what the engine raises."""
        request_id = make_id(self.tag, self.next_number)
        self.next_number += 1
        run.sent_as(request_id)
        self._sent[request_id] = (path, run, self._clock())
        self._quiet.clear()
        self._on_change()
        timeout_s = self._settings.slice_timeout_s if is_slice else self._settings.line_timeout_s
        if not is_slice:
            self.pacer.decoding(grant)
        measured = False
        answer: Completion | None = None
        end = "error"
        holds = self._holds
        clock = self._clocks[request_id] = RequestClock(timeout_s, held=self._held)
        try:
            async with clock.running(self.engine.url, path):
                answer = await self.engine.complete(
                    path, _encode(body), request_id=request_id, timeout_s=clock.outer_s
                )
            measured = is_slice and answer.status < 400 and not answer.aborted and holds == self._holds
            end = "abort" if answer.aborted else "ok" if answer.status < 400 else "error"
        except asyncio.CancelledError:
            end = "closed"
            raise
        else:
            return answer
        finally:
            _, _, sent_s = self._sent.pop(request_id)
            del self._clocks[request_id]
            self._note(run, sent_s, answer, end)
            if measured:
                self.pacer.slice_answered(grant)
            else:
                self.pacer.answered(grant)
            if not self._sent:
                self.quiet_s = self._clock()
                self._quiet.set()
                self.pacer.quiet()
            self._on_change()

    def hold(self, held: bool) -> None:
        """The engine stands still with its requests, or goes on: their time limits do the same."""
        if held:
            self._holds += 1
        self._held = held
        for clock in self._clocks.values():
            clock.hold(held)

    def _note(self, run: LineRun, sent_s: float, answer: Completion | None, end: str) -> None:
        if self._log is None:
            return
        self._log.add(
            RequestRow(
                s=sent_s,
                e=self._clock(),
                offline=True,
                id=run.custom_id,
                **tokens_of(None if answer is None else answer.body.get("usage")),
                end=end,
            )
        )

    async def end_all(self, close: Callable[[LineRun, bool], None]) -> tuple[int, int]:
        """End every request at the engine's next iteration; returns how many there were, and how many of them
        had to be closed for want of an answer, once all are back.

        The first abort is on its way when this first awaits. Requests that an abort does not reach, or that
        are not back within the bound, are closed by `close(line, False)`; those too young for an abort to
        find them by `close(line, True)`.
        """
        total = len(self._sent)
        young_from = self._clock() - self._settings.young_s
        young = {run for _, run, sent_s in self._sent.values() if sent_s > young_from}
        for run in young:
            close(run, True)
        closed: set[LineRun] = set()
        give_up = self._clock() + self._settings.abort_bound_s
        posts: set[asyncio.Task[None]] = set()
        wait_s = self._settings.abort_again_s
        while self._sent:
            late = self._clock() >= give_up
            by_path: dict[str, list[str]] = {}
            for request_id, (path, run, _) in self._sent.items():
                if run in young:
                    continue
                if not late and (path != run.path or run.shape.abortable):
                    run.told_to_end = True
                    by_path.setdefault(path, []).append(request_id)
                elif run not in closed:
                    closed.add(run)
                    close(run, False)
            for path, request_ids in by_path.items():
                post = asyncio.ensure_future(self._abort(path, request_ids))
                posts.add(post)
                post.add_done_callback(posts.discard)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._quiet.wait()
            wait_s = min(2 * wait_s, self._settings.abort_repeat_s)
        for post in posts:
            post.cancel()
        return total, len(closed)

    async def _abort(self, path: str, request_ids: list[str]) -> None:
        try:
            await self._control.abort(path, request_ids)
        except EngineError as error:
            _log.warning(
                "An abort did not reach the engine; it is sent again, and after its bound the "
                "connections are closed, which ends the requests too.",
                key="abort_failed",
                error=str(error),
            )
