"""Time in the twin: what happens when, in an order that depends on nothing but what was asked for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from math import inf
from typing import TypeVar

from hybridsched.twin.engine import TwinEngine
from hybridsched.twin.request import Event

FIRST, LAST = 0, 1
"""Ranks. At one instant, what comes from outside (an arrival, a timer) comes before what an engine's
iteration ends with, so that a request which arrives with the end of an iteration joins the next one."""

T = TypeVar("T")


class Loop:
    """Calls at times, on a clock that jumps from one to the next. Times are seconds from the loop's start.

    Calls of the same time come by rank, and then in the order in which they were asked for.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._serial = 0
        self._cancelled: set[int] = set()
        self._stopped = False

    def random(self, purpose: str) -> random.Random:
        """A source for one purpose: the same for the same seed, whatever the others have drawn."""
        return random.Random(f"{self.seed}/{purpose}")  # noqa: S311 - must be repeatable, guards no secret

    def at(self, time_s: float, call: Callable[[], None], rank: int = FIRST) -> int:
        """Call at `time_s`. Returns what `cancel` takes.

        Raises:
            ValueError: that time is past, or no time at all.
        """
        if not time_s >= self.now_s:
            raise ValueError(f"nothing can happen at {time_s} s: it is {self.now_s} s")
        self._serial = serial = self._serial + 1
        heappush(self._heap, (time_s, rank, serial, call))
        return serial

    def after(self, delay_s: float, call: Callable[[], None]) -> int:
        """Call in `delay_s` seconds, of which there are 0 or more. As `at`."""
        if not delay_s >= 0.0:
            raise ValueError(f"nothing can happen in {delay_s} s: it is {self.now_s} s")
        self._serial = serial = self._serial + 1
        heappush(self._heap, (self.now_s + delay_s, FIRST, serial, call))
        return serial

    def cancel(self, serial: int) -> None:
        """Do not make a call that has not been made yet."""
        self._cancelled.add(serial)

    def feed(self, items: Iterable[tuple[float, T]], call: Callable[[T], None]) -> None:
        """Call with each item at its time. The items are ordered by time and drawn one by one.

        Raises:
            ValueError: (from `run`) an item is earlier than the one before.
        """
        self._feed(iter(items), call)

    def _feed(self, items: Iterator[tuple[float, T]], call: Callable[[T], None]) -> None:
        ahead = next(items, None)
        if ahead is None:
            return
        item = ahead[1]

        def deliver() -> None:
            nonlocal item
            current = item
            following = next(items, None)
            if following is not None:
                item = following[1]
                self.at(following[0], deliver)
            call(current)

        self.at(ahead[0], deliver)

    def stop(self) -> None:
        """Let `run` return after the call that is being made."""
        self._stopped = True

    def run(self, until_s: float = inf) -> None:
        """Make the calls up to `until_s`, which is included. What lies beyond stays for the next `run`."""
        heap, cancelled = self._heap, self._cancelled
        self._stopped = False
        while heap and not self._stopped:
            entry = heappop(heap)
            time_s, _, serial, call = entry
            if time_s > until_s:
                heappush(heap, entry)
                break
            if cancelled and serial in cancelled:
                cancelled.discard(serial)
                continue
            self.now_s = time_s
            call()
        if not self._stopped and until_s != inf:
            self.now_s = max(self.now_s, until_s)


class EngineClock:
    """Advances an engine when it is due. Call `changed` after everything that is done to the engine."""

    def __init__(self, loop: Loop, engine: TwinEngine, on_events: Callable[[list[Event]], None]) -> None:
        """`on_events` is called with what an iteration ended with, if anything; it may act on the engine."""
        self.engine = engine
        self._loop = loop
        self._on_events = on_events
        self._due_s = inf

    def changed(self) -> None:
        """The engine may be due at another time than before."""
        due_s = self.engine.next_s()
        if due_s != self._due_s:
            self._due_s = due_s
            if due_s != inf:
                loop = self._loop  # as `Loop.at` does, without asking whether it is past: it cannot be
                loop._serial = serial = loop._serial + 1
                heappush(loop._heap, (due_s, LAST, serial, self._wake))

    def _wake(self) -> None:
        now_s = self._loop.now_s
        if now_s != self._due_s:
            return  # asked for before the run was cut, or another began
        events = self.engine.advance(now_s)
        if events:
            self._on_events(events)
        self.changed()
