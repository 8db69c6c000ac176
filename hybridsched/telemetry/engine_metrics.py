"""From readings of an engine's metrics to the signals that decisions use. Pure: time is an argument.

An absent or impossible value is unknown (None), never 0. Counters that stand still while the engine holds
requests mean that it is frozen, whatever its gauges say: vLLM's gauges keep their last value while it is
paused or stuck, and a proxy may repeat an old page for ever. So the caller says what its own workers have
there. Gauges of 0 beside counters that move contradict nothing: requests of one token are gone by the time
the gauge is set.
"""

from __future__ import annotations

from collections import deque
from math import isfinite
from typing import Protocol

from hybridsched.core.values import Value
from hybridsched.telemetry.window import Buckets, bucket_delta, bucket_percentile


class EngineReading(Protocol):
    """The fields of `engines.protocol.EngineStats` that are used here. None: not reported."""

    @property
    def running(self) -> float | None: ...
    @property
    def waiting(self) -> float | None: ...
    @property
    def kv_use(self) -> float | None: ...
    @property
    def prompt_tokens_total(self) -> float | None: ...
    @property
    def generation_tokens_total(self) -> float | None: ...
    @property
    def iterations_total(self) -> float | None: ...
    @property
    def ttft_buckets(self) -> tuple[tuple[float, float], ...]: ...
    @property
    def tpot_buckets(self) -> tuple[tuple[float, float], ...]: ...


class EngineSignals(Value, frozen=True, kw_only=True):
    """What the last reading says. Times are milliseconds."""

    at_ms: float
    """When the reading was taken, on the caller's clock; its age is the caller's now minus this."""
    running: float | None
    waiting: float | None
    kv_use: float | None
    frozen_ms: float | None
    """How long requests have been held with no counter moving, and how long ago that began for a while after
    the last has left without any; None when the engine reports no counter."""
    ttft_p99_ms: float | None
    """All the engine's requests, offline included, over the window; None without any."""
    tpot_p99_ms: float | None
    resets: int
    """How often a counter has fallen: restarts of the engine that were seen."""
    rejected: tuple[str, ...] = ()
    """Fields whose value cannot be (NaN, negative, a share above 1): treated as unknown."""


_COUNTERS = ("prompt_tokens_total", "generation_tokens_total", "iterations_total")


class EngineTracker:
    """Takes readings in order of time. One per engine; a new engine at the same address shows as a reset."""

    def __init__(
        self, *, window_ms: float = 30_000.0, doubt_after_ms: float = 1_000.0, doubt_ms: float = 30_000.0
    ) -> None:
        """`window_ms`: the span of the percentiles taken from the engine's histograms.

        Requests that were held for `doubt_after_ms` and left without any counter moving leave the engine in
        doubt for `doubt_ms`, or until a counter moves: else a lane would be opened again the moment that its
        work is taken away, onto the same frozen numbers.
        """
        self._window_ms = window_ms
        self._doubt_after_ms = doubt_after_ms
        self._doubt_ms = doubt_ms
        self._held_at_ms = 0.0
        self._counters: dict[str, float] = {}
        self._still_since_ms: float | None = None
        self._resets = 0
        self._ttft: deque[tuple[float, Buckets]] = deque()
        self._tpot: deque[tuple[float, Buckets]] = deque()
        self._last: EngineSignals | None = None

    @property
    def last(self) -> EngineSignals | None:
        """The signals of the last reading; None before the first. A failed reading leaves it to age."""
        return self._last

    def observe(
        self,
        stats: EngineReading,
        at_ms: float,
        *,
        held: int = 0,
        said: int = 0,
        said_at_ms: float | None = None,
    ) -> EngineSignals:
        """Take one reading.

        `held`: requests that the caller has in the engine; `said`: those that another worker said at
        `said_at_ms` to have there. They count as held even when the gauges show none, because a paused engine
        does not update them. What was only said is no ground for doubt from then on: a worker that was killed
        takes its requests with it, and an engine that has nothing to do counts nothing.
        """
        rejected: list[str] = []
        running = _count(stats.running, "running", rejected)
        waiting = _count(stats.waiting, "waiting", rejected)
        kv_use = _count(stats.kv_use, "kv_use", rejected)
        if kv_use is not None and kv_use > 1.0:
            rejected.append("kv_use")
            kv_use = None
        reported = {name: _count(getattr(stats, name), name, rejected) for name in _COUNTERS}
        counters = {name: value for name, value in reported.items() if value is not None}
        if any(counters[name] < self._counters[name] for name in counters.keys() & self._counters.keys()):
            self._restart()
        moved = any(value > self._counters.get(name, value) for name, value in counters.items())
        first = not (counters.keys() & self._counters.keys())
        self._counters.update(counters)
        # A reading without counters says nothing of movement: the time of standing still goes on.
        seen = (running or 0) + (waiting or 0) + held > 0
        if seen or said:
            known_ms = at_ms if seen or said_at_ms is None else min(at_ms, said_at_ms)
            self._held_at_ms = max(self._held_at_ms, known_ms)
        frozen = self._frozen(at_ms, seen or said > 0, moved or first) if counters else None
        self._last = EngineSignals(
            at_ms=at_ms,
            running=running,
            waiting=waiting,
            kv_use=kv_use,
            frozen_ms=frozen,
            ttft_p99_ms=self._windowed(self._ttft, stats.ttft_buckets, at_ms),
            tpot_p99_ms=self._windowed(self._tpot, stats.tpot_buckets, at_ms),
            resets=self._resets,
            rejected=tuple(rejected),
        )
        return self._last

    def _restart(self) -> None:
        """A counter fell: another engine process answers. What the old one counted says nothing any more."""
        self._resets += 1
        self._counters.clear()
        self._still_since_ms = None
        self._ttft.clear()
        self._tpot.clear()

    def _frozen(self, at_ms: float, holds: bool, moved: bool) -> float:
        since = self._still_since_ms
        if not holds:
            doubted = since is not None and self._held_at_ms - since >= self._doubt_after_ms
            if moved or since is None or not doubted or at_ms - self._held_at_ms >= self._doubt_ms:
                self._still_since_ms = None
                return 0.0
            return max(0.0, at_ms - since)
        if moved or since is None:
            # A request that came in since the last reading cannot have waited before it: count from here.
            self._still_since_ms = since = at_ms
        return max(0.0, at_ms - since)

    def _windowed(
        self, history: deque[tuple[float, Buckets]], buckets: tuple[tuple[float, float], ...], at_ms: float
    ) -> float | None:
        if not buckets:
            history.clear()
            return None
        if history and bucket_delta(history[-1][1], buckets) is None:
            history.clear()
        history.append((at_ms, buckets))
        # The oldest reading kept is the last one at or before the start of the window.
        while len(history) > 1 and at_ms - history[1][0] >= self._window_ms:
            history.popleft()
        gained = bucket_delta(history[0][1], buckets)
        p99 = bucket_percentile(gained, 0.99) if gained else None
        return None if p99 is None else p99 * 1000.0


def _count(value: float | None, name: str, rejected: list[str]) -> float | None:
    """A number that can be a count; otherwise None, and its name in `rejected` when there was a value."""
    if value is None:
        return None
    if not isfinite(value) or value < 0:
        rejected.append(name)
        return None
    return value
