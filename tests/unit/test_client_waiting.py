"""A stream hands out each token group once, in order, of one attempt, whatever arrives."""

from __future__ import annotations

import msgspec

from hybridsched.client.waiting import Waiter
from hybridsched.store.online_values import End, EndStatus
from hybridsched.store.replies import Ended, Group, parse

OK = End(status=EndStatus.OK)


def group(number: int, attempt: int = 1) -> Group:
    return Group("x", attempt, number, msgspec.Raw(b'[{"n":%d}]' % number))


async def test_repeated_groups_are_dropped() -> None:
    waiter = Waiter()
    for number in (1, 1, 2, 1, 2, 3):
        waiter.take(group(number))
    assert waiter.chunks == [{"n": 1}, {"n": 2}, {"n": 3}]


async def test_a_gap_ends_the_stream_with_a_clear_failure() -> None:
    waiter = Waiter()
    waiter.take(group(1))
    waiter.take(group(3))
    assert waiter.end is not None
    assert (waiter.end.status, waiter.end.code) == (EndStatus.FAILED, "stream_gap")
    assert waiter.chunks == [{"n": 1}]


async def test_a_later_attempt_may_not_continue_an_earlier_one() -> None:
    waiter = Waiter()
    waiter.take(group(1, attempt=1))
    waiter.take(group(2, attempt=2))
    assert waiter.end is not None
    assert waiter.end.code == "stream_gap"


async def test_a_later_attempt_may_begin_when_nothing_was_seen() -> None:
    waiter = Waiter()
    waiter.take(group(1, attempt=2))
    waiter.take(group(2, attempt=1))
    waiter.take(group(2, attempt=2))
    assert waiter.chunks == [{"n": 1}, {"n": 2}]


async def test_the_first_end_counts_and_nothing_comes_after_it() -> None:
    waiter = Waiter()
    waiter.take(Ended("x", 1, OK))
    waiter.take(Ended("x", 1, End.expired()))
    waiter.take(group(1))
    assert waiter.end is OK
    assert waiter.chunks == []


async def test_wait_returns_at_once_when_something_came_before() -> None:
    waiter = Waiter()
    waiter.take(group(1))
    await waiter.wait()
    waiter.take(Ended("x", 1, OK))
    await waiter.wait()
    await waiter.wait()


def test_foreign_entries_of_a_reply_stream_are_ignored() -> None:
    assert parse([b"hello", b"world"]) is None
    assert parse([b"id", b"x", b"attempt", b"1", b"end", b"not json"]) is None
    assert parse([b"id", b"x", b"attempt", b"1"]) is None
