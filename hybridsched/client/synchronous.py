"""The client for threads: the asyncio client on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from hybridsched.client.asynchronous import AsyncClient
from hybridsched.client.calls import closed_error
from hybridsched.client.errors import ClientClosed
from hybridsched.client.requests import Reply
from hybridsched.client.streaming import AsyncStream
from hybridsched.store.online_values import QueueLimits

T = TypeVar("T")


class Client:
    """A client of one pool, for any number of threads. Arguments and errors are those of `AsyncClient`.

    All threads share its connections and one blocking read for all their answers.
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
        self._inner = AsyncClient(
            url,
            pool,
            default_timeout_s=default_timeout_s,
            max_waiting=max_waiting,
            patience_s=patience_s,
            unserved_patience_s=unserved_patience_s,
            limits=limits,
        )
        self._lock = threading.Lock()
        self._closed = False
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hybridsched-client", daemon=True)
        self._thread.start()

    def complete(
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
        """Send a request and wait for its whole answer; see `AsyncClient.complete`."""
        return self.run(
            self._inner.complete(
                body,
                model=model,
                path=path,
                timeout_s=timeout_s,
                priority=priority,
                request_id=request_id,
                **fields,
            )
        )

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
    ) -> Stream:
        """The same, chunk by chunk; see `AsyncClient.stream`."""
        chunks = self._inner.stream(
            body,
            model=model,
            path=path,
            timeout_s=timeout_s,
            priority=priority,
            request_id=request_id,
            **fields,
        )
        return Stream(self, chunks)

    def cancel(self, request_id: str) -> str:
        """Cancel a request; see `AsyncClient.cancel`."""
        return self.run(self._inner.cancel(request_id))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the client's loop and wait for it. An interrupt (Ctrl-C) cancels it.

        Raises:
            ClientClosed: the client is closed, or was while this waited.
        """
        with self._lock:
            if self._closed:
                work.close()
                raise closed_error("not sent")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._calls.add(future)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if self._closed:
                raise closed_error("under way") from None
            raise
        except BaseException:
            future.cancel()
            raise
        finally:
            self._calls.discard(future)

    def close(self) -> None:
        """Close the connections and end the thread. Does nothing the second time.

        Threads that wait for an answer get `ClientClosed`; what was sent is left to its deadline.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            calls = set(self._calls)
        asyncio.run_coroutine_threadsafe(self._inner.aclose(), self._loop).result()
        # Each of them has been told and needs a turn or two of the loop, unless it is stuck in a connection.
        for late in concurrent.futures.wait(calls, timeout=1.0).not_done:
            late.cancel()
        concurrent.futures.wait(calls)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Stream:
    """The chunks of one answer; see `AsyncStream`. Iterate it once, best within `with`."""

    def __init__(self, client: Client, chunks: AsyncStream) -> None:
        self._client = client
        self._chunks = chunks

    @property
    def id(self) -> str:
        """The request's id."""
        return self._chunks.id

    @property
    def usage(self) -> dict[str, Any] | None:
        """The engine's token counts, after the last chunk."""
        return self._chunks.usage

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended, after the last chunk."""
        return self._chunks.finish_reason

    @property
    def replica(self) -> str | None:
        """Which replica answered, after the last chunk."""
        return self._chunks.replica

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """The next chunk, parsed; errors as `AsyncStream.__anext__`."""
        try:
            return self._client.run(self._chunks.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Stop reading. A request that has not ended is cancelled, unless others wait for it."""
        with contextlib.suppress(ClientClosed):
            self._client.run(self._chunks.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
