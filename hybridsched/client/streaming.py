"""The chunks of one answer, for asyncio."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

from hybridsched.client.calls import LAST_LOOK_S, Call, Link
from hybridsched.client.requests import checked
from hybridsched.store.online_values import Request


class AsyncStream:
    """The chunks of one answer. Iterate it once, best within `async with`: leaving early cancels the request.

    After the last chunk, `usage`, `finish_reason` and `replica` are known.
    """

    def __init__(self, link: Link, request: Request) -> None:
        self._link = link
        self._request = request
        self._call: Call | None = None
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
        except BaseException:
            self._over = True
            if self._call is not None:
                self._call.close()
            raise

    async def _step(self) -> Any:
        if self._call is None:
            self._call = Call(self._link, self._request, stream=True)
        call, waiter = self._call, self._call.waiter
        while self._next >= len(waiter.chunks):
            if waiter.end is not None:
                end = checked(self.id, waiter.end)
                self.usage, self.finish_reason, self.replica = end.usage, end.finish_reason, end.replica
                raise StopAsyncIteration
            waiter.chunks.clear()
            self._next = 0
            await call.more()
        self._next += 1
        return waiter.chunks[self._next - 1]

    async def aclose(self) -> None:
        """Stop reading. A request that has not ended is cancelled, unless others wait for it."""
        self._over = True
        left = None if self._call is None else self._call.close()
        if left is not None:
            await asyncio.wait({left}, timeout=LAST_LOOK_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
