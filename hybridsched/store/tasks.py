"""Ending tasks that talk to Redis."""

from __future__ import annotations

import asyncio
from typing import Any

ASK_AGAIN_S = 0.05


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended, whatever they end with.

    One `cancel` is not enough: `asyncio.wait_for` of Python 3.11, with which redis-py sends, swallows a
    cancellation that comes in the moment its own work is done (gh-86296, mended in 3.12).
    """
    waiting = {task for task in tasks if not task.done()}
    while waiting:
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=ASK_AGAIN_S)
    # Fetched, so that asyncio does not report an error that nobody waits for.
    await asyncio.gather(*tasks, return_exceptions=True)
