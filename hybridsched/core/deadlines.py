"""Which batch is next, and whether it will be in time: urgency rises with the risk of missing a deadline.

A batch's *risk* is the share of the time to its deadline that its work takes, at the pace measured of late
and together with the work of every batch that is due before it. Up to `CALM` batches share the lanes in turn,
with a deadline or without. Beyond, the batch goes before all others, the earliest deadline first: of all
orders that one misses no deadline that any order could meet (Jackson 1955, for one machine). A batch that
cannot be in time even so goes in turn with the calm ones: before others it would only take them down with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence

from hybridsched.core.values import Value

CALM = 0.5
"""Risk up to which there is no hurry: the pace may yet fall to half of what it was."""

SPAN_MS = 300_000.0
"""The pace is that of the last five minutes, gaps in which every lane was closed included."""

LEAST_SPAN_MS = 30_000.0
"""A shorter look says nothing of it."""


class Work(Value, frozen=True, kw_only=True):
    """What one batch still has to do."""

    batch: str
    tokens: float
    """Prompt and output tokens of its lines that have not ended, as estimated."""
    submitted_ms: float
    outstanding: int = 0
    """Its chunks that are planned and not done."""
    deadline_ms: float | None = None


class Outlook(Value, frozen=True, kw_only=True):
    """Where a batch stands towards its deadline."""

    batch: str
    risk: float | None
    """None: it has no deadline, or the pace is not known."""
    ends_ms: float | None
    """When it would end if it went first from now on, with those that are due before it; None: not known."""
    needs_tokens_per_s: float | None
    """The pace at which it would just be in time; None: it has no deadline, or that is over."""

    @property
    def feasible(self) -> bool | None:
        """Whether it can be in time; None: not known, or no question."""
        return None if self.risk is None else self.risk <= 1.0

    @property
    def urgent(self) -> bool:
        """Whether it goes before the others."""
        return self.risk is not None and CALM < self.risk <= 1.0


class Pace:
    """Tokens a second that a pool's batches were done at of late. Time is an argument."""

    def __init__(self) -> None:
        self._left: dict[str, float] = {}
        self._done = 0.0
        self._seen: deque[tuple[float, float]] = deque()

    def observe(self, now_ms: float, left: Mapping[str, float]) -> None:
        """Take the tokens that each batch has left. One that is gone has ended, whichever way."""
        if self._seen and now_ms <= self._seen[-1][0]:
            return
        for batch, tokens in left.items():
            self._done += max(0.0, self._left.get(batch, tokens) - tokens)
        self._left = dict(left)
        self._seen.append((now_ms, self._done))
        while len(self._seen) > 1 and now_ms - self._seen[1][0] >= SPAN_MS:
            self._seen.popleft()

    def tokens_per_s(self) -> float | None:
        """None while too little has been seen."""
        if len(self._seen) < 2:
            return None
        (begin_ms, before), (end_ms, after) = self._seen[0], self._seen[-1]
        span_ms = end_ms - begin_ms
        return (after - before) * 1000.0 / span_ms if span_ms >= LEAST_SPAN_MS else None


def outlooks(works: Iterable[Work], now_ms: float, tokens_per_s: float | None) -> dict[str, Outlook]:
    """How each batch stands, at that pace. A pace of 0 says as little as none."""
    found: dict[str, Outlook] = {}
    pace = tokens_per_s if tokens_per_s is not None and 0.0 < tokens_per_s < float("inf") else None
    before = 0.0
    for work in sorted(works, key=_due):
        if work.deadline_ms is None:
            found[work.batch] = Outlook(batch=work.batch, risk=None, ends_ms=None, needs_tokens_per_s=None)
            continue
        left_s = (work.deadline_ms - now_ms) / 1000.0
        tokens = before + max(0.0, work.tokens)
        needs = tokens / left_s if left_s > 0.0 else None
        risk = ends_ms = None
        if pace is not None:
            ends_ms = now_ms + tokens / pace * 1000.0
            risk = tokens / pace / left_s if left_s > 0.0 else float(tokens > 0.0) * _HOPELESS
        outlook = Outlook(batch=work.batch, risk=risk, ends_ms=ends_ms, needs_tokens_per_s=needs)
        if outlook.feasible is not False:
            before = tokens
        found[work.batch] = outlook
    return found


_HOPELESS = 1e9
"""Risk of a batch whose deadline is over; a number, so that it can be written down."""


def urgent(works: Sequence[Work], now_ms: float, tokens_per_s: float | None) -> tuple[str, ...]:
    """The batches that go before all others, the earliest deadline first."""
    known = outlooks(works, now_ms, tokens_per_s)
    return tuple(work.batch for work in sorted(works, key=_due) if known[work.batch].urgent)


def turns(
    works: Sequence[Work], open_batches: Container[str], now_ms: float, tokens_per_s: float | None
) -> tuple[str, ...]:
    """The open batches (they have lines that are not planned yet) whose turn it is, in order.

    Urgent ones, the earliest deadline first; with any of these, no others. Else all in turn: fewest
    outstanding chunks, then oldest.
    """
    hurry = tuple(batch for batch in urgent(works, now_ms, tokens_per_s) if batch in open_batches)
    if hurry:
        return hurry
    waiting = [work for work in works if work.batch in open_batches]
    ordered = sorted(waiting, key=lambda work: (work.outstanding, work.submitted_ms, work.batch))
    return tuple(work.batch for work in ordered)


def _due(work: Work) -> tuple[float, float, str]:
    deadline_ms = float("inf") if work.deadline_ms is None else work.deadline_ms
    return deadline_ms, work.submitted_ms, work.batch
