"""What has come for a caller so far: each token group once and in order, and one end."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from hybridsched.store.errors import StoreError
from hybridsched.store.online_values import End
from hybridsched.store.replies import Ended, Group


class Waiter:
    """One caller that waits for one request."""

    __slots__ = ("attempt", "chunks", "end", "error", "number", "ready")

    def __init__(self) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.chunks: list[Any] = []
        self.end: End | None = None
        self.error: StoreError | None = None
        self.attempt = 0
        self.number = 0

    def take(self, entry: Group | Ended) -> None:
        """Take an entry of the reply stream; each group once, in order, of one attempt."""
        if isinstance(entry, Ended):
            self.finish(entry.end)
            return
        if self.end is not None or entry.attempt < self.attempt or entry.number <= self.number:
            return
        if entry.number != self.number + 1 or (self.number and entry.attempt != self.attempt):
            self.finish(
                End.failed(
                    "stream_gap",
                    "part of the answer went to an earlier reply stream or was trimmed before it was read; "
                    "send the request again under a new id",
                    http_status=None,
                )
            )
            return
        self.attempt, self.number = entry.attempt, entry.number
        self.chunks += msgspec.json.decode(entry.chunks)
        self._wake()

    def finish(self, end: End) -> None:
        if self.end is None:
            self.end = end
        self._wake()

    def fail(self, error: StoreError) -> None:
        self.error = error
        self._wake()

    def _wake(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)

    async def wait(self) -> None:
        """Wait until there is something that the last call had not seen.

        Raises:
            StoreError: reading answers has failed for good.
        """
        await self.ready
        if self.error is not None:
            raise self.error
        if self.end is None:
            self.ready = asyncio.get_running_loop().create_future()
