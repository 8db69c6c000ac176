"""The rule of pulling, case by case; tests/contract holds the script to it."""

from __future__ import annotations

from hybridsched.core.routing import Asker, Others, Terms, Turn, claim, load_of
from hybridsched.core.values import Value


class Waiting(Value, frozen=True, kw_only=True):
    accepted_ms: float = 0.0
    deadline_ms: float = 60_000.0
    prompt_tokens: int = 1000
    cost: int = 1100


def asker(load: float = 0.0, inflight: int = 0, room: int = 8) -> Asker:
    return Asker(load=load, inflight=inflight, room=room)


def taken(queue: list[Waiting], who: Asker, others: Others | None, *, now_ms: float = 1.0) -> tuple[int, int]:
    grant = claim((queue,), who, others, Terms(), now_ms=now_ms)
    return grant.taken[0], grant.live


def test_who_is_alone_takes_all_that_it_has_room_for() -> None:
    assert taken([Waiting()] * 5, asker(load=9e9, room=3), None) == (3, 3)


def test_the_heavier_one_leaves_the_work_to_the_lighter_one() -> None:
    assert taken([Waiting()], asker(load=300.0), Others(load=0.0, inflight=0, count=1)) == (0, 0)
    assert taken([Waiting()], asker(load=200.0), Others(load=0.0, inflight=0, count=1)) == (1, 1), "the slack"


def test_a_burst_is_spread_and_the_slack_counts_once() -> None:
    small = [Waiting(prompt_tokens=10, cost=10)] * 4
    assert taken(small, asker(), Others(load=0.0, inflight=0, count=1)) == (2, 2), "an even share"
    assert taken(small, asker(), Others(load=0.0, inflight=0, count=3)) == (1, 1)


def test_who_has_waited_long_goes_to_whoever_asks() -> None:
    heavy, idle = asker(load=9e9), Others(load=0.0, inflight=0, count=1)
    assert taken([Waiting()] * 3, heavy, idle, now_ms=24.9) == (0, 0)
    assert taken([Waiting()] * 3, heavy, idle, now_ms=25.0) == (3, 3)


def packed(rank: int, load: float = 0.0, inflight: int = 0, room: int = 8) -> Asker:
    turn = Turn(rank=rank, max_inflight=3, max_load=2500.0)
    return Asker(load=load, inflight=inflight, room=room, turn=turn)


def test_in_a_pack_order_the_lowest_rank_takes_up_to_its_caps_and_no_more() -> None:
    behind = Others(load=0.0, inflight=0, count=3, first=1)
    small = [Waiting(prompt_tokens=10, cost=10)] * 6
    assert taken(small, packed(0), behind) == (3, 3), "requests"
    assert taken([Waiting()] * 6, packed(0), behind) == (3, 3), "2,010 tokens are below"
    assert taken([Waiting()] * 6, packed(0, load=2500.0), behind) == (0, 0)


def test_a_higher_rank_leaves_the_work_to_the_lower_one_however_idle_it_is() -> None:
    ahead = Others(load=2000.0, inflight=2, count=3, first=0)
    assert taken([Waiting()], packed(1), ahead) == (0, 0)
    assert taken([Waiting()], packed(1), ahead, now_ms=25.0) == (1, 1), "patience is over"
    assert taken([Waiting()], asker(), ahead) == (0, 0), "one without a rank comes last"


def test_when_all_stand_at_their_caps_load_decides() -> None:
    full = Others(load=3000.0, inflight=5, count=3)
    assert taken([Waiting()], packed(1, load=2600.0, inflight=3), full) == (1, 1)
    assert taken([Waiting()], packed(0, load=9000.0, inflight=9), full) == (0, 0)
    heavy = Others(load=5000.0, inflight=5, count=3)
    assert taken([Waiting()] * 9, packed(2), heavy) == (5, 5), "its caps, then up to the others' load"


def test_the_expired_are_handed_over_and_weigh_nothing() -> None:
    queue = [Waiting(deadline_ms=1.0), Waiting(), Waiting(deadline_ms=0.5)]
    grant = claim((queue,), asker(room=2), None, Terms(), now_ms=1.0)
    assert (grant.taken, grant.live, grant.inflight) == ((3,), 1, 1)
    assert grant.load == load_of(queue[1], Terms()) == 1000 + 0.05 * 100


def test_no_room_takes_not_even_the_expired() -> None:
    assert taken([Waiting(deadline_ms=0.0)], asker(room=0), None) == (0, 0)
