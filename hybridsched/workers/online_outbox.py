"""The way back to the client: groups of events in order, then the end, through outages of the store.

Each request has one group on its way at most; what the engine sends meanwhile makes the next. The queue
puts the groups of all requests of one turn of the event loop into one round trip.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import RedisError

from hybridsched.log import get_logger
from hybridsched.store.online import OnlineQueue
from hybridsched.store.online_values import Claimed, End

GIVE_UP_S = 30.0
"""An answer that could not be delivered for this long is dropped; its request is reclaimed or expires."""

_BACK_OFF_S = (0.05, 1.0)

_T = TypeVar("_T")
_log = get_logger("online")


class UndeliveredError(Exception):
    """The store could not be reached for too long."""


class Outbox:
    """The answer to one request.

    `lost` is called when it cannot be given: with True when the request is another worker's by now, with
    False when the store was away for too long.
    """

    def __init__(
        self,
        queue: OnlineQueue,
        claimed: Claimed,
        *,
        lost: Callable[[bool], None],
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self._queue = queue
        self._claimed = claimed
        self._lost = lost
        self._give_up_s = give_up_s
        self._waiting: list[bytes] = []
        self._number = 0
        self._sender: asyncio.Task[None] | None = None
        self.closed = False
        """Nothing more is sent: ended, lost, or given up."""

    def put(self, event: bytes) -> None:
        """Send one event, in order, soon. Needs a running loop; never blocks."""
        if self.closed:
            return
        self._waiting.append(event)
        if self._sender is None:
            self._sender = asyncio.get_running_loop().create_task(self._send())

    async def finish(self, end: End) -> bool:
        """Send the end, after every event. False: the request is no longer this worker's.

        Raises:
            UndeliveredError: the store was away for too long.
        """
        if self._sender is not None:
            await asyncio.wait([self._sender])
        if self.closed:
            return False
        try:
            return await deliver(lambda: self._queue.finish(self._claimed, end), self._give_up_s)
        finally:
            self.closed = True

    async def _send(self) -> None:
        try:
            while self._waiting and not self.closed:
                group, self._waiting = self._waiting, []
                self._number += 1
                if not await self._emit(self._number, group):
                    self._close(True)
        except UndeliveredError:
            self._close(False)
        except Exception:  # noqa: BLE001 - the sender's edge; the request is given up
            _log.exception(
                "Tokens could not be sent on; the request is left to end with its lease.",
                key="tokens_dropped",
                id=self._claimed.id,
            )
            self._close(False)
        finally:
            self._sender = None

    async def _emit(self, number: int, group: list[bytes]) -> bool:
        # A group that may have arrived already keeps its number: readers drop a number they have seen.
        return await deliver(lambda: self._queue.emit(self._claimed, number, group), self._give_up_s)

    def _close(self, lease_lost: bool) -> None:
        self.closed = True
        self._waiting = []
        self._lost(lease_lost)


async def deliver(send: Callable[[], Awaitable[_T]], give_up_s: float) -> _T:
    """Try until the store takes it.

    Raises:
        UndeliveredError: it did not for `give_up_s` seconds.
    """
    give_up_at = time.monotonic() + give_up_s
    back_off = _BACK_OFF_S[0]
    while True:
        try:
            return await send()
        except (RedisError, OSError) as error:
            if time.monotonic() + back_off > give_up_at:
                _log.error(
                    "An answer could not be delivered because Redis stayed away; it is dropped.",
                    key="answer_dropped",
                    error=str(error),
                )
                raise UndeliveredError(str(error)) from error
        await asyncio.sleep(back_off)
        back_off = min(2 * back_off, _BACK_OFF_S[1])
