"""Answers on their way back: in order, once each, through outages, and not for a request that was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
import redis

from hybridsched.store.online import OnlineQueue
from hybridsched.store.online_values import Claimed, End, EndStatus
from hybridsched.workers.online_outbox import Outbox, UndeliveredError
from tests.helpers import await_until
from tests.unit.online_claims import claimed


class FakeQueue:
    """Notes what is sent. `failures` calls fail first; `mine` False fences everything."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, list[bytes]] | str] = []
        self.failures = 0
        self.mine = True
        self.hold: asyncio.Event | None = None

    async def _go(self) -> None:
        if self.hold is not None:
            await self.hold.wait()
        if self.failures:
            self.failures -= 1
            raise redis.ConnectionError("away")

    async def emit(self, request: Claimed, number: int, chunks: Sequence[bytes]) -> bool:
        await self._go()
        if self.mine:
            self.sent.append((number, list(chunks)))
        return self.mine

    async def finish(self, request: Claimed, end: End) -> bool:
        await self._go()
        if self.mine:
            self.sent.append(end.status.value)
        return self.mine


def outbox(queue: FakeQueue, lost: list[bool], **options: Any) -> Outbox:
    return Outbox(cast("OnlineQueue", queue), claimed(), lost=lost.append, **options)


OK = End(status=EndStatus.OK)


async def test_what_comes_in_one_turn_goes_out_as_one_group() -> None:
    queue = FakeQueue()
    box = outbox(queue, [])
    box.put(b"1")
    box.put(b"2")
    assert await box.finish(OK)
    assert queue.sent == [(1, [b"1", b"2"]), "ok"]


async def test_what_comes_while_a_group_is_on_its_way_makes_the_next() -> None:
    queue = FakeQueue()
    queue.hold = asyncio.Event()
    box = outbox(queue, [])
    box.put(b"1")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    box.put(b"2")
    box.put(b"3")
    queue.hold.set()
    assert await box.finish(OK)
    assert queue.sent == [(1, [b"1"]), (2, [b"2", b"3"]), "ok"]


async def test_an_outage_is_waited_out_and_the_group_keeps_its_number() -> None:
    queue = FakeQueue()
    queue.failures = 2
    box = outbox(queue, [])
    box.put(b"1")
    assert await box.finish(OK)
    assert queue.sent == [(1, [b"1"]), "ok"]


async def test_a_long_outage_is_given_up() -> None:
    queue, lost = FakeQueue(), []
    queue.failures = 1000
    box = outbox(queue, lost, give_up_s=0.05)
    box.put(b"1")
    await await_until(lambda: lost, what="the outbox to give up")
    assert lost == [False]
    assert not await box.finish(OK)
    with pytest.raises(UndeliveredError):
        await outbox(queue, lost, give_up_s=0.05).finish(OK)


async def test_a_lost_request_is_told_once_and_sends_nothing_more() -> None:
    queue, lost = FakeQueue(), []
    queue.mine = False
    box = outbox(queue, lost)
    box.put(b"1")
    await await_until(lambda: lost, what="the loss")
    box.put(b"2")
    assert not await box.finish(OK)
    assert (lost, queue.sent) == ([True], [])
