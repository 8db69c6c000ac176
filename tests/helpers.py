"""Waiting with a deadline, and whether a process runs. Nothing here sleeps for a fixed time and hopes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path


def wait_until(check: Callable[[], object], *, timeout_s: float = 10.0, what: str = "the condition") -> None:
    """Poll `check` until it is true; fail the test with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come within {timeout_s} s")
        time.sleep(0.01)


async def await_until(
    check: Callable[[], object | Awaitable[object]], *, timeout_s: float = 10.0, what: str = "the condition"
) -> None:
    """The same for coroutines."""
    deadline = time.monotonic() + timeout_s
    while True:
        outcome = check()
        if asyncio.iscoroutine(outcome) or isinstance(outcome, asyncio.Future):
            outcome = await outcome
        if outcome:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come within {timeout_s} s")
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs. One that ended and whose parent has not asked for its status does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
