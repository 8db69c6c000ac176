"""The requests that one lane has in its engine: sent at the right pace, ended all at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from hybridsched.engines.protocol import Completion, Engine, EngineError
from hybridsched.log import get_logger
from hybridsched.workers.offline_pacer import Grant, PrefillPacer
from hybridsched.workers.offline_run import LineRun

_log = get_logger("offline")
_encode = msgspec.json.Encoder().encode


class LineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits, seconds of wall time."""

    line_timeout_s: float = 600.0
    """Longest time for one request of a line; then the connection is closed and the line is run again."""
    slice_timeout_s: float = 120.0
    abort_repeat_s: float = 0.02
    """An abort is sent again after this while answers are missing."""
    abort_missed_s: float = 0.002
    """The same when the engine ended fewer requests than asked: the abort overtook some of them."""
    young_s: float = 0.01
    """A request sent less than this before a pause may still be on its way, where no abort finds it. Its
    connection is closed instead: it has produced a token at most, and a server drops what it has not read."""
    abort_bound_s: float = 3.0
    """After this the connections are closed, which ends the requests too, without their tokens."""
    busy_wait_s: float = 0.25
    """Wait after the engine refused a request because it was full."""


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
    ) -> None:
        self.engine = engine
        self._control = control
        self._settings = settings
        self._on_change = on_change
        self._clock = clock
        self.pacer = PrefillPacer(clock=clock)
        self._sent: dict[str, tuple[str, LineRun, float]] = {}
        self.quiet_s = clock()
        """When the last request came back, on the clock given."""
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def inflight(self) -> int:
        """Requests in the engine, or on their way to it."""
        return len(self._sent)

    def runs(self) -> set[LineRun]:
        """The lines that have a request in flight."""
        return {run for _, run, _ in self._sent.values()}

    async def send(
        self, run: LineRun, path: str, body: dict[str, Any], grant: Grant, *, is_slice: bool = False
    ) -> Completion:
        """One request and its answer. Raises what the engine raises."""
        request_id = run.next_request_id()
        self._sent[request_id] = (path, run, self._clock())
        self._quiet.clear()
        self._on_change()
        timeout_s = self._settings.slice_timeout_s if is_slice else self._settings.line_timeout_s
        if not is_slice:
            self.pacer.decoding(grant)
        measured = False
        try:
            answer = await self.engine.complete(
                path, _encode(body), request_id=request_id, timeout_s=timeout_s
            )
            measured = is_slice and answer.status < 400 and not answer.aborted
            return answer
        finally:
            del self._sent[request_id]
            if measured:
                self.pacer.slice_answered(grant)
            else:
                self.pacer.answered(grant)
            if not self._sent:
                self.quiet_s = self._clock()
                self._quiet.set()
            self._on_change()

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
        missed = asyncio.Event()
        while self._sent:
            late = self._clock() >= give_up
            by_path: dict[str, list[str]] = {}
            for request_id, (path, run, _) in self._sent.items():
                if run in young:
                    continue
                if not late and (path != run.path or run.shape.abortable):
                    by_path.setdefault(path, []).append(request_id)
                elif run not in closed:
                    closed.add(run)
                    close(run, False)
            for path, request_ids in by_path.items():
                post = asyncio.ensure_future(self._abort(path, request_ids, missed))
                posts.add(post)
                post.add_done_callback(posts.discard)
            await self._until_quiet(missed)
        for post in posts:
            post.cancel()
        return total, len(closed)

    async def _abort(self, path: str, request_ids: list[str], missed: asyncio.Event) -> None:
        try:
            if await self._control.abort(path, request_ids) < len(request_ids):
                missed.set()
        except EngineError as error:
            _log.warning(
                "An abort did not reach the engine; it is sent again, and after its bound the "
                "connections are closed, which ends the requests too.",
                key="abort_failed",
                error=str(error),
            )

    async def _until_quiet(self, missed: asyncio.Event) -> None:
        """Wait until all answers are in, or it is time for the next abort."""
        quiet = asyncio.ensure_future(self._quiet.wait())
        overtaken = asyncio.ensure_future(missed.wait())
        settings = self._settings
        await asyncio.wait(
            (quiet, overtaken), timeout=settings.abort_repeat_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not quiet.done() and overtaken.done():
            missed.clear()
            await asyncio.wait((quiet,), timeout=settings.abort_missed_s)
        quiet.cancel()
        overtaken.cancel()
