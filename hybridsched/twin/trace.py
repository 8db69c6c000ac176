"""Online traces at another load (other requests in the same time, or the same ones in another time), and one
that is made: waves of bursts and valleys."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from hybridsched.core.values import Value
from hybridsched.traces import TraceError, TraceRow, cut, read_trace

JITTER_S = 1.0
"""How far a copy of a request may lie from it. Bursts that are longer stay what they were."""

MOST_REQUESTS = 5_000_000
"""Online requests that are simulated at most: each takes some hundred bytes."""


class Scaling(StrEnum):
    """How a load is changed by a factor."""

    COMPRESS = "compress"
    """Time runs faster: all gaps are shorter, so bursts and valleys are, too."""
    RESAMPLE = "resample"
    """The trace keeps its length and its rate over time its shape: requests are left out at random, or
    copied to random times close by. What is finer than `JITTER_S` gets closer to a Poisson process."""


class Waves(Value, frozen=True, kw_only=True):
    """Bursts and valleys of equal length in turn, a burst first; arrivals at random within each.

    The default is the load of a published measurement of unprotected mixing, one A100 with prompts of 512 and
    answers of 128 tokens: TTFT p50 72 ms alone and 278 ms with a batch beside, p95 92 and 597 ms
    (llm-d-batch-gateway, issue 491).
    """

    high_rps: float = 15.0
    low_rps: float = 1.0
    wave_s: float = 90.0
    """Length of a burst, and of a valley."""
    prompt_tokens: int = 512
    output_tokens: int = 128

    def __post_init__(self) -> None:
        for name in ("high_rps", "wave_s"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"waves: {name} is {getattr(self, name):g}; a number above 0 is allowed")
        if not 0.0 <= self.low_rps <= self.high_rps:
            raise ValueError(
                f"waves: low_rps is {self.low_rps:g}; 0 up to high_rps ({self.high_rps:g}) is allowed"
            )
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"waves: {name} is {getattr(self, name)}; 1 or more is allowed")

    @property
    def name(self) -> str:
        return f"waves of {self.high_rps:g} and {self.low_rps:g} requests/s, {self.wave_s:g} s each"


def parse_waves(given: str) -> Waves:
    """Waves as `HIGH,LOW,S` or `HIGH,LOW,S,PROMPT,OUTPUT`.

    Raises:
        ValueError: they are none; the message says what is allowed.
    """
    parts = given.split(",")
    allowed = "give HIGH,LOW,S or HIGH,LOW,S,PROMPT,OUTPUT, such as 15,1,90"
    if len(parts) not in (3, 5):
        raise ValueError(f"waves {given!r} have {len(parts)} numbers; {allowed}")
    try:
        high, low, wave_s = map(float, parts[:3])
        prompt, output = map(int, parts[3:] or ("512", "128"))
        return Waves(high_rps=high, low_rps=low, wave_s=wave_s, prompt_tokens=prompt, output_tokens=output)
    except ValueError as error:
        raise ValueError(f"waves {given!r}: {error}; {allowed}") from None


def make_waves(waves: Waves, duration_s: float, *, factor: float = 1.0, seed: int = 0) -> list[TraceRow]:
    """Arrivals of a Poisson process whose rate is `factor` times that of the waves.

    Raises:
        TraceError: no request falls into that time, or more than `MOST_REQUESTS`.
    """
    most = waves.high_rps * factor
    _bounded(most * duration_s, f"{duration_s:g} s at {most:g} requests/s")
    source = random.Random(f"{seed}/waves")  # noqa: S311 - must be repeatable, guards no secret
    rows: list[TraceRow] = []
    at_s = source.expovariate(most)
    while at_s < duration_s:
        in_burst = int(at_s / waves.wave_s) % 2 == 0
        # Thinned: each arrival of the higher rate stays with the share that the rate has at its time.
        if source.random() * waves.high_rps < (waves.high_rps if in_burst else waves.low_rps):
            rows.append(
                TraceRow(arrival_s=at_s, prompt_tokens=waves.prompt_tokens, output_tokens=waves.output_tokens)
            )
        at_s += source.expovariate(most)
    if not rows:
        raise TraceError(f"no request falls into {duration_s:g} s of {waves.name}; give more time or load")
    return rows


def load_trace(
    path: Path,
    *,
    start_s: float = 0.0,
    duration_s: float | None = None,
    factor: float = 1.0,
    scaling: Scaling = Scaling.RESAMPLE,
    seed: int = 0,
) -> list[TraceRow]:
    """A slice of a trace file (see `read_trace`) at `factor` times its load, counted from the slice's start.

    The slice is cut out of the trace's own time, before the load is changed.

    Raises:
        TraceError: the file cannot be used, or no request is left.
        ValueError: the factor is no number above 0.
    """
    rows = read_trace(path)
    if start_s or duration_s is not None:
        rows = cut(rows, start_s, math.inf if duration_s is None else duration_s)
    rows = scale(rows, factor, scaling=scaling, seed=seed)
    if not rows:
        raise TraceError(
            f"trace {path}: a load of {factor:g} times its own leaves no request; give a higher one"
        )
    return rows


def scale(
    rows: Sequence[TraceRow],
    factor: float,
    *,
    scaling: Scaling = Scaling.RESAMPLE,
    seed: int = 0,
    jitter_s: float = JITTER_S,
) -> list[TraceRow]:
    """The rows at `factor` times their load, in order of arrival. The same seed gives the same rows.

    Raises:
        TraceError: there would be more than `MOST_REQUESTS`.
        ValueError: the factor is no number above 0, or the jitter none of 0 or more.
    """
    if not 0.0 < factor < math.inf:
        raise ValueError(f"the load's factor must be a number above 0, got {factor}")
    if not 0.0 <= jitter_s < math.inf:
        raise ValueError(f"the jitter must be 0 s or more, got {jitter_s}")
    if factor == 1.0:
        return list(rows)
    if scaling is Scaling.COMPRESS:
        return [_moved(row, row.arrival_s / factor) for row in rows]
    _bounded(len(rows) * factor, f"{len(rows):,} at a load of {factor:g} times their own")
    return _resampled(rows, factor, seed, jitter_s)


def _bounded(requests: float, what: str) -> None:
    if requests > MOST_REQUESTS:
        raise TraceError(
            f"about {requests:,.0f} online requests were asked for ({what}); at most {MOST_REQUESTS:,} are "
            f"simulated: give less load or time"
        )


def _resampled(rows: Sequence[TraceRow], factor: float, seed: int, jitter_s: float) -> list[TraceRow]:
    source = random.Random(f"{seed}/load")  # noqa: S311 - must be repeatable, guards no secret
    whole, part = int(factor), factor - int(factor)
    scaled: list[TraceRow] = []
    for row in rows:
        count = whole + (source.random() < part)
        if count:
            scaled.append(row)
            for _ in range(count - 1):
                # Before the trace's start is as far after it: no request is lost at the edge.
                moved_s = abs(row.arrival_s + source.uniform(-jitter_s, jitter_s))
                scaled.append(_moved(row, moved_s))
    scaled.sort(key=lambda row: row.arrival_s)
    return scaled


def _moved(row: TraceRow, arrival_s: float) -> TraceRow:
    return TraceRow(arrival_s=arrival_s, prompt_tokens=row.prompt_tokens, output_tokens=row.output_tokens)
