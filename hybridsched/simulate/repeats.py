"""The same simulation several times, with arrivals moved by milliseconds: how far its figures can be trusted.

Which of two replicas takes a request depends on less than a millisecond, and all that comes after depends
on it. A percentile of few requests moves by several percent with that, which is no property of a policy.
"""

from __future__ import annotations

import random
from statistics import median
from typing import Any

import msgspec

from hybridsched.simulate.options import SimulatePlan

MOVED_S = 0.005
"""Arrivals are moved by up to this, later."""

FIGURES: dict[str, tuple[str, ...]] = {
    "harvested_ratio": ("harvest", "harvested_ratio"),
    "ceiling_share": ("ceiling", "share"),
    "lines_completed": ("offline", "completed"),
    "ttft_p99_ms": ("online", "ttft_ms", "p99"),
    "tpot_p99_ms": ("online", "tpot_ms", "p99"),
    "slo_attainment": ("online", "slo_attainment"),
    "ttft_p99_ratio": ("co_location", "ttft_p99_ratio"),
    "tpot_p99_ratio": ("co_location", "tpot_p99_ratio"),
    "pauses": ("pauses", "count"),
    "signal_to_quiet_p50_ms": ("pauses", "signal_to_quiet_ms", "p50"),
    "signal_to_quiet_p99_ms": ("pauses", "signal_to_quiet_ms", "p99"),
    "tokens_recomputed": ("offline", "tokens_recomputed"),
    "offline_tokens_done": ("ceiling", "tokens_done"),
}


def moved(plan: SimulatePlan, number: int) -> SimulatePlan:
    """The plan with its arrivals moved, in another way for each number. The seed is the plan's."""
    source = random.Random(f"{plan.options.seed}/moved/{number}")  # noqa: S311 - must be repeatable
    rows = [
        msgspec.structs.replace(row, arrival_s=row.arrival_s + source.uniform(0.0, MOVED_S))
        for row in plan.rows
    ]
    rows.sort(key=lambda row: row.arrival_s)
    return msgspec.structs.replace(plan, rows=tuple(rows))


def spread_of(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """For each figure its least, middle and greatest value over the runs; None where no run has it."""
    out: dict[str, Any] = {"runs": len(summaries)}
    for name, path in FIGURES.items():
        values = [value for one in summaries if (value := _at(one, path)) is not None]
        out[name] = (
            {"min": min(values), "median": round(median(values), 6), "max": max(values)} if values else None
        )
    return out


def _at(summary: dict[str, Any], path: tuple[str, ...]) -> float | None:
    found: Any = summary
    for key in path:
        found = None if found is None else found[key]
    return None if found is None else float(found)
