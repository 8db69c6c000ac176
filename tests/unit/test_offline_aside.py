"""Batches that cannot go on, and the threads that wait for their disks."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

from redis import RedisError

from hybridsched.batches.errors import BatchFileError, DiskFullError
from hybridsched.workers.offline_aside import Aside
from hybridsched.workers.offline_takers import MOST_STUCK, Takers


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def made() -> tuple[Aside, Clock, list[tuple[str, str, str]]]:
    clock, notes = Clock(), list[tuple[str, str, str]]()
    aside = Aside(lambda *note: notes.append(cast(Any, note)), back_off_s=(2.0, 10.0), clock=clock)
    return aside, clock, notes


def waits_s(aside: Aside, clock: Clock) -> float:
    began = clock.now_s
    while aside.holds("a"):
        clock.now_s += 0.5
    return clock.now_s - began


def test_the_time_doubles_up_to_a_bound_and_starts_anew_once_it_went_on() -> None:
    aside, clock, notes = made()
    found = []
    for _ in range(5):
        aside.put("a", BatchFileError("no such mount"))
        assert not aside.holds("b")
        found.append(waits_s(aside, clock))
    assert found == [2.0, 4.0, 8.0, 10.0, 10.0]
    aside.went_on("a")
    aside.put("a", DiskFullError("cannot write /data/x: No space left on device"))
    assert waits_s(aside, clock) == 2.0
    assert [code for _, code, _ in notes] == ["files_unusable"] * 5 + ["disk_full"]
    assert notes[-1][2].startswith("cannot write /data/x: No space left on device (seen on ")


def test_a_batch_with_results_in_memory_is_held_until_they_are_on_the_disk() -> None:
    aside, clock, _ = made()
    aside.stuck("a", DiskFullError("full"))
    aside.stuck("a", DiskFullError("full"))
    clock.now_s += 1000
    assert aside.holds("a")
    aside.unstuck("a")
    assert aside.holds("a")
    aside.unstuck("a")
    assert not aside.holds("a")


def test_ended_batches_are_forgotten() -> None:
    aside, _, _ = made()
    aside.put("a", BatchFileError("x"))
    aside.put("b", BatchFileError("x"))
    aside.keep_only({"b"})
    assert (aside.holds("a"), aside.holds("b")) == (False, True)


def test_a_store_that_is_away_is_no_reason_not_to_set_it_aside() -> None:
    def note(*_: str) -> None:
        raise RedisError("away")

    aside = Aside(note)
    aside.put("a", BatchFileError("x"))
    assert aside.holds("a")


class Taker(threading.Thread):
    def __init__(self, number: int) -> None:
        super().__init__(name=f"t{number}", daemon=True)
        self.over = threading.Event()

    def run(self) -> None:
        self.over.wait(20)

    def wake(self) -> None:
        self.over.set()


def test_a_thread_that_waits_is_replaced_up_to_a_bound_and_none_after_the_stop() -> None:
    threads: list[Taker] = []

    def make(number: int) -> Any:
        threads.append(Taker(number))
        return threads[-1]

    takers = Takers(make, 2)
    takers.start()
    assert [takers.relieve() for _ in range(MOST_STUCK + 2)] == [True] * MOST_STUCK + [False] * 2
    assert len(threads) == 2 + MOST_STUCK
    threads[0].wake()
    threads[0].join(10)
    assert takers.relieve(), "one that has ended makes room"
    takers.wake()
    takers.join(time.monotonic() + 10)
    assert not any(thread.is_alive() for thread in threads)
    assert not takers.relieve()
