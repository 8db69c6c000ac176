"""The online queue of one model: what waits, who is woken for it, and deadlines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hybridsched.core.values import UNKNOWN, QueueView, Signal
from hybridsched.twin.clock import Loop
from hybridsched.twin.online import Board, OnlineRequest

SAFETY_S = 0.2
"""A replica claims this often without a wake (`workers.online_intake.IntakeOptions.safety_s`)."""

PULLED_S = 0.02
"""A request that has waited less is being pulled by whom its accept has woken."""


class OnlineQueue:
    """Requests that nobody has claimed, oldest first. One class of urgency, one time to live for all."""

    def __init__(
        self,
        loop: Loop,
        board: Board,
        *,
        timeout_s: float,
        wake: Callable[[int], None],
        claim_all: Callable[[], None],
        expire: Callable[[OnlineRequest], None],
    ) -> None:
        """`wake(replica)` reaches one, `claim_all` has every replica try; `expire` ends a request."""
        self._loop = loop
        self.board = board
        self._timeout_s = timeout_s
        self._wake = wake
        self._claim_all = claim_all
        self._expire = expire
        self.waiting: deque[OnlineRequest] = deque()
        self._looking = False
        self._deadlines: deque[OnlineRequest] = deque()
        self._watching = False

    def accept(self, request: OnlineRequest) -> None:
        """A request comes in: the least loaded replica with room is woken."""
        now_s = self._loop.now_s
        request.accepted_ms = now_s * 1e3
        request.deadline_ms = (now_s + self._timeout_s) * 1e3
        self.waiting.append(request)
        self._deadlines.append(request)
        if not self._watching:
            self._watching = True
            self._loop.at(now_s + self._timeout_s, self._watch_deadlines)
        best = self.board.least_loaded(now_s)
        if best is not None:
            self.wake(best[0])
        self.look_later()

    def wake(self, replica: int) -> None:
        """Wake a replica, unless it was and has not claimed since."""
        if not self.board.woken[replica]:
            self.board.woken[replica] = True
            self._wake(replica)

    def take(self, count: int, now_s: float) -> list[OnlineRequest]:
        """So many from the front are claimed; those that are to run. Expired ones have had their answer."""
        taken = [self.waiting.popleft() for _ in range(count)]
        return [request for request in taken if not request.status and request.deadline_ms > now_s * 1e3]

    def oldest_wait_s(self) -> float | None:
        """How long the oldest has waited; None: nothing waits."""
        return self._loop.now_s - self.waiting[0].accepted_ms / 1e3 if self.waiting else None

    def view(self, model: str) -> QueueView:
        """What a snapshot shows of it."""
        wait_s = self.oldest_wait_s()
        return QueueView(
            model=model,
            depth=Signal(value=float(len(self.waiting)), age_ms=0.0),
            oldest_wait_ms=UNKNOWN if wait_s is None else Signal(value=wait_s * 1e3, age_ms=0.0),
        )

    def look_later(self) -> None:
        """While something waits, replicas look without a wake now and then."""
        if not self._looking:
            self._looking = True
            self._loop.after(SAFETY_S, self._look)

    def _look(self) -> None:
        self._looking = False
        wait_s = self.oldest_wait_s()
        if wait_s is not None:
            if wait_s >= PULLED_S:
                self._claim_all()
            self.look_later()

    def _watch_deadlines(self) -> None:
        """End what has expired. All live equally long, so they expire in order of their arrival."""
        now_ms = self._loop.now_s * 1e3
        deadlines = self._deadlines
        while deadlines and (deadlines[0].status or deadlines[0].deadline_ms <= now_ms):
            request = deadlines.popleft()
            if not request.status:
                self._expire(request)
        self._watching = bool(deadlines)
        if deadlines:
            self._loop.at(deadlines[0].deadline_ms / 1e3, self._watch_deadlines)
