"""The figure of what each engine ran and how its gate stood, from logs or from counts. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import Any, TypeVar

from hybridsched.core.reasons import Reason
from hybridsched.core.values import GateState
from hybridsched.report import harvest, intervals
from hybridsched.report.figure import BINS, IDLE, MIXED, OFFLINE, ONLINE, Figure, span_s
from hybridsched.report.intervals import Spans
from hybridsched.report.record import EngineCounts, PassRecord, RunRecord

_T = TypeVar("_T")

OPEN, CLOSED, UNKNOWN, OTHER = "#66aa77", "#8899aa", "#bb5566", "rgba(128,128,128,0.25)"

WORK_NAMES = ("idle", "online", "offline", "both in one iteration")
GATE_NAMES = ("open", "closed: online needs it", "closed: a signal is unknown", "closed: other")

_ONLINE_REASONS = {
    Reason.ONLINE_ACTIVE,
    Reason.ONLINE_ARRIVED,
    Reason.ONLINE_QUEUED,
    Reason.IDLE_WINDOW,
    Reason.FOREIGN_LOAD,
}
_UNKNOWN_REASONS = {
    Reason.TELEMETRY_MISSING,
    Reason.TELEMETRY_STALE,
    Reason.METRIC_MISSING,
    Reason.METRIC_STALE,
    Reason.METRIC_FROZEN,
    Reason.ENGINE_UNHEALTHY,
    Reason.ENGINE_WRONG_MODEL,
    Reason.ENGINE_HUNG,
    Reason.ENGINE_WRONG_ANSWER,
    Reason.ENGINE_MEMORY,
    Reason.ENGINE_ASLEEP,
    Reason.QUEUE_UNKNOWN,
}


def lanes(record: RunRecord) -> Figure:
    run, speed = record.together, record.speed
    bins, width = BINS, (run.end_s - run.start_s) / BINS or 1.0
    counted = next((log.counts for log in run.engines if log.counts is not None), None)
    if counted is not None:
        width = counted.bin_s
        bins = max(1, ceil((run.end_s - run.start_s) / width - 1e-9))
    edges = [run.start_s + number * width for number in range(bins + 1)]
    work: dict[str, list[int]] = {}
    gates: dict[str, list[int]] = {}
    for log in run.engines:
        if log.counts is not None:
            work[f"{log.replica} work"] = _counted_work(log.counts, bins)
            gates[f"{log.replica} gate"] = _counted_gate(log.counts, bins)
            continue
        online = harvest.online_spans(log, run.events)
        offline = intervals.union((it.s, it.e) for it in log.iterations if it.off > 0)
        mixed = intervals.union((it.s, it.e) for it in log.iterations if it.on > 0 and it.off > 0)
        work[f"{log.replica} work"] = _work_row(edges, online, offline, mixed)
        gates[f"{log.replica} gate"] = _gate_row(edges, run, log.replica)
    bands = [f"{log.replica} {part}" for log in run.engines for part in ("work", "gate")]
    middles = [round((number + 0.5) * width * speed, 3) for number in range(bins)]
    return Figure(
        key="lanes",
        title="What each engine ran, and its gate",
        caption="Upper band of each engine: what it computed most of the time. Lower band: its offline gate. "
        "Offline work should fill what online leaves, and stop where online begins.",
        data=[
            _heatmap(middles, bands, work, WORK_NAMES, (IDLE, ONLINE, OFFLINE, MIXED)),
            _heatmap(middles, bands, gates, GATE_NAMES, (OPEN, CLOSED, UNKNOWN, OTHER)),
        ],
        layout={
            "xaxis": {"title": {"text": "trace time, s"}, "range": [0, span_s(record)]},
            "yaxis": {
                "type": "category",
                "autorange": "reversed",
                "categoryorder": "array",
                "categoryarray": bands,
                "showgrid": False,
            },
            "margin": {"l": 80},
        },
        height=90 + 28 * max(2, len(bands)),
        legend=(
            (ONLINE, "online"),
            (OFFLINE, "offline"),
            (MIXED, "both at once"),
            (IDLE, "idle"),
            (OPEN, "gate open"),
            (CLOSED, "closed for online"),
            (UNKNOWN, "closed: signal unknown"),
            (OTHER, "closed: other"),
        ),
    )


def _heatmap(
    x: list[float],
    bands: list[str],
    rows: dict[str, list[int]],
    names: Sequence[str],
    colours: Sequence[str],
) -> dict[str, Any]:
    """Cells 0, 1, ... of some bands; the other bands stay free for another such map on the same axes."""
    cells = [rows.get(band) for band in bands]
    return {
        "type": "heatmap",
        "x": x,
        "y": bands,
        "z": [row if row else [None] * len(x) for row in cells],
        "text": [[names[cell] for cell in row] if row else [""] * len(x) for row in cells],
        "colorscale": _steps(colours),
        "zmin": -0.5,
        "zmax": len(colours) - 0.5,
        "showscale": False,
        "hoverongaps": False,
        "ygap": 2,
        "hovertemplate": "%{y}, %{x:.1f} s: %{text}<extra></extra>",
    }


def _steps(colours: Sequence[str]) -> list[list[Any]]:
    """A colour scale of equal steps for the cells 0, 1, 2, ..."""
    share = 1 / len(colours)
    return [
        [round(edge, 6), colour]
        for place, colour in enumerate(colours)
        for edge in (place * share, (place + 1) * share)
    ]


def _shares(edges: Sequence[float], spans: Spans) -> list[float]:
    """Length of `spans` within each bin."""
    out = [0.0] * (len(edges) - 1)
    for start, end in spans:
        place = max(0, bisect_right(edges, start) - 1)
        while place < len(out) and edges[place] < end:
            out[place] += max(0.0, min(end, edges[place + 1]) - max(start, edges[place]))
            place += 1
    return out


def _work_row(edges: Sequence[float], online: Spans, offline: Spans, mixed: Spans) -> list[int]:
    shares = (_shares(edges, online), _shares(edges, offline), _shares(edges, mixed))
    return _most_of(edges[1] - edges[0], *shares)


def _counted_work(counts: EngineCounts, bins: int) -> list[int]:
    return _most_of(
        counts.bin_s,
        *(_filled(part, bins, 0.0) for part in (counts.online_bins, counts.offline_bins, counts.mixed_bins)),
    )


def _counted_gate(counts: EngineCounts, bins: int) -> list[int]:
    return [
        _gate_kind(GateState.OPEN if label == GateState.OPEN else GateState.CLOSED, label)
        for label in _filled(counts.gate_bins, bins, "")
    ]


def _filled(values: Sequence[_T], length: int, rest: _T) -> list[_T]:
    return [*values[:length], *([rest] * (length - len(values)))]


def _most_of(width: float, online: list[float], offline: list[float], mixed: list[float]) -> list[int]:
    """What most of each bin was, from the seconds in it."""
    row = []
    for on, off, both in zip(online, offline, mixed, strict=True):
        parts = (max(0.0, width - on - off + both), on - both, off - both, both)
        row.append(max(range(4), key=lambda cell: (round(parts[cell], 9), -cell)))
    return row


def _gate_kind(state: str, reason: str) -> int:
    if state == GateState.OPEN:
        return 0
    if reason in _ONLINE_REASONS:
        return 1
    return 2 if reason in _UNKNOWN_REASONS else 3


def _gate_row(edges: Sequence[float], run: PassRecord, lane: str) -> list[int]:
    changes = sorted(
        (
            event.mono_s,
            1
            if event.t == "signal"
            else _gate_kind(str(event.data.get("state")), str(event.data.get("reason"))),
        )
        for event in run.events
        if event.lane == lane and event.t in {"gate", "signal"}
    )
    times = [at for at, _ in changes]
    row = []
    for left, right in pairwise(edges):
        place = bisect_right(times, (left + right) / 2) - 1
        row.append(changes[place][1] if place >= 0 else 3)
    return row
