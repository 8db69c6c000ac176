"""What has come for a caller so far: each token group once and in order, and one end."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from hybridsched.store.online_values import End, EndStatus
from hybridsched.store.replies import Ended, Group, bad_answer


class Waiter:
    """One caller that waits for one request; `stream`: for its chunks too."""

    __slots__ = ("attempt", "chunks", "end", "error", "number", "ready", "stream")

    def __init__(self, *, stream: bool = False) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stream = stream
        self.chunks: list[Any] = []
        self.end: End | None = None
        self.error: Exception | None = None
        self.attempt = 0
        self.number = 0

    def take(self, entry: Group | Ended) -> None:
        """Take an entry of the reply stream; each group once, in order, of one attempt.

        What makes no sense ends this request with code `engine_bad_answer`, what is missing with
        `stream_gap`.
        """
        if isinstance(entry, Ended):
            self.finish(self._judged(entry))
            return
        if self.end is not None or entry.attempt < self.attempt or entry.number <= self.number:
            return
        if entry.number != self.number + 1 or (self.number and entry.attempt != self.attempt):
            self.finish(stream_gap())
            return
        self.attempt, self.number = entry.attempt, entry.number
        try:
            chunks = msgspec.json.decode(entry.chunks)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self.finish(bad_answer(f"a chunk of its stream is no JSON ({error})"))
            return
        if not isinstance(chunks, list):
            self.finish(bad_answer("a group of chunks is no JSON array"))
            return
        self.chunks += chunks
        self._wake()

    def _judged(self, entry: Ended) -> End:
        """The end of a stream is good only when all of it came, and it says how it finished."""
        end = entry.end
        if self.stream and end.status is EndStatus.OK:
            if entry.groups > self.number:
                return stream_gap()
            if end.finish_reason is None and end.usage is None:
                return bad_answer("its stream ended without finish reason and usage")
        return end

    def finish(self, end: End) -> None:
        """The end; the first one counts."""
        if self.end is None:
            self.end = end
        self._wake()

    def fail(self, error: Exception) -> None:
        """Nothing more can come: `wait` raises `error`."""
        if self.error is None:
            self.error = error
        self._wake()

    def _wake(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)

    async def wait(self) -> None:
        """Wait until there is something that the last call had not seen.

        Raises:
            StoreError: reading answers has failed for good.
            RequestError: waiting makes no sense any more.
        """
        await self.ready
        if self.end is None:
            if self.error is not None:
                raise self.error
            self.ready = asyncio.get_running_loop().create_future()


def stream_gap() -> End:
    """The end of a stream of which a part cannot be had."""
    return End.failed(
        "stream_gap",
        "part of the answer went to an earlier reply stream or was trimmed before it was read; "
        "send the request again under a new id",
        http_status=None,
    )
