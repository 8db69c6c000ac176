"""Who waits for which answer, and the one task that reads the answers of a client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

import redis
import redis.asyncio

from hybridsched.client.outage import Outages
from hybridsched.client.waiting import Waiter
from hybridsched.store.connection import explain
from hybridsched.store.patience import passes, pauses
from hybridsched.store.replies import Ended, Group, ReplyReader, bad_answer

_log = logging.getLogger("hybridsched.client")


class Inbox:
    """The waiters of one client, and the reader of its reply stream, which starts with the first of them."""

    def __init__(self, client: redis.asyncio.Redis, url: str, key: str, outages: Outages) -> None:
        self.key = key
        self._client = client
        self._url = url
        self._outages = outages
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[str, list[Waiter]] = {}

    def register(self, request_id: str, *, stream: bool) -> Waiter:
        """One more who waits for a request."""
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read(), name="hybridsched-replies")
        waiter = Waiter(stream=stream)
        self._waiting.setdefault(request_id, []).append(waiter)
        return waiter

    def unregister(self, request_id: str, waiter: Waiter) -> None:
        """This one does not wait any more."""
        waiters = self._waiting[request_id]
        if len(waiters) == 1:
            del self._waiting[request_id]
        else:
            waiters.remove(waiter)

    def waiting(self, request_id: str) -> int:
        """How many wait for it."""
        return len(self._waiting.get(request_id, ()))

    def fail_all(self, error: Callable[[str], Exception]) -> None:
        """Nothing more comes, for anybody; `error` makes what each is told from the request's id."""
        for request_id, waiters in self._waiting.items():
            for waiter in waiters:
                waiter.fail(error(request_id))

    def stop(self) -> set[asyncio.Task[None]]:
        """Read no more. Returns what is still to be cancelled and awaited."""
        reader, self._reader = self._reader, None
        return set() if reader is None else {reader}

    async def _read(self) -> None:
        """Read answers and hand them to whoever waits, for ever."""
        reader = ReplyReader(self._client, self.key)
        try:
            while True:
                for entry in await self._next(reader):
                    self._hand_out(entry)
        except redis.RedisError as error:
            failure = explain(error, self._url, "reading answers")
        except Exception as error:  # noqa: BLE001 - the outer edge: nobody may be left waiting for a dead reader
            _log.exception("Reading answers has failed; those who wait are told.")
            failure = explain(
                redis.ConnectionError(f"{type(error).__name__}: {error}"), self._url, "reading answers"
            )
        self.fail_all(lambda _: failure)

    def _hand_out(self, entry: Group | Ended) -> None:
        for waiter in self._waiting.get(entry.id, ()):
            try:
                waiter.take(entry)
            except Exception as error:  # noqa: BLE001 - one answer's fault ends that request and no other
                _log.exception("An answer could not be taken; its request fails, others go on.")
                waiter.finish(bad_answer(f"{type(error).__name__}: {error}"))

    async def _next(self, reader: ReplyReader) -> Iterator[Group | Ended]:
        for pause in pauses():
            try:
                entries = await reader.read()
            except (redis.RedisError, OSError) as error:
                if not passes(error):
                    raise
                self._outages.begins(error)
                await asyncio.sleep(pause)
            else:
                self._outages.over()
                return entries
        raise AssertionError("the pauses never end")
