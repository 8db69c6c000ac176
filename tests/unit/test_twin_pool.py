"""Parts of the twin's pool by themselves, and what once went wrong in it."""

from __future__ import annotations

import random
import statistics

import msgspec
import pytest

from hybridsched.core.policy import OnlinePolicy, PolicyKind
from hybridsched.core.routing import Others
from hybridsched.twin.clock import Loop
from hybridsched.twin.latencies import Latencies, Way, Ways
from hybridsched.twin.lengths import Length
from hybridsched.twin.online import Board
from hybridsched.twin.pool import Pool
from tests.twin_pool import IDLE_WINDOW, rows_of, run, spec


def test_the_board_names_the_lightest_with_room() -> None:
    board = Board(3, 0.01)
    board.write(0, 500.0, 2, room=True)
    board.write(1, 0.0, 0, room=False)
    board.write(2, 500.0, 1, room=True)
    assert board.least_loaded(0.0) == (2, Others(load=500.0, inflight=1, count=2)), "fewer requests"
    assert board.least_loaded(0.0, 2) == (0, Others(load=500.0, inflight=2, count=1))
    board.write(0, 500.0, 8, room=False)
    assert board.least_loaded(0.0, 2) is None


def test_a_record_that_follows_is_seen_from_its_time_on() -> None:
    board = Board(2, 0.01)
    board.write(0, 900.0, 1, room=True)
    board.write(1, 100.0, 1, room=True)
    board.will_write(0, 0.0, 0, room=True, now_s=1.0)
    assert board.least_loaded(0.999) == (1, Others(load=100.0, inflight=1, count=2))
    assert board.least_loaded(1.0) == (0, Others(load=0.0, inflight=0, count=2))
    board.will_write(0, 50.0, 1, room=True, now_s=1.001)
    board.will_write(0, 700.0, 2, room=True, now_s=1.002)
    assert board.least_loaded(1.0099) == (0, Others(load=0.0, inflight=0, count=2)), "not too soon after"
    assert board.least_loaded(1.0101) == (1, Others(load=100.0, inflight=1, count=2)), "the last word counts"


def test_a_request_that_expires_as_the_engine_ends_it_ends_once() -> None:
    """It was ended by its deadline and again by its last iteration, and its replica took two at once
    after."""
    policy = msgspec.structs.replace(
        IDLE_WINDOW, online=OnlinePolicy(max_inflight=1, default_timeout_ms=12.0)
    )
    pool = run(spec(1, policy), [(0.0, 500, 1), (1.0, 500, 1)], [], 2.0)
    assert [one.status for one in pool.requests] == ["expired", "expired"]
    assert pool.replicas[0].inflight == 0
    assert pool.replicas[0].load == 0.0
    assert pool.replicas[0].room() == 1


def test_no_replica_holds_more_than_its_cap() -> None:
    online = OnlinePolicy(max_inflight=2, default_timeout_ms=3000.0)
    policy = msgspec.structs.replace(IDLE_WINDOW, online=online)
    loop = Loop()
    pool = Pool(loop, spec(2, policy), rows_of([(0.001 * n, 800, 40) for n in range(40)]), [])
    pool.start()
    most = 0
    for tick in range(400):
        loop.run(tick * 0.01)
        most = max(most, *(replica.inflight for replica in pool.replicas))
    assert most == 2
    assert {one.status for one in pool.requests} == {"ok", "expired"}


def test_without_protection_gates_stay_open_under_online_load() -> None:
    policy = msgspec.structs.replace(IDLE_WINDOW, name="unprotected", kind=PolicyKind.UNPROTECTED)
    load = [(0.6 * number, 400, 20) for number in range(16)]
    open_all = run(spec(1, policy), load, [(1000, 100)] * 200, 10.0)
    guarded = run(spec(1), load, [(1000, 100)] * 200, 10.0)
    assert open_all.meters[0].pauses == []
    assert guarded.meters[0].pauses
    assert open_all.meters[0].mixed_s > 1.0 > guarded.meters[0].mixed_s


def test_a_long_closed_lane_gives_its_lines_to_another_one() -> None:
    """One engine is kept busy for longer than a lane holds on to its chunks; the other one finishes the
    batch."""
    loop = Loop()
    batch = [Length(prompt_tokens=400, output_tokens=400)] * 250
    pool = Pool(loop, spec(2), rows_of([(3.0, 100, 9000)]), batch)
    pool.run(60.0)
    assert pool.feed.remaining == 0
    assert all(line.results == 1 for line in pool.feed.lines)
    assert pool.work_end_s is not None
    assert pool.work_end_s > 33.0, "some lines waited for 30 s on the busy engine's lane"


def test_idle_seconds_end_with_the_work() -> None:
    pool = run(spec(1), [], [(200, 20)] * 10, 20.0)
    assert pool.feed.remaining == 0
    assert pool.work_end_s is not None
    assert pool.work_end_s < 10.0


def test_a_request_overtakes_an_abort_now_and_then() -> None:
    """While every way took the same time none ever did, and the slowest pauses were missing."""
    load = [(1.0 + 0.7 * number, 900, 4) for number in range(150)]
    batch = [(1000, 100)] * 500
    varied = run(spec(1), load, batch, 110.0)
    fixed = run(spec(1, latencies=Latencies(spread=0.0)), load, batch, 110.0)
    assert 0 < varied.meters[0].mixed_iterations < 40
    assert fixed.meters[0].mixed_iterations == 0
    slowest = max(pause.quiet_s for pause in varied.meters[0].pauses)
    assert slowest > max(pause.quiet_s for pause in fixed.meters[0].pauses)


def test_the_ways_of_a_request_are_the_same_in_every_run_of_a_seed() -> None:
    one, two = (Ways(0.45, random.Random(7)) for _ in range(2))
    for _ in range(5):
        two.next()
    assert [one.of(n, way) for n in range(9) for way in Way] == [
        two.of(n, way) for n in range(9) for way in Way
    ]
    assert len({one.of(n, way) for n in range(9) for way in Way}) == 36
    assert statistics.median(one.next() for _ in range(4000)) == pytest.approx(1.0, rel=0.05)
    assert {Ways(0.0, random.Random(7)).next() for _ in range(9)} == {1.0}
