"""Slurm's answers row by row: one that cannot be read spoils itself only.

Any user may submit a job with words that nobody foresaw, and an administrator may type them. The others must
still be served: the row is passed over, and said once in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from hybridsched.cluster.parse_words import read_gres
from hybridsched.cluster.values import ClusterError, Gres
from hybridsched.log import get_logger

_REMEMBERED = 1_000
"""Log lines that are not said again."""

_log = get_logger("cluster")

UNREADABLE = (ClusterError, ValueError, OverflowError, LookupError, TypeError)
"""What reading a row may raise: our own, and what numbers beyond all sense and pyslurm's own parts give."""

R = TypeVar("R")
T = TypeVar("T")


class Rows:
    """Reads rows, each alone. One of these per reader remembers what it has said."""

    def __init__(self) -> None:
        self._said: dict[str, None] = {}
        self.spoiled = 0
        """Rows passed over until now."""

    def read(self, what: str, rows: Iterable[R], one: Callable[[R], T]) -> list[T]:
        """What `one` makes of each row, without those that it cannot read. `what` names a row in the log."""
        found: list[T] = []
        for row in rows:
            try:
                found.append(one(row))
            except UNREADABLE as error:
                self.spoiled += 1
                self.say(f"Slurm shows {what} that cannot be read; it is passed over", str(error))
        return found

    def gres(self, text: str, whose: str) -> tuple[Gres, ...]:
        """The GRES of a job: entries that cannot be read are left out, for the job itself still counts."""
        found, bad = read_gres(text)
        for item in bad:
            self.say(f"{whose} asks for a GRES that cannot be read; it counts as none", repr(item[:200]))
        return found

    def say(self, words: str, why: str) -> None:
        """One log line, the first time."""
        key = f"{words}: {why}"
        if key in self._said:
            return
        if len(self._said) >= _REMEMBERED:
            self._said.clear()
        self._said[key] = None
        _log.warning(words, event_key="cluster.bad_row", why=why)
