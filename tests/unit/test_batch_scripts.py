"""The batch scripts by their text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

WORKERS = Path(__file__).resolve().parents[2] / "workers"
FUNCTION = re.compile(r"^\w+\(\) \{.*\}$")
EMPTY = re.compile(r"^(\w+='' ?)+$")


@pytest.mark.parametrize("name", ["offline.sbatch", "own.sbatch"])
def test_the_signals_are_heard_before_anything_takes_time(name: str) -> None:
    """A job that Slurm takes back in its first moments ends FAILED while its shell has no traps."""
    lines = [line.split(" #")[0].strip() for line in (WORKERS / name).read_text().splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    first = next(n for n, line in enumerate(lines) if line.startswith("trap "))
    assert lines[first : first + 2] == ["trap on_leave USR1 USR2", "trap on_end TERM INT"]
    for line in lines[:first]:
        assert FUNCTION.match(line) or EMPTY.match(line), line
