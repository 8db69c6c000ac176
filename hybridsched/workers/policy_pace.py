"""When the next cycle of the policy worker runs."""

from __future__ import annotations

import asyncio
import contextlib
import time

from hybridsched.core.cycles import COALESCE_MS, coalesce_ms, wait_ms
from hybridsched.core.policy import PolicyKind, PoolPolicy
from hybridsched.core.values import GateDecision
from hybridsched.workers.policy_observe import Observation

_NONE = PoolPolicy(name="none", kind=PolicyKind.ONLINE_ONLY)
"""Its times hold while there is no policy."""


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
        policy = policy or _NONE
        self._coalesce_s = coalesce_ms(policy) / 1000.0
        self._due = seen.mono_s + wait_ms(policy, decisions, look_again=seen.look_again) / 1000.0

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
