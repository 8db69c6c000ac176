"""The client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Coroutine, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import redis
import stamina

from hybridsched.client.errors import QueueFull, RetryBudgetExhausted
from hybridsched.client.requests import Reply, build_request, checked, to_reply
from hybridsched.client.waiting import Waiter
from hybridsched.log import keep_stdout_clean
from hybridsched.store.connection import async_client, explain
from hybridsched.store.errors import StoreError
from hybridsched.store.online import OnlineQueue
from hybridsched.store.online_values import (
    END_DECODER,
    Acceptance,
    Accepted,
    End,
    EndStatus,
    QueueLimits,
    Request,
)
from hybridsched.store.replies import Ended, Group, ReplyReader

GRACE_S = 1.0
"""How long after its deadline a client still waits for the answer that says so."""

TROUBLE = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.BusyLoadingError, OSError)
"""Errors that may pass when it is tried again."""


class AsyncClient:
    """A client of one pool, for one event loop. Connects at the first request.

    Args:
        url: see `hybridsched.store.connection`.
        default_timeout_s: deadline of requests that name none.
        max_waiting: refuse a request (`QueueFull`) when this many of its model and class wait; 0: never.
        patience_s: how long Redis may be away before `StoreUnavailable` is raised (never past the deadline).

    Raises:
        StoreUrlError: the URL cannot be understood.
        ValueError: the pool's name cannot stand in a key.
    """

    def __init__(
        self,
        url: str,
        pool: str,
        *,
        default_timeout_s: float = 60.0,
        max_waiting: int = 0,
        patience_s: float = 10.0,
        limits: QueueLimits | None = None,
    ) -> None:
        keep_stdout_clean()
        self._url = url
        self._default_timeout_s = default_timeout_s
        self._max_waiting = max_waiting
        self._patience_s = patience_s
        self._commands = async_client(url, name="hybridsched-client")
        self._reads = async_client(url, name="hybridsched-replies")
        self._queue = OnlineQueue(self._commands, pool, limits)
        self._name = uuid.uuid4().hex
        self._count = itertools.count(1)
        self._reply_key = self._queue.keys.reply(self._name)
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[str, list[Waiter]] = {}
        self._background: set[asyncio.Task[Any]] = set()

    async def complete(
        self,
        body: Mapping[str, Any] | None = None,
        *,
        model: str | None = None,
        path: str = "/v1/chat/completions",
        timeout_s: float | None = None,
        priority: int = 1,
        request_id: str | None = None,
        **fields: Any,
    ) -> Reply:
        """Send a request and wait for its whole answer.

        `body` and `fields` together are the OpenAI-style body. A `request_id` of your own makes it safe to
        send the request again: it is run once. Cancelling the awaiting task cancels the request.

        Raises:
            RequestError: one of its kinds says what became of it.
            StoreError: Redis cannot be reached or refuses.
            ValueError: model missing, or a name or priority that cannot be used.
        """
        request = self._request(body, fields, model, path, timeout_s, priority, request_id, stream=False)
        waiter = self._register(request.id)
        try:
            async with asyncio.timeout(request.timeout_ms / 1000 + GRACE_S):
                await self._accept(request)
                while waiter.end is None:
                    await waiter.wait()
        except TimeoutError:
            waiter.end = await self._too_late(request)
        except asyncio.CancelledError:
            self._in_background(self._cancel_quietly(request.id))
            raise
        finally:
            self._unregister(request.id, waiter)
        return to_reply(request.id, waiter.end)

    def stream(
        self,
        body: Mapping[str, Any] | None = None,
        *,
        model: str | None = None,
        path: str = "/v1/chat/completions",
        timeout_s: float | None = None,
        priority: int = 1,
        request_id: str | None = None,
        **fields: Any,
    ) -> AsyncStream:
        """The same, chunk by chunk: the engine's SSE objects, parsed. Sent when the iteration begins.

        Raises:
            ValueError: as `complete`; its other errors come from the iteration.
        """
        return AsyncStream(
            self, self._request(body, fields, model, path, timeout_s, priority, request_id, stream=True)
        )

    async def cancel(self, request_id: str) -> str:
        """Cancel a request. Returns `cancelled`, `aborting` (it runs; the end follows), `done` or `unknown`.

        Raises:
            StoreError: Redis cannot be reached or refuses.
        """
        try:
            return await self._queue.cancel(request_id)
        except (redis.RedisError, OSError) as error:
            raise self._explained(error, f"cancelling request {request_id}") from error

    async def aclose(self) -> None:
        """Close the connections. Requests under way are left to their deadlines."""
        tasks = {*self._background, *([self._reader] if self._reader else [])}
        while tasks:
            # Again and again: a cancellation that meets an answer just arriving is lost within redis-py.
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=0.1)
        self._reader = None
        await self._commands.aclose()
        await self._reads.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _request(
        self,
        body: Mapping[str, Any] | None,
        fields: Mapping[str, Any],
        model: str | None,
        path: str,
        timeout_s: float | None,
        priority: int,
        request_id: str | None,
        *,
        stream: bool,
    ) -> Request:
        return build_request(
            {**(body or {}), **fields},
            model=model,
            path=path,
            timeout_s=self._default_timeout_s if timeout_s is None else timeout_s,
            priority=priority,
            request_id=request_id or f"{self._name}-{next(self._count)}",
            stream=stream,
            reply=self._reply_key,
            max_waiting=self._max_waiting,
        )

    def _register(self, request_id: str) -> Waiter:
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read())
        waiter = Waiter()
        self._waiting.setdefault(request_id, []).append(waiter)
        return waiter

    def _unregister(self, request_id: str, waiter: Waiter) -> None:
        waiters = self._waiting[request_id]
        waiters.remove(waiter)
        if not waiters:
            del self._waiting[request_id]

    async def _accept(self, request: Request) -> None:
        try:
            accepted = await self._queue.accept(request)
        except TROUBLE:
            accepted = await self._accept_patiently(request)
        except redis.RedisError as error:
            raise self._explained(error, f"sending request {request.id}") from error
        if accepted.outcome is Acceptance.QUEUE_FULL:
            raise QueueFull(request.id, f"{request.max_waiting} requests of {request.model} wait already")
        if accepted.outcome is Acceptance.RETRY_BUDGET_EXHAUSTED:
            raise RetryBudgetExhausted(
                request.id, f"it was sent again more than {self._queue.limits.retry_budget} times"
            )

    async def _accept_patiently(self, request: Request) -> Accepted:
        """Try again with back-off. The id makes it safe: whatever was accepted before is attached to."""
        patience_s = min(self._patience_s, request.timeout_ms / 1000)
        try:
            async for attempt in stamina.retry_context(
                on=TROUBLE,
                attempts=None,
                timeout=patience_s,
                wait_initial=0.05,
                wait_max=1.0,
                wait_jitter=0.1,
            ):
                with attempt:
                    return await self._queue.accept(request)
        except (redis.RedisError, OSError) as error:
            raise self._explained(error, f"sending request {request.id}") from error
        raise AssertionError("the loop above returns or raises")

    async def _too_late(self, request: Request) -> End:
        """No end came in time: it may have been lost on the way, so look for the kept one."""
        with contextlib.suppress(redis.RedisError, OSError):
            kept = await self._queue.result(request.id)
            if kept is not None:
                return END_DECODER.decode(kept)
        self._in_background(self._cancel_quietly(request.id))
        return End(
            status=EndStatus.EXPIRED,
            message=f"no answer came within its {request.timeout_ms / 1000:g} s and {GRACE_S:g} s more; see "
            f"whether an online worker of model {request.model} runs (hybridsched pool status)",
        )

    async def _cancel_quietly(self, request_id: str) -> None:
        """Best effort, for a caller that has gone: without it the request runs to its end for nobody."""
        with contextlib.suppress(redis.RedisError, OSError):
            await self._queue.cancel(request_id)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _read(self) -> None:
        """Read answers and hand them to whoever waits, for ever."""
        reader = ReplyReader(self._reads, self._reply_key)
        try:
            while True:
                try:
                    entries = await reader.read()
                except TROUBLE:
                    entries = await self._read_patiently(reader)
                for entry in entries:
                    for waiter in self._waiting.get(entry.id, ()):
                        waiter.take(entry)
        except redis.RedisError as error:
            failure = self._explained(error, "reading answers")
            for waiters in self._waiting.values():
                for waiter in waiters:
                    waiter.fail(failure)

    async def _read_patiently(self, reader: ReplyReader) -> Iterator[Group | Ended]:
        async for attempt in stamina.retry_context(
            on=TROUBLE, attempts=None, timeout=None, wait_initial=0.05, wait_max=1.0, wait_jitter=0.1
        ):
            with attempt:
                return await reader.read()
        raise AssertionError("the loop above returns or raises")

    def _explained(self, error: redis.RedisError | OSError, doing: str) -> StoreError:
        known = error if isinstance(error, redis.RedisError) else redis.ConnectionError(str(error))
        return explain(known, self._url, doing)


class AsyncStream:
    """The chunks of one answer. Iterate it once, best within `async with`: leaving early cancels the request.

    After the last chunk, `usage`, `finish_reason` and `replica` are known.
    """

    def __init__(self, client: AsyncClient, request: Request) -> None:
        self._client = client
        self._request = request
        self._waiter: Waiter | None = None
        self._deadline = 0.0
        self._next = 0
        self._over = False
        self.usage: dict[str, Any] | None = None
        self.finish_reason: str | None = None
        self.replica: str | None = None

    @property
    def id(self) -> str:
        """The request's id."""
        return self._request.id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """The next chunk, parsed.

        Raises:
            RequestError: the request failed, was cancelled or passed its deadline; chunks that came before
                have been handed out.
            StoreError: Redis cannot be reached or refuses.
        """
        if self._over:
            raise StopAsyncIteration
        try:
            return await self._step()
        except BaseException as error:
            waiter = self._waiter
            if not isinstance(error, StopAsyncIteration) and waiter is not None and waiter.end is None:
                self._client._in_background(self._client._cancel_quietly(self.id))
            self._close()
            raise

    async def _step(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._waiter is None:
            self._deadline = loop.time() + self._request.timeout_ms / 1000 + GRACE_S
            self._waiter = self._client._register(self.id)
            await self._client._accept(self._request)
        waiter = self._waiter
        while self._next >= len(waiter.chunks):
            if waiter.end is not None:
                end = checked(self.id, waiter.end)
                self.usage, self.finish_reason, self.replica = end.usage, end.finish_reason, end.replica
                raise StopAsyncIteration
            waiter.chunks.clear()
            self._next = 0
            try:
                async with asyncio.timeout_at(self._deadline):
                    await waiter.wait()
            except TimeoutError:
                waiter.finish(await self._client._too_late(self._request))
        self._next += 1
        return waiter.chunks[self._next - 1]

    def _close(self) -> None:
        if self._waiter is not None and not self._over:
            self._client._unregister(self.id, self._waiter)
        self._over = True

    async def aclose(self) -> None:
        """Stop reading. A request that has not ended is cancelled."""
        if self._waiter is not None and not self._over and self._waiter.end is None:
            await self._client._cancel_quietly(self.id)
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
