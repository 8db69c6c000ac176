"""Online requests of the twin, and the records by which its replicas pull them."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from hybridsched.core.routing import Others, Turn
from hybridsched.twin.request import TwinRequest


class OnlineRequest:
    """One online request from the trace to its end. Times are seconds on the loop's clock."""

    __slots__ = (
        "accepted_ms",
        "arrival_s",
        "claimed_s",
        "cost",
        "deadline_ms",
        "end_s",
        "first_s",
        "index",
        "last_s",
        "load",
        "output_tokens",
        "prompt_tokens",
        "replica",
        "status",
        "twin",
    )

    def __init__(self, index: int, arrival_s: float, prompt_tokens: int, output_tokens: int) -> None:
        self.index = index
        self.arrival_s = arrival_s
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.cost = prompt_tokens + output_tokens
        self.accepted_ms = 0.0
        self.deadline_ms = inf
        self.claimed_s: float | None = None
        self.first_s: float | None = None
        """When its first and its last token were at the client."""
        self.last_s: float | None = None
        self.end_s: float | None = None
        self.status = ""
        """ok, expired or failed; empty while it has not ended."""
        self.replica = -1
        self.load = 0.0
        """What it adds to its replica's load now."""
        self.twin: TwinRequest | None = None


_FULL = (inf, 0)


class Board:
    """The hash of replicas that claims and wakes go by: what each of them last said of its load.

    A record that a worker is about to write is written as of its time, when somebody looks.
    """

    def __init__(self, replicas: int, pause_s: float) -> None:
        self._keys: list[tuple[float, int]] = [(0.0, 0)] * replicas
        """(load, requests) by replica; a full one carries an infinite load."""
        self.woken = [False] * replicas
        """A wake was published and the replica has not claimed since, so no second one is needed."""
        self._roomy = replicas
        self._pause_s = pause_s
        self._written_s = [-inf] * replicas
        self._due: dict[int, tuple[float, tuple[float, int]]] = {}
        self._due_heap: list[tuple[float, int]] = []
        """When the next of them is due; entries of those that were written before are passed over."""
        self._turns: list[tuple[int, Turn]] = []
        """The pack order as published: replicas by rank."""
        self._turn_of: dict[int, Turn] = {}
        self._order_until_s = -inf

    def put_in_order(self, turns: list[tuple[int, Turn]], until_s: float) -> None:
        """A pack order was published or renewed; its lease ends at `until_s`."""
        if turns is not self._turns:
            self._turns = turns
            self._turn_of = dict(turns)
        self._order_until_s = until_s

    def turn(self, replica: int, now_s: float) -> Turn | None:
        """The replica's place in the order that is in force."""
        return self._turn_of.get(replica) if now_s < self._order_until_s else None

    def _first(self, now_s: float, but: int) -> tuple[int, int] | None:
        """The replica below its caps of the lowest rank, and that rank."""
        if now_s >= self._order_until_s:
            return None
        keys = self._keys
        for replica, turn in self._turns:
            load, inflight = keys[replica]
            # `turn.below`, written out: most of them are full, and this is asked twice a request.
            if inflight < turn.max_inflight and load < turn.max_load and replica != but:
                return replica, turn.rank
        return None

    def write(self, replica: int, load: float, inflight: int, *, room: bool) -> None:
        """A claim has written the replica's record."""
        self._put(replica, (load, inflight) if room else _FULL)

    def _put(self, replica: int, key: tuple[float, int]) -> None:
        old = self._keys[replica]
        if (old is _FULL) is not (key is _FULL):
            self._roomy += 1 if old is _FULL else -1
        self._keys[replica] = key

    def will_write(self, replica: int, load: float, inflight: int, *, room: bool, now_s: float) -> None:
        """The replica's load has fallen to this: its record follows, but not too soon after the one
        before."""
        pending = self._due.get(replica)
        due_s = None if pending is None else pending[0]
        if pending is not None and pending[0] <= now_s:
            self._written_s[replica] = pending[0]
            self._put(replica, pending[1])
            due_s = None
        if due_s is None:
            due_s = max(now_s, self._written_s[replica] + self._pause_s)
            heappush(self._due_heap, (due_s, replica))
        self._due[replica] = (due_s, (load, inflight) if room else _FULL)

    def _settle(self, now_s: float) -> None:
        heap, due = self._due_heap, self._due
        while heap and heap[0][0] <= now_s:
            due_s, replica = heappop(heap)
            pending = due.get(replica)
            if pending is not None and pending[0] == due_s:
                del due[replica]
                self._written_s[replica] = due_s
                self._put(replica, pending[1])

    def least_loaded(self, now_s: float, but: int = -1) -> tuple[int, Others] | None:
        """The replica to wake: with room and the least load (of equals the one with fewer requests), or the
        first of the pack order below its caps; and what the one of the least load says."""
        if self._due_heap and self._due_heap[0][0] <= now_s:
            self._settle(now_s)
        keys = self._keys
        if but < 0:
            best = min(keys)
            at = keys.index(best)
            roomy = self._roomy
        else:
            own = keys[but]
            keys[but] = _FULL
            best = min(keys)
            at = keys.index(best)
            keys[but] = own
            roomy = self._roomy - (own is not _FULL)
        if roomy <= 0:
            return None
        first = self._first(now_s, but) if self._turns else None
        if first is not None:
            return first[0], Others(load=best[0], inflight=best[1], count=roomy, first=first[1])
        return at, Others(load=best[0], inflight=best[1], count=roomy)
