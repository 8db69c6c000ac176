"""When the next cycle of the policy worker runs: at an interval, at the end of an idle window, soon after a
nudge."""

from __future__ import annotations

from collections.abc import Iterable

from hybridsched.core.policy import PoolPolicy
from hybridsched.core.values import GateDecision

COALESCE_MS = (1.0, 20.0)
"""Least and most that a nudge waits for others. Within these: a quarter of the idle window, so that the cycle
after a replica fell idle comes well before its window is over, however many nudges there are."""

MARGIN_MS = 0.2
"""A look at the end of an idle window comes this much after it, lest rounding makes it too early."""


def coalesce_ms(policy: PoolPolicy) -> float:
    """How long a nudge waits for others."""
    return min(max(policy.idle.window_ms / 4.0, COALESCE_MS[0]), COALESCE_MS[1])


def wait_ms(policy: PoolPolicy, decisions: Iterable[GateDecision], *, look_again: bool = False) -> float:
    """From a cycle's look at the pool to the next one, if nobody nudges. `look_again`: something was
    unclear."""
    wait = policy.cycle.interval_ms
    checks = [d.check_in_ms for d in decisions if d.check_in_ms is not None]
    if checks:
        wait = min(wait, max(min(checks), 0.0) + MARGIN_MS)
    return min(wait, coalesce_ms(policy)) if look_again else wait
