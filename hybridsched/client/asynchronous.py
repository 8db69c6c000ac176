"""The client for asyncio."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import redis

from hybridsched.client.calls import Call, Link, closed_error
from hybridsched.client.inbox import Inbox
from hybridsched.client.models import ModelWatch
from hybridsched.client.outage import Outages
from hybridsched.client.requests import Reply, build_request, seconds, to_reply
from hybridsched.client.streaming import AsyncStream
from hybridsched.store.connection import async_client
from hybridsched.store.online import OnlineQueue
from hybridsched.store.online_values import QueueLimits, Request
from hybridsched.store.serving import serving


class AsyncClient:
    """A client of one pool, for one event loop. Connects at the first request.

    Args:
        url: see `hybridsched.store.connection`.
        default_timeout_s: deadline of requests that name none.
        max_waiting: refuse a request (`QueueFull`) when this many of its model and class wait; 0: never.
        patience_s: how long Redis may be away before `StoreUnavailable` is raised (never past the deadline).
        unserved_patience_s: how long to wait for a model that no replica serves, while others are served and
            the policy starts none of it, before `NotServed` is raised; None: until the deadline.

    Raises:
        StoreUrlError: the URL cannot be understood.
        ValueError: the pool's name cannot stand in a key, or a number is none that can be used.
    """

    def __init__(
        self,
        url: str,
        pool: str,
        *,
        default_timeout_s: float = 60.0,
        max_waiting: int = 0,
        patience_s: float = 10.0,
        unserved_patience_s: float | None = 10.0,
        limits: QueueLimits | None = None,
    ) -> None:
        if isinstance(max_waiting, bool) or not isinstance(max_waiting, int) or max_waiting < 0:
            raise ValueError(f"max_waiting is {max_waiting!r}; give a whole number, 0 for no limit")
        self._default_timeout_s = seconds("default_timeout_s", default_timeout_s)
        self._max_waiting = max_waiting
        self._commands = async_client(url, name="hybridsched-client")
        self._reads = async_client(url, name="hybridsched-replies")
        self._queue = OnlineQueue(self._commands, pool, limits)
        self._name = uuid.uuid4().hex
        self._count = itertools.count(1)
        outages = Outages(url)
        models = ModelWatch(
            lambda model: serving(self._commands, pool, model),
            None if unserved_patience_s is None else seconds("unserved_patience_s", unserved_patience_s),
        )
        self._link = Link(
            self._queue,
            Inbox(self._reads, url, self._queue.keys.reply(self._name), outages),
            models,
            outages,
            url=url,
            patience_s=seconds("patience_s", patience_s),
        )

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
        send the request again: it is run once. Cancelling the awaiting task cancels the request, unless
        others wait for the same id.

        Raises:
            RequestError: one of its kinds says what became of it.
            StoreError: Redis cannot be reached or refuses.
            ValueError: model missing, or a name, number or body that cannot be sent.
        """
        request = self._request(body, fields, model, path, timeout_s, priority, request_id, stream=False)
        call = Call(self._link, request, stream=False)
        try:
            while (end := call.waiter.end) is None:
                await call.more()
        finally:
            call.close()
        return to_reply(request.id, end)

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
            self._link, self._request(body, fields, model, path, timeout_s, priority, request_id, stream=True)
        )

    async def cancel(self, request_id: str) -> str:
        """Cancel a request for all who wait for it.

        Returns `cancelled`, `aborting` (it runs; the end follows), `done` or `unknown`.

        Raises:
            StoreError: Redis cannot be reached or refuses.
        """
        if self._link.closed:
            raise closed_error(request_id)
        try:
            return await self._queue.cancel(request_id)
        except (redis.RedisError, OSError) as error:
            raise self._link.explained(error, f"cancelling request {request_id}") from error

    async def aclose(self) -> None:
        """Close the connections. Whoever waits gets `ClientClosed`; what was sent is left to its deadline."""
        tasks = self._link.close()
        while tasks:
            # Again and again: a cancellation that meets an answer just arriving is lost within redis-py.
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=0.1)
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
            {**_mapping(body), **fields},
            model=model,
            path=path,
            timeout_s=self._default_timeout_s if timeout_s is None else timeout_s,
            priority=priority,
            request_id=f"{self._name}-{next(self._count)}" if request_id is None else request_id,
            stream=stream,
            reply=self._link.inbox.key,
            max_waiting=self._max_waiting,
        )


def _mapping(body: Any) -> Mapping[str, Any]:
    if body is None:
        return {}
    if not isinstance(body, Mapping):
        raise ValueError(f"the body is of type {type(body).__name__}; give a dict")  # noqa: TRY004 - as all others
    return body
