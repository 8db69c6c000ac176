"""Readings to signals: unknown, frozen, restarted, percentiles of a window."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hybridsched.engines.protocol import EngineStats
from hybridsched.telemetry.engine_metrics import EngineReading, EngineTracker
from hybridsched.telemetry.window import SlidingWindow, bucket_delta, bucket_percentile


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
