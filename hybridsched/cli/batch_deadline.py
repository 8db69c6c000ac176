"""Whether a batch will be in time, for people and for programs."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from hybridsched.cli.words import span

if TYPE_CHECKING:
    from hybridsched.core.deadlines import Outlook
    from hybridsched.store.batch_reader import BatchReader
    from hybridsched.store.batch_values import BatchProgress


def outlook_of(store: BatchReader, progress: BatchProgress) -> dict[str, Any] | None:
    """How a batch stands towards its deadline; None: it has none, or has ended, or that cannot be seen."""
    import redis

    try:
        found = store.outlook(progress)
    except redis.ResponseError:
        return None  # a key of another type: what the lanes' part of the answer says
    if found is None:
        return None
    outlook, pace, now_ms = found
    return {
        "feasible": outlook.feasible,
        "urgent": outlook.urgent,
        "risk": outlook.risk,
        "expected_end_ms": outlook.ends_ms,
        "needs_tokens_per_s": outlook.needs_tokens_per_s,
        "tokens_per_s": pace,
        "message": deadline_text(outlook, pace, now_ms),
    }


def deadline_text(outlook: Outlook, pace: float | None, now_ms: float) -> str:
    """One sentence: whether it can be met, and if not, what would make it so."""
    if outlook.needs_tokens_per_s is None:
        return "the deadline is over"
    if pace is None:
        return "whether it can be met is not known yet: the pace of the last half minute is needed"
    if outlook.ends_ms is None or outlook.risk is None:
        return (
            "whether it can be met is not known: no offline work has run of late. It needs "
            f"{outlook.needs_tokens_per_s:,.0f} tokens/s"
        )
    ends = span(float(round(outlook.ends_ms - now_ms)))
    if outlook.feasible:
        first = "; it goes before other batches" if outlook.urgent else ""
        return f"at {pace:,.0f} tokens/s it ends in about {ends} if it goes first{first}"
    return (
        f"it cannot be met: at {pace:,.0f} tokens/s it ends in about {ends} even if it goes first. It needs "
        f"{outlook.needs_tokens_per_s:,.0f} tokens/s ({outlook.needs_tokens_per_s / pace:.1f} times as much: "
        f"more lanes, or less online load), fewer lines, or a deadline from {_when(outlook.ends_ms)} on"
    )


def _when(at_ms: float) -> str:
    return datetime.fromtimestamp(at_ms / 1000.0).astimezone().strftime("%Y-%m-%d %H:%M:%S")
