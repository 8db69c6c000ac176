"""Several policies on the same load in one picture: what each harvests, and what online pays for it."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import msgspec

from hybridsched.report.figure import Figure
from hybridsched.report.html import number, page, section, table
from hybridsched.report.summary import BARS
from hybridsched.simulate.compare import COLUMNS, cells, rows

COLOURS = ("#4477aa", "#e0a526", "#bb5566", "#66aa77", "#8866aa", "#33aacc", "#aa7744", "#777777")
"""One a policy, in turn."""

CEILING_AIM = 0.90
"""Share of the ceiling to reach: a design figure of the project."""

_COSTS = (
    ("ttft_p99_ratio", "time to first token, p99", "circle"),
    ("tpot_p99_ratio", "time per output token, p99", "diamond-open"),
)


def write_comparison(summaries: list[dict[str, Any]], folder: Path) -> None:
    """`compare.json` (a list, one object for each policy in order) and `report.html` of all of them."""
    (folder / "compare.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(rows(summaries)), indent=2) + b"\n"
    )
    (folder / "report.html").write_text(render(summaries), encoding="utf-8")


def render(summaries: list[dict[str, Any]]) -> str:
    """The page: the picture, the table, and where the page of each policy stands."""
    part = picture(rows(summaries))
    title = "hybridsched simulate: policies compared"
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="soft">{html.escape(setting(summaries))}</p>',
        section(part),
        table(
            COLUMNS,
            [
                [_link(line[0]), *(html.escape(cell) for cell in line[1:])]
                for line in (cells(row) for row in rows(summaries))
            ],
        ),
        f'<p class="soft">{html.escape(_words())}</p>',
    ]
    return page(title, body, [part])


def picture(found: list[dict[str, Any]]) -> Figure:
    """Left: idle engine seconds harvested, over p99 latency against online alone. Right: the share of the
    ceiling."""
    data: list[dict[str, Any]] = []
    for place, row in enumerate(found):
        colour = COLOURS[place % len(COLOURS)]
        data += _points(row, colour)
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": row["policy"],
                "showlegend": False,
                "x": [row["ceiling_share"]],
                "y": [row["policy"]],
                "text": ["–" if row["ceiling_share"] is None else f"{row['ceiling_share']:.1%}"],
                "textposition": "auto",
                "marker": {"color": colour},
                "xaxis": "x2",
                "yaxis": "y2",
            }
        )
    return Figure(
        key="compare",
        title="What each policy harvests, what online pays, and its share of the ceiling",
        caption="Left: idle engine seconds that ran offline work (height), over p99 latency with offline "
        "work divided by that of online alone with the same routing (logarithmic; ● time to first token, "
        "◇ time per output token; dotted: ×1.05 and the bar of the harvest). Best is up and left. Right: "
        "offline tokens done, of what a clairvoyant scheduler could do at most (dotted: 90 %).",
        data=data,
        layout={
            "xaxis": {
                "type": "log",
                "domain": [0, 0.6],
                "title": {"text": "p99 latency, × online alone"},
                "tickvals": [0.8, 0.9, 1, 1.05, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100],
            },
            "yaxis": {
                "tickformat": ".0%",
                "range": [0, 1.05],
                "title": {"text": "idle engine seconds harvested"},
            },
            "xaxis2": {
                "domain": [0.75, 1],
                "anchor": "y2",
                "tickformat": ".0%",
                "range": [0, 1.02],
                "title": {"text": "share of the ceiling"},
            },
            "yaxis2": {"anchor": "x2", "autorange": "reversed", "automargin": True},
            "shapes": [
                _dotted(x=BARS["ttft_p99_ratio"]),
                _dotted(y=BARS["harvested_ratio"]),
                _dotted(x=CEILING_AIM, axes=("x2", "y2")),
            ],
        },
        height=max(320, 120 + 34 * len(found)),
    )


def _points(row: dict[str, Any], colour: str) -> list[dict[str, Any]]:
    share = row["ceiling_share"]
    beside = "" if share is None else f" ({share:.0%} of ceiling)"
    points = []
    for name, what, symbol in _COSTS:
        ratio, harvested = row[name], row["harvested_ratio"]
        first = name == _COSTS[0][0]
        points.append(
            {
                "type": "scatter",
                "mode": "markers+text" if first else "markers",
                "name": row["policy"],
                "legendgroup": row["policy"],
                "showlegend": first,
                "x": [] if ratio is None or harvested is None else [ratio],
                "y": [] if ratio is None or harvested is None else [harvested],
                "text": [f"{row['policy']}{beside}"],
                "textposition": "bottom right",
                "hovertemplate": f"{what}: ×%{{x:.3f}}<br>harvested %{{y:.1%}}<extra>{row['policy']}</extra>",
                "marker": {"color": colour, "size": 11, "symbol": symbol},
            }
        )
    return points


def _dotted(
    *, x: float | None = None, y: float | None = None, axes: tuple[str, str] = ("x", "y")
) -> dict[str, Any]:
    """A line at a bar, across one panel."""
    here, other = axes
    line = {"type": "line", "line": {"color": "#999999", "width": 1, "dash": "dot"}}
    if x is not None:
        return line | {"xref": here, "yref": f"{other} domain", "x0": x, "x1": x, "y0": 0, "y1": 1}
    return line | {"xref": f"{here} domain", "yref": other, "x0": 0, "x1": 1, "y0": y, "y1": y}


def setting(summaries: list[dict[str, Any]]) -> str:
    """What was run, the same for all."""
    one = summaries[0]
    run, ceiling = one["run"], one.get("ceiling")
    said = (
        f"{run['gpus']} engines, {run['duration_s']:g} s of trace {run['trace']} in the twin, "
        f"{one['online']['requests']:,} online requests, a batch of {one['offline']['lines']:,} lines."
    )
    if ceiling is None:
        return said
    return (
        f"{said} The ceiling: {number(ceiling['tokens'])} offline tokens in "
        f"{number(ceiling['engine_seconds_left'])} of {number(one['harvest']['engine_seconds'])} engine "
        f"seconds, those that online does not need at its objective of time per output token."
    )


def _link(policy: str) -> str:
    return f'<a href="{html.escape(policy, quote=True)}/report.html">{html.escape(policy)}</a>'


def _words() -> str:
    return (
        "Each policy has its own run of online alone, routed as the policy routes, and its own ceiling, at "
        "its objective. A policy that breaks the objective can come out above the ceiling. The page of each "
        "policy stands behind its name; docs/simulate.md defines the figures."
    )
