"""Offline requests that nobody pauses any more: their worker has fallen silent and their lane is closed.

A worker that is frozen (stopped by a signal, starved, on a machine that hangs) keeps its connections, so the
engine goes on with its requests beside online ones. Whoever stands beside the engine ends them instead. The
worker finds them ended with their tokens when it wakes, as after any pause, and goes on from there.

`step` is pure; times are the Redis server's, in ms.
"""

from __future__ import annotations

from collections.abc import Iterable

from hybridsched.core.values import Value

PREFIX = "hsoff-"
"""Every id of an offline request begins so."""

SILENT_MS = 1_000.0
"""A lane's worker speaks four times a second at least; one that says nothing for this long may be frozen."""

AGAIN_MS = 1_000.0
TRIES = 3
"""An abort may overtake a request that is still on its way to the engine, so it is sent again, but not for
ever: who is silent sends nothing more."""

AHEAD = 1_024
"""Requests that a worker may have sent since it last spoke, at most; a lane sends far fewer in that time."""


class OrphanState(Value, frozen=True, kw_only=True):
    """What is known of one lane from step to step."""

    closed_since_ms: float | None = None
    tries: int = 0
    tried_ms: float = 0.0


def step(
    state: OrphanState, *, now_ms: float, gate_open: bool, grace_ms: float, heard_ms: float | None
) -> tuple[OrphanState, bool]:
    """Whether the lane's requests are to be ended at the engine now.

    `heard_ms`: when its worker last spoke; None: none stands there. `grace_ms`: how long after a close its
    requests may still run.
    """
    if gate_open or heard_ms is None:
        return OrphanState(), False
    since_ms = now_ms if state.closed_since_ms is None else state.closed_since_ms
    if now_ms - heard_ms <= SILENT_MS:
        return OrphanState(closed_since_ms=since_ms), False
    due = (
        now_ms - since_ms > grace_ms + SILENT_MS
        and state.tries < TRIES
        and (not state.tries or now_ms - state.tried_ms >= AGAIN_MS)
    )
    if not due:
        return OrphanState(closed_since_ms=since_ms, tries=state.tries, tried_ms=state.tried_ms), False
    return OrphanState(closed_since_ms=since_ms, tries=state.tries + 1, tried_ms=now_ms), True


def left_behind(tag_before: str, tag_now: str) -> bool:
    """Whether another worker speaks for the lane now. What the one before it has in the engine is nobody's:
    it stands in no budget, and its worker has lost the lane or has left.
    """
    return bool(tag_before) and tag_before != tag_now


def request_id(tag: str, number: int) -> str:
    """The id of a worker's request. `tag` tells workers apart, numbers are given out once, in order."""
    return f"{PREFIX}{tag}-{number}"


def orphan_ids(tag: str, numbers: Iterable[int], next_number: int) -> list[str]:
    """Ids of all that a silent worker can have in its engine.

    `numbers`: what it had there when it last spoke; from `next_number` on comes what it may have sent since.
    """
    return [request_id(tag, number) for number in (*numbers, *range(next_number, next_number + AHEAD))]
