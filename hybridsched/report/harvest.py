"""What the engines' logs say: seconds online, idle and harvested, and how fast each pause took hold. Pure.

Spans are wall seconds of the host's monotonic clock; the caller turns them into engine seconds with `speed`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from hybridsched.core.values import Value
from hybridsched.report import intervals
from hybridsched.report.intervals import Spans
from hybridsched.report.record import EngineLog, Event, Iteration, PassRecord


class EngineUse(Value, frozen=True, kw_only=True):
    """One engine over the run, wall seconds."""

    replica: str
    span_s: float
    online_s: float
    """An online request ran or waited."""
    idle_s: float
    """None ran or waited, while offline work remained."""
    harvested_s: float
    """Those of them in which offline requests ran."""
    mixed_s: float
    """Iterations that computed online and offline requests together."""
    mixed_iterations: int


class Pause(Value, frozen=True, kw_only=True):
    """One signal that found offline work on a lane, wall seconds."""

    lane: str
    at_s: float
    quiet_s: float
    """From the signal to the end of the last iteration that ran offline work; 0 if none ended after it."""
    iteration_s: float
    """Length of the last iteration that ran offline work: the one that the engine could not be kept from."""
    found_work: bool
    """Whether an iteration with offline work ended after the signal and before the lane resumed."""

    @property
    def path_s(self) -> float:
        """What the signal itself took: how long after it an iteration with offline work could still begin.

        It is `quiet_s` less that one iteration; 0 when that iteration ran already at the signal. An iteration
        that begins while the signal is under way cannot be stopped, whether another ran before it or not.
        """
        return max(0.0, self.quiet_s - self.iteration_s)


def work_end(record: PassRecord, remaining: int) -> float:
    """Until when offline work remained: the end of the run, or of the last iteration that ran any."""
    if remaining > 0:
        return record.end_s
    ends = [it.e for log in record.engines for it in log.iterations if it.off > 0]
    return min(max([*ends, record.start_s]), record.end_s)


def online_spans(log: EngineLog, events: Sequence[Event]) -> Spans:
    """When an online request ran or waited on the engine.

    A request that comes while an offline iteration runs waits for the end of that iteration, which the
    log cannot show; so the time from a signal to the next online iteration counts as online too.
    """
    busy = [(it.s, it.e) for it in log.iterations if it.on > 0 or it.won > 0]
    starts = [start for start, _ in busy]
    for event in events:
        if event.t == "signal" and event.lane == log.replica:
            place = bisect_left(starts, event.mono_s)
            if place < len(starts):
                busy.append((event.mono_s, starts[place]))
    return intervals.union(busy)


def engine_use(log: EngineLog, record: PassRecord, until_s: float) -> EngineUse:
    """How one engine spent the run; offline work remained until `until_s`."""
    online = intervals.clip(online_spans(log, record.events), record.start_s, record.end_s)
    offline = intervals.union((it.s, it.e) for it in log.iterations if it.off > 0)
    mixed = [it for it in log.iterations if it.on > 0 and it.off > 0]
    idle = intervals.complement(online, record.start_s, until_s)
    mixed_spans = intervals.union((it.s, it.e) for it in mixed)
    return EngineUse(
        replica=log.replica,
        span_s=record.end_s - record.start_s,
        online_s=intervals.total(online),
        idle_s=intervals.total(idle),
        harvested_s=intervals.total(intervals.intersect(idle, offline)),
        mixed_s=intervals.total(intervals.clip(mixed_spans, record.start_s, record.end_s)),
        mixed_iterations=len(mixed),
    )


def pauses(record: PassRecord) -> list[Pause]:
    """Every signal of the run, measured on the iteration log of its engine."""
    logs = {log.replica: [it for it in log.iterations if it.off > 0] for log in record.engines}
    resumes: dict[str, list[float]] = {}
    for event in record.events:
        if event.t == "resume":
            resumes.setdefault(event.lane, []).append(event.mono_s)
    for times in resumes.values():
        times.sort()
    return [
        _pause(event, logs.get(event.lane, []), resumes.get(event.lane, []))
        for event in sorted(record.events, key=lambda event: event.mono_s)
        if event.t == "signal"
    ]


def _pause(signal: Event, offline: Sequence[Iteration], resumes: Sequence[float]) -> Pause:
    at = signal.mono_s
    place = bisect_right(resumes, at)
    resumed = resumes[place] if place < len(resumes) else float("inf")
    after = [it for it in offline[bisect_right(offline, at, key=lambda it: it.e) :] if it.s < resumed]
    if not after:
        return Pause(lane=signal.lane, at_s=at, quiet_s=0.0, iteration_s=0.0, found_work=False)
    return Pause(
        lane=signal.lane,
        at_s=at,
        quiet_s=after[-1].e - at,
        iteration_s=after[-1].e - after[-1].s,
        found_work=True,
    )
