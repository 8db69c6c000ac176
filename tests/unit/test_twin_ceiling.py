"""The bound: what it is made of, and that no run of the twin that keeps the objective gets past it."""

from __future__ import annotations

import pytest

from hybridsched.engines.simulated.scheduler import Limits
from hybridsched.traces import TraceRow
from hybridsched.twin.ceiling import offline_alone, online_needs_s
from hybridsched.twin.lengths import Length
from tests.twin_pool import PROFILE, run, spec

LIMITS = Limits()


def row(prompt: int, output: int) -> TraceRow:
    return TraceRow(arrival_s=0.0, prompt_tokens=prompt, output_tokens=output)


def test_nothing_needs_nothing() -> None:
    assert online_needs_s([], PROFILE, LIMITS, tpot_ms=50.0) == 0.0


def test_a_prompt_costs_its_share_of_full_iterations() -> None:
    full = PROFILE.iteration_ms(prefill_tokens=2048, batch_decode=0, total_context=0, prefill_pairs=0)
    needs_s = online_needs_s([row(2048, 1)], PROFILE, LIMITS, tpot_ms=50.0)
    assert needs_s == pytest.approx((full + PROFILE.e * 2048**2) / 1e3)
    assert needs_s <= PROFILE.iteration_ms(prefill_tokens=2048, batch_decode=0, total_context=0) / 1e3 + 1e-9


def test_a_wider_objective_needs_less_and_an_impossible_one_is_served_one_by_one() -> None:
    rows = [row(200, 300)] * 100
    needs = [online_needs_s(rows, PROFILE, LIMITS, tpot_ms=tpot) for tpot in (0.001, 12.0, 20.0, 200.0)]
    assert needs == sorted(needs, reverse=True)
    assert len(set(needs)) == 4
    alone_ms = PROFILE.iteration_ms(prefill_tokens=0, batch_decode=1, total_context=350)
    assert needs[0] > 100 * 299 * alone_ms * 0.98 / 1e3


def test_requests_that_really_ran_took_no_less() -> None:
    """All at once on one engine: nothing packs denser, yet it takes at least what the bound says."""
    arrivals = [(0.0, 300 + number, 50 + number) for number in range(60)]
    pool = run(spec(1, offline=False), arrivals, [], 1.0)
    needs_s = online_needs_s(
        [row(prompt, output) for _, prompt, output in arrivals], PROFILE, LIMITS, tpot_ms=50.0
    )
    assert 0.5 * pool.meters[0].online_s < needs_s <= pool.meters[0].online_s


def test_offline_alone_at_its_best_is_no_slower_than_by_policy_and_bounds_a_run() -> None:
    lengths = [Length(prompt_tokens=1500, output_tokens=150)] * 50
    best, by_policy = offline_alone(spec(1), lengths)
    assert best >= by_policy > 0
    pool = run(spec(1), [(5.0, 1000, 50)], [(1500, 150)] * 300, 30.0)
    totals = pool.replicas[0].engine.totals
    done = totals.prefill_offline + totals.output_offline - totals.recomputed
    assert done < best * 30.5
