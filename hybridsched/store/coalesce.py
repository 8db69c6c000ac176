"""Many small calls of one turn of the event loop become one round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Coalescer(Generic[T, R]):
    """Collects items and hands them over in order, one hand-over at a time.

    While one is on its way the next collects, so batches grow with the load and an idle caller waits for
    nobody. When `send` fails, everyone in that hand-over gets the error; an error among its results is for
    the caller of that item.

    `for_callers`: an item whose caller has gone before its hand-over began is dropped.
    """

    def __init__(
        self, send: Callable[[Sequence[T]], Awaitable[Sequence[R | Exception]]], *, for_callers: bool = False
    ) -> None:
        self._send = send
        self._for_callers = for_callers
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._sent: list[tuple[T, asyncio.Future[R]]] = []
        self._task: asyncio.Task[None] | None = None

    async def submit(self, item: T) -> R:
        """Hand `item` over and wait for its result."""
        return await self.post(item)

    def post(self, item: T) -> asyncio.Future[R]:
        """The same; the future may be awaited later. Order of posting is order of sending."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return future

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                if self._for_callers:
                    batch = [one for one in batch if not one[1].done()]
                if not batch:
                    continue
                self._sent = batch
                try:
                    results = await self._send([item for item, _ in batch])
                except Exception as error:  # noqa: BLE001 - handed to every caller of the batch
                    for _, future in batch:
                        if not future.done():
                            future.set_exception(error)
                else:
                    for (_, future), result in zip(batch, results, strict=True):
                        if future.done():
                            continue
                        if isinstance(result, Exception):
                            future.set_exception(result)
                        else:
                            future.set_result(result)
                self._sent = []
        finally:
            self._task = None
            for _, future in [*self._sent, *self._waiting]:
                future.cancel()
            self._sent, self._waiting = [], []

    def abandon(self, error: Exception) -> set[asyncio.Task[None]]:
        """Everyone who waits gets `error` now; what is on its way stays on its way.

        Returns the task of the hand-over, if there is one, to be cancelled and awaited.
        """
        for _, future in [*self._sent, *self._waiting]:
            if not future.done():
                future.set_exception(error)
        self._waiting = []
        return set() if self._task is None else {self._task}

    async def drain(self) -> None:
        """Wait until everything posted so far was handed over."""
        while self._task is not None:
            await asyncio.wait([self._task])
