"""What an online worker knows of its engine: is it there, what can it hold, what do its metrics say.

Whether it may be used is decided by `core.engine_health`; here it is looked at, and the decisions are carried
out. Runs beside the requests and never delays one: health and metrics have tasks of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from hybridsched.core import engine_health as health
from hybridsched.core.admission import Capacity
from hybridsched.core.latency import IterationTimes, Reading
from hybridsched.core.policy import HealthPolicy
from hybridsched.engines.checks import check_serves
from hybridsched.engines.protocol import Engine, EngineError, EngineInfo
from hybridsched.log import get_logger
from hybridsched.telemetry.engine_metrics import EngineTracker
from hybridsched.workers.engine_keeper import EngineKeeper
from hybridsched.workers.online_tasks import run_together

SCRAPE_S = 0.15
"""Between two readings of the metrics while the replica is idle: below the shortest useful idle window."""

BUSY_SCRAPE_S = 0.4
"""The same while it serves online requests: the lane is closed then, and parsing takes time from them."""

HEALTH_S = 0.5
RECOVERY_S = 0.1
"""Between two health checks while the engine is down, so that it serves again soon after it is back."""

MODELS_S = 5.0
"""Between two looks at what a healthy engine serves: one that was restarted can come up with another model
within one health check. A refusal that could mean it, and counters that fell, are looked into at once."""

HEALTH_TIMEOUT_S = 2.0
"""A health check of vLLM only asks whether its engine process lives; it answers in milliseconds."""

FAILURES = 2
"""Failed health checks in a row before an engine is called unhealthy: one may be lost under load."""

HUNG_S = 10.0
"""An engine that has been unhealthy this long is given up: the requests it holds are answered."""

_log = get_logger("online")


class EngineWatch:
    """Follows one engine, which must serve `model`.

    `changed` is called when it becomes usable or stops being so; `hung` when it has been away for too long,
    `ended` when it is taken out though it is there: the requests that it holds are to be ended then. `held`
    tells how many online requests the worker has in the engine, `offline` how many the lane's worker says it
    has there, and when (monotonic ms) it said so. `memory` is asked in a thread for the engine's MiB.
    `restart` is called when it has to be started again; `restarts` counts that for those who look from
    outside.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model: str,
        held: Callable[[], int],
        offline: Callable[[], tuple[int, float]] = lambda: (0, 0.0),
        changed: Callable[[bool], None],
        hung: Callable[[], None],
        ended: Callable[[], None] = lambda: None,
        hung_s: float = HUNG_S,
        limits: Callable[[], HealthPolicy] = HealthPolicy,
        memory: Callable[[], float | None] = lambda: None,
        restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._model = model
        self._held = held
        self._offline = offline
        self._changed = changed
        self._hung = hung
        self._hung_s = hung_s
        self._keeper = EngineKeeper(
            engine,
            model=model,
            limits=limits,
            memory=memory,
            changed=self._set,
            ended=ended,
            restart=restart,
        )
        self._tracker = EngineTracker()
        self._times = IterationTimes()
        self._look = asyncio.Event()
        self._scrape = asyncio.Event()
        self._down_since: float | None = None
        self._gave_up = False
        self._models_at = 0.0
        self._broken: set[str] = set()
        self._asleep = False
        self._restarted = False
        self._model_fault = ""
        self.healthy = False
        self.checked_at: float | None = None
        """Monotonic seconds of the last finished health check."""
        self.info: EngineInfo | None = None

    @property
    def fault(self) -> str:
        """The code of what is wrong with an engine that answers its health check; empty when nothing is."""
        return self._model_fault or self._keeper.fault

    @property
    def restarts(self) -> int:
        """How often the engine had to be started again so far."""
        return self._keeper.restarts

    @property
    def tracker(self) -> EngineTracker:
        return self._tracker

    @property
    def times(self) -> IterationTimes:
        """How long its iterations take; readings are stamped with monotonic milliseconds."""
        return self._times

    @property
    def capacity(self) -> Capacity:
        """What the engine says it can hold; vLLM does not tell its sequence slots."""
        info = self.info
        if info is None:
            return Capacity()
        return Capacity(kv_tokens=info.kv_tokens, max_model_len=info.max_model_len)

    def suspect(self) -> None:
        """A request failed because the engine was not there: take nothing more until it has passed the test.

        Without this a dead engine, failing fast, would look like the least loaded one and eat the queue.
        """
        if self.healthy:
            self._set(False, "a request found it gone, or its answer was none")
        self._keeper.suspect()
        self._look.set()

    def answered(self) -> None:
        """The engine has sent a token or an answer: it does not hang."""
        self._keeper.answered()

    async def confirm(self) -> None:
        """Look now whether the engine serves the model.

        Raises:
            EngineError: engine_wrong_model, and it is unhealthy from here on; or it does not say so now.
        """
        try:
            info = await self._engine.info()
            check_serves(info, self._model, self._engine.url)
        except EngineError as error:
            self._model_fault = error.code if error.code == "engine_wrong_model" else ""
            if self._model_fault:
                if self.healthy:
                    self._set(False, str(error))
                self._keeper.take(self._seen(up=False))
            raise
        self.info, self._model_fault, self._models_at = info, "", time.monotonic()

    def scrape_now(self) -> None:
        """Read the metrics at once: the replica has just become idle."""
        self._scrape.set()

    async def run(self) -> None:
        """Until cancelled."""
        await run_together(
            health=self._watch_health(), metrics=self._watch_metrics(), keeper=self._keeper.run()
        )

    async def check(self) -> bool:
        """One health check, and what the engine says of itself when it came back. Returns its health."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                well = await self._engine.healthy()
        except TimeoutError:
            well = False
        if not well:
            self._model_fault = ""
        elif self._keeper.down or time.monotonic() - self._models_at >= MODELS_S:
            was = self._model_fault
            try:
                await self.confirm()
            except EngineError as error:
                if not was or self._model_fault != was:
                    _log.warning(
                        "The engine answers its health check but does not say that it serves the model; it "
                        "is tried again.",
                        key=self._model_fault or "engine_info_failed",
                        url=self._engine.url,
                        error=str(error),
                    )
                well = False
        self.checked_at = time.monotonic()
        return well

    async def _check_whatever(self) -> bool:
        """A check. An engine whose answer breaks it in a way that nothing here foresees is not healthy."""
        try:
            return await self.check()
        except Exception:  # noqa: BLE001 - the loop's edge; said in the log, and nothing is claimed
            self._say_once("health")
            self.checked_at = time.monotonic()
            return False

    def _say_once(self, what: str) -> None:
        if what not in self._broken:
            self._broken.add(what)
            _log.exception(
                "The engine's answer broke its check, which counts as failed; it is tried again.",
                key="engine_check_broke",
                what=what,
                url=self._engine.url,
            )

    async def _watch_health(self) -> None:
        failures = 0
        while True:
            self._look.clear()
            well = await self._check_whatever()
            failures = 0 if well else failures + 1
            if well:
                self._down_since = None
                self._gave_up = False
            elif self._down_since is None:
                self._down_since = time.monotonic()
            was_up = not self._keeper.down
            self._keeper.take(
                self._seen(up=well or (was_up and not self._model_fault and failures < FAILURES))
            )
            if (
                self._down_since is not None
                and not self._gave_up
                and time.monotonic() - self._down_since >= self._hung_s
            ):
                self._gave_up = True
                self._hung()
            await wait_for(self._look, HEALTH_S if failures == 0 else RECOVERY_S)

    def _seen(self, *, up: bool) -> health.Seen:
        """What is known of the engine now."""
        now, last = time.monotonic() * 1000.0, self._tracker.last
        metrics_ms = None if last is None else now - last.at_ms
        still_ms = None
        if last is not None and last.frozen_ms is not None:
            still_ms = last.frozen_ms and last.frozen_ms + (metrics_ms or 0.0)
        restarted, self._restarted = self._restarted, False
        return health.Seen(
            now_ms=now,
            up=up,
            restarted=restarted,
            asleep=self._asleep,
            still_ms=still_ms,
            metrics_ms=metrics_ms,
            memory_mib=self._keeper.memory_mib,
            held=self._held(),
        )

    async def _watch_metrics(self) -> None:
        while True:
            self._scrape.clear()
            try:
                await self._read_metrics()
            except EngineError:
                pass  # the age of the last reading grows: that is what is published
            except Exception:  # noqa: BLE001 - the loop's edge; said in the log, and the last reading ages
                self._say_once("metrics")
            await wait_for(self._scrape, BUSY_SCRAPE_S if self._held() else SCRAPE_S)

    async def _read_metrics(self) -> None:
        stats = await self._engine.stats()
        resets = 0 if self._tracker.last is None else self._tracker.last.resets
        at_ms = time.monotonic() * 1000.0
        self._times.observe(
            Reading(
                at_ms=at_ms,
                iterations=stats.iterations_total,
                tokens=stats.computed_tokens,
                kv_use=stats.kv_use,
                running=stats.running,
            )
        )
        said, said_at_ms = self._offline()
        seen = self._tracker.observe(stats, at_ms, held=self._held(), said=said, said_at_ms=said_at_ms)
        asleep = stats.awake == 0.0
        if seen.resets != resets:
            self._models_at = 0.0  # restarted: with which model?
            self._restarted = True
        if seen.resets != resets or asleep != self._asleep:
            self._asleep = asleep
            self._look.set()

    def _set(self, healthy: bool, why: str = "") -> None:
        if healthy == self.healthy:
            return
        self.healthy = healthy
        if healthy:
            _log.info(
                "The engine is healthy; online requests are taken.",
                key="engine_healthy",
                url=self._engine.url,
            )
        else:
            _log.warning(
                "The engine cannot be used; no online request is taken until a check passes.",
                key="engine_unhealthy",
                url=self._engine.url,
                why=why,
            )
        self._changed(healthy)


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Until the event is set, at most `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
