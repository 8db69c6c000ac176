"""How long the cycles of the policy worker take, over the recent ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import msgspec

from hybridsched.store.found import read_json

RECENT = 2048
"""Cycles that the quantiles look back on."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the leading policy worker says of itself (key `policy-worker`)."""

    leader: str
    """Its fencing token."""
    pid: int
    at_ms: float
    """Server time of the snapshot of its last cycle."""
    cycles: int
    cycle_ms: dict[str, float]
    """p50, p99 and max of the recent cycles, wall time from the first read to the last write."""
    cpu_ms: dict[str, float]
    """The same for the CPU time of the worker's thread."""
    lanes: int
    open: int
    """Lanes whose gate the last cycle decided to open or keep open."""
    policy: str
    """Name of the policy in force; empty when there is none."""
    version: int
    speed: float
    problem: str = ""
    """Why a newer policy is not in force, or none at all; empty when all is well."""


_STATUS = msgspec.json.Decoder(WorkerStatus)


def read_status(raw: bytes | None) -> WorkerStatus | None:
    """What stands at that key; None when nothing does, or nothing that can be read."""
    return read_json(_STATUS, raw, "what the policy worker says of itself")


class CycleStats:
    """Durations of the recent cycles, in milliseconds."""

    def __init__(self) -> None:
        self.cycles = 0
        self._wall: deque[float] = deque(maxlen=RECENT)
        self._cpu: deque[float] = deque(maxlen=RECENT)

    def add(self, wall_ms: float, cpu_ms: float) -> None:
        """Note one cycle."""
        self.cycles += 1
        self._wall.append(wall_ms)
        self._cpu.append(cpu_ms)

    @property
    def last_ms(self) -> float:
        """Wall time of the last cycle; 0 before the first."""
        return self._wall[-1] if self._wall else 0.0

    def wall(self) -> dict[str, float]:
        """p50, p99 and max of the wall time."""
        return summary(self._wall)

    def cpu(self) -> dict[str, float]:
        """p50, p99 and max of the CPU time."""
        return summary(self._cpu)


def summary(values: Sequence[float] | deque[float]) -> dict[str, float]:
    """p50, p99 and max (nearest rank), rounded to microseconds; zeros without values."""
    ordered = sorted(values)
    if not ordered:
        return {"p50": 0.0, "p99": 0.0, "max": 0.0}
    return {
        "p50": round(_rank(ordered, 0.50), 3),
        "p99": round(_rank(ordered, 0.99), 3),
        "max": round(ordered[-1], 3),
    }


def _rank(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
