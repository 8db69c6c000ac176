"""Several policies on the same load in one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridsched.report.html import number
from hybridsched.simulate.repeats import FIGURES, spread_of

COLUMNS = (
    *("policy", "harvested", "offline tokens", "of ceiling", "lines done", "TTFT p99 ms", "x alone"),
    *("TPOT p99 ms", "x alone", "in objectives", "pauses", "quiet p99 ms", "computed again"),
)


def rows(summaries: list[dict[str, Any]], names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The figures to compare, for each policy in order; of several runs the middle ones, and `repeats`.

    With `names` each row has its `name` besides.
    """
    found = []
    for place, one in enumerate(summaries):
        figures = spread_of([one]) if one.get("repeats") is None else one["repeats"]
        row: dict[str, Any] = {} if names is None else {"name": names[place]}
        row["policy"] = one["policy"]["name"]
        row |= {name: None if figures[name] is None else figures[name]["median"] for name in FIGURES}
        if one.get("repeats") is not None:
            row["repeats"] = one["repeats"]
        found.append(row)
    return found


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table, under `COLUMNS`."""
    return [
        row.get("name", row["policy"]),
        _share(row["harvested_ratio"]),
        number(row["offline_tokens_done"]),
        _share(row["ceiling_share"]),
        number(row["lines_completed"]),
        number(row["ttft_p99_ms"]),
        _ratio(row, "ttft_p99_ratio"),
        number(row["tpot_p99_ms"], 1),
        _ratio(row, "tpot_p99_ratio"),
        _share(row["slo_attainment"]),
        number(row["pauses"]),
        number(row["signal_to_quiet_p99_ms"], 1),
        number(row["tokens_recomputed"]),
    ]


def table(
    summaries: list[dict[str, Any]], *, names: Sequence[str] | None = None, of: str = COLUMNS[0]
) -> str:
    """The same for people at a terminal. The first column is called `of`, and holds `names` if given."""
    return aligned([[of, *COLUMNS[1:]], *(cells(row) for row in rows(summaries, names))])


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Rows of cells as columns of text, the first to the left and the others to the right."""
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _ratio(row: dict[str, Any], name: str) -> str:
    """The middle value and, of several runs, between what they lie."""
    spread = (row.get("repeats") or {}).get(name)
    middle = number(row[name], 3)
    return middle if spread is None else f"{middle} ({spread['min']:.2f}-{spread['max']:.2f})"
