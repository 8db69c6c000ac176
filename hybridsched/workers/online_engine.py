"""What an online worker knows of its engine: is it there, what can it hold, what do its metrics say.

Runs beside the requests and never delays one: health and metrics have tasks of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from hybridsched.core.admission import Capacity
from hybridsched.engines.protocol import Engine, EngineError, EngineInfo
from hybridsched.log import get_logger
from hybridsched.telemetry.engine_metrics import EngineTracker
from hybridsched.workers.online_tasks import run_together

SCRAPE_S = 0.15
"""Between two readings of the metrics while the replica is idle: below the shortest useful idle window."""

BUSY_SCRAPE_S = 0.4
"""The same while it serves online requests: the lane is closed then, and parsing takes time from them."""

HEALTH_S = 0.5
RECOVERY_S = 0.1
"""Between two health checks while the engine is down, so that it serves again soon after it is back."""

HEALTH_TIMEOUT_S = 2.0
"""A health check of vLLM only asks whether its engine process lives; it answers in milliseconds."""

FAILURES = 2
"""Failed health checks in a row before an engine is called unhealthy: one may be lost under load."""

HUNG_S = 10.0
"""An engine that has been unhealthy this long is given up: the requests it holds are answered."""

_log = get_logger("online")


class EngineWatch:
    """Follows one engine.

    `changed` is called when it becomes healthy or stops being so, `hung` when it is given
    up; `held` tells how many online requests the worker has in the engine.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        held: Callable[[], int],
        changed: Callable[[bool], None],
        hung: Callable[[], None],
        hung_s: float = HUNG_S,
    ) -> None:
        self._engine = engine
        self._held = held
        self._changed = changed
        self._hung = hung
        self._hung_s = hung_s
        self._tracker = EngineTracker()
        self._look = asyncio.Event()
        self._scrape = asyncio.Event()
        self._down_since: float | None = None
        self._gave_up = False
        self.healthy = False
        self.checked_at: float | None = None
        """Monotonic seconds of the last finished health check."""
        self.info: EngineInfo | None = None

    @property
    def tracker(self) -> EngineTracker:
        return self._tracker

    @property
    def capacity(self) -> Capacity:
        """What the engine says it can hold; vLLM does not tell its sequence slots."""
        info = self.info
        if info is None:
            return Capacity()
        return Capacity(kv_tokens=info.kv_tokens, max_model_len=info.max_model_len)

    def suspect(self) -> None:
        """A request failed because the engine was not there: take nothing more until a check has passed.

        Without this a dead engine, failing fast, would look like the least loaded one and eat the queue.
        """
        if self.healthy:
            self._set(False)
        self._look.set()

    def scrape_now(self) -> None:
        """Read the metrics at once: the replica has just become idle."""
        self._scrape.set()

    async def run(self) -> None:
        """Until cancelled."""
        await run_together(health=self._watch_health(), metrics=self._watch_metrics())

    async def check(self) -> bool:
        """One health check, and what the engine says of itself when it came back. Returns its health."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                well = await self._engine.healthy()
        except TimeoutError:
            well = False
        if well and not self.healthy:
            try:
                self.info = await self._engine.info()
            except EngineError as error:
                _log.warning(
                    "The engine answers its health check but not what it serves; it is tried again.",
                    key="engine_info_failed",
                    url=self._engine.url,
                    error=str(error),
                )
                well = False
        self.checked_at = time.monotonic()
        return well

    async def _watch_health(self) -> None:
        failures = 0
        while True:
            self._look.clear()
            if await self.check():
                failures = 0
                self._down_since = None
                self._gave_up = False
                if not self.healthy:
                    self._set(True)
            else:
                failures += 1
                if self._down_since is None:
                    self._down_since = time.monotonic()
                if self.healthy and failures >= FAILURES:
                    self._set(False)
                if not self._gave_up and time.monotonic() - self._down_since >= self._hung_s:
                    self._gave_up = True
                    self._hung()
            await wait_for(self._look, HEALTH_S if failures == 0 else RECOVERY_S)

    async def _watch_metrics(self) -> None:
        while True:
            self._scrape.clear()
            try:
                stats = await self._engine.stats()
            except EngineError:
                pass  # the age of the last reading grows: that is what is published
            else:
                self._tracker.observe(stats, time.monotonic() * 1000.0, held=self._held())
            await wait_for(self._scrape, BUSY_SCRAPE_S if self._held() else SCRAPE_S)

    def _set(self, healthy: bool) -> None:
        self.healthy = healthy
        if healthy:
            _log.info(
                "The engine is healthy; online requests are taken.",
                key="engine_healthy",
                url=self._engine.url,
            )
        else:
            _log.warning(
                "The engine does not answer; no online request is taken until it does.",
                key="engine_unhealthy",
                url=self._engine.url,
            )
        self._changed(healthy)


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Until the event is set, at most `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
