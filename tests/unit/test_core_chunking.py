"""Chunk sizes and the throughput they follow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.core.chunking import Throughput, next_chunk_lines, next_chunk_tokens
from hybridsched.core.policy import OfflinePolicy

POLICY = OfflinePolicy(chunk_target_ms=4000, chunk_first_lines=8, chunk_max_lines=100)


def test_the_first_sample_is_the_average_and_later_ones_weigh_by_their_length() -> None:
    first = Throughput(tau_s=10).observe(tokens=500, seconds=1)
    assert first.tokens_per_s == 500
    short = first.observe(tokens=1, seconds=0.001)
    assert short.tokens_per_s == pytest.approx(500, rel=1e-3)
    long = first.observe(tokens=100_000, seconds=100)
    assert long.tokens_per_s == pytest.approx(1000, rel=1e-3)
    one_tau = first.observe(tokens=10_000, seconds=10)
    assert one_tau.tokens_per_s == pytest.approx(500 + 0.632 * 500, rel=1e-3)


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [(0, 1), (-1, 1), (1, 0), (1, -1), (float("nan"), 1), (1, float("nan")), (float("inf"), 1)],
)
def test_what_is_no_measurement_is_ignored(tokens: float, seconds: float) -> None:
    for old in (Throughput(), Throughput(tokens_per_s=5.0)):
        assert old.observe(tokens=tokens, seconds=seconds) == old


def test_chunk_tokens_make_the_boundary_come_in_time() -> None:
    assert next_chunk_tokens(POLICY, 1000) == 4000
    assert next_chunk_tokens(POLICY, None) == POLICY.chunk_first_tokens
    assert next_chunk_tokens(POLICY, 1000, kv_tokens=2000) == 1700
    assert next_chunk_tokens(POLICY, 1e-9) == 1
    # measured on few lines at a time: as many as may run side by side fit all the same
    assert next_chunk_tokens(POLICY, 1000, tokens_per_line=300, parallel=64) == 19_200
    assert next_chunk_tokens(POLICY, None, tokens_per_line=300, parallel=64) == POLICY.chunk_first_tokens
    assert next_chunk_tokens(POLICY, 1000, tokens_per_line=300, parallel=64, kv_tokens=2000) == 1700


def lines(rate: float | None, per_line: float | None, parallel: int = 4) -> int:
    return next_chunk_lines(POLICY, rate, tokens_per_line=per_line, parallel=parallel)


def test_the_first_chunk_is_small() -> None:
    assert lines(None, 10) == 8
    assert lines(1000, None) == 8
    assert lines(1000, 0) == 8


def test_lines_follow_the_throughput_within_bounds() -> None:
    assert lines(1000, 100) == 40
    assert lines(100_000, 100) == 100
    assert lines(1, 100, parallel=1) == 1


def test_a_chunk_has_as_many_lines_as_may_run_side_by_side() -> None:
    # 8 lines of 500 tokens at 100 tokens/s each took 5 s: a chunk of 64 lines takes no longer.
    assert lines(800, 500, parallel=64) == 64


@given(
    rate=st.none() | st.floats(),
    per_line=st.none() | st.floats(),
    parallel=st.integers(0, 10_000),
    low=st.integers(1, 50),
    high=st.integers(1, 500),
)
def test_a_chunk_is_never_empty_nor_out_of_bounds(
    rate: float | None, per_line: float | None, parallel: int, low: int, high: int
) -> None:
    policy = OfflinePolicy(chunk_min_lines=low, chunk_max_lines=max(low, high))
    size = next_chunk_lines(policy, rate, tokens_per_line=per_line, parallel=parallel)
    assert max(1, low) <= size <= max(low, high)
    assert next_chunk_tokens(policy, rate) >= 1


def test_absurd_measurements_stay_finite() -> None:
    assert next_chunk_tokens(POLICY, 1.7e308) == 10**12
    assert lines(1.7e308, 5e-324) == 100
