"""One online request against the engine: from its body to how it ended. Touches no store.

Whatever happens - an engine that dies, hangs or refuses, a deadline, a cancel, a lost lease - there is
exactly one `Ending`, and the request is no longer in the engine when it is returned: closing the connection
ends it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Any

import msgspec

from hybridsched.engines.checks import bad_answer
from hybridsched.engines.protocol import Engine, EngineError, StreamChunk
from hybridsched.log import get_logger
from hybridsched.workers.online_body import (
    PATHS,
    BodyError,
    Event,
    Prepared,
    error_message,
    finish_of,
    prepare,
    read_event,
)

IDLE_TIMEOUT_S = 30.0
"""Longest silence of a stream, first token included: vLLM stopped by SIGTERM leaves its streams open."""

_GATEWAY = {"engine_busy": 503, "engine_timeout": 504}
_SUSPECT = ("engine_unreachable", "engine_died", "engine_timeout", "engine_bad_answer")
_MOST_TOKENS = 10**9
"""An answer that says it has more says nothing."""
_MOST_BEFORE = 1000
"""Events that are kept back for the first token; an engine sends one or two."""
_SHOWN = 100
"""Characters shown of what a client sent."""

_log = get_logger("online")


class Stop(StrEnum):
    """Why a running request is ended from outside."""

    CANCELLED = "cancelled"
    """Its client asked for it."""
    LEASE_LOST = "lease_lost"
    """Another worker has it: nothing may be answered here."""
    ENGINE_HUNG = "engine_hung"
    """The engine has not answered its health check for too long."""
    ENGINE_OUT = "engine_out"
    """The engine answers its health check and cannot be used."""
    STOPPING = "stopping"
    """The worker is being stopped and the time for what is in flight is over."""
    STORE_LOST = "store_lost"
    """The answers could not be delivered for too long."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed of a claimed request to run it."""

    id: str
    attempt: int
    path: str
    body: bytes
    stream: bool
    priority: int
    deadline_at: float
    """Monotonic seconds."""
    accepted_at: float
    """Monotonic seconds at which the store accepted it, by the server's age of the request at the claim."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended. The fields up to `http_status` are those of the reply's `end`."""

    status: str
    """ok, expired, failed or cancelled."""
    code: str | None = None
    message: str | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    body: dict[str, Any] | None = None
    http_status: int | None = None
    give_back: bool = False
    """Nothing has been sent and another replica may succeed."""
    suspect: bool = False
    """The engine itself is in doubt."""
    again: bool = False
    """With `give_back`: the same engine may succeed too, where there is no other."""
    not_there: bool = False
    """The engine says that what was asked for is not there: its model, or what the request names?"""


EXPIRED = Ending(
    status="expired",
    code="deadline_exceeded",
    message="the deadline passed before the answer was complete; its request was ended in the engine",
    http_status=504,
)


class Running:
    """A request while it runs. `tokens` and `first` are called in the event loop and must not block."""

    def __init__(
        self,
        request: Request,
        *,
        tokens: Callable[[bytes], None],
        first: Callable[[float], None],
        widened: Callable[[int], None],
    ) -> None:
        self.request = request
        self.send = tokens
        """Takes one event of the stream for the client."""
        self.first = first
        """Called once, with the milliseconds from accept to first token."""
        self.widened = widened
        """Called with `n` when the request takes more than one sequence."""
        self.stopped: Stop | None = None
        self.sent = 0
        """Events given to the client."""
        self.sequences = 1
        self.tpot_ms: float | None = None
        self._first_at: float | None = None
        self._task: asyncio.Task[Any] | None = None

    def stop(self, why: Stop) -> None:
        """End it now. The first reason counts."""
        if self.stopped is None:
            self.stopped = why
            if self._task is not None:
                self._task.cancel()

    def output(self) -> None:
        """The engine produced tokens."""
        if self._first_at is None:
            self._first_at = time.monotonic()
            self.first((self._first_at - self.request.accepted_at) * 1000.0)

    def finished(self, usage: dict[str, Any] | None) -> None:
        """Work out the time per output token, where there is more than one."""
        count = (usage or {}).get("completion_tokens")
        if self._first_at is not None and isinstance(count, int) and 1 < count < _MOST_TOKENS:
            self.tpot_ms = (time.monotonic() - self._first_at) * 1000.0 / (count - 1)

    async def run(self, engine: Engine, *, idle_timeout_s: float, engine_priority: bool) -> Ending:
        """Run it to its end. Only a cancellation that `stop` did not cause gets out: whatever else is raised
        becomes an ending, since a request without one would be held for ever.
        """
        self._task = asyncio.current_task()
        try:
            if self.stopped is None:
                return await self._run(engine, idle_timeout_s, engine_priority)
        except asyncio.CancelledError:
            if self.stopped is None:
                raise
            if self._task is not None:
                self._task.uncancel()
        except Exception as error:  # noqa: BLE001 - the request's edge: it must end in an answer
            _log.exception(
                "A request failed in a way that nothing here foresees; it is answered as failed.",
                key="request_broke",
                id=self.request.id,
            )
            return internal_error(error)
        finally:
            self._task = None
        return _stopped(self.stopped, sent=self.sent)

    async def _run(self, engine: Engine, idle_timeout_s: float, engine_priority: bool) -> Ending:
        request = self.request
        left = request.deadline_at - time.monotonic()
        if left <= 0:
            return EXPIRED
        if request.path not in PATHS:
            return _refused(
                404, "not_found", f"path {request.path[:_SHOWN]!r} is not served; use {' or '.join(PATHS)}"
            )
        try:
            prepared = prepare(
                request.body, stream=request.stream, priority=request.priority if engine_priority else None
            )
        except BodyError as error:
            return _refused(400, "bad_request", str(error))
        if prepared.sequences > 1:
            self.sequences = prepared.sequences
            self.widened(prepared.sequences)
        try:
            async with asyncio.timeout(left) as clock:
                if request.stream:
                    return await self._stream(engine, prepared, idle_timeout_s)
                return await self._whole(engine, prepared, left)
        except TimeoutError:
            if clock.expired():
                return EXPIRED
            raise
        except EngineError as error:
            # The engine's own time limit for an answer is the deadline; say so rather than blame the engine.
            if time.monotonic() >= request.deadline_at:
                return EXPIRED
            return engine_failed(error, sent=self.sent)

    @property
    def engine_id(self) -> str:
        """The request's id in the engine; the prefix keeps it apart from offline ids, whoever chose it."""
        return f"hson-{self.request.id}-{self.request.attempt}"

    async def _stream(self, engine: Engine, prepared: Prepared, idle_timeout_s: float) -> Ending:
        request = self.request
        reason: str | None = None
        usage: dict[str, Any] | None = None
        before: list[bytes] = []
        stream = engine.stream(
            request.path, prepared.body, request_id=self.engine_id, idle_timeout_s=idle_timeout_s
        )
        async with _closing(stream) as events:
            async for chunk in events:
                event = read_event(chunk.data)
                if event.problem:
                    raise bad_answer(engine.url, request.path, 200, event.problem)
                if event.error is not None:
                    return self._error_inside(event)
                reason = event.finish_reason or reason
                usage = event.usage or usage
                if reason == "abort":
                    return _aborted(sent=self.sent)
                if event.usage_only and prepared.hide_usage:
                    continue
                # A chat begins with an event that only names the role. It waits for the first token: once
                # anything has been sent, no other replica may try.
                before.append(chunk.data)
                if len(before) > _MOST_BEFORE:
                    raise bad_answer(engine.url, request.path, 200, "events without end and without a token")
                if event.has_output:
                    self.output()
                if event.has_output or self.sent or reason is not None:
                    for data in before:
                        self.sent += 1
                        self.send(data)
                    before.clear()
        if reason is None:
            return _died("its stream ended without a finish reason", sent=self.sent)
        self.finished(usage)
        return Ending(status="ok", finish_reason=reason, usage=usage, http_status=200)

    def _error_inside(self, event: Event) -> Ending:
        """vLLM reports a dead engine process, or a request it cannot go on with, inside a 200 stream."""
        error = event.error or {}
        code = error.get("code")
        if isinstance(code, int) and 400 <= code < 500 and not self.sent:
            return _refused(code, "bad_request", error_message(error), body={"error": error})
        return _died(error_message(error), sent=self.sent)

    async def _whole(self, engine: Engine, prepared: Prepared, left: float) -> Ending:
        answer = await engine.complete(
            self.request.path, prepared.body, request_id=self.engine_id, timeout_s=left
        )
        if answer.status >= 400:
            code = "not_found" if answer.status == 404 else "bad_request"
            return _refused(answer.status, code, error_message(answer.body), body=answer.body, by_engine=True)
        if answer.aborted:
            return _aborted(sent=0)
        reason, usage = finish_of(answer.body)
        return Ending(
            status="ok", finish_reason=reason, usage=usage, body=answer.body, http_status=answer.status
        )


@asynccontextmanager
async def _closing(events: AsyncIterator[StreamChunk]) -> AsyncIterator[AsyncIterator[StreamChunk]]:
    """Close an iterator that can be closed, so that the engine sees the disconnect before we go on."""
    try:
        yield events
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()


def _refused(
    status: int, code: str, message: str, body: dict[str, Any] | None = None, *, by_engine: bool = False
) -> Ending:
    return Ending(
        status="failed",
        code=code,
        message=message,
        http_status=status,
        body=body,
        not_there=by_engine and status == 404,
    )


def internal_error(error: Exception) -> Ending:
    """The ending of a request on which the worker itself failed."""
    return Ending(
        status="failed",
        code="internal_error",
        message=f"the worker failed on this request ({type(error).__name__}); its log says more",
        http_status=500,
    )


def engine_failed(error: EngineError, *, sent: int) -> Ending:
    """The ending that an engine's error makes, after `sent` events were given to the client."""
    if error.status is not None and 400 <= error.status < 500:
        code = error.code if error.code in ("bad_request", "not_found") else "bad_request"
        return _refused(error.status, code, str(error), body=error.body, by_engine=True)
    suspect = error.code in _SUSPECT
    if sent:
        return Ending(
            status="failed",
            code="engine_failed",
            message=f"the engine failed after {sent} events of the answer had been sent: {error}",
            http_status=502,
            suspect=suspect,
        )
    return Ending(
        status="failed",
        code=error.code,
        message=str(error),
        http_status=_GATEWAY.get(error.code, 502),
        give_back=error.retryable,
        suspect=suspect,
        again=error.code == "engine_bad_answer",
    )


def _died(what: str, *, sent: int) -> Ending:
    return engine_failed(
        EngineError(f"the engine died: {what}", code="engine_died", retryable=True), sent=sent
    )


def _aborted(*, sent: int) -> Ending:
    """Somebody told the engine to end it: an operator's abort of all, or a pause that aborts."""
    return Ending(
        status="failed",
        code="engine_aborted",
        message="the engine ended the request because somebody told it to, not the client; send it again",
        http_status=502,
        give_back=not sent,
    )


def _stopped(why: Stop, *, sent: int) -> Ending:
    if why is Stop.CANCELLED:
        return Ending(
            status="cancelled", code="cancelled", message="the request was cancelled", http_status=499
        )
    words = {
        Stop.ENGINE_HUNG: ("engine_timeout", "the engine has stopped answering", 504),
        Stop.ENGINE_OUT: ("engine_failed", "the engine was taken out before the answer was complete", 502),
        Stop.STOPPING: ("worker_stopped", "the replica was stopped before the answer was complete", 503),
        Stop.STORE_LOST: ("store_lost", "the answer could not be delivered", 503),
        Stop.LEASE_LOST: ("lease_lost", "another worker has taken the request over", 503),
    }
    code, message, status = words[why]
    return Ending(
        status="failed",
        code="engine_failed" if sent and why is Stop.ENGINE_HUNG else code,
        message=f"{message}; {sent} events of the answer had been sent" if sent else message,
        http_status=status,
        give_back=not sent,
        again=why is Stop.ENGINE_OUT,
    )
