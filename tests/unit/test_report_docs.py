"""docs/report.md defines every column of the raw files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridsched.report.record import Iteration, OnlineRow

ROOT = Path(__file__).parent.parent.parent
TEXT = (
    (ROOT / "docs" / "report.md").read_text(encoding="utf-8").split("## The raw files")[1].split("\n## ")[0]
)


def first_cells(part: str) -> set[str]:
    """The names in the first column of a part's table."""
    rows = re.findall(r"^\| (`[^|]*) \|", part, flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}


@pytest.mark.parametrize(
    ("begins", "ends", "names"),
    [
        ("`requests.csv`", "`engines/", {"pass", *OnlineRow.__struct_fields__}),
        ("`engines/", "`events.jsonl`", set(Iteration.__struct_fields__)),
    ],
)
def test_every_column_is_defined_and_no_other(begins: str, ends: str, names: set[str]) -> None:
    assert first_cells(TEXT.split(begins)[1].split(ends)[0]) == names


def test_every_kind_of_event_that_is_written_is_defined() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "hybridsched" / "workers").glob("*.py")]
    written = {kind for text in sources for kind in re.findall(r'"t": "([a-z]+)"', text)}
    assert written >= {"gate", "signal", "quiet", "resume", "chunk", "slurm"}
    defined = first_cells(TEXT.split("`events.jsonl`")[1].split("`decisions.jsonl`")[0])
    assert defined - {"t"} == written
