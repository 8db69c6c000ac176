"""The report's figures as plotly.js values (traces and layout), built from the record. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import log10
from typing import Any

from hybridsched.core.reasons import Reason
from hybridsched.core.values import GateState, Value
from hybridsched.report import harvest, intervals, summary
from hybridsched.report.intervals import Spans
from hybridsched.report.percentiles import percentile
from hybridsched.report.record import OnlineRow, PassRecord, RunRecord

ONLINE, OFFLINE, MIXED, IDLE = "#4477aa", "#e0a526", "#bb5566", "rgba(128,128,128,0.18)"
OPEN, CLOSED, UNKNOWN, OTHER = "#66aa77", "#8899aa", "#bb5566", "rgba(128,128,128,0.25)"
BINS = 600

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
    Reason.QUEUE_UNKNOWN,
}


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


def figures(record: RunRecord) -> list[Figure]:
    """All figures, in reading order."""
    return [
        _load(record),
        _lanes(record),
        _cdf(record),
        _over_time(record),
        _pauses(record),
    ]


def _span_s(record: RunRecord) -> float:
    return (record.together.end_s - record.together.start_s) * record.speed


def _counts(times: Iterable[tuple[float, float]], width: float, bins: int) -> list[float]:
    """Sums of (time, amount) by bin."""
    sums = [0.0] * bins
    for at, amount in times:
        place = int(at // width)
        if 0 <= place < bins:
            sums[place] += amount
    return sums


def _load(record: RunRecord) -> Figure:
    run, speed = record.together, record.speed
    span = _span_s(record)
    width = 1.0 if span <= BINS else span / BINS
    bins = max(1, int(span / width) + 1)
    middles = [round((number + 0.5) * width, 3) for number in range(bins)]
    arrivals = _counts(((row.scheduled_s * speed, 1 / width) for row in run.online), width, bins)
    tokens = _counts(
        (
            ((it.e - run.start_s) * speed, it.goff / width)
            for log in run.engines
            for it in log.iterations
            if it.goff
        ),
        width,
        bins,
    )
    return Figure(
        key="load",
        title="Online load, and the offline output beside it",
        caption="Bars: online requests that arrive per second. Line: offline tokens generated per second, "
        "all engines.",
        data=[
            {
                "type": "bar",
                "name": "online requests/s",
                "x": middles,
                "y": [round(v, 3) for v in arrivals],
                "marker": {"color": ONLINE},
                "width": width,
            },
            {
                "type": "scatter",
                "mode": "lines",
                "name": "offline tokens/s",
                "x": middles,
                "y": [round(v, 1) for v in tokens],
                "line": {"color": OFFLINE, "width": 1.5},
                "yaxis": "y2",
            },
        ],
        layout={
            "xaxis": {"title": {"text": "trace time, s"}, "range": [0, span]},
            "yaxis": {"title": {"text": "requests/s"}, "rangemode": "tozero"},
            "yaxis2": {
                "title": {"text": "tokens/s"},
                "overlaying": "y",
                "side": "right",
                "showgrid": False,
                "rangemode": "tozero",
            },
        },
    )


def _lanes(record: RunRecord) -> Figure:
    run, speed = record.together, record.speed
    width = (run.end_s - run.start_s) / BINS or 1.0
    edges = [run.start_s + number * width for number in range(BINS + 1)]
    work: dict[str, list[int]] = {}
    gates: dict[str, list[int]] = {}
    for log in run.engines:
        online = harvest.online_spans(log, run.events)
        offline = intervals.union((it.s, it.e) for it in log.iterations if it.off > 0)
        mixed = intervals.union((it.s, it.e) for it in log.iterations if it.on > 0 and it.off > 0)
        work[f"{log.replica} work"] = _work_row(edges, online, offline, mixed)
        gates[f"{log.replica} gate"] = _gate_row(edges, run, log.replica)
    bands = [f"{log.replica} {part}" for log in run.engines for part in ("work", "gate")]
    middles = [round((number + 0.5) * width * speed, 3) for number in range(BINS)]
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
            "xaxis": {"title": {"text": "trace time, s"}, "range": [0, _span_s(record)]},
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
    width = edges[1] - edges[0]
    row = []
    for on, off, both in zip(
        _shares(edges, online), _shares(edges, offline), _shares(edges, mixed), strict=True
    ):
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


def _curve(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """A cumulative distribution of at most about 400 points."""
    ordered = sorted(values)
    stride = max(1, len(ordered) // 400)
    places = sorted({*range(0, len(ordered), stride), len(ordered) - 1}) if ordered else []
    return [round(ordered[p], 3) for p in places], [round((p + 1) / len(ordered), 5) for p in places]


def _runs(record: RunRecord) -> list[tuple[str, str, PassRecord]]:
    runs = [("with offline work", OFFLINE, record.together)]
    if record.baseline:
        runs.append(("online alone", ONLINE, record.baseline))
    return runs


def _line(value: float, axis: str) -> dict[str, Any]:
    """A dotted line at an objective."""
    other = "y" if axis == "x" else "x"
    return {
        "type": "line",
        f"{axis}0": value,
        f"{axis}1": value,
        f"{other}ref": "paper",
        f"{other}0": 0,
        f"{other}1": 1,
        "line": {"color": "#999999", "width": 1, "dash": "dot"},
    }


def _values(rows: Sequence[OnlineRow], speed: float, figure: str) -> list[float]:
    measure = summary.ttft_ms if figure == "ttft" else summary.tpot_ms
    return [value for row in rows if row.status == "ok" and (value := measure(row, speed)) is not None]


def _log_range(data: Sequence[dict[str, Any]], axis: str) -> list[float]:
    """From the first percentile to the largest value: tokens that arrive together have a pace near 0."""
    values = [x for one in data if one.get("xaxis", "x") == axis for x in one["x"]]
    low = max(percentile(values, 0.01) or 1.0, 0.1)
    return [log10(low) - 0.05, log10(max([low, *values])) + 0.05]


def _cdf(record: RunRecord) -> Figure:
    data: list[dict[str, Any]] = []
    for name, colour, run in _runs(record):
        for figure, axes in (("ttft", {}), ("tpot", {"xaxis": "x2", "yaxis": "y2"})):
            x, y = _curve(_values(run.online, record.speed, figure))
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": name,
                    "legendgroup": name,
                    "showlegend": figure == "ttft",
                    "x": x,
                    "y": y,
                    "line": {"color": colour, "width": 2},
                    **axes,
                }
            )
    return Figure(
        key="cdf",
        title="Time to first token, and time per token: with and without offline work",
        caption="Share of the requests (height) answered within a time (axis, logarithmic). Where the curves "
        "lie on each other, online does not feel the offline work.",
        data=data,
        layout={
            "xaxis": {
                "type": "log",
                "domain": [0, 0.47],
                "range": _log_range(data, "x"),
                "title": {"text": "TTFT, ms"},
            },
            "yaxis": {"range": [0, 1.02], "tickformat": ".0%"},
            "xaxis2": {
                "type": "log",
                "domain": [0.53, 1],
                "range": _log_range(data, "x2"),
                "anchor": "y2",
                "title": {"text": "time per output token, ms"},
            },
            "yaxis2": {"range": [0, 1.02], "anchor": "x2", "tickformat": ".0%", "showticklabels": False},
        },
        height=300,
    )


def _over_time(record: RunRecord) -> Figure:
    data = []
    for name, colour, run in reversed(_runs(record)):
        points = [
            (row.scheduled_s * record.speed, value)
            for row in run.online
            if row.status == "ok" and (value := summary.ttft_ms(row, record.speed)) is not None
        ]
        data.append(
            {
                "type": "scattergl" if len(points) > 5000 else "scatter",
                "mode": "markers",
                "name": name,
                "x": [round(at, 3) for at, _ in points],
                "y": [round(value, 2) for _, value in points],
                "marker": {"color": colour, "size": 5, "opacity": 0.7},
            }
        )
    return Figure(
        key="time",
        title="Time to first token over the trace",
        caption=f"One point a request. Dotted: the objective, {record.policy.slo.ttft_ms:g} ms.",
        data=data,
        layout={
            "xaxis": {"title": {"text": "trace time, s"}, "range": [0, _span_s(record)]},
            "yaxis": {"type": "log", "title": {"text": "TTFT, ms"}},
            "shapes": [_line(record.policy.slo.ttft_ms, "y")],
        },
        height=280,
    )


def _pauses(record: RunRecord) -> Figure:
    found = [pause for pause in harvest.pauses(record.together) if pause.found_work]
    factor = 1000 * record.speed
    quiet = [round(pause.quiet_s * factor, 2) for pause in found]
    path = [round(pause.path_s * factor, 2) for pause in found]
    top = max([*quiet, 4 * summary.BARS["signal_path_ms"]])
    bins = {"start": 0, "end": top * 1.01, "size": top / 40}
    return Figure(
        key="pauses",
        title="How fast offline work gives way",
        caption="From the online request's arrival to the end of the last iteration that ran offline work; "
        "and the part of it beyond one iteration, which is the signal's own (dotted: its bar).",
        data=[
            {
                "type": "histogram",
                "name": name,
                "x": values,
                "marker": {"color": colour},
                "opacity": 0.7,
                "xbins": bins,
                "autobinx": False,
            }
            for name, values, colour in (
                ("signal to quiet", quiet, ONLINE),
                ("beyond one iteration", path, MIXED),
            )
        ],
        layout={
            "barmode": "overlay",
            "xaxis": {"title": {"text": "ms"}, "range": [0, top * 1.02]},
            "yaxis": {"title": {"text": "pauses"}},
            "shapes": [_line(summary.BARS["signal_path_ms"], "x")],
        },
    )
