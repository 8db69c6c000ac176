"""What happened, for reports: a bounded stream that is written without making anybody wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from redis.exceptions import RedisError

from hybridsched.log import get_logger
from hybridsched.store.channels import entries
from hybridsched.store.keys import Keys
from hybridsched.store.tasks import end_tasks

if TYPE_CHECKING:
    from types import TracebackType

    from redis.asyncio import Redis

MAX_EVENTS = 100_000
"""Events that the stream keeps, about."""

_BUFFER = 20_000
_PAGE = 5_000
_BATCH = 500
_BACK_OFF_S = (0.1, 2.0)
_ENCODE = msgspec.json.Encoder()
_log = get_logger("events")


class EventLog:
    """The events of one pool. Each is a JSON object with its kind in `t`, and `mono_s` where time matters.

    `append` and `append_many` only put events in a buffer; a task writes it. Use it as an async context, or
    call `close`, so that the rest is written. In an outage of Redis the newest 20,000 events are kept.
    """

    def __init__(self, client: Redis, pool: str, *, flush_ms: float = 50.0) -> None:
        self._client = client
        self._key = Keys(pool).events
        self._flush_s = flush_ms / 1000.0
        self._buffer: deque[bytes] = deque()
        self._filled = asyncio.Event()
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.lost = 0
        """Events dropped because Redis was away for too long."""

    def append(self, event: Mapping[str, Any]) -> None:
        """Note one event. Needs a running event loop; never blocks, never fails because of Redis."""
        self.append_many((event,))

    def append_many(self, events: Iterable[Mapping[str, Any]]) -> None:
        """The same for several, in order."""
        for event in events:
            if len(self._buffer) >= _BUFFER:
                self._buffer.popleft()
                self.lost += 1
            self._buffer.append(_ENCODE.encode(event))
        if self._buffer:
            self._filled.set()
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._write(), name="event-log")

    async def flush(self) -> None:
        """Write what the buffer holds. Raises what the Redis client raises; nothing is lost then.

        When the connection breaks between writing and its answer, the events of that batch come twice.
        """
        async with self._writing:
            await self._flush()

    async def _flush(self) -> None:
        while self._buffer:
            batch = [self._buffer[i] for i in range(min(_BATCH, len(self._buffer)))]
            pipe = self._client.pipeline(transaction=False)
            for event in batch:
                pipe.xadd(self._key, {"e": event}, maxlen=MAX_EVENTS, approximate=True)
            before = self.lost
            await pipe.execute()
            # Events that the bound dropped meanwhile were the first of this batch.
            for _ in range(max(0, len(batch) - (self.lost - before))):
                self._buffer.popleft()

    async def close(self) -> None:
        """Write the rest, as far as Redis can be reached, and end the task."""
        task, self._task = self._task, None
        if task is not None:
            # Not in the middle of a batch: written and not yet taken off the buffer, it would come twice.
            async with self._writing:
                await end_tasks(task)
        try:
            await self.flush()
        except (RedisError, OSError) as error:
            self.lost += len(self._buffer)
            _log.warning(
                "Events could not be written at the end because Redis cannot be reached; "
                "the report will lack them.",
                key="events_lost",
                lost=self.lost,
                error=str(error),
            )

    async def __aenter__(self) -> EventLog:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def read_all(self, *, kinds: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """Every event in the stream, oldest first; only those of `kinds` when given."""
        wanted = None if kinds is None else frozenset(kinds)
        found: list[dict[str, Any]] = []
        start = "-"
        while True:
            page = entries(await self._client.xrange(self._key, min=start, max="+", count=_PAGE))
            for _, fields in page:
                event = _event(fields)
                if event is not None and (wanted is None or event.get("t") in wanted):
                    found.append(event)
            if len(page) < _PAGE:
                return found
            start = "(" + page[-1][0]

    async def _write(self) -> None:
        back_off = _BACK_OFF_S[0]
        while True:
            await self._filled.wait()
            await asyncio.sleep(self._flush_s)
            self._filled.clear()
            try:
                await self.flush()
                back_off = _BACK_OFF_S[0]
            except (RedisError, OSError) as error:
                _log.warning(
                    "Events cannot be written: Redis cannot be reached. They are kept and written later.",
                    key="events_outage",
                    kept=len(self._buffer),
                    error=str(error),
                )
                self._filled.set()
                await asyncio.sleep(back_off)
                back_off = min(back_off * 2, _BACK_OFF_S[1])


def _event(fields: Mapping[bytes, bytes]) -> dict[str, Any] | None:
    try:
        event = msgspec.json.decode(fields.get(b"e", b""))
    except msgspec.MsgspecError:
        return None
    return event if isinstance(event, dict) else None
