"""Ends requests whose model nobody serves, before their deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from hybridsched.client.errors import NotServed
from hybridsched.client.waiting import Waiter
from hybridsched.store.serving import Serving

_log = logging.getLogger("hybridsched.client")


class ModelWatch:
    """Looks after requests that were accepted while no replica of their model was live.

    After `patience_s` without one they fail, but only when the pool serves other models and neither telemetry
    nor policy knows theirs: a worker that is being started must be waited for. None: never.
    """

    def __init__(self, look: Callable[[str], Awaitable[Serving]], patience_s: float | None) -> None:
        self._look = look
        self._patience_s = patience_s
        self._waiting: dict[str, dict[Waiter, tuple[str, float]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def watch(self, model: str, request_id: str, waiter: Waiter) -> None:
        """Look after this one too."""
        if self._patience_s is None:
            return
        due = asyncio.get_running_loop().time() + self._patience_s
        self._waiting.setdefault(model, {}).setdefault(waiter, (request_id, due))
        if model not in self._tasks:
            self._tasks[model] = asyncio.create_task(self._run(model, self._patience_s))

    def forget(self, model: str, waiter: Waiter) -> None:
        """This one waits no more."""
        waiting = self._waiting.get(model)
        if waiting is not None:
            waiting.pop(waiter, None)

    def stop(self) -> set[asyncio.Task[None]]:
        """Look no more. Returns what is still to be cancelled and awaited."""
        return set(self._tasks.values())

    async def _run(self, model: str, patience_s: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            while waiting := self._waiting.get(model):
                await asyncio.sleep(max(0.0, min(due for _, due in waiting.values()) - loop.time()))
                if not waiting:
                    return
                found = await self._look(model)
                if found.expected:
                    return
                now = loop.time()
                for waiter, (request_id, due) in list(waiting.items()):
                    if due > now:
                        continue
                    if found.models:
                        waiter.fail(_not_served(request_id, model, found, patience_s))
                        del waiting[waiter]
                    else:  # nothing is served: the whole pool may be starting
                        waiting[waiter] = (request_id, now + patience_s)
        except Exception as error:  # noqa: BLE001 - unknown is not "not served": the deadline decides
            _log.info(
                "Which models are served could not be read (%s); deadlines decide.", type(error).__name__
            )
        finally:
            del self._tasks[model]
            self._waiting.pop(model, None)


def _not_served(request_id: str, model: str, found: Serving, patience_s: float) -> NotServed:
    return NotServed(
        request_id,
        f"no replica serves model {model} for {patience_s:g} s; models served: {', '.join(found.models)}",
    )
