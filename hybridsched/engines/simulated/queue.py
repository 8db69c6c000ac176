"""Sequences that wait for a place in the batch: first come first served, or by priority."""

from __future__ import annotations

import heapq
from collections import deque
from typing import Generic, Protocol, TypeVar

from hybridsched.engines.simulated.sequence import Status

_WAITING = Status.WAITING  # an enum's member is slow to look up


class Waits(Protocol):
    """What the queue needs of a sequence: with its tokens (`Seq`), or only their counts."""

    status: Status
    priority: int
    arrival: float
    order: int
    offline: bool


S = TypeVar("S", bound=Waits)


class WaitingQueue(Generic[S]):
    """Entries of sequences that were ended meanwhile stay until they come up, and are dropped then."""

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._queue: deque[S] = deque()
        self._heap: list[tuple[int, float, int, S]] = []
        self.online = 0
        self.offline = 0
        """Sequences that wait, of each kind."""

    def add(self, seq: S, *, front: bool = False) -> None:
        """Let `seq` wait; `front` puts a preempted one before the others (by priority: at its own place)."""
        seq.status = _WAITING
        if seq.offline:
            self.offline += 1
        else:
            self.online += 1
        if self._by_priority:
            heapq.heappush(self._heap, (seq.priority, seq.arrival, seq.order, seq))
        elif front:
            self._queue.appendleft(seq)
        else:
            self._queue.append(seq)

    def peek(self) -> S | None:
        """The next one."""
        if self._by_priority:
            while self._heap:
                seq = self._heap[0][3]
                if seq.status is _WAITING:
                    return seq
                heapq.heappop(self._heap)
            return None
        while self._queue:
            seq = self._queue[0]
            if seq.status is _WAITING:
                return seq
            self._queue.popleft()
        return None

    def pop(self) -> None:
        """Remove what `peek` gave."""
        seq = heapq.heappop(self._heap)[3] if self._by_priority else self._queue.popleft()
        self.forget(seq)

    def forget(self, seq: S) -> None:
        """Count a waiting sequence out; the caller changes its status."""
        if seq.offline:
            self.offline -= 1
        else:
            self.online -= 1

    def items(self) -> list[S]:
        """All that wait, in no particular order."""
        entries = [e[3] for e in self._heap] if self._by_priority else list(self._queue)
        return [s for s in entries if s.status is Status.WAITING]
