"""What the engines' logs say: seconds online, idle and harvested, and how fast each pause took hold. Pure.

Spans are wall seconds of the host's monotonic clock; the caller turns them into engine seconds with `speed`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from hybridsched.core.values import Value
from hybridsched.report import intervals
from hybridsched.report.intervals import Spans
from hybridsched.report.record import EngineLog, Event, Iteration, PassRecord, Pause


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


def work_end(record: PassRecord, remaining: int) -> float:
    """Until when offline work remained: the end of the run, or of the last iteration that ran any."""
    if record.work_end_s is not None:
        return record.work_end_s
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
    counts = log.counts
    if counts is not None:
        return EngineUse(
            replica=log.replica,
            span_s=record.end_s - record.start_s - counts.away_s,
            online_s=counts.online_s,
            idle_s=counts.idle_s,
            harvested_s=counts.harvested_s,
            mixed_s=counts.mixed_s,
            mixed_iterations=counts.mixed_iterations,
        )
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


def offline_tokens(log: EngineLog) -> tuple[int, int]:
    """Offline tokens that the engine has computed: of prompts, and generated."""
    if log.counts is not None:
        return log.counts.prompt_tokens, log.counts.output_tokens
    return sum(it.poff for it in log.iterations), sum(it.goff for it in log.iterations)


def pauses(record: PassRecord) -> list[Pause]:
    """Every signal of the run, measured on the iteration log of its engine."""
    if record.pauses is not None:
        return sorted(record.pauses.pauses, key=lambda pause: (pause.at_s, pause.lane))
    logs = {log.replica: [it for it in log.iterations if it.off > 0] for log in record.engines}
    resumes: dict[str, list[float]] = {}
    for event in record.events:
        if event.t == "resume":
            resumes.setdefault(event.lane, []).append(event.mono_s)
    for times in resumes.values():
        times.sort()
    return [
        _pause(event, logs.get(event.lane, []), resumes.get(event.lane, []), stretches=record.by_requests)
        for event in sorted(record.events, key=lambda event: event.mono_s)
        if event.t == "signal"
    ]


def _pause(
    signal: Event, offline: Sequence[Iteration], resumes: Sequence[float], *, stretches: bool
) -> Pause:
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
        iteration_s=0.0 if stretches else after[-1].e - after[-1].s,
        found_work=True,
    )
