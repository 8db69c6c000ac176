"""A record of a run, made up by rule: two engines, three bursts of online requests, offline work between."""

from __future__ import annotations

from hybridsched.report.record import (
    BatchCheck,
    EngineLog,
    Event,
    Iteration,
    OnlineRow,
    PassRecord,
    PolicyStats,
    RunRecord,
)

BURSTS = ((2.0, 4.0), (9.0, 12.0), (20.0, 21.0))
END_S = 30.0
ORIGIN_S = 1000.0
"""The monotonic clock does not begin with the run."""
STEP_S = 0.025


def _online(slower: float) -> tuple[OnlineRow, ...]:
    rows = []
    for start, end in BURSTS:
        for number in range(int((end - start) * 8)):
            at = start + number / 8
            index = len(rows)
            first = at + (0.05 + 0.01 * (index % 7)) * slower
            expired = index == 5
            rows.append(
                OnlineRow(
                    index=index,
                    id=f"q{index}",
                    scheduled_s=at,
                    sent_s=at + (0.03 if index == 7 else 0.001),
                    first_s=None if expired else first,
                    last_s=None if expired else first + 0.2 * slower,
                    end_s=first + 0.2,
                    prompt_tokens=100,
                    max_tokens=11,
                    tokens=0 if expired else 11,
                    status="expired" if expired else "ok",
                    code="deadline" if expired else "",
                )
            )
    return tuple(rows)


def _iterations(offline: bool, shift: float) -> tuple[Iteration, ...]:
    rows = []
    steps = round(END_S / STEP_S)
    for step in range(steps):
        at = step * STEP_S
        busy = any(start + shift <= at < end + shift for start, end in BURSTS)
        late = any(end + shift <= at < end + shift + 0.2 for _, end in BURSTS)
        if not busy and (late or not offline):
            continue
        rows.append(
            Iteration(
                s=ORIGIN_S + at,
                e=ORIGIN_S + at + STEP_S,
                on=3 if busy else 0,
                off=0 if busy else 8,
                gon=3 if busy else 0,
                goff=0 if busy else 8,
                poff=0 if busy else 16,
                late=0.001,
            )
        )
    return tuple(rows)


def _events(lane: str, shift: float) -> list[Event]:
    events = [
        Event(t="gate", lane=lane, mono_s=ORIGIN_S, data={"state": "open", "reason": "idle"}),
        Event(t="resume", lane=lane, mono_s=ORIGIN_S),
    ]
    for number, (start, end) in enumerate(BURSTS):
        at = ORIGIN_S + start + shift
        again = ORIGIN_S + end + shift + 0.2
        events += [
            Event(t="signal", lane=lane, mono_s=at - 0.01, data={"replica": lane}),
            Event(t="gate", lane=lane, mono_s=at, data={"state": "closed", "reason": "online_active"}),
            Event(
                t="quiet",
                lane=lane,
                mono_s=at + 0.01,
                data={
                    "rung": "iteration" if number else "boundary",
                    "ended": number * 4,
                    "kept_tokens": number,
                },
            ),
            Event(t="gate", lane=lane, mono_s=again, data={"state": "open", "reason": "idle"}),
            Event(t="resume", lane=lane, mono_s=again),
        ]
    return events


def _pass(offline: bool, slower: float) -> PassRecord:
    lanes = (("r0", 0.0), ("r1", 0.5))
    return PassRecord(
        start_s=ORIGIN_S,
        end_s=ORIGIN_S + END_S,
        online=_online(slower),
        engines=tuple(
            EngineLog(replica=name, iterations=_iterations(offline, shift)) for name, shift in lanes
        ),
        events=tuple(event for name, shift in lanes for event in _events(name, shift)) if offline else (),
    )


def make_record(*, baseline: bool = True) -> RunRecord:
    """The record, always the same."""
    return RunRecord(
        speed=2.0,
        gpus=2,
        duration_s=60.0,
        trace="made-up.csv",
        policy=PolicyStats(name="idle-window", version=1, cycles=120, cycle_ms={"p50": 1.49, "p99": 1.98}),
        batch=BatchCheck(
            lines=500,
            completed=300,
            failed=2,
            remaining=198,
            prompt_tokens=29_000,
            output_tokens=14_900,
            kept_prompt_tokens=800,
            kept_tokens=24,
            worker_recomputed=190,
        ),
        together=_pass(offline=True, slower=1.04),
        baseline=_pass(offline=False, slower=1.0) if baseline else None,
        wall_s=66.0,
    )
