"""When the next cycle of the policy worker runs."""

from __future__ import annotations

import asyncio
import contextlib
import time

from hybridsched.core.policy import CyclePolicy, PoolPolicy
from hybridsched.core.values import GateDecision
from hybridsched.workers.policy_observe import Observation

COALESCE_MS = (1.0, 20.0)
"""Least and most that a nudge waits for others. Within these: a quarter of the idle window, so that the cycle
after a replica fell idle comes well before its window is over, however many nudges there are."""

MARGIN_MS = 0.2
"""A look at the end of an idle window comes this much after it, lest rounding makes it too early."""


class Pace:
    """Waits for whichever comes first: the interval, the end of an idle window, a nudge, the end."""

    def __init__(self) -> None:
        self._due = 0.0
        self._coalesce_s = COALESCE_MS[1] / 1000.0
        self._wake = asyncio.Event()
        self._ended = False
        self.nudges = 0

    def nudge(self) -> None:
        """Something changed: run a cycle soon."""
        self.nudges += 1
        self._wake.set()

    def end(self) -> None:
        """Wait for nothing any more."""
        self._ended = True
        self._wake.set()

    def plan(self, seen: Observation, decisions: tuple[GateDecision, ...], policy: PoolPolicy | None) -> None:
        """After a cycle: when must the next one run at the latest."""
        cycle = CyclePolicy() if policy is None else policy.cycle
        window_ms = COALESCE_MS[1] * 4 if policy is None else policy.idle.window_ms
        self._coalesce_s = min(max(window_ms / 4.0, COALESCE_MS[0]), COALESCE_MS[1]) / 1000.0
        wait_s = cycle.interval_ms / 1000.0
        checks = [d.check_in_ms for d in decisions if d.check_in_ms is not None]
        if checks:
            wait_s = min(wait_s, (max(min(checks), 0.0) + MARGIN_MS) / 1000.0)
        if seen.look_again:
            wait_s = min(wait_s, self._coalesce_s)
        self._due = seen.mono_s + wait_s

    async def wait(self, last_cycle_s: float) -> None:
        """Until the next cycle. Nudges never take more than about half of a core: the gap is at least as long
        as the last cycle took."""
        ready = time.monotonic() + last_cycle_s
        if await self._woken(self._due - time.monotonic()):
            soon = max(time.monotonic() + self._coalesce_s, ready)
            if not self._ended:
                await asyncio.sleep(max(0.0, min(soon, self._due) - time.monotonic()))
        self._wake.clear()

    async def sleep(self, seconds: float) -> None:
        """For this long, or until the end."""
        until = time.monotonic() + seconds
        while not self._ended and (left := until - time.monotonic()) > 0:
            self._wake.clear()
            await self._woken(left)

    async def _woken(self, seconds: float) -> bool:
        if seconds <= 0:
            # Also an overdue cycle lets the listener have its turn.
            await asyncio.sleep(0)
            return False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)
        return self._wake.is_set()
