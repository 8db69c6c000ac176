"""Counts of each node and the last rung, case by case."""

from __future__ import annotations

import msgspec
import pytest

from hybridsched.core.fill import answered, offered, plan
from hybridsched.core.fill_values import (
    LOST_MS,
    FillJob,
    FillLane,
    FillNode,
    FillState,
    FillView,
    FillWhy,
    Instruction,
    RequeueJob,
    RequeueWhy,
    SetFill,
)
from hybridsched.core.policy import SlurmPolicy

POLICY = SlurmPolicy(requeue_after_ms=60_000, fill_hysteresis_ms=2_000, reassert_ms=5_000, max_age_ms=30_000)
NOW = 1_000_000.0


def node(live: int | None = 0, *, seen: float = NOW, name: str = "n1", usable: bool = True) -> FillNode:
    return FillNode(node=name, live=live, seen_ms=seen, usable=usable)


def opened(lane: str, name: str = "n1") -> FillLane:
    return FillLane(lane=lane, node=name, open=True)


def closed(lane: str, ms: float | None, name: str = "n1", *, now: float = NOW) -> FillLane:
    return FillLane(lane=lane, node=name, open=False, closed_since_ms=None if ms is None else now - ms)


def job(
    number: int, lane: str | None, *, ran: float = 500_000, name: str = "n1", leaving: bool = False
) -> FillJob:
    return FillJob(job=number, node=name, lane=lane, started_ms=NOW - ran, leaving=leaving)


def view(
    *things: FillNode | FillLane | FillJob, now: float = NOW, seen: float | None = NOW, floor: int = 0
) -> FillView:
    return FillView(
        now_ms=now,
        nodes=tuple(t for t in things if isinstance(t, FillNode)),
        lanes=tuple(t for t in things if isinstance(t, FillLane)),
        jobs=tuple(t for t in things if isinstance(t, FillJob)),
        jobs_seen_ms=seen,
        floor=floor,
    )


def settled(**counts: int) -> FillState:
    return FillState(settled=dict(counts))


def bare(out: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    return tuple(msgspec.structs.replace(i, number=0) for i in out)


def counts(state: FillState, seen: FillView) -> dict[str, tuple[int, FillWhy]]:
    _, out = plan(state, seen, POLICY)
    return {i.node: (i.count, i.why) for i in out if isinstance(i, SetFill)}


def requeued(state: FillState, seen: FillView) -> dict[int, RequeueWhy]:
    _, out = plan(state, seen, POLICY)
    return {i.job: i.why for i in out if isinstance(i, RequeueJob)}


def test_the_count_is_the_open_lanes() -> None:
    assert counts(FillState(), view(node(), opened("a"), opened("b"), closed("c", 9e6))) == {
        "n1": (2, FillWhy.LANES_OPEN)
    }


def test_a_right_count_is_left_alone() -> None:
    state, out = plan(FillState(), view(node(1), opened("a")), POLICY)
    assert out == ()
    assert state.settled == {"n1": 1}


def test_a_fresh_start_does_not_trust_what_slurm_was_configured_with() -> None:
    assert counts(FillState(), view(node(4), closed("a", 100), closed("b", None))) == {
        "n1": (0, FillWhy.LANES_CLOSED)
    }


def test_a_node_without_lanes_admits_nothing() -> None:
    assert counts(FillState(), view(node(4))) == {"n1": (0, FillWhy.LANES_CLOSED)}


def test_a_lane_that_a_job_has_is_not_offered() -> None:
    seen = view(node(3), opened("a"), opened("b"), opened("c"), job(1, "a"), job(2, "b"))
    assert counts(settled(n1=3), seen) == {"n1": (1, FillWhy.LANES_OPEN)}
    taken = view(node(1), opened("a"), job(1, "a"))
    assert counts(settled(n1=1), taken) == {"n1": (0, FillWhy.LANES_TAKEN)}


def test_a_job_keeps_its_lane_while_it_is_closed() -> None:
    kept = job(1, "b")
    assert counts(settled(n1=1), view(node(1), opened("a"), closed("b", 30_000), kept)) == {}
    back = view(node(1), opened("a"), opened("b"), kept)
    assert counts(settled(n1=1), back) == {}, "b opens for its own job"


def test_with_every_gate_closed_nothing_starts_in_a_job_s_place() -> None:
    assert counts(settled(n1=1), view(node(1), closed("a", 30_000), job(1, "a"))) == {
        "n1": (0, FillWhy.LANES_CLOSED)
    }


def test_a_job_without_a_lane_is_about_to_take_an_open_one() -> None:
    starting = job(1, None, ran=0)
    assert counts(settled(n1=1), view(node(1), opened("a"), closed("b", 9e6), starting)) == {
        "n1": (0, FillWhy.LANES_TAKEN)
    }
    assert counts(settled(n1=1), view(node(1), opened("a"), opened("b"), starting)) == {}
    orphan = job(1, "gone")
    assert counts(settled(n1=1), view(node(1), opened("a"), orphan)) == {"n1": (0, FillWhy.LANES_TAKEN)}


def test_more_jobs_than_free_lanes_offer_nothing() -> None:
    jobs = [job(i, None, ran=0) for i in range(4)]
    assert counts(settled(n1=4), view(node(4), opened("a"), opened("b"), *jobs)) == {
        "n1": (0, FillWhy.LANES_TAKEN)
    }


def test_a_job_that_is_being_ended_has_its_lane_until_it_is_gone() -> None:
    going = job(1, "a", leaving=True)
    assert counts(settled(n1=0), view(node(0), opened("a"), going)) == {}
    assert counts(settled(n1=0), view(node(0), opened("a"), opened("b"), going)) == {
        "n1": (1, FillWhy.LANES_OPEN)
    }
    nowhere = job(1, None, leaving=True)
    assert counts(settled(n1=0), view(node(0), opened("a"), nowhere)) == {"n1": (1, FillWhy.LANES_OPEN)}


def test_a_burst_does_not_lower_the_count() -> None:
    assert counts(settled(n1=1), view(node(1), closed("a", 1_999))) == {}
    assert counts(settled(n1=1), view(node(1), closed("a", 2_000))) == {"n1": (0, FillWhy.LANES_CLOSED)}
    assert counts(settled(n1=1), view(node(1), closed("a", None))) == {"n1": (0, FillWhy.LANES_CLOSED)}


def test_a_job_that_comes_lowers_the_count_at_once_even_in_a_burst() -> None:
    burst = (closed("a", 10), opened("b"))
    assert counts(settled(n1=2), view(node(2), *burst)) == {}
    assert counts(settled(n1=2), view(node(2), *burst, job(1, "a"))) == {"n1": (1, FillWhy.LANES_OPEN)}
    assert counts(settled(n1=2), view(node(2), *burst, job(1, "b"))) == {"n1": (1, FillWhy.LANES_OPEN)}
    assert counts(settled(n1=2), view(node(2), *burst, job(1, "b"), job(2, "a"))) == {
        "n1": (0, FillWhy.LANES_TAKEN)
    }


def test_a_burst_raises_nothing_either() -> None:
    assert counts(settled(n1=0), view(node(0), closed("a", 10))) == {}
    assert counts(settled(n1=1), view(node(1), opened("a"), closed("b", 10))) == {}


def test_slow_slurm_is_asked_once() -> None:
    state, out = plan(FillState(), view(node(0), opened("a")), POLICY)
    assert bare(out) == (SetFill(node="n1", count=1, why=FillWhy.LANES_OPEN),)
    for later in (250, 5_000, 20_000, LOST_MS - 1):
        state, again = plan(state, view(node(0, seen=NOW + later), opened("a"), now=NOW + later), POLICY)
        assert again == ()
    _, lost = plan(state, view(node(0, seen=NOW + LOST_MS), opened("a"), now=NOW + LOST_MS), POLICY)
    assert bare(lost) == bare(out)


def test_an_answer_without_effect_is_repeated_after_a_while() -> None:
    state, out = plan(FillState(), view(node(0), opened("a")), POLICY)
    state = answered(state, out[0], NOW + 100)
    for later, expected in ((200, ()), (5_099, ()), (5_100, out)):
        seen = view(node(0, seen=NOW + later), opened("a"), now=NOW + later)
        assert bare(plan(state, seen, POLICY)[1]) == bare(expected)


def test_a_reading_from_before_the_order_says_nothing_of_it() -> None:
    state, _ = plan(FillState(), view(node(4, seen=NOW - 500), closed("a", 9e6)), POLICY)
    state, out = plan(state, view(node(0, seen=NOW - 1), closed("a", 9e6), now=NOW + 10), POLICY)
    assert out == ()
    assert "n1" in state.told
    state, out = plan(state, view(node(0, seen=NOW + 20), closed("a", 9e6), now=NOW + 30), POLICY)
    assert out == ()
    assert "n1" in state.told, "it has not been answered: it may have been 0 all along"
    state = answered(state, SetFill(node="n1", count=0, why=FillWhy.LANES_CLOSED, number=1), NOW + 40)
    state, out = plan(state, view(node(0, seen=NOW + 20), closed("a", 9e6), now=NOW + 50), POLICY)
    assert out == ()
    assert state.told == {}
    assert state.settled == {"n1": 0}


def test_a_reset_is_answered_at_once() -> None:
    assert counts(settled(n1=0), view(node(4), closed("a", 9e6))) == {"n1": (0, FillWhy.RESET)}
    assert counts(settled(n1=1), view(node(4), opened("a"))) == {"n1": (1, FillWhy.RESET)}


def test_a_new_wish_does_not_wait_for_the_old_one() -> None:
    state, first = plan(FillState(), view(node(0), opened("a")), POLICY)
    now = NOW + 3_000
    state, out = plan(state, view(node(0, seen=now), closed("a", 2_500, now=now), now=now), POLICY)
    assert bare(out) == (SetFill(node="n1", count=0, why=FillWhy.LANES_CLOSED),)
    assert answered(state, first[0], now) == state, "the answer to a replaced order says nothing"


def test_an_answer_belongs_to_its_own_order() -> None:
    state, first = plan(FillState(), view(node(4), closed("a", 9e6)), POLICY)
    state, _ = plan(state, view(node(4), opened("a"), now=NOW + 10), POLICY)
    state, last = plan(state, view(node(None), opened("a"), now=NOW + 20), POLICY)
    assert (first[0].count, last[0].count) == (0, 0)
    assert answered(state, first[0], NOW + 30) == state
    assert answered(state, last[0], NOW + 30) != state


@pytest.mark.parametrize("unknown", [node(None), node(2, seen=NOW - 30_001)])
def test_an_unknown_count_is_set_to_nothing(unknown: FillNode) -> None:
    state, out = plan(settled(n1=2), view(unknown, opened("a"), opened("b")), POLICY)
    assert bare(out) == (SetFill(node="n1", count=0, why=FillWhy.LIVE_UNKNOWN),)
    assert plan(state, view(unknown, opened("a"), opened("b"), now=NOW + 1_000), POLICY)[1] == ()
    state = answered(state, out[0], NOW + 1_000)
    assert plan(state, view(unknown, opened("a"), opened("b"), now=NOW + 6_000), POLICY)[1] != ()


def test_a_node_that_is_down_admits_nothing() -> None:
    assert counts(settled(n1=1), view(node(1, usable=False), opened("a"))) == {
        "n1": (0, FillWhy.NODE_UNUSABLE)
    }


def test_the_floor_is_left_to_online() -> None:
    things = [node(0), node(0, name="n2"), opened("a"), opened("b"), opened("c", "n2")]
    assert counts(FillState(), view(*things, floor=1)) == {"n1": (2, FillWhy.LANES_OPEN)}
    assert counts(settled(n1=2, n2=1), view(node(2), node(1, name="n2"), *things[2:], floor=3)) == {
        "n1": (0, FillWhy.FLOOR),
        "n2": (0, FillWhy.FLOOR),
    }
    with_job = [node(0), node(0, name="n2"), opened("a"), opened("c", "n2"), job(1, "c", name="n2")]
    assert counts(FillState(), view(*with_job, floor=1)) == {}, "a lane with a job on it goes first"


@pytest.mark.parametrize(
    ("lane", "expected"),
    [
        (closed("a", 60_000), {1: RequeueWhy.GATE_CLOSED}),
        (closed("a", 59_999), {}),
        (closed("a", None), {}),
        (opened("a"), {}),
        (closed("b", 9e6), {}),  # its own lane has only now been seen to be gone
    ],
)
def test_the_last_rung_waits_for_its_time(lane: FillLane, expected: dict[int, RequeueWhy]) -> None:
    assert requeued(FillState(), view(node(1), lane, job(1, "a"))) == expected


def test_a_job_that_has_just_started_is_not_sent_back() -> None:
    assert requeued(FillState(), view(node(1), closed("a", 9e6), job(1, "a", ran=59_999))) == {}
    assert requeued(FillState(), view(node(1), closed("a", 9e6), job(1, None, ran=59_999))) == {}


def test_a_job_without_a_lane_leaves_when_there_is_none_to_have() -> None:
    shut, busy, free = closed("a", 9e6), opened("b"), opened("c")
    other = job(2, "b")
    assert requeued(FillState(), view(node(2), shut, busy, other, job(1, None))) == {1: RequeueWhy.NO_LANE}
    assert requeued(FillState(), view(node(2), shut, busy, free, other, job(1, None))) == {}
    assert requeued(FillState(), view(node(2), other, job(1, None))) == {}, "no lane of the node is known"


def test_a_job_on_a_node_without_lanes_leaves_after_the_policys_time_of_that() -> None:
    """It may be the short while in which the node's replica starts again."""
    state, told = FillState(), []
    looks = ((0, False), (59_000, False), (59_500, True), (60_000, False), (119_000, False), (120_000, False))
    for after_ms, lane in looks:
        at = NOW + after_ms
        lanes = (opened("b"),) if lane else ()
        state, out = plan(state, view(node(1, seen=at), *lanes, job(1, None), now=at, seen=at), POLICY)
        told += [(after_ms, i.why) for i in out if isinstance(i, RequeueJob)]
    assert told == [(120_000, RequeueWhy.NO_LANE)]


def test_a_job_whose_own_lane_has_gone_leaves_after_the_policys_time_of_that() -> None:
    """Its replica died; the other lanes of the node say nothing about it."""
    state, told = FillState(), []
    looks = ((0, False), (59_000, False), (59_500, True), (60_000, False), (119_000, False), (120_000, False))
    for after_ms, back in looks:
        at = NOW + after_ms
        lanes = (opened("b"), *((opened("a"),) if back else ()))
        state, out = plan(state, view(node(1, seen=at), *lanes, job(1, "a"), now=at, seen=at), POLICY)
        told += [(after_ms, i.why) for i in out if isinstance(i, RequeueJob)]
    assert told == [(120_000, RequeueWhy.NO_LANE)]


def test_nobody_is_requeued_on_an_old_reading_or_twice() -> None:
    things = (node(1), closed("a", 9e6), job(1, "a"))
    assert requeued(FillState(), view(*things, seen=None)) == {}
    assert requeued(FillState(), view(*things, seen=NOW - 30_001)) == {}
    assert requeued(FillState(), view(node(1), closed("a", 9e6), job(1, "a", leaving=True))) == {}
    state, out = plan(settled(n1=1), view(*things), POLICY)
    order = RequeueJob(job=1, why=RequeueWhy.GATE_CLOSED)
    assert bare(out) == (SetFill(node="n1", count=0, why=FillWhy.LANES_CLOSED), order), (
        "the place is shut first"
    )
    now = NOW + 1_000
    assert plan(state, view(*things, now=now, seen=now), POLICY)[1] == ()
    state = answered(state, out[-1], now)
    later = now + 5_000
    assert plan(state, view(*things, now=later, seen=later), POLICY)[1][-1].number > out[-1].number, (
        "it still holds its place"
    )
    gone, _ = plan(state, view(node(0), closed("a", 9e6), now=later, seen=later), POLICY)
    assert gone.leaving == {}


def test_a_job_that_is_told_to_leave_frees_its_place_for_no_one() -> None:
    things = (node(1), opened("a"), closed("b", 9e6), job(1, "a"), job(2, "b"))
    state, out = plan(settled(n1=1), view(*things), POLICY)
    assert bare(out) == (
        SetFill(node="n1", count=0, why=FillWhy.LANES_TAKEN),
        RequeueJob(job=2, why=RequeueWhy.GATE_CLOSED),
    )
    assert list(state.leaving) == [2]


def test_counts_fall_before_others_rise() -> None:
    things = [node(0), node(1, name="n2"), opened("a"), closed("b", 9e6, "n2")]
    _, out = plan(settled(n1=0, n2=1), view(*things), POLICY)
    assert [i.node for i in out if isinstance(i, SetFill)] == ["n2", "n1"]


def test_what_is_offered_is_the_free_open_lanes_of_all_nodes() -> None:
    """Also beside jobs that keep closed lanes: who waits only for Slurm's time may start on it."""
    seen = [opened("a"), closed("b", 30_000), closed("c", 30_000), job(1, "b"), job(2, "c")]
    more = [node(2, name="n2"), opened("d", "n2"), opened("e", "n2")]
    state, _ = plan(FillState(), view(node(0), *seen, *more), POLICY)
    assert offered(state) == 3
    state, _ = plan(state, view(node(0), closed("a", 9e6), *seen[1:], node(2, name="n2")), POLICY)
    assert offered(state) == 0


def test_state_goes_through_json() -> None:
    state, _ = plan(FillState(), view(node(1), closed("a", 9e6), job(1, "a")), POLICY)
    assert msgspec.json.decode(msgspec.json.encode(state), type=FillState) == state


# -- models ---------------------------------------------------------------------------------------------


def of(thing: FillLane | FillJob, model: str) -> FillLane | FillJob:
    return msgspec.structs.replace(thing, model=model)


def waiting(seen: FillView, *models: str | None) -> FillView:
    return msgspec.structs.replace(seen, waiting=frozenset(models))


def test_a_lane_counts_for_jobs_of_its_model_only() -> None:
    """Slurm started a job of `big` on n1, where the lane of `tiny` stood open, and nothing moved any more."""
    lanes = (of(opened("a"), "tiny"), of(opened("b", "n2"), "big"))
    seen = view(node(), node(name="n2"), *lanes)
    open_one = (1, FillWhy.LANES_OPEN)
    assert counts(FillState(), waiting(seen, "big")) == {"n2": open_one}
    assert counts(settled(n1=1), waiting(view(node(1), *lanes), "big")) == {"n1": (0, FillWhy.OTHER_MODEL)}
    for everybody in ((), (None,), ("big", "tiny"), ("big", None)):
        assert counts(FillState(), waiting(seen, *everybody)) == {"n1": open_one, "n2": open_one}


def test_a_job_is_on_its_way_to_lanes_of_its_model_only() -> None:
    seen = view(node(), of(opened("a"), "tiny"), of(opened("b"), "big"), of(job(1, None), "big"))
    assert counts(FillState(), waiting(seen, "tiny", "big")) == {"n1": (1, FillWhy.LANES_OPEN)}
    assert counts(settled(n1=1), waiting(msgspec.structs.replace(seen, nodes=(node(1),)), "big")) == {
        "n1": (0, FillWhy.OTHER_MODEL)
    }
    stray = view(node(), of(opened("a"), "tiny"), of(job(1, None), "big"))
    assert counts(FillState(), waiting(stray, "tiny")) == {"n1": (1, FillWhy.LANES_OPEN)}
    unknown = view(node(1), of(opened("a"), "tiny"), job(1, None))
    assert counts(settled(n1=1), waiting(unknown, "tiny")) == {"n1": (0, FillWhy.LANES_TAKEN)}


def test_a_job_leaves_a_node_without_its_model_soon() -> None:
    lost = view(of(opened("a"), "tiny"), of(job(1, None, ran=20_000), "big"))
    state, out = plan(FillState(), lost, POLICY)
    assert out == (), "seen for the first time"
    later = msgspec.structs.replace(lost, now_ms=NOW + 10_000, jobs_seen_ms=NOW + 10_000)
    assert requeued(state, later) == {1: RequeueWhy.WRONG_NODE}
    there = msgspec.structs.replace(later, lanes=(*later.lanes, of(closed("b", 5.0), "big")))
    assert requeued(state, there) == {}, "a lane of its model, closed as it is"
    blind = msgspec.structs.replace(later, jobs_seen_ms=None)
    assert requeued(state, blind) == {}
    started = msgspec.structs.replace(later, jobs=(of(job(1, None, ran=-5_000), "big"),))
    assert requeued(state, started) == {}, "another run, that has just begun"
    for other in (job(1, None, ran=20_000), of(job(1, "a", ran=20_000), "big")):
        assert requeued(state, msgspec.structs.replace(later, jobs=(other,))) == {}
