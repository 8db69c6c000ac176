"""The report's figures as plotly.js values (traces and layout), built from the record. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log10
from typing import Any

from hybridsched.report import harvest, summary
from hybridsched.report.figure import BINS, MIXED, OFFLINE, ONLINE, Figure, span_s
from hybridsched.report.lane_figure import lanes
from hybridsched.report.percentiles import percentile
from hybridsched.report.record import OnlineRow, PassRecord, RunRecord

POINTS = 20_000
"""Most points of a scatter: more make the page too heavy to open."""


def figures(record: RunRecord) -> list[Figure]:
    """All figures, in reading order."""
    return [
        _load(record),
        lanes(record),
        _cdf(record),
        _over_time(record),
        _pauses(record),
    ]


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
    span = span_s(record)
    counts = [log.counts for log in run.engines if log.counts is not None]
    width = 1.0 if span <= BINS else span / BINS
    bins = max(1, int(span / width) + 1)
    middles = [round((number + 0.5) * width, 3) for number in range(bins)]
    arrivals = _counts(((row.scheduled_s * speed, 1 / width) for row in run.online), width, bins)
    tokens = _counts(
        (
            *(
                ((it.e - run.start_s) * speed, it.goff / width)
                for log in run.engines
                for it in log.iterations
                if it.goff
            ),
            *(
                ((place + 0.5) * one.bin_s * speed, amount / width)
                for one in counts
                for place, amount in enumerate(one.token_bins)
            ),
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
        points = points[:: -(-len(points) // POINTS) or 1]
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
        caption="One point a request (of very many, one in several). Dotted: the objective, "
        f"{record.policy.slo.ttft_ms:g} ms.",
        data=data,
        layout={
            "xaxis": {"title": {"text": "trace time, s"}, "range": [0, span_s(record)]},
            "yaxis": {"type": "log", "title": {"text": "TTFT, ms"}},
            "shapes": [_line(record.policy.slo.ttft_ms, "y")],
        },
        height=280,
    )


def _pauses(record: RunRecord) -> Figure:
    found = [pause for pause in harvest.pauses(record.together) if pause.found_work]
    factor = 1000 * record.speed
    quiet = [round(pause.quiet_s * factor, 2) for pause in found]
    # Without iterations nothing is known beyond one.
    path = [] if record.together.by_requests else [round(pause.path_s * factor, 2) for pause in found]
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
