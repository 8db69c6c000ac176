"""Whatever the load: lines end once, closed lanes are quiet, decisions are core's, counts are true."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridsched.core.codec import DecisionRecord, replay
from hybridsched.core.policy import (
    OfflinePolicy,
    OnlinePolicy,
    PackPolicy,
    PausePolicy,
    PolicyKind,
    PoolPolicy,
    Rung,
    SlurmPolicy,
)
from hybridsched.core.reasons import Reason
from hybridsched.core.values import GateState
from hybridsched.report import harvest
from hybridsched.report.record import PassRecord
from hybridsched.simulate.record import batch_check, pass_record
from hybridsched.twin.absence import Absence
from hybridsched.twin.clock import Loop
from hybridsched.twin.jobs import SlurmDelays
from hybridsched.twin.lengths import Length
from hybridsched.twin.pool import Pool, PoolSpec
from tests.twin_pool import IDLE_WINDOW, WrittenMeter, rows_of, run, spec

DURATION_S = 12.0

arrivals = st.lists(
    st.tuples(
        st.floats(0.0, DURATION_S).map(lambda at: round(at, 4)),
        st.integers(1, 4000),
        st.integers(1, 120),
    ),
    max_size=25,
).map(sorted)
batches = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 150)), max_size=60)
policies = st.builds(
    lambda kind, window, grace, ladder, inflight, slices, cap, floor, pack: PoolPolicy(
        name="p",
        kind=kind,
        idle=msgspec.structs.replace(IDLE_WINDOW.idle, window_ms=window),
        pause=PausePolicy(grace_ms=grace, ladder=ladder),
        offline=OfflinePolicy(max_inflight=inflight, slice_tokens=slices, chunk_first_lines=8),
        online=OnlinePolicy(max_inflight=cap, default_timeout_ms=6000.0),
        floor_gpus=floor,
        pack=PackPolicy(enabled=pack > 0, max_inflight=max(1, pack), far_slice_tokens=0),
        slurm=SlurmPolicy(requeue_after_ms=1500.0),
    ),
    st.sampled_from(
        [PolicyKind.IDLE_WINDOW, PolicyKind.CONSOLIDATE, PolicyKind.HEADROOM, PolicyKind.UNPROTECTED]
    ),
    st.sampled_from([5.0, 150.0, 800.0]),
    st.sampled_from([0.0, 0.0, 40.0, 500.0]),
    st.sampled_from([(Rung.BOUNDARY, Rung.ITERATION), (Rung.BOUNDARY,)]),
    st.sampled_from([1, 4, 64]),
    st.sampled_from([0, 100, 512]),
    st.sampled_from([1, 3, 64]),
    st.sampled_from([0, 0, 1]),
    st.sampled_from([0, 1, 2, 64]),
)


absences = st.sampled_from([(), (), (Absence(replica=0, from_s=2.0, to_s=7.0),)])
slurm = st.sampled_from([None, None, SlurmDelays(start_ms=300.0, requeue_wait_ms=700.0)])


@settings(max_examples=100)
@given(load=arrivals, batch=batches, policy=policies, engines=st.integers(1, 3), away=absences, jobs=slurm)
def test_every_line_ends_once_or_is_kept_and_every_request_is_answered(
    load: list[tuple[float, int, int]],
    batch: list[tuple[int, int]],
    policy: PoolPolicy,
    engines: int,
    away: tuple[Absence, ...],
    jobs: SlurmDelays | None,
) -> None:
    pool = run(spec(engines, policy, absences=away, slurm=jobs), load, batch, DURATION_S)
    check = batch_check(pool)
    assert (check.missing, check.duplicates, check.wrong_length) == (0, 0, 0)
    assert check.completed + check.remaining == len(batch)
    assert all(one.status in ("ok", "expired") and one.end_s is not None for one in pool.requests)
    for one in pool.requests:
        if one.status == "ok":
            assert one.first_s is not None
            assert one.last_s is not None
            assert one.arrival_s < one.first_s <= one.last_s == one.end_s
    assert all(lane.quiet and lane.executor.inflight == 0 for lane in pool.lanes)
    assert all(replica.inflight == 0 == replica.engine.online for replica in pool.replicas)


class Watched(Pool):
    """Looks at the engines each time the loop has made a call."""

    def __init__(self, loop: Loop, of: PoolSpec, *rest: object) -> None:
        super().__init__(loop, of, *rest)  # type: ignore[arg-type]
        self.looks = 0

    def look(self) -> None:
        for number, lane in enumerate(self.lanes):
            engine = self.replicas[number].engine
            if lane.quiet:
                self.looks += 1
                # A young request's answer is not waited for: its connection is closed, and it may be in the
                # engine for as long as the abort takes and to the end of the iteration.
                waited_for = [one for one in lane.executor.in_flight if not one.dropped]
                assert not waited_for
                in_engine = engine.offline
                assert in_engine <= lane.executor.closing, "offline work behind a closed and quiet lane"
            if not lane.is_open:
                assert not lane.executor.admitting


@settings(max_examples=80)
@given(load=arrivals, batch=batches, policy=policies, engines=st.integers(1, 2))
def test_no_offline_request_is_in_an_engine_whose_lane_is_closed_and_quiet(
    load: list[tuple[float, int, int]], batch: list[tuple[int, int]], policy: PoolPolicy, engines: int
) -> None:
    loop = Loop()
    lengths = [Length(prompt_tokens=prompt, output_tokens=output) for prompt, output in batch]
    pool = Watched(loop, spec(engines, policy), rows_of(load), lengths)
    pool.start()
    for tick in range(int(DURATION_S * 200)):
        loop.run(tick / 200 + 0.00123)
        pool.look()
    assert pool.looks or not pool.lanes or policy.kind is PolicyKind.UNPROTECTED or not batch or not load


@settings(max_examples=80)
@given(load=arrivals, batch=batches, policy=policies, engines=st.integers(1, 3), away=absences, jobs=slurm)
def test_the_decisions_are_those_of_core_and_none_is_left_out(
    load: list[tuple[float, int, int]],
    batch: list[tuple[int, int]],
    policy: PoolPolicy,
    engines: int,
    away: tuple[Absence, ...],
    jobs: SlurmDelays | None,
) -> None:
    """The log replays without a difference; and deciding on every lane in every cycle changes nothing."""
    some: list[DecisionRecord] = []
    every: list[DecisionRecord] = []
    of = spec(engines, policy, absences=away, slurm=jobs)
    lazy = run(of, load, batch, DURATION_S, records=some)
    full = run(msgspec.structs.replace(of, exhaustive=True), load, batch, DURATION_S, records=every)
    assert [difference for record in some + every for difference in replay(record)] == []
    assert lazy.worker.cycles == full.worker.cycles
    assert lazy.worker.decided <= full.worker.decided
    for lane in range(engines):
        assert changes(some, f"r{lane}") == changes(every, f"r{lane}")
    assert [one.first_s for one in lazy.requests] == pytest.approx([one.first_s for one in full.requests])
    assert [line.results for line in lazy.feed.lines] == [line.results for line in full.feed.lines]


def changes(records: list[DecisionRecord], lane: str) -> list[tuple[int, GateState, Reason]]:
    """The cycle and what it said, each time that the lane's state or reason became another."""
    found: list[tuple[int, GateState, Reason]] = []
    for record in records:
        for decision in record.decisions:
            if decision.lane == lane and (not found or found[-1][1:] != (decision.state, decision.reason)):
                found.append((record.cycle, decision.state, decision.reason))
    return found


@settings(max_examples=80)
@given(load=arrivals, batch=batches, policy=policies, engines=st.integers(1, 2))
def test_the_counts_are_those_of_a_log_of_every_iteration(
    load: list[tuple[float, int, int]], batch: list[tuple[int, int]], policy: PoolPolicy, engines: int
) -> None:
    lengths = [Length(prompt_tokens=prompt, output_tokens=output) for prompt, output in batch]
    loop = Loop()
    pool = Pool(loop, spec(engines, policy), rows_of(load), lengths)
    written = []
    for number, replica in enumerate(pool.replicas):
        meter = WrittenMeter(f"r{number}", 0.5)
        meter.now = lambda: loop.now_s
        replica.engine.meter = pool.meters[number] = meter
        written.append(meter)
    pool.run(DURATION_S)
    record = pass_record(pool, "t")
    log = PassRecord(
        start_s=0.0,
        end_s=record.end_s,
        engines=tuple(meter.log() for meter in written),
        events=tuple(event for meter in written for event in meter.events),
    )
    for counted, logged in zip(record.engines, log.engines, strict=True):
        ours = harvest.engine_use(counted, record, record.end_s)
        theirs = harvest.engine_use(logged, log, record.end_s)
        # The log cannot show an online request that waits while an iteration runs; only a signal tells of it.
        assert ours.online_s >= theirs.online_s - 1e-6
        assert ours.mixed_s == pytest.approx(theirs.mixed_s, abs=1e-6)
        assert ours.mixed_iterations == theirs.mixed_iterations
        assert ours.harvested_s <= theirs.harvested_s + 1e-6
        # What one of them takes for online the other takes for harvested: together they are the same time.
        both = theirs.harvested_s + theirs.online_s
        assert ours.harvested_s + ours.online_s == pytest.approx(both, abs=1e-6)
    # Where the lane opens between a request's accept and its claim, the log takes that opening for the end of
    # the pause that the claim begins.
    opened = [(event.lane, event.mono_s) for event in log.events if event.t == "resume"]
    clear = [
        one
        for one in harvest.pauses(record)
        if not any(lane == one.lane and 0 <= at - one.at_s < 0.02 for lane, at in opened)
    ]
    at = {(one.lane, one.at_s) for one in clear}
    found = [one for one in clear if one.found_work]
    expected = [one for one in harvest.pauses(log) if one.found_work and (one.lane, one.at_s) in at]
    assert [(one.lane, one.at_s) for one in found] == [(one.lane, one.at_s) for one in expected]
    assert [one.quiet_s for one in found] == pytest.approx([one.quiet_s for one in expected])
    assert [one.iteration_s for one in found] == pytest.approx([one.iteration_s for one in expected])


def test_the_same_run_twice_is_the_same() -> None:
    load = [(0.3 * number, 500 + 37 * number, 20 + number) for number in range(30)]
    batch = [(700 + 13 * number, 60) for number in range(80)]
    one, two = (pass_record(run(spec(2), load, batch, 10.0), "t") for _ in range(2))
    assert msgspec.json.encode(one) == msgspec.json.encode(two)


def test_a_dead_policy_worker_closes_every_lane_by_its_lease() -> None:
    loop = Loop()
    pool = Pool(loop, spec(2), [], [Length(prompt_tokens=500, output_tokens=200)] * 400)
    pool.start()
    loop.run(3.0)
    assert all(lane.is_open for lane in pool.lanes)
    pool.lose_policy_worker()
    loop.run(3.0 + IDLE_WINDOW.cycle.lease_ms / 1e3)
    assert not any(lane.is_open for lane in pool.lanes)
    loop.run(10.0)
    assert all(lane.quiet for lane in pool.lanes)
    assert all(replica.engine.offline == 0 for replica in pool.replicas)
