"""How bursty a load is, learned from its own arrivals: the largest burst to have room for, within `BIN_MS`.

Counts of what replicas have claimed fall into bins of equal width; the burst is a quantile of the bins of
the last minutes. It says nothing before some bins are full, and again when nobody has counted for a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import ceil

BIN_MS = 250.0
"""Width of a bin: about as long as a replica takes for the load that it may carry before another is used.
What comes later finds that worked off."""

BINS = 1200
"""Bins that are remembered: five minutes."""

LEAST_BINS = 40
"""Fewer say nothing of bursts."""


class Arrivals:
    """Arrivals of one model. Time is an argument, in milliseconds."""

    def __init__(self, bin_ms: float = BIN_MS) -> None:
        self._bin_ms = bin_ms
        self._seen: dict[str, tuple[float, float]] = {}
        self._bins: deque[tuple[float, float]] = deque(maxlen=BINS)
        self._from_ms: float | None = None
        self._requests = 0.0
        self._tokens = 0.0

    def observe(self, now_ms: float, claimed: Mapping[str, tuple[float, float]]) -> None:
        """Take what each replica has claimed since its start: requests, and their prompt tokens.

        A counter that fell is that of a worker that began anew. The first look at a replica only says where
        its counting stands.
        """
        begin = self._from_ms
        if begin is None or now_ms < begin or now_ms - begin > BINS * self._bin_ms:
            self._bins.clear()
            self._from_ms, self._requests, self._tokens = now_ms, 0.0, 0.0
        else:
            while now_ms - begin >= self._bin_ms:
                self._bins.append((self._requests, self._tokens))
                self._requests = self._tokens = 0.0
                begin += self._bin_ms
            self._from_ms = begin
        for replica, (requests, tokens) in claimed.items():
            before = self._seen.get(replica)
            if before is not None:
                fell = requests < before[0] or tokens < before[1]
                self._requests += requests if fell else requests - before[0]
                self._tokens += tokens if fell else tokens - before[1]
        self._seen = dict(claimed)

    def burst(self, quantile: float) -> tuple[float, float] | None:
        """Requests and prompt tokens of a bin at that quantile (nearest rank), each by itself.

        None while too few bins are known.
        """
        bins = self._bins
        if len(bins) < LEAST_BINS:
            return None
        place = min(len(bins) - 1, max(0, ceil(quantile * len(bins)) - 1))
        return sorted([one[0] for one in bins])[place], sorted([one[1] for one in bins])[place]
