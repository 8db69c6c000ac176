"""Percentiles as every part of the report has them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def percentile(values: Iterable[float], share: float) -> float | None:
    """Nearest rank: the smallest value with at least `share` (0..1] of all values at or below it."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float], *names: str) -> dict[str, float | None]:
    """Percentiles by name (`p50`, `p99`, `max`), rounded to a thousandth."""
    out: dict[str, float | None] = {}
    for name in names:
        value = percentile(values, 1.0 if name == "max" else float(name[1:]) / 100)
        out[name] = None if value is None else round(value, 3)
    return out
