"""The baselines of the twin: who serves, who runs offline work, and what a change costs."""

from __future__ import annotations

import pytest

from hybridsched.core.policy import PolicyKind, PoolPolicy
from hybridsched.simulate.options import SimulateOptions, SimulateUsageError, make_plan
from hybridsched.simulate.record import batch_check
from hybridsched.simulate.run import run_record, spec_of
from hybridsched.twin.baselines import BASELINES, Baseline, BaselineKind, baseline_named
from hybridsched.twin.clock import Loop
from hybridsched.twin.lengths import Length
from hybridsched.twin.pool import Pool
from tests.twin_pool import rows_of, spec

LIKE = PoolPolicy(name="like", kind=PolicyKind.IDLE_WINDOW)
LINES = [Length(prompt_tokens=800, output_tokens=60)] * 4000


def ran(baseline: Baseline, arrivals: list[tuple[float, int, int]], engines: int, seconds: float) -> Pool:
    policy = baseline.policy(baseline.kind.value, LIKE)
    pool = Pool(Loop(), spec(engines, policy, baseline=baseline), rows_of(arrivals), LINES)
    pool.run(seconds)
    check = batch_check(pool)
    assert (check.missing, check.duplicates, check.wrong_length) == (0, 0, 0)
    assert all(one.status == "ok" for one in pool.requests)
    return pool


def offline_tokens(pool: Pool) -> list[int]:
    return [replica.engine.totals.prefill_offline for replica in pool.replicas]


def test_a_static_split_never_mixes() -> None:
    arrivals = [(0.1 * number, 500, 20) for number in range(100)]
    pool = ran(Baseline(kind=BaselineKind.STATIC_SPLIT, online_engines=1), arrivals, 3, 20.0)
    assert [tokens > 0 for tokens in offline_tokens(pool)] == [False, True, True]
    assert {one.replica for one in pool.requests} == {0}
    assert sum(meter.mixed_s for meter in pool.meters) == 0.0


def test_engine_priority_lets_online_overtake_in_the_engines_queue() -> None:
    arrivals = [(5.0 + 0.5 * number, 500, 20) for number in range(10)]
    alone = Baseline(kind=BaselineKind.ENGINE_PRIORITY)
    pool = ran(alone, arrivals, 1, 15.0)
    assert pool.replicas[0].engine.limits.scheduling_policy == "priority"
    assert sum(meter.mixed_s for meter in pool.meters) > 0.0
    first_ms = [1e3 * ((one.first_s or 0.0) - one.arrival_s) for one in pool.requests]
    fcfs = Pool(
        Loop(), spec(1, alone.policy("plain", LIKE)), rows_of(arrivals), LINES
    )  # the same work without priorities
    fcfs.run(15.0)
    plain_ms = [1e3 * ((one.first_s or 0.0) - one.arrival_s) for one in fcfs.requests]
    assert max(first_ms) < max(plain_ms)


def test_a_replica_that_slurm_takes_from_offline_loads_its_engine_first() -> None:
    burst = [(10.0 + 0.01 * number, 300, 1500) for number in range(12)]
    pool = ran(Baseline(kind=BaselineKind.SLURM_REQUEUE, load_s=20.0), burst, 3, 60.0)
    claimed = sorted((one.claimed_s or 0.0, one.replica) for one in pool.requests)
    assert {replica for at_s, replica in claimed if at_s < 30.0} == {0}, (
        "the scaler looks at 10 s at the earliest"
    )
    tokens = offline_tokens(pool)
    assert tokens[0] == 0
    assert 0 < tokens[1] < 0.8 * tokens[2], "its engine was online's for a while"
    gates = [meter.gate_bins for meter in pool.meters]
    assert ["policy_closed" in bins for bins in gates] == [False, True, False]


def test_slurm_gives_a_replica_back_after_a_calm_while() -> None:
    burst = [(1.0 + 0.01 * number, 300, 400) for number in range(20)]
    baseline = Baseline(kind=BaselineKind.SLURM_REQUEUE, load_s=5.0, calm_s=20.0)
    pool = ran(baseline, burst, 3, 100.0)
    bins = pool.meters[2].gate_bins
    closed = bins.index("policy_closed")
    assert "open" in bins[:closed]
    assert "open" in bins[closed:], "offline is back"


def test_names() -> None:
    assert [baseline_named(name) for name in BASELINES] == [Baseline(kind=kind) for kind in BaselineKind]
    assert baseline_named("static-split:2") == Baseline(kind=BaselineKind.STATIC_SPLIT, online_engines=2)
    assert baseline_named("consolidate") is None
    assert baseline_named("offline-alone:2") is None
    with pytest.raises(ValueError, match="a number from 1"):
        baseline_named("static-split:0")
    with pytest.raises(SimulateUsageError, match="a number from 1"):
        make_plan(SimulateOptions(policies=("static-split:x",)))


def test_they_take_the_objectives_of_the_policy_beside_them_and_no_part_in_online_alone() -> None:
    plan = make_plan(SimulateOptions(policies=("static-split", "consolidate"), duration_s=10.0))
    split, packed = plan.policies
    assert (split.slo, split.online) == (packed.slo, packed.online)
    assert spec_of(plan, split).baseline is not None
    assert spec_of(plan, split, offline=False).baseline is None
    assert spec_of(plan, packed).baseline is None


def test_offline_alone_reports_no_online_request() -> None:
    plan = make_plan(SimulateOptions(policies=("offline-alone",), duration_s=10.0, gpus=1, baseline=False))
    record = run_record(plan, plan.policies[0])
    assert record.together.online == ()
    assert record.batch.completed > 0
