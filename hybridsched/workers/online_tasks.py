"""Loops that run side by side until they are told to end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from hybridsched.store.tasks import end_tasks


async def run_together(**loops: Coroutine[Any, Any, None]) -> None:
    """Run loops, by name, until cancelled or until one of them fails; then end all of them.

    No TaskGroup: it cancels its tasks once, and a cancellation can be lost within redis-py (see `end_tasks`).
    Raises what the first loop that failed raised.
    """
    tasks = [asyncio.create_task(loop, name=name) for name, loop in loops.items()]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        await end_tasks(*tasks)
