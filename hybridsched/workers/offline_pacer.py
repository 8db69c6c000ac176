"""The lines of one lane wait here for leave to send, in order, as `core.pacing` gives it."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Awaitable, Callable
from math import inf

from hybridsched.core.pacing import UNREAD_MOST, Grant, PromptPace

_ASK_FROM = UNREAD_MOST // 2
"""Unread requests from which the engine is asked whether it has read them."""
_ON_ITS_WAY_S = 0.001
"""From leave to send until the body is in the engine's socket, seconds: a question before that would be
answered before the request is read."""


class PrefillPacer:
    """Orders the prompts of one lane. Everything happens on one event loop.

    `ask` puts a small question to the engine's front end; True: answered, so that all that lay there before
    it has been read. Without it nothing is known to be read before `UNREAD_BOUND_S`.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[bool]] | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None
        self._clock = clock
        self._pace = PromptPace()
        self._waiting: list[tuple[tuple[int, ...], int, int, asyncio.Future[Grant | None]]] = []
        self._sequence = 0
        self._timer: asyncio.TimerHandle | None = None
        self._finals: dict[Grant, asyncio.TimerHandle] = {}

    @property
    def slice_tokens(self) -> int:
        """Prompt tokens for one iteration; 0 lets everything through."""
        return self._pace.slice_tokens

    @slice_tokens.setter
    def slice_tokens(self, tokens: int) -> None:
        self._pace.slice_tokens = tokens

    @property
    def iteration_s(self) -> float:
        """Measured length of an iteration that holds a slice, seconds of wall time."""
        return self._pace.iteration_s

    async def acquire(self, order: tuple[int, ...], tokens: int) -> Grant | None:
        """Wait for leave to send; the lowest `order` first. None: the lane has been stopped meanwhile."""
        now_s = self._clock()
        if not self._waiting and self._pace.wait_s(tokens, now_s) <= 0:
            return self._grant(tokens, now_s)
        future: asyncio.Future[Grant | None] = asyncio.get_running_loop().create_future()
        self._sequence += 1
        heapq.heappush(self._waiting, (order, self._sequence, tokens, future))
        self._pump()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and (grant := future.result()) is not None:
                self._close(grant)
            raise

    def answered(self, grant: Grant) -> None:
        """The request of `grant` has come back."""
        self._close(grant)

    def slice_answered(self, grant: Grant) -> None:
        """A slice has been computed; its time tells the length of an iteration."""
        self._pace.measured(grant, self._clock())
        self._close(grant)

    def decoding(self, grant: Grant) -> None:
        """The request of `grant` was sent and goes on decoding: its prompt counts for a while only."""
        if self.slice_tokens > 0 and grant.open:
            loop = asyncio.get_running_loop()
            self._finals[grant] = loop.call_later(self._pace.final_s, self._close, grant)

    def quiet(self) -> None:
        """Every request has come back."""
        self._pace.read(self._pace.sent)

    def stop(self) -> None:
        """Send every waiter away without leave."""
        if self._asking is not None:
            self._asking.cancel()
        waiting, self._waiting = self._waiting, []
        for *_, future in waiting:
            if not future.done():
                future.set_result(None)

    def _close(self, grant: Grant) -> None:
        timer = self._finals.pop(grant, None)
        if timer is not None:
            timer.cancel()
        if self._pace.close(grant):
            self._pump()

    def _pump(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            _, _, tokens, future = self._waiting[0]
            if future.done():  # its task was cancelled
                heapq.heappop(self._waiting)
                continue
            now_s = self._clock()
            wait_s = self._pace.wait_s(tokens, now_s)
            if wait_s == inf:
                return  # the next answer pumps again
            if wait_s > 0:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._pump)
                return
            heapq.heappop(self._waiting)
            future.set_result(self._grant(tokens, now_s))

    def _grant(self, tokens: int, now_s: float) -> Grant:
        grant = self._pace.grant(tokens, now_s)
        if self._ask is not None and self._asking is None and self._pace.unread(now_s) >= _ASK_FROM:
            self._asking = asyncio.create_task(self._read(self._ask), name="unread")
        return grant

    async def _read(self, ask: Callable[[], Awaitable[bool]]) -> None:
        """Ask until few requests are unread. Without an answer they are taken to be read after a while."""
        try:
            while self._pace.unread(self._clock()) >= _ASK_FROM:
                await asyncio.sleep(_ON_ITS_WAY_S)
                sent = self._pace.sent
                if not await ask():
                    return
                self._pace.read(sent)
                self._pump()
        finally:
            self._asking = None
