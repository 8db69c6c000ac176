"""Who takes a waiting online request: the rule by which replicas pull, as `claim.lua` carries it out.

No router stands in the way of a request. A replica that asks is given requests, most urgent class first,
while it has room and no other replica with room carries less load by more than the slack. Loads are those
of the replicas' records, so those of others may be out of date by a record's age; its own are exact.

Where a pack order is in force (`core.packing`), the lowest rank below its caps is given requests before all
others, and wakes go to it. When every ranked replica with room stands at its caps, or the order's lease is
over, load decides as above.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Protocol

from hybridsched.core.values import Value


class Terms(Value, frozen=True, kw_only=True):
    """What a pool's replicas agree on."""

    slack_tokens: float = 256.0
    """A replica may take a first request while it carries at most this much more load than the best other."""
    patience_ms: float = 25.0
    """A request that has waited this long goes to whoever asks: the better replica may be dead or slow."""
    decode_weight: float = 0.05
    """Load of a token to decode; one of a prompt is 1."""


class Waits(Protocol):
    """A request that nobody has claimed."""

    accepted_ms: float
    deadline_ms: float
    prompt_tokens: int
    cost: int
    """Prompt and most output, tokens."""


class Turn(Value, frozen=True, kw_only=True):
    """A replica's place in the pack order, while the lease holds."""

    rank: int
    max_inflight: int
    max_load: float

    def below(self, load: float, inflight: int) -> bool:
        """Whether a replica that carries this is below its caps."""
        return inflight < self.max_inflight and load < self.max_load


class Asker(Value, frozen=True, kw_only=True):
    """The replica that claims, by its own exact numbers."""

    load: float
    inflight: int
    room: int
    """Most that it takes now."""
    turn: Turn | None = None
    """None: it has no place in a pack order, or none that is in force."""


class Others(Value, frozen=True, kw_only=True):
    """The other live replicas of the model that have room, by their records."""

    load: float
    """Load and requests of the least loaded of them (of equals the one with fewer requests)."""
    inflight: int
    count: int
    """How many there are."""
    first: int | None = None
    """The lowest rank among those of them that stand below their caps; None: none does."""


class Grant(Value, frozen=True, kw_only=True):
    """What a claim is given."""

    taken: tuple[int, ...]
    """From the front of each class's queue, expired ones included."""
    live: int
    """Those of them that are to run."""
    load: float
    inflight: int
    """The asker's load and requests with them."""


def load_of(request: Waits, terms: Terms) -> float:
    """What a request adds to its replica's load."""
    return request.prompt_tokens + terms.decode_weight * max(0, request.cost - request.prompt_tokens)


def claim(
    queues: Sequence[Sequence[Waits]], asker: Asker, others: Others | None, terms: Terms, *, now_ms: float
) -> Grant:
    """How much of each queue (most urgent first, each oldest first) the asker may take at `now_ms`.

    `others` is None when no other replica has room. The slack, which is for loads that are out of date, holds
    for the first request and for an even share of what waits. In a pack order a replica below its caps takes
    while none of a lower rank is. Expired requests are handed over too, to be
    answered; they count neither as load nor as room.
    """
    load, inflight, room = asker.load, asker.inflight, asker.room
    taken = [0] * len(queues)
    live = 0
    share = 1
    if others is not None:
        share = max(1, ceil(sum(map(len, queues)) / (others.count + 1)))
    for place, queue in enumerate(queues):
        at, length = 0, len(queue)
        while at < length and room > 0:
            request = queue[at]
            if (
                others is not None
                and not _may_take(load, inflight, asker.turn, others, terms, first=live < share)
                and request.accepted_ms + terms.patience_ms > now_ms
            ):
                break
            at += 1
            if request.deadline_ms > now_ms:
                load += load_of(request, terms)
                inflight += 1
                room -= 1
                live += 1
        taken[place] = at
    return Grant(taken=tuple(taken), live=live, load=load, inflight=inflight)


def _may_take(
    load: float, inflight: int, turn: Turn | None, others: Others, terms: Terms, *, first: bool
) -> bool:
    """Whether it is the asker's turn, patience aside. `first`: its even share is not over yet."""
    below = turn is not None and turn.below(load, inflight)
    if others.first is not None:
        return below and turn is not None and turn.rank < others.first
    if below or (first and load <= others.load + terms.slack_tokens):
        return True
    return load < others.load or (load == others.load and inflight <= others.inflight)
