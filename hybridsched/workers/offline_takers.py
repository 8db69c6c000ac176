"""The threads of a lane that take chunks: always as many as can, whatever some of them wait for."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hybridsched.log import get_logger

if TYPE_CHECKING:
    from hybridsched.workers.offline_rq import ChunkThread

_log = get_logger("offline")

MOST_STUCK = 32
"""Threads that may wait for space on a disk at once, each with the results of one chunk in memory."""


class Takers:
    """`count` threads that can take a chunk; one that gets stuck is replaced, and ends with its chunk."""

    def __init__(self, make: Callable[[int], ChunkThread], count: int) -> None:
        self._make = make
        self._count = count
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._threads: list[ChunkThread] = []
        self._stopping = False

    def start(self) -> None:
        """Start them."""
        for _ in range(self._count):
            self._add()

    def relieve(self) -> bool:
        """Called by a thread that waits for a disk: another one takes its place. False: too many wait."""
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            if self._stopping or len(self._threads) >= self._count + MOST_STUCK:
                return False
            self._add()
            return True

    def wake(self) -> None:
        """Have all look at the lane's state at once; no further one is started."""
        with self._lock:
            self._stopping = True
            threads = list(self._threads)
        for thread in threads:
            thread.wake()

    def join(self, until_s: float) -> None:
        """Wait for all to end, until `until_s` of the monotonic clock."""
        join_all(self._threads, until_s)

    def _add(self) -> None:
        thread = self._make(next(self._numbers))
        self._threads.append(thread)
        thread.start()


def join_all(threads: Sequence[threading.Thread], until_s: float) -> None:
    """Wait for threads to end, until `until_s` of the monotonic clock; name those that do not."""
    for thread in threads:
        thread.join(max(0.1, until_s - time.monotonic()))
        if thread.is_alive():
            _log.warning(
                "A thread did not end in time; its chunk comes free when its lease ends.",
                key="stop_late",
                thread=thread.name,
            )
