"""Readings to signals: unknown, frozen, restarted, percentiles of a window."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.engines.protocol import EngineStats
from hybridsched.telemetry.engine_metrics import EngineReading, EngineTracker
from hybridsched.telemetry.window import RENEW_SUM, SlidingWindow, bucket_delta, bucket_percentile


def reading(**fields: Any) -> EngineReading:
    defaults: dict[str, Any] = {
        "running": 0.0,
        "waiting": 0.0,
        "kv_use": 0.0,
        "prompt_tokens_total": 0.0,
        "generation_tokens_total": 0.0,
        "iterations_total": 0.0,
    }
    return EngineStats(**(defaults | fields))


def test_absent_metrics_are_unknown() -> None:
    tracker = EngineTracker()
    assert tracker.last is None
    signals = tracker.observe(EngineStats(), 5.0)
    assert (signals.running, signals.waiting, signals.kv_use) == (None, None, None)
    assert signals.frozen_ms is None
    assert (signals.ttft_p99_ms, signals.tpot_p99_ms) == (None, None)
    assert tracker.last is signals


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_impossible_values_are_unknown_and_named(value: float) -> None:
    signals = EngineTracker().observe(reading(running=value, kv_use=value), 0.0)
    assert (signals.running, signals.kv_use) == (None, None)
    assert signals.rejected == ("running", "kv_use")


def test_a_kv_use_in_percent_is_rejected() -> None:
    signals = EngineTracker().observe(reading(kv_use=55.0), 0.0)
    assert (signals.kv_use, signals.rejected) == (None, ("kv_use",))


def test_an_empty_engine_is_never_frozen() -> None:
    tracker = EngineTracker()
    for at in (0.0, 1000.0, 60_000.0):
        assert tracker.observe(reading(), at).frozen_ms == 0.0


@pytest.mark.parametrize("counter", ["prompt_tokens_total", "generation_tokens_total", "iterations_total"])
def test_frozen_counts_from_the_last_movement_of_any_counter(counter: str) -> None:
    tracker = EngineTracker()
    tracker.observe(reading(running=2.0), 0.0)
    assert tracker.observe(reading(running=2.0), 400.0).frozen_ms == 400.0
    assert tracker.observe(reading(running=2.0, **{counter: 1.0}), 500.0).frozen_ms == 0.0
    assert tracker.observe(reading(running=2.0, **{counter: 1.0}), 900.0).frozen_ms == 400.0
    assert tracker.observe(reading(running=0.0, **{counter: 1.0}), 1000.0).frozen_ms == 0.0


def test_a_request_after_a_long_idle_time_does_not_look_frozen_at_once() -> None:
    tracker = EngineTracker()
    tracker.observe(reading(), 0.0)
    tracker.observe(reading(), 60_000.0)
    assert tracker.observe(reading(waiting=1.0), 60_100.0).frozen_ms == 0.0


def test_requests_that_only_the_caller_knows_of_count_as_held() -> None:
    """A paused vLLM shows waiting 0 although it has taken a request."""
    tracker = EngineTracker()
    tracker.observe(reading(), 0.0, held=1)
    assert tracker.observe(reading(), 3000.0, held=1).frozen_ms == 3000.0


def test_work_that_left_without_a_counter_moving_leaves_a_doubt() -> None:
    """Taken away because its numbers stood still, it must not be given back onto the same numbers."""
    tracker = EngineTracker(doubt_after_ms=1000.0, doubt_ms=5000.0)
    for at in (0.0, 1500.0, 3000.0):
        tracker.observe(reading(), at, held=64)
    assert tracker.observe(reading(), 3100.0).frozen_ms == 3100.0
    assert tracker.observe(reading(), 7900.0).frozen_ms == 7900.0
    assert tracker.observe(reading(), 8000.0).frozen_ms == 0.0, "after a while it may be tried again"
    for at in (9000.0, 12_000.0):
        tracker.observe(reading(), at, held=1)
    assert tracker.observe(reading(iterations_total=1.0), 12_100.0).frozen_ms == 0.0, "a counter moved"
    tracker.observe(reading(iterations_total=1.0), 13_000.0, held=1)
    tracker.observe(reading(iterations_total=1.0), 13_900.0, held=1)
    assert tracker.observe(reading(iterations_total=1.0), 14_000.0).frozen_ms == 0.0, "it was not long"


def test_a_killed_workers_last_word_is_no_ground_for_doubt() -> None:
    """Its record outlives it by a second or more, beside an engine that has dropped its requests."""
    tracker = EngineTracker(doubt_after_ms=1000.0, doubt_ms=30_000.0)
    tracker.observe(reading(running=64.0), 0.0, said=64, said_at_ms=0.0)
    tracker.observe(reading(running=64.0, iterations_total=9.0), 400.0, said=64, said_at_ms=300.0)
    for at in (800.0, 1200.0, 1600.0):
        tracker.observe(reading(iterations_total=9.0), at, said=64, said_at_ms=450.0)
    assert tracker.observe(reading(iterations_total=9.0), 1750.0).frozen_ms == 0.0


def test_a_living_workers_word_that_leaves_is_one() -> None:
    tracker = EngineTracker(doubt_after_ms=1000.0, doubt_ms=30_000.0)
    for at in (0.0, 500.0, 1000.0, 1500.0):
        tracker.observe(reading(), at, said=64, said_at_ms=at - 200.0)
    assert tracker.observe(reading(), 1600.0).frozen_ms == 1600.0
    # Its worker is killed only then: what was seen before stays seen.
    assert tracker.observe(reading(), 3100.0).frozen_ms == 3100.0


def test_a_reading_without_counters_does_not_wipe_the_time_of_standing_still() -> None:
    tracker = EngineTracker()
    tracker.observe(reading(running=1.0), 0.0)
    assert tracker.observe(EngineStats(running=1.0, waiting=0.0), 100.0).frozen_ms is None
    assert tracker.observe(reading(running=1.0), 2000.0).frozen_ms == 2000.0


def test_a_fallen_counter_is_a_restart() -> None:
    tracker = EngineTracker()
    tracker.observe(reading(running=1.0, generation_tokens_total=900.0), 0.0)
    tracker.observe(reading(running=1.0, generation_tokens_total=900.0), 5000.0)
    after = tracker.observe(reading(running=1.0, generation_tokens_total=3.0), 5100.0)
    assert (after.resets, after.frozen_ms) == (1, 0.0)
    assert tracker.observe(reading(running=1.0, generation_tokens_total=3.0), 5200.0).frozen_ms == 100.0


def buckets(*counts: float) -> tuple[tuple[float, float], ...]:
    return tuple(zip((0.1, 0.2, math.inf), counts, strict=True))


def test_percentiles_are_of_the_window_only() -> None:
    tracker = EngineTracker(window_ms=1000.0)
    assert tracker.observe(reading(ttft_buckets=buckets(0, 0, 0)), 0.0).ttft_p99_ms is None
    slow = tracker.observe(reading(ttft_buckets=buckets(0, 100, 100)), 500.0).ttft_p99_ms
    assert slow == pytest.approx(199.0)
    tracker.observe(reading(ttft_buckets=buckets(0, 100, 100)), 1500.0)
    quick = tracker.observe(reading(ttft_buckets=buckets(100, 200, 200)), 2000.0).ttft_p99_ms
    assert quick == pytest.approx(99.0)
    assert tracker.observe(reading(ttft_buckets=buckets(100, 200, 200)), 9000.0).ttft_p99_ms is None


def test_changed_bounds_or_a_fallen_bucket_start_the_window_anew() -> None:
    tracker = EngineTracker()
    tracker.observe(reading(tpot_buckets=buckets(5, 5, 5)), 0.0)
    assert tracker.observe(reading(tpot_buckets=((1.0, 9.0), (math.inf, 9.0))), 1.0).tpot_p99_ms is None
    assert tracker.observe(reading(tpot_buckets=((1.0, 2.0), (math.inf, 2.0))), 2.0).tpot_p99_ms is None
    assert tracker.observe(reading(tpot_buckets=((1.0, 3.0), (math.inf, 3.0))), 3.0).tpot_p99_ms == 990.0


def test_bucket_helpers() -> None:
    assert bucket_delta(buckets(1, 2, 3), buckets(1, 3, 5)) == [(0.1, 0), (0.2, 1), (math.inf, 2)]
    assert bucket_delta(buckets(1, 2, 3), buckets(0, 3, 5)) is None
    assert bucket_percentile([], 0.5) is None
    assert bucket_percentile(buckets(0, 0, 0), 0.5) is None
    assert bucket_percentile(buckets(10, 10, 10), 0.5) == pytest.approx(0.05)
    assert bucket_percentile(buckets(0, 0, 4), 0.5) == 0.2, "unbounded: its lower bound"


@given(
    steps=st.lists(st.tuples(st.floats(0.0, 40.0), st.floats(0.0, 1e6)), max_size=60),
    capacity=st.integers(1, 20),
)
def test_the_mean_of_a_window_is_that_of_its_values(steps: list[tuple[float, float]], capacity: int) -> None:
    """A running sum: what is dropped by age and by capacity leaves it."""
    window = SlidingWindow(100.0, capacity=capacity)
    now, held = 0.0, []
    for gap, value in steps:
        now += gap
        window.add(now, value)
        held = [(at, one) for at, one in [*held, (now, value)][-capacity:] if now - at <= 100.0]
        assert window.mean(now) == pytest.approx(sum(one for _, one in held) / len(held), abs=1e-6)
    assert window.mean(now + 101.0) is None


def test_the_mean_does_not_drift() -> None:
    window = SlidingWindow(1e9, capacity=3)
    window.add(0.0, 1e17)
    for at in range(2 * RENEW_SUM):
        window.add(float(at), 0.1)
    assert window.mean(float(2 * RENEW_SUM)) == pytest.approx(0.1)


def test_sliding_window() -> None:
    window = SlidingWindow(100.0, capacity=3)
    assert window.percentile(0.99, 0.0) is None
    for at, value in enumerate((9.0, 1.0, 2.0, 3.0, math.nan)):
        window.add(float(at), value)
    assert len(window) == 3
    assert window.percentile(1.0, 5.0) == 3.0
    assert window.percentile(0.5, 5.0) == 2.0
    assert window.percentile(0.0, 5.0) == 1.0
    assert window.percentile(0.5, 102.5) == 3.0
    assert window.percentile(0.5, 500.0) is None
    with pytest.raises(ValueError, match="positive"):
        SlidingWindow(0.0)
