"""What a check of a cluster says, and the words that the checks share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from hybridsched.slurmfiles.facts import ClusterFacts


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    CRITICAL = "critical"
    UNKNOWN = "unknown"


_STATUS = {Level.OK: 0, Level.WARNING: 1, Level.CRITICAL: 2, Level.UNKNOWN: 3}
WORST_FIRST = (Level.CRITICAL, Level.UNKNOWN, Level.WARNING, Level.OK)
"""What cannot be told outweighs a warning."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. `remedy` is empty when there is nothing to do."""

    code: str
    level: Level
    text: str
    remedy: str = ""


def exit_status(findings: Sequence[Finding]) -> int:
    """Nagios: 0 ok, 1 warning, 2 critical, 3 unknown. What cannot be told outweighs a warning."""
    levels = {finding.level for finding in findings}
    return _STATUS[next((level for level in WORST_FIRST if level in levels), Level.OK)]


def ok(code: str, text: str) -> Finding:
    """Looked at, and as it should be."""
    return Finding(code=code, level=Level.OK, text=text)


def warning(code: str, text: str, remedy: str) -> Finding:
    """Works, worse than it could."""
    return Finding(code=code, level=Level.WARNING, text=text, remedy=remedy)


def critical(code: str, text: str, remedy: str) -> Finding:
    """Work is lost, or online is harmed, or offline never runs."""
    return Finding(code=code, level=Level.CRITICAL, text=text, remedy=remedy)


def number(text: str) -> int | None:
    """The number that a value begins with: 30 for `30 sec`."""
    found = re.match(r"\d+", text)
    return int(found.group()) if found else None


def release(version: str) -> tuple[int, int] | None:
    """(22, 5) for `22.05.8`."""
    found = re.search(r"(\d+)\.(\d+)", version)
    return (int(found.group(1)), int(found.group(2))) if found else None


def nodes_of(facts: ClusterFacts, partition: str) -> list[str]:
    """The nodes that are in a partition."""
    return [name for name, row in facts.nodes.items() if partition in row.get("Partitions", "").split(",")]


def some(names: Sequence[str]) -> str:
    """The first names of a list that may be long."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
