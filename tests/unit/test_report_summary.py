"""The summary's figures on small records whose values can be worked out by hand."""

from __future__ import annotations

import pytest

from hybridsched.core.policy import SloPolicy
from hybridsched.report import harvest, intervals, summary
from hybridsched.report.percentiles import percentile
from hybridsched.report.record import EngineLog, Event, Iteration, OnlineRow, PassRecord


def row(index: int, *, first: float | None, last: float | None, tokens: int, status: str = "ok") -> OnlineRow:
    return OnlineRow(
        index=index,
        id=f"q{index}",
        scheduled_s=1.0,
        sent_s=1.001,
        first_s=first,
        last_s=last,
        end_s=9.0,
        prompt_tokens=10,
        max_tokens=tokens,
        tokens=tokens,
        status=status,
        code="" if status == "ok" else f"was_{status}",
    )


def it(start: float, end: float, **fields: int) -> Iteration:
    return Iteration(s=start, e=end, **fields)


def record(*iterations: Iteration, events: tuple[Event, ...] = (), end: float = 10.0) -> PassRecord:
    return PassRecord(
        start_s=0.0, end_s=end, engines=(EngineLog(replica="r0", iterations=iterations),), events=events
    )


def signal(at: float) -> Event:
    return Event(t="signal", mono_s=at, lane="r0")


def resume(at: float) -> Event:
    return Event(t="resume", mono_s=at, lane="r0")


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([7.0], 0.99, 7.0),
        ([1.0, 2.0, 3.0, 4.0], 0.5, 2.0),
        ([4.0, 1.0, 3.0, 2.0], 0.75, 3.0),
        ([1.0, 2.0, 3.0, 4.0], 0.76, 4.0),
        ([float(n) for n in range(1, 101)], 0.99, 99.0),
        ([float(n) for n in range(1, 102)], 0.99, 100.0),
    ],
)
def test_percentiles_are_nearest_rank(values: list[float], share: float, expected: float | None) -> None:
    assert percentile(values, share) == expected


def test_latency_counts_from_the_scheduled_arrival_on_the_engine_clock() -> None:
    answer = row(0, first=1.5, last=2.5, tokens=5)
    assert summary.ttft_ms(answer, 1.0) == pytest.approx(500)
    assert summary.ttft_ms(answer, 2.0) == pytest.approx(1000)
    assert summary.tpot_ms(answer, 1.0) == pytest.approx(250)
    assert summary.tpot_ms(row(0, first=1.5, last=1.5, tokens=1), 1.0) is None
    assert summary.ttft_ms(row(0, first=None, last=None, tokens=0, status="expired"), 1.0) is None


def test_attainment_counts_every_request_and_both_objectives() -> None:
    slo = SloPolicy(ttft_ms=500, tpot_ms=250)
    rows = [
        row(0, first=1.5, last=2.5, tokens=5),  # exactly within both
        row(1, first=1.51, last=2.5, tokens=5),  # first token late
        row(2, first=1.2, last=2.3, tokens=5),  # 275 ms a token
        row(3, first=1.2, last=1.2, tokens=1),  # one token has no pace
        row(4, first=None, last=None, tokens=0, status="expired"),
        row(5, first=1.1, last=1.2, tokens=2, status="failed"),
        row(6, first=None, last=None, tokens=0, status="cancelled"),
        row(7, first=1.4, last=2.4, tokens=5),
    ]
    result = summary.online_summary(rows, slo, 1.0)
    assert (result["requests"], result["ok"], result["expired"], result["failed"]) == (8, 5, 1, 2)
    assert result["slo_attainment"] == pytest.approx(3 / 8)
    assert result["ttft_ms"] == {"p50": 400.0, "p95": 510.0, "p99": 510.0}
    assert result["tpot_ms"] == {"p50": 250.0, "p95": 275.0, "p99": 275.0}
    assert result["codes"] == {"was_cancelled": 1, "was_expired": 1, "was_failed": 1}


def test_no_request_gives_unknowns_not_zeros() -> None:
    result = summary.online_summary([], SloPolicy(), 1.0)
    assert result["slo_attainment"] is None
    assert result["ttft_ms"] == {"p50": None, "p95": None, "p99": None}


def test_spans() -> None:
    assert intervals.union([(3, 4), (0, 1), (0.5, 2), (2, 2)]) == [(0, 2), (3, 4)]
    assert intervals.intersect([(0, 2), (3, 5)], [(1, 4)]) == [(1, 2), (3, 4)]
    assert intervals.complement([(1, 2), (4, 9)], 0, 5) == [(0, 1), (2, 4)]
    assert intervals.complement([], 0, 5) == [(0, 5)]
    assert intervals.complement([(0, 9)], 1, 5) == []
    assert intervals.clip([(0, 2), (3, 9)], 1, 4) == [(1, 2), (3, 4)]
    assert intervals.total([(0, 2), (3, 4.5)]) == 3.5


def test_idle_and_harvested_seconds_of_an_engine() -> None:
    run = record(
        it(-1, 0.5, off=1),  # began before the trace: only what is within counts
        it(2, 3, on=1),
        it(3, 4, on=1, off=2),  # both: neither idle nor harvested
        it(4, 6, off=2),
        it(6, 7, off=2, won=1),  # an online request waits: not idle
        it(9, 11, off=1),  # beyond the end
    )
    use = harvest.engine_use(run.engines[0], run, run.end_s)
    assert use.span_s == 10
    assert use.online_s == 3
    assert use.idle_s == 7
    assert use.harvested_s == 0.5 + 2 + 1
    assert (use.mixed_s, use.mixed_iterations) == (1, 1)


def test_a_request_that_waits_for_the_end_of_an_iteration_is_not_idle_time() -> None:
    run = record(it(0, 4, off=1), it(4, 5, on=1), events=(signal(3.0), signal(9.5)))
    use = harvest.engine_use(run.engines[0], run, run.end_s)
    assert use.online_s == 2  # 3..5; the signal at 9.5 was followed by no online iteration
    assert use.idle_s == 8
    assert use.harvested_s == 3


def test_idle_time_ends_with_the_offline_work() -> None:
    run = record(it(0, 2, off=1), it(2, 3, on=1))
    assert harvest.work_end(run, remaining=5) == 10
    assert harvest.work_end(run, remaining=0) == 2
    use = harvest.engine_use(run.engines[0], run, 2.0)
    assert (use.idle_s, use.harvested_s) == (2, 2)
    empty = record(it(2, 3, on=1))
    assert harvest.work_end(empty, remaining=0) == 0


def test_pauses_are_measured_to_the_last_offline_iteration_before_the_resume() -> None:
    run = record(
        it(0.0, 1.0, off=4),
        it(1.0, 1.5, off=4),  # one more began after the signal
        it(1.5, 2.0, on=1),
        it(3.0, 3.5, off=4),  # after the resume: no part of the pause
        events=(signal(0.75), resume(2.5)),
    )
    [pause] = harvest.pauses(run)
    assert pause.found_work
    assert pause.quiet_s == 0.75
    assert pause.iteration_s == 0.5
    assert pause.path_s == 0.25
    assert harvest.pauses(record(it(0, 1, off=1), events=(signal(2.0),)))[0].found_work is False


def test_the_signal_path_is_what_a_pause_takes_beyond_one_iteration() -> None:
    run = record(
        it(0.0, 0.1, off=1),
        it(0.1, 0.2, off=1),
        it(0.2, 0.3, off=1),
        events=(signal(0.05),),
    )
    [pause] = harvest.pauses(run)
    assert pause.quiet_s == pytest.approx(0.25)
    assert pause.path_s == pytest.approx(0.15)
    result = summary.pause_summary(run, 2.0)
    assert result["count"] == 1
    assert result["signal_to_quiet_ms"]["p99"] == pytest.approx(500)
    assert result["signal_path_ms"]["p50"] == pytest.approx(300)


def test_pauses_of_other_lanes_do_not_mix_and_empty_lanes_are_counted_apart() -> None:
    run = PassRecord(
        start_s=0,
        end_s=10,
        engines=(
            EngineLog(replica="r0", iterations=(it(0, 1, off=1),)),
            EngineLog(replica="r1", iterations=(it(0, 3, off=1),)),
        ),
        events=(
            Event(t="signal", mono_s=0.5, lane="r0"),
            Event(t="signal", mono_s=2.0, lane="r0"),
            Event(t="signal", mono_s=1.0, lane="r1"),
            Event(
                t="quiet", mono_s=1.0, lane="r0", data={"rung": "iteration", "ended": 3, "kept_tokens": 40}
            ),
            Event(t="quiet", mono_s=3.0, lane="r1", data={"rung": "boundary", "ended": 0, "kept_tokens": 0}),
            Event(t="quiet", mono_s=5.0, lane="own", data={"rung": "keep", "ended": 0, "kept_tokens": 0}),
            Event(t="asleep", mono_s=9.0, lane="own", data={"reason": "online_active"}),
        ),
    )
    result = summary.pause_summary(run, 1.0)
    assert (result["signals"], result["count"]) == (3, 2)
    assert result["signal_to_quiet_ms"] == {"p50": 500.0, "p99": 2000.0, "max": 2000.0}
    assert result["by_rung"] == {"boundary": 1, "iteration": 1, "keep": 1, "sleep": 1}
    assert (result["requests_ended"], result["tokens_kept"]) == (3, 40)


def test_co_location_is_a_ratio_of_percentiles() -> None:
    together = summary.online_summary([row(0, first=1.5, last=2.5, tokens=5)], SloPolicy(), 1.0)
    alone = summary.online_summary([row(0, first=1.4, last=2.4, tokens=5)], SloPolicy(), 1.0)
    ratios = summary.co_location(together, alone)
    assert ratios is not None
    assert ratios["ttft_p99_ratio"] == 1.25
    assert ratios["tpot_p99_ratio"] == 1.0
    assert summary.co_location(together, None) is None
    nothing = summary.online_summary([], SloPolicy(), 1.0)
    assert set((summary.co_location(together, nothing) or {}).values()) == {None}
