"""How offline prompt tokens enter the engine: about one slice for each of its iterations.

The length of an iteration is what a pause waits for, so no iteration should hold more than one slice of
prompt. An answer comes at the end of an iteration, when the next one has already been put together: with one
slice in flight every second iteration would go without. So two may be in flight, sent half an iteration
apart: one is being computed while the other waits for the next iteration.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable

FIRST_ITERATION_S = 0.02
"""Guess of an iteration before the first slice has been answered, seconds. Only its order of size matters."""

_SMOOTHING = 0.3
"""Weight of the newest measurement of an iteration's length."""

_SPACING = 0.7
"""Least time between two slices, in iterations. Measured on the simulated A100 with prompts of 2,500 tokens:
0.5 and 0.7 keep 94 % of the unsliced throughput, 0.9 begins to leave iterations empty, and one slice at a
time keeps 72 %."""

_FINAL_ITERATIONS = 1.5
"""A request that goes on decoding says nothing when its prompt is in; it is taken to be after this many
iterations: on average half of the running one, and its own."""

SEND_BURST = 4
SEND_WINDOW_S = 0.004
"""At most so many requests in this time, seconds. A lane that resumes has dozens of long bodies to send; all
at once they would keep the engine's front end busy for tens of milliseconds, and an abort that comes then
would wait behind them. Four bodies of 2,500 token ids take about 2 ms to read."""


class Grant:
    """Leave to send one request whose prompt still has `tokens` to be computed."""

    __slots__ = ("alone", "open", "sent_s", "timer", "tokens")

    def __init__(self, tokens: int, sent_s: float, *, alone: bool) -> None:
        self.tokens = tokens
        self.sent_s = sent_s
        self.alone = alone
        self.open = True
        self.timer: asyncio.TimerHandle | None = None


class PrefillPacer:
    """Orders the prompts of one lane. Everything happens on one event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.slice_tokens = 0
        """Prompt tokens for one iteration; 0 lets everything through."""
        self._inflight_tokens = 0
        self._inflight = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._sends: deque[float] = deque(maxlen=SEND_BURST)
        self._waiting: list[tuple[tuple[int, ...], int, int, asyncio.Future[Grant | None]]] = []
        self._sequence = 0
        self._timer: asyncio.TimerHandle | None = None
        self._iteration_s = FIRST_ITERATION_S

    @property
    def iteration_s(self) -> float:
        """Measured length of an iteration that holds a slice, seconds of wall time."""
        return self._iteration_s

    async def acquire(self, order: tuple[int, ...], tokens: int) -> Grant | None:
        """Wait for leave to send; the lowest `order` first. None: the lane has been stopped meanwhile."""
        now_s = self._clock()
        if not self._waiting and self._burst_wait_s(now_s) <= 0 and self._fits(tokens, now_s):
            return self._grant(tokens)
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
        span = self._clock() - grant.sent_s
        if not grant.alone:
            span /= 2  # it waited for the end of the running iteration first
        self._iteration_s += _SMOOTHING * (span - self._iteration_s)
        self._close(grant)

    def decoding(self, grant: Grant) -> None:
        """The request of `grant` was sent and goes on decoding: its prompt counts for a while only."""
        if self.slice_tokens > 0 and grant.open:
            loop = asyncio.get_running_loop()
            grant.timer = loop.call_later(self._iteration_s * _FINAL_ITERATIONS, self._close, grant)

    def stop(self) -> None:
        """Send every waiter away without leave."""
        waiting, self._waiting = self._waiting, []
        for *_, future in waiting:
            if not future.done():
                future.set_result(None)

    def _burst_wait_s(self, now_s: float) -> float:
        """How long until one more request may be sent, whatever it holds."""
        if len(self._sends) < SEND_BURST:
            return 0.0
        return self._sends[0] + SEND_WINDOW_S - now_s

    def _fits(self, tokens: int, now_s: float) -> bool:
        if self._inflight == 0 or self.slice_tokens <= 0:
            return True
        spacing = self._iteration_s * _SPACING
        while self._recent and self._recent[0][0] <= now_s - spacing:
            self._recent.popleft()
        just_sent = sum(sent for _, sent in self._recent)
        return (
            self._inflight_tokens + tokens <= 2 * self.slice_tokens
            and just_sent + tokens <= self.slice_tokens
        )

    def _grant(self, tokens: int) -> Grant:
        now_s = self._clock()
        grant = Grant(tokens, now_s, alone=self._inflight == 0)
        self._inflight += 1
        self._inflight_tokens += tokens
        self._sends.append(now_s)
        if self.slice_tokens > 0:
            self._recent.append((now_s, tokens))
        return grant

    def _close(self, grant: Grant) -> None:
        if not grant.open:
            return
        grant.open = False
        if grant.timer is not None:
            grant.timer.cancel()
        self._inflight -= 1
        self._inflight_tokens -= grant.tokens
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
            wait_s = self._burst_wait_s(now_s)
            if not self._fits(tokens, now_s):
                if not self._recent or self._inflight_tokens + tokens > 2 * self.slice_tokens:
                    return  # the next answer pumps again
                wait_s = max(wait_s, self._recent[0][0] + self._iteration_s * _SPACING - now_s, 0.0002)
            if wait_s > 0:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._pump)
                return
            heapq.heappop(self._waiting)
            future.set_result(self._grant(tokens))
