"""How long an engine's iterations take, learned from its own counters: a hinge fitted by least squares.

    ms = fixed + per_token x max(0, tokens - free) + per_cache x share of the KV cache in use

A batch of up to `free` tokens costs as much as one: the weights are read once whatever the batch, and only
beyond does arithmetic take longer than that read (the roofline; the same form as the published profiles of
the simulated engine). The cache's share stands for the context that attention reads.

vLLM counts its iterations and the tokens in them (a prompt's with the end of its prefill); between two
readings of a busy engine that gives mean tokens and mean milliseconds of an iteration. Means of a convex
curve lie above it, never below, and a moment without work in between makes an iteration look longer: both err
to the safe side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from hybridsched.core.values import LatencyFit, Value

SAMPLES = 160
"""Samples that are remembered."""

LEAST_SAMPLES = 12
"""Fewer fit anything."""

LEAST_ITERATIONS = 3
"""A sample of fewer is mostly the two that the readings cut."""

LONGEST_MS = 2000.0
"""Readings further apart say too little of any one iteration."""

MOST_TOKENS, SHORTEST_MS = 1e6, 1e-3
"""No engine has more tokens in an iteration, or a shorter one: such a sample is a counter's slip."""

FREE_TOKENS = (0.0, 16.0, 32.0, 64.0, 128.0, 256.0)
"""Where the hinge may lie: the best of these is taken."""

_OUTLIER = 0.5
"""Samples that miss the first fit by more than this share are left out of the second."""

_LEAST_ABOVE = 4
"""So many samples must lie beyond the hinge, or nothing is known of the slope."""

_LEAST_RISE = 0.01
"""Over the tokens seen an iteration must grow by this share of the shortest: a flatter slope is rounding."""


class Reading(Value, frozen=True, kw_only=True):
    """An engine's counters at one time. None: not reported."""

    at_ms: float
    iterations: float | None
    tokens: float | None
    """Tokens in them, prompt and output."""
    kv_use: float | None
    running: float | None


class Sample(Value, frozen=True, kw_only=True):
    """Means between two readings."""

    tokens: float
    kv_use: float
    ms: float


class IterationTimes:
    """What one engine's readings have come to. A restart (a counter that falls) begins anew."""

    def __init__(self) -> None:
        self._last: Reading | None = None
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._fit: LatencyFit | None = None
        self._stale = 0
        self._at_ms: float | None = None

    @property
    def at_ms(self) -> float | None:
        """When the last sample was taken; None: none was."""
        return self._at_ms

    def observe(self, reading: Reading) -> None:
        """Take one reading; times must not go back."""
        last, self._last = self._last, reading
        if last is None:
            return
        sample = sample_of(last, reading)
        if sample is None:
            if _fell(last, reading):
                self._samples.clear()
                self._fit = None
            return
        self._samples.append(sample)
        self._at_ms = reading.at_ms
        self._stale += 1

    def fit(self) -> LatencyFit | None:
        """The fit as of the samples so far; worked out anew after every eighth of them. None: unknown."""
        if len(self._samples) >= LEAST_SAMPLES and (self._fit is None or self._stale >= 8):
            self._fit = fit(tuple(self._samples))
            self._stale = 0
        return self._fit


def sample_of(before: Reading, after: Reading) -> Sample | None:
    """What lies between two readings; None where the engine was not busy at both, or a number is missing."""
    if (
        before.iterations is None
        or after.iterations is None
        or before.tokens is None
        or after.tokens is None
        or after.kv_use is None
        or before.kv_use is None
        or not before.running
        or not after.running
    ):
        return None
    span_ms = after.at_ms - before.at_ms
    iterations = after.iterations - before.iterations
    tokens = after.tokens - before.tokens
    if not (0.0 < span_ms <= LONGEST_MS and iterations >= LEAST_ITERATIONS and tokens >= 0.0):
        return None
    kv_use = (before.kv_use + after.kv_use) / 2
    sample = Sample(tokens=tokens / iterations, kv_use=kv_use, ms=span_ms / iterations)
    possible = sample.tokens <= MOST_TOKENS and 0.0 <= kv_use <= 1.0 and sample.ms >= SHORTEST_MS
    return sample if possible else None


def _fell(before: Reading, after: Reading) -> bool:
    return (
        before.iterations is not None
        and after.iterations is not None
        and after.iterations < before.iterations
    )


def fit(samples: Sequence[Sample]) -> LatencyFit | None:
    """The hinge that fits best, by relative error; None when too little is known of its slope."""
    first = _best(samples)
    if first is None:
        return None
    kept = [one for one in samples if abs(predict(first, one.tokens, one.kv_use) / one.ms - 1.0) <= _OUTLIER]
    return (_best(kept) if len(kept) >= LEAST_SAMPLES else None) or first


def predict(model: LatencyFit, tokens: float, kv_use: float) -> float:
    """Milliseconds of an iteration with so many tokens, at that use of the KV cache."""
    over = max(0.0, tokens - model.free_tokens)
    return model.fixed_ms + model.token_ms * over + model.cache_ms * kv_use


def _best(samples: Sequence[Sample]) -> LatencyFit | None:
    found: LatencyFit | None = None
    for free in FREE_TOKENS:
        if sum(one.tokens > free for one in samples) < _LEAST_ABOVE:
            break
        model = _solve(samples, free)
        if model is not None and (found is None or model.error < found.error):
            found = model
    return found


def _solve(samples: Sequence[Sample], free: float) -> LatencyFit | None:
    """Least squares of the relative error at one place of the hinge; slopes are never negative."""
    rows = [(1.0, max(0.0, one.tokens - free), one.kv_use) for one in samples]
    times = [one.ms for one in samples]
    for columns in ((0, 1, 2), (0, 1)):
        found = _least_squares([[row[i] for i in columns] for row in rows], times)
        if found is None or any(value < 0.0 for value in found) or found[0] <= 0.0:
            continue
        if found[1] * max(row[1] for row in rows) <= _LEAST_RISE * found[0]:
            continue
        model = LatencyFit(
            fixed_ms=found[0],
            free_tokens=free,
            token_ms=found[1],
            cache_ms=found[2] if len(found) > 2 else 0.0,
            samples=len(samples),
        )
        errors = [abs(predict(model, one.tokens, one.kv_use) / one.ms - 1.0) for one in samples]
        return msgspec.structs.replace(model, error=sum(errors) / len(errors))
    return None


def _least_squares(rows: list[list[float]], times: list[float]) -> list[float] | None:
    """Coefficients that make the sum of squared relative errors least; None: the columns say the same."""
    size = len(rows[0])
    matrix = [[0.0] * (size + 1) for _ in range(size)]
    for row, ms in zip(rows, times, strict=True):
        weight = 1.0 / (ms * ms)
        for i in range(size):
            for j in range(size):
                matrix[i][j] += weight * row[i] * row[j]
            matrix[i][size] += weight * row[i] * ms
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(matrix[k][i]))
        if abs(matrix[pivot][i]) < 1e-12:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for k in range(size):
            if k != i:
                factor = matrix[k][i] / matrix[i][i]
                matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] for i in range(size)]
