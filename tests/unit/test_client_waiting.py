"""A stream hands out each token group once, in order, of one attempt, whatever arrives."""

from __future__ import annotations

import msgspec
import pytest

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


def test_entries_of_a_reply_stream_that_name_no_request_are_ignored() -> None:
    assert parse([b"hello", b"world"]) is None
    assert parse([b"id", b"x", b"attempt", b"many"]) is None
    assert parse([b"id", b"\xff", b"attempt", b"1", b"end", b"{}"]) is None
    assert parse([b"odd"]) is None


@pytest.mark.parametrize(
    "fields",
    [
        [b"end", b"not json"],
        [b"end", b'{"status":"fine"}'],
        [b"end", b'{"status":"ok","body":' + b"[" * 100_000],
        [b"end", b'{"status":"ok"}', b"groups", b"x"],
        [b"n", b"one", b"tok", b"[]"],
        [],
    ],
    ids=lambda fields: repr(fields)[:40],
)
def test_an_entry_that_cannot_be_read_ends_the_request_that_it_names(fields: list[bytes]) -> None:
    entry = parse([b"id", b"x", b"attempt", b"1", *fields])
    assert isinstance(entry, Ended)
    assert (entry.id, entry.end.status, entry.end.code) == ("x", EndStatus.FAILED, "engine_bad_answer")


@pytest.mark.parametrize("tok", [b"garbage", b"[", b'{"n":1}', b"[" * 100_000, b"\xff", b"[1,]"])
async def test_a_group_that_is_no_json_ends_its_request(tok: bytes) -> None:
    waiter = Waiter(stream=True)
    waiter.take(Group("x", 1, 1, msgspec.Raw(tok)))
    assert waiter.end is not None
    assert (waiter.end.status, waiter.end.code) == (EndStatus.FAILED, "engine_bad_answer")
    await waiter.wait()


@pytest.mark.parametrize(
    ("groups", "end", "code"),
    [
        (1, End(status=EndStatus.OK, finish_reason="stop"), None),
        (1, End(status=EndStatus.OK, usage={"completion_tokens": 1}), None),
        (2, End(status=EndStatus.OK, finish_reason="stop"), "stream_gap"),
        (1, End(status=EndStatus.OK), "engine_bad_answer"),
        (2, End.expired(), "deadline_exceeded"),
    ],
)
async def test_a_stream_is_whole_only_with_all_its_groups_and_a_proper_end(
    groups: int, end: End, code: str | None
) -> None:
    waiter = Waiter(stream=True)
    waiter.take(group(1))
    waiter.take(Ended("x", 1, end, groups))
    assert waiter.end is not None
    assert waiter.end.code == code
