"""What the figures of the report have in common."""

from __future__ import annotations

from typing import Any

from hybridsched.core.values import Value
from hybridsched.report.record import RunRecord

ONLINE, OFFLINE, MIXED, IDLE = "#4477aa", "#e0a526", "#bb5566", "rgba(128,128,128,0.18)"
BINS = 600


class Figure(Value, frozen=True, kw_only=True):
    """One figure of the page."""

    key: str
    title: str
    caption: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 260
    legend: tuple[tuple[str, str], ...] = ()
    """(colour, name) chips where plotly draws no legend of its own."""


def span_s(record: RunRecord) -> float:
    return (record.together.end_s - record.together.start_s) * record.speed
