"""The table of lanes of `pool status` and `top`, at the width that there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridsched.cli.pool_view import cell, headline
from hybridsched.cli.words import span

if TYPE_CHECKING:
    from rich.console import RenderableType

LANE_WIDTH = 24
"""What a lane's name may take before other columns give way; shorter names take less."""


class Column(NamedTuple):
    """One column. Where the screen is too narrow, those that have a `rank` go, the highest first."""

    title: str
    text: Callable[[dict[str, Any]], str]
    rank: int = 0
    right: bool = True


def _span(value: float | None, unknown: str) -> str:
    return unknown if value is None else span(value)


def _job(lane: dict[str, Any]) -> str:
    job = lane.get("slurm_job")
    return "-" if job is None else f"{job['job']} on {job['node']}" if job["node"] else str(job["job"])


def _budget(lane: dict[str, Any]) -> str:
    return str(lane["budget"]["max_inflight"]) if lane["state"] == "open" else "-"


def _now(lane: dict[str, Any], source: str, text: str) -> str:
    """A number of the replica or its engine; one that says nothing of now is not shown as if it did."""
    return "stale" if lane[f"{source}_stale"] else text


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value * 100:.0f} %"


COLUMNS = (
    Column("job", lambda lane: _job(lane), 7, right=False),
    Column("model", lambda lane: lane["model"] or "?", 6, right=False),
    Column("gate", lambda lane: lane["state"] if lane["gone_ms"] is None else "gone", right=False),
    Column("reason", lambda lane: lane["reason"], right=False),
    Column(
        "since",
        lambda lane: _span(lane["since_ms"] if lane["gone_ms"] is None else lane["gone_ms"], "-"),
        right=False,
    ),
    Column("budget", _budget, 2),
    Column("online", lambda lane: _now(lane, "online", cell(lane["online_inflight"]))),
    Column("idle for", lambda lane: _span(lane["online_idle_ms"], "?"), 1),
    Column("offline", lambda lane: _now(lane, "offline", cell(lane["offline_inflight"]))),
    Column("running", lambda lane: _now(lane, "engine", cell(lane["engine_running"])), 4),
    Column("waiting", lambda lane: _now(lane, "engine", cell(lane["engine_waiting"])), 5),
    Column("KV", lambda lane: _now(lane, "engine", _share(lane["kv_use"])), 3),
)
"""All but the lane's name, which takes what is left."""


def render(status: dict[str, Any], width: int) -> RenderableType:
    """The document of `pool_view.look` for a screen of `width` columns."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    lines = [Text(line) for line in headline(status)]
    lanes = status["lanes"]
    if not lanes:
        return Group(*lines)
    columns, lane_width, gap = _fitted(lanes, width)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    table.add_column("lane", no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right" if column.right else "left", no_wrap=True)
    for lane in lanes:
        cells = [Text(column.text(lane)) for column in columns]
        is_open = lane["state"] == "open" and lane["gone_ms"] is None
        cells[columns.index(_GATE)].stylize("green" if is_open else "yellow")
        table.add_row(Text(shortened(lane["lane"], lane_width)), *cells)
    return Group(*lines, Text(""), table)


def _fitted(lanes: list[dict[str, Any]], width: int) -> tuple[list[Column], int, int]:
    """The columns that are shown, the width of the lanes' names, and the gap between columns."""
    wide = {column: max(len(column.title), *(len(column.text(lane)) for lane in lanes)) for column in COLUMNS}
    wanted = min(LANE_WIDTH, max(len("lane"), *(len(lane["lane"]) for lane in lanes)))
    taken = any(lane.get("slurm_job") for lane in lanes)
    columns, gap = [c for c in COLUMNS if taken or c.title != "job"], 2 if width >= 100 else 1
    while True:
        left = width - sum(wide[column] + gap for column in columns)
        least = max(columns, key=lambda column: column.rank)
        if left >= wanted or not least.rank:
            return columns, max(left, 1), gap
        columns.remove(least)


_GATE = next(column for column in COLUMNS if column.title == "gate")


def shortened(name: str, width: int) -> str:
    """The name within `width`, its end kept whole: that is where names of one kind differ."""
    if len(name) <= width:
        return name
    tail = (width - 1) * 2 // 3
    return f"{name[: width - 1 - tail]}…{name[-tail:]}"
