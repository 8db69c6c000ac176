"""Replicas that are away, and lanes whose workers are Slurm jobs."""

from __future__ import annotations

import msgspec
import pytest

from hybridsched.core.policy import OfflinePolicy, OnlinePolicy, PausePolicy, SlurmPolicy
from hybridsched.simulate.record import batch_check, pass_record
from hybridsched.twin.absence import Absence, parse_absence
from hybridsched.twin.clock import Loop
from hybridsched.twin.jobs import SlurmDelays
from hybridsched.twin.lengths import Length
from hybridsched.twin.pool import Pool
from tests.twin_pool import IDLE_WINDOW, rows_of, run, spec


def away(replica: int, from_s: float, to_s: float) -> tuple[Absence, ...]:
    return (Absence(replica=replica, from_s=from_s, to_s=to_s),)


def test_requests_wait_for_a_cold_start_or_go_to_another() -> None:
    load = [(0.5 * number, 400, 20) for number in range(20)]
    alone = run(spec(1, absences=away(0, 0.0, 6.0)), load, [], 12.0)
    assert all(one.status == "ok" for one in alone.requests)
    assert min(one.first_s or 0.0 for one in alone.requests) > 6.0
    two = run(spec(2, absences=away(0, 0.0, 6.0)), load, [], 12.0)
    early = [one for one in two.requests if one.arrival_s < 5.0]
    assert {one.replica for one in early} == {1}
    assert max((one.first_s or 0.0) - one.arrival_s for one in early) < 1.0


def test_who_goes_away_ends_what_it_holds_and_its_lane_is_closed() -> None:
    loop = Loop()
    pool = Pool(
        loop,
        spec(2, absences=away(0, 5.0, 50.0)),
        rows_of([(4.9, 500, 300)]),
        [Length(prompt_tokens=500, output_tokens=100)] * 2000,
    )
    pool.start()
    loop.run(4.99)
    busy = pool.requests[0].replica
    loop.run(6.0)
    assert pool.replicas[0].away
    assert not pool.lanes[0].is_open
    loop.run(30.0)
    assert pool.requests[0].status == "ok", f"it ran on r{busy}"
    assert pool.lanes[0].quiet
    assert pool.lanes[1].is_open, "the other lane goes on"
    loop.run(40.0)
    assert pool.lanes[0].executor.lines == 0, "its lines are another lane's by now"
    assert pool.replicas[0].engine.online == pool.replicas[0].engine.offline == 0
    loop.run(55.0)
    assert pool.lanes[0].is_open
    assert pool.replicas[0].away_s(55.0) == pytest.approx(45.0, abs=0.1 if busy else 15.0)


def test_nothing_is_lost_and_time_away_is_not_idle() -> None:
    load = [(0.3 * number, 700, 60) for number in range(100)]
    batch = [(600, 80)] * 3000
    pool = run(spec(3, absences=away(1, 10.0, 25.0)), load, batch, 40.0)
    check = batch_check(pool)
    assert (check.missing, check.duplicates, check.wrong_length) == (0, 0, 0)
    assert all(one.status == "ok" for one in pool.requests)
    record = pass_record(pool, "t")
    counts = record.engines[1].counts
    assert counts is not None
    assert 12.0 < counts.away_s <= 15.0
    assert counts.idle_s + counts.online_s + counts.away_s == pytest.approx(pool.end_s, abs=1e-6)
    assert counts.harvested_s <= counts.idle_s + 1e-9


def test_a_job_comes_after_its_gate_and_goes_after_a_long_close() -> None:
    policy = msgspec.structs.replace(IDLE_WINDOW, slurm=SlurmPolicy(enabled=True, requeue_after_ms=20_000.0))
    delays = SlurmDelays(start_ms=2000.0, requeue_wait_ms=5000.0)
    loop = Loop()
    # One long request keeps the engine busy from 10 s to about 80 s.
    pool = Pool(
        loop,
        spec(1, policy, slurm=delays),
        rows_of([(10.0, 200, 6000)]),
        [Length(prompt_tokens=300, output_tokens=100)] * 4000,
    )
    pool.start()
    loop.run(1.5)
    assert pool.gate(0) is not None
    assert not pool.lanes[0].is_open, "its gate is open, and its job on the way"
    loop.run(3.0)
    assert pool.lanes[0].is_open
    assert pool.jobs is not None
    assert (pool.jobs.starts, pool.jobs.requeues) == (1, 0)
    loop.run(29.0)
    assert (pool.jobs.starts, pool.jobs.requeues) == (1, 0)
    loop.run(32.0)
    assert (pool.jobs.starts, pool.jobs.requeues) == (1, 1)
    assert pool.lanes[0].executor.lines == 0
    end_s = 0.0
    while pool.requests[0].end_s is None:
        loop.run(loop.now_s + 1.0)
    end_s = pool.requests[0].end_s
    loop.run(end_s + 1.5)
    assert not pool.lanes[0].is_open
    loop.run(end_s + 3.0)
    assert pool.lanes[0].is_open
    assert pool.jobs.starts == 2


@pytest.mark.parametrize("given", ["r0", "0@5", "x@1-2", "r0@5-3", "-1@0-3", "r0@0-inf", "r0@-1-3"])
def test_an_absence_that_is_none_says_what_is_allowed(given: str) -> None:
    with pytest.raises(ValueError, match=r"is none|give REPLICA@FROM-TO"):
        parse_absence(given)


def test_an_absence_as_it_is_given() -> None:
    assert parse_absence("r3@1.5-60") == Absence(replica=3, from_s=1.5, to_s=60.0)
    assert parse_absence("3@0-60").replica == 3


def test_a_lane_that_gives_its_lines_back_is_decided_on_anew() -> None:
    """Its gate was not looked at, as nothing had said that its work was gone."""
    policy = msgspec.structs.replace(
        IDLE_WINDOW,
        idle=msgspec.structs.replace(IDLE_WINDOW.idle, window_ms=800.0),
        pause=PausePolicy(grace_ms=40.0),
        offline=OfflinePolicy(max_inflight=1, slice_tokens=0, chunk_first_lines=8),
        online=OnlinePolicy(max_inflight=1, default_timeout_ms=6000.0),
        slurm=SlurmPolicy(requeue_after_ms=1500.0),
    )
    load = [(0.0, 1, 1), (0.0, 1, 1), (0.0, 225, 120), (1.0, 834, 47), (4.0, 786, 110), (5.0, 898, 120)]
    of = spec(2, policy, slurm=SlurmDelays(start_ms=300.0, requeue_wait_ms=700.0))
    lazy = run(of, load, [(1023, 7), (2793, 150)], 12.0)
    full = run(msgspec.structs.replace(of, exhaustive=True), load, [(1023, 7), (2793, 150)], 12.0)
    assert lazy.worker.cycles == full.worker.cycles
    assert [meter.gate_bins for meter in lazy.meters] == [meter.gate_bins for meter in full.meters]
