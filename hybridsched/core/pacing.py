"""How offline prompt tokens enter the engine: about one slice for each of its iterations.

The length of an iteration is what a pause waits for, so no iteration should hold more than one slice of
prompt. An answer comes at the end of an iteration, when the next one has already been put together: with one
slice in flight every second iteration would go without. So two may be in flight, sent half an iteration
apart: one is being computed while the other waits for the next iteration.
"""

from __future__ import annotations

from collections import deque
from math import inf

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

UNREAD_MOST = 4
"""Most requests under way that the engine is not known to have read. A front end that is short of processor
time reads slower than `SEND_BURST` allows for, and what it has not read an abort has to wait behind."""

UNREAD_BOUND_S = 0.05
"""After this a request is taken to be read, seconds: where nobody asks the engine, or it does not answer,
that makes a lane slower and does not stop it."""

_LEAST_WAIT_S = 0.0002


def slice_step(slice_tokens: int, block: int) -> int:
    """Prompt tokens of one slice: whole KV blocks, at least one, so that the next one finds them cached."""
    return max(block, slice_tokens - slice_tokens % block)


class Grant:
    """Leave to send one request whose prompt still has `tokens` to be computed."""

    __slots__ = ("alone", "open", "sent_s", "tokens")

    def __init__(self, tokens: int, sent_s: float, *, alone: bool) -> None:
        self.tokens = tokens
        self.sent_s = sent_s
        self.alone = alone
        self.open = True


class PromptPace:
    """What is under way on one lane, and when the next request may be sent. Time comes by argument."""

    def __init__(self) -> None:
        self.slice_tokens = 0
        """Prompt tokens for one iteration; 0 lets everything through."""
        self.iteration_s = FIRST_ITERATION_S
        """Measured length of an iteration that holds a slice, seconds."""
        self._inflight_tokens = 0
        self._inflight = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._recent_tokens = 0
        self._sends: deque[float] = deque(maxlen=SEND_BURST)
        self._unread: deque[float] = deque()
        self.sent = 0
        """Requests granted so far."""

    @property
    def final_s(self) -> float:
        """After this a request that decodes has its prompt in, as far as one can tell. Seconds."""
        return self.iteration_s * _FINAL_ITERATIONS

    def wait_s(self, tokens: int, now_s: float) -> float:
        """How long until a request with so many prompt tokens may be sent, if nothing else happens.

        0 or less: now. Infinite: not before something is closed.
        """
        wait_s = 0.0
        if len(self._sends) == SEND_BURST:
            wait_s = self._sends[0] + SEND_WINDOW_S - now_s
        if self.unread(now_s) >= UNREAD_MOST:
            wait_s = max(wait_s, self._unread[-UNREAD_MOST] + UNREAD_BOUND_S - now_s)
        if self._inflight == 0 or self.slice_tokens <= 0:
            return wait_s
        if self._inflight_tokens + tokens > 2 * self.slice_tokens:
            return inf
        recent, spacing = self._recent, self.iteration_s * _SPACING
        while recent and recent[0][0] <= now_s - spacing:
            self._recent_tokens -= recent.popleft()[1]
        if self._recent_tokens + tokens > self.slice_tokens:
            if not recent:
                return inf
            return max(wait_s, recent[0][0] + spacing - now_s, _LEAST_WAIT_S)
        return wait_s

    def grant(self, tokens: int, now_s: float) -> Grant:
        """A request is sent."""
        grant = Grant(tokens, now_s, alone=self._inflight == 0)
        self.sent += 1
        self._unread.append(now_s)
        self._inflight += 1
        self._inflight_tokens += tokens
        self._sends.append(now_s)
        if self.slice_tokens > 0:
            self._recent.append((now_s, tokens))
            self._recent_tokens += tokens
        return grant

    def unread(self, now_s: float) -> int:
        """Requests that the engine is not known to have read."""
        unread = self._unread
        while unread and unread[0] + UNREAD_BOUND_S <= now_s:
            unread.popleft()
        return len(unread)

    def read(self, sent: int) -> None:
        """The engine has read the first so many requests of this lane."""
        unread = self._unread
        while unread and self.sent - len(unread) < sent:
            unread.popleft()

    def measured(self, grant: Grant, now_s: float) -> None:
        """A slice has been computed; its time tells the length of an iteration. Close its grant as well."""
        span = now_s - grant.sent_s
        if not grant.alone:
            span /= 2  # it waited for the end of the running iteration first
        self.iteration_s += _SMOOTHING * (span - self.iteration_s)

    def close(self, grant: Grant) -> bool:
        """The prompt of `grant` is in, or never will be. False: that was known already."""
        if not grant.open:
            return False
        grant.open = False
        self._inflight -= 1
        self._inflight_tokens -= grant.tokens
        return True
