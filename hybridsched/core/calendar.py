"""When which mode holds, and when a switch has to begin. Pure: the time zone and the time are arguments.

Times are milliseconds of the Unix epoch; windows are spans of the wall clock of the zone. A time of day that
a change of the clocks skips is taken for the moment after the gap, one that comes twice for its first
occurrence: so windows that touch on the wall clock touch in time as well.

Where windows of several modes overlap, the mode that stands first in the policy holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, timedelta, tzinfo

import msgspec

from hybridsched.core.modes import Mode, ModesPolicy, Window
from hybridsched.core.values import Value

DAY_MS = 86_400_000.0
AHEAD_DAYS = 8
"""A window of one day of the week comes again within these."""

KEPT = 8
"""Measurements of one kind that are kept; the longest of them is expected."""

DRAIN, CUT, SLURM, LOAD = "drain", "cut", "slurm", "load"
"""The parts of a switch that are measured, in the order in which they pass."""


class Change(Value, frozen=True, kw_only=True):
    """A boundary of the calendar: from then on another mode holds."""

    at_ms: float
    mode: str


def minutes(text: str) -> int:
    """Minutes of `HH:MM` since midnight.

    Raises:
        ValueError: it is no time of day.
    """
    hour, colon, minute = text.partition(":")
    if not (colon and hour.isdigit() and minute.isdigit() and len(hour) <= 2 and len(minute) == 2):
        raise ValueError(f"{text!r} is no time of day; write it like 07:00")
    if int(hour) > 23 or int(minute) > 59:
        raise ValueError(f"{text!r} is no time of day; hours go from 00 to 23, minutes from 00 to 59")
    return int(hour) * 60 + int(minute)


def moment_ms(day: date, minute: int, zone: tzinfo) -> float:
    """The moment of a time of day on a day of the zone."""
    wall = datetime(day.year, day.month, day.day, minute // 60, minute % 60)
    early = wall.replace(tzinfo=zone, fold=0)
    late = wall.replace(tzinfo=zone, fold=1)
    first, second = early.astimezone(UTC), late.astimezone(UTC)
    if second >= first:  # there once, or twice: its first occurrence
        return first.timestamp() * 1000.0
    # In a gap: the two readings stand on either side of it. Its moment is where the offset changes.
    low, high = int(second.timestamp()), int(first.timestamp())
    before = datetime.fromtimestamp(low, UTC).astimezone(zone).utcoffset()
    while high - low > 1:
        middle = (low + high) // 2
        if datetime.fromtimestamp(middle, UTC).astimezone(zone).utcoffset() == before:
            low = middle
        else:
            high = middle
    return high * 1000.0


def spans(window: Window, zone: tzinfo, from_ms: float, to_ms: float) -> Iterator[tuple[float, float]]:
    """The occurrences of a window that touch [from, to), each with its start and end, in order."""
    start, end = minutes(window.start), minutes(window.end)
    first = datetime.fromtimestamp(from_ms / 1000.0, zone).date() - timedelta(days=2)
    last = datetime.fromtimestamp(to_ms / 1000.0, zone).date() + timedelta(days=1)
    for n in range((last - first).days + 1):
        day = first + timedelta(days=n)
        if day.weekday() not in window.weekdays:
            continue
        begins = moment_ms(day, start, zone)
        ends = moment_ms(day if end > start else day + timedelta(days=1), end, zone)
        if begins < ends and ends > from_ms and begins < to_ms:
            yield begins, ends


def mode_at(policy: ModesPolicy, zone: tzinfo, at_ms: float) -> str:
    """The mode that holds at a moment; empty: none does, and whatever stands stays."""
    for mode in policy.mode:
        for window in mode.windows:
            if any(begins <= at_ms < ends for begins, ends in spans(window, zone, at_ms, at_ms + 1.0)):
                return mode.name
    return policy.default


def current(policy: ModesPolicy, zone: tzinfo, at_ms: float) -> Change:
    """The mode that holds at a moment, and since when (as far back as `AHEAD_DAYS`)."""
    held = _held(policy, zone, at_ms - AHEAD_DAYS * DAY_MS, at_ms + 1.0)
    now = mode_at(policy, zone, at_ms)
    since_ms = 0.0
    for (_, before), (moment, _) in itertools.pairwise(held):
        if moment <= at_ms and before != now:
            since_ms = moment
    return Change(at_ms=since_ms, mode=now)


def next_change(policy: ModesPolicy, zone: tzinfo, at_ms: float) -> Change | None:
    """The first moment after `at_ms` at which another mode begins to hold; None: none does."""
    now = mode_at(policy, zone, at_ms)
    for moment, name in _held(policy, zone, at_ms, at_ms + AHEAD_DAYS * DAY_MS):
        if moment > at_ms and name and name != now:
            return Change(at_ms=moment, mode=name)
    return None


def _held(policy: ModesPolicy, zone: tzinfo, from_ms: float, to_ms: float) -> list[tuple[float, str]]:
    """The mode that holds from each boundary of a window in [from, to) on, in order; first that at `from_ms`.

    One sweep over the occurrences: a look at each boundary for itself takes seconds with 200 windows.
    """
    turns: dict[float, list[tuple[int, int]]] = {from_ms: []}
    for rank, mode in enumerate(policy.mode):
        for window in mode.windows:
            for begins, ends in spans(window, zone, from_ms, to_ms):
                turns.setdefault(begins, []).append((rank, 1))
                turns.setdefault(ends, []).append((rank, -1))
    open_windows = [0] * len(policy.mode)
    held = []
    for moment in sorted(turns):
        for rank, step in turns[moment]:
            open_windows[rank] += step
        if from_ms <= moment < to_ms:  # behind that, windows are missing that begin there
            ranks = (rank for rank, count in enumerate(open_windows) if count)
            first = next(ranks, None)
            held.append((moment, policy.default if first is None else policy.mode[first].name))
    return held


# -- how long it takes -----------------------------------------------------------------------------------


class Durations(Value, frozen=True, kw_only=True):
    """What was measured: kind -> the last spans in ms, newest last.

    Kinds are `drain MODE` (until a host in that mode was empty), `cut MODE` and `slurm MODE` (into that
    mode), and `load MODE` (until its engines served).
    """

    spans: dict[str, tuple[float, ...]] = msgspec.field(default_factory=dict)

    def with_span(self, kind: str, ms: float) -> Durations:
        """With one more measurement. What is no span of time is left out."""
        if not (math.isfinite(ms) and ms >= 0):
            return self
        return Durations(spans={**self.spans, kind: (*self.spans.get(kind, ()), ms)[-KEPT:]})

    def expect(self, kind: str, default_ms: float) -> float:
        """The longest of the last ones: a switch that is early costs less than one that is late."""
        known = [ms for ms in self.spans.get(kind, ()) if math.isfinite(ms) and ms >= 0]
        return max(known) if known else default_ms


CUT_MS = 30_000.0
"""Cutting the GPUs of a host, before it has been measured."""

SLURM_MS = 10_000.0
"""One node record down and another up, before it has been measured."""

DRAIN_MS = 60_000.0
"""A host with our own work becomes empty, before it has been measured."""


class Estimate(Value, frozen=True, kw_only=True):
    """How long the change of one host takes, part by part, in ms."""

    drain_ms: float
    cut_ms: float
    slurm_ms: float
    load_ms: float

    @property
    def total_ms(self) -> float:
        return self.drain_ms + self.cut_ms + self.slurm_ms + self.load_ms


def estimate(durations: Durations, policy: ModesPolicy, old: str, new: Mode) -> Estimate:
    """The change of one host from mode `old` to mode `new`."""
    before = policy.named(old)
    cuts = before is None or before.layout != new.layout
    loads = [engine.warm_ms for engine in new.engines if engine.per_host]
    return Estimate(
        drain_ms=durations.expect(f"{DRAIN} {old}", min(DRAIN_MS, policy.drain_ms)),
        cut_ms=durations.expect(f"{CUT} {new.name}", CUT_MS) if cuts and new.layout else 0.0,
        slurm_ms=durations.expect(f"{SLURM} {new.name}", SLURM_MS),
        load_ms=durations.expect(f"{LOAD} {new.name}", max(loads)) if loads else 0.0,
    )


def at_once(policy: ModesPolicy, old: Mode | None, new: Mode, hosts: int) -> int:
    """Hosts that can change at once: the policy's limit, less where the floors of both modes need more to
    stay. At least one: a floor that not even one host may leave is the policy's mistake, and is refused."""
    most = policy.max_unavailable
    for model, floor in floor_between(old, new).items():
        per_host = min(
            sum(e.per_host for e in mode.engines if e.model == model)
            for mode in (old, new)
            if mode is not None
        )
        if per_host:
            most = min(most, hosts - math.ceil(floor / per_host))
    return max(1, most)


def floor_between(old: Mode | None, new: Mode | None) -> dict[str, int]:
    """While hosts change from one mode to another: for each model the lower of the two floors."""
    floors = [mode.floors() for mode in (old, new) if mode is not None]
    if not floors:
        return {}
    shared = set(floors[0]).intersection(*floors)
    return {model: min(of.get(model, 0) for of in floors) for model in sorted(shared)}


def span_ms(each: Iterable[float], at_a_time: int) -> float:
    """How long changes take that follow each other as places become free, `at_a_time` side by side."""
    ends = [0.0] * max(1, at_a_time)
    for ms in each:
        ends.sort()
        ends[0] += ms
    return max(ends)
