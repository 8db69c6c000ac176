"""Lines that wait for leave to send, and the question whether the engine has read what was sent."""

from __future__ import annotations

import asyncio

from hybridsched.core.pacing import SEND_WINDOW_S, UNREAD_BOUND_S, UNREAD_MOST, Grant
from hybridsched.workers.offline_pacer import PrefillPacer


class FrontEnd:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked = 0
        self.busy = asyncio.Event()
        self.reads = asyncio.Event()
        self.well = True

    async def ask(self) -> bool:
        self.asked += 1
        self.busy.set()
        await self.reads.wait()
        return self.well


class Clock:
    """Stands still unless a test moves it; what waits for real time goes by the loop's."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


async def sent(pacer: PrefillPacer, clock: Clock, requests: int) -> list[Grant]:
    """So many requests, as far apart as bursts allow."""
    grants = []
    for number in range(requests):
        grant = await pacer.acquire((number,), 10)
        assert grant is not None
        grants.append(grant)
        clock.s += SEND_WINDOW_S
    return grants


async def test_the_next_request_waits_until_the_front_end_has_answered() -> None:
    front, clock = FrontEnd(), Clock()
    pacer = PrefillPacer(front.ask, clock=clock)
    await sent(pacer, clock, UNREAD_MOST)
    later = asyncio.ensure_future(pacer.acquire((99,), 10))
    await front.busy.wait()
    assert not later.done()
    front.reads.set()
    assert await asyncio.wait_for(later, 10) is not None
    assert front.asked == 1, "one request alone is not asked for"
    pacer.stop()


async def test_a_front_end_without_an_answer_makes_a_lane_slower_and_does_not_stop_it() -> None:
    front, clock = FrontEnd(), Clock()
    front.well = False
    front.reads.set()
    pacer = PrefillPacer(front.ask, clock=clock)
    first, *_ = await sent(pacer, clock, UNREAD_MOST)
    later = asyncio.ensure_future(pacer.acquire((99,), 10))
    await front.busy.wait()
    assert not later.done()
    clock.s = first.sent_s + UNREAD_BOUND_S
    assert await asyncio.wait_for(later, 10) is not None
    pacer.stop()


async def test_a_pause_ends_the_question_and_the_next_opening_asks_anew() -> None:
    front, clock = FrontEnd(), Clock()
    pacer = PrefillPacer(front.ask, clock=clock)
    await sent(pacer, clock, UNREAD_MOST)
    await front.busy.wait()
    pacer.stop()
    pacer.quiet()
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "unread"]
    front.reads.set()
    await sent(pacer, clock, 3 * UNREAD_MOST)
    assert front.asked >= 2
    pacer.stop()
