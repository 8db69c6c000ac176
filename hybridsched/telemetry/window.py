"""Percentiles over the recent past. Pure: time is an argument."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from math import ceil, fsum, inf, isfinite

RENEW_SUM = 1000
"""Values dropped between two sums of all."""


class SlidingWindow:
    """The last values within a span, at most `capacity` of them; percentiles by a sort.

    Percentiles are never averaged: a wider window is asked of the values, not of narrower percentiles.
    """

    def __init__(self, span_ms: float, *, capacity: int = 2048) -> None:
        if span_ms <= 0 or capacity < 1:
            raise ValueError(f"span_ms {span_ms} and capacity {capacity} must be positive")
        self._span_ms = span_ms
        self._capacity = capacity
        self._values: deque[tuple[float, float]] = deque()
        self._sum = 0.0
        self._drops = 0

    def add(self, at_ms: float, value: float) -> None:
        """Take a value measured at `at_ms`; times must not go back. NaN and infinities are dropped."""
        if isfinite(value):
            self._values.append((at_ms, value))
            self._sum += value
            if len(self._values) > self._capacity:
                self._drop()

    def _drop(self) -> None:
        """Forget the oldest value. Now and then the sum is made anew, before its rounding adds up."""
        self._sum -= self._values.popleft()[1]
        self._drops += 1
        if self._drops >= RENEW_SUM:
            self._drops = 0
            self._sum = fsum(value for _, value in self._values)

    def _forget(self, now_ms: float) -> None:
        """Drop what is older than the span."""
        values, span_ms = self._values, self._span_ms
        while values and now_ms - values[0][0] > span_ms:
            self._drop()

    def percentile(self, share: float, now_ms: float) -> float | None:
        """The nearest-rank percentile (`share` 0..1) of the values within the span; None without any."""
        self._forget(now_ms)
        if not self._values:
            return None
        ordered = sorted(value for _, value in self._values)
        return ordered[min(len(ordered) - 1, max(0, ceil(share * len(ordered)) - 1))]

    def mean(self, now_ms: float) -> float | None:
        """The mean of the values within the span; None without any."""
        self._forget(now_ms)
        if not self._values:
            return None
        return self._sum / len(self._values)

    def __len__(self) -> int:
        return len(self._values)


Buckets = Sequence[tuple[float, float]]
"""(upper bound, cumulative count), ascending: a Prometheus histogram."""


def bucket_delta(before: Buckets, after: Buckets) -> list[tuple[float, float]] | None:
    """What a cumulative histogram gained. None when the bounds changed or a count fell (a restart)."""
    if len(before) != len(after):
        return None
    gained: list[tuple[float, float]] = []
    for (bound, old), (same, new) in zip(before, after, strict=True):
        if bound != same or new < old:
            return None
        gained.append((bound, new - old))
    return gained


def bucket_percentile(gained: Buckets, share: float) -> float | None:
    """The percentile within a histogram, linear inside its bucket; None without any observation.

    In the last, unbounded bucket the answer is its lower bound: the true value may be higher.
    """
    if not gained or gained[-1][1] <= 0:
        return None
    rank = share * gained[-1][1]
    at = bisect_left(gained, rank, key=lambda bucket: bucket[1])
    at = min(at, len(gained) - 1)
    bound, count = gained[at]
    lower, below = gained[at - 1] if at else (0.0, 0.0)
    if bound == inf:
        return lower
    if count <= below:
        return bound
    return lower + (bound - lower) * (rank - below) / (count - below)
