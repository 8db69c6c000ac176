"""The keeper of one engine's health: has `core.engine_health` decide, sends the test, acts on the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from hybridsched.core import engine_health as health
from hybridsched.core.policy import HealthPolicy
from hybridsched.engines.protocol import Engine, EngineError, EngineStats
from hybridsched.log import get_logger
from hybridsched.store.tasks import end_tasks
from hybridsched.workers.engine_probe import EngineProbe

MEMORY_S = 5.0
"""Between two looks at the memory of the engine's processes, where the policy has a limit."""

MOVED_S = 2.0
"""A counter that does not move within this after an answer stands still: a page may be a scrape old."""

_LOOK_S = 0.15

_log = get_logger("online")


class EngineKeeper:
    """Everything happens on one event loop; nothing here delays a request.

    `changed` is called with whether the engine serves, and why not; `ended` when the requests that it holds
    are to be ended; `restart` when it has to be started again. `memory` is asked in a thread for its MiB.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model: str,
        limits: Callable[[], HealthPolicy],
        memory: Callable[[], float | None],
        changed: Callable[[bool, str], None],
        ended: Callable[[], None],
        restart: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._memory = memory
        self._changed = changed
        self._ended = ended
        self._restart = restart
        self._state = health.EngineHealth()
        self._serves = False
        self._test = EngineProbe(engine, model=model)
        self._testing: asyncio.Task[None] | None = None
        self._usual: tuple[str, ...] | None = None
        """What this engine process has answered to the test."""
        self._answered_at = 0.0
        self._broken: set[str] = set()
        self.memory_mib: float | None = None
        self.restarts = 0
        """How often the engine had to be started again so far."""

    @property
    def down(self) -> bool:
        """Whether it was not there at the last look."""
        return self._state.phase is health.Phase.DOWN

    @property
    def fault(self) -> str:
        """Why an engine that is there cannot be used, as a code; empty when it can, or nobody knows yet."""
        return self._state.fault.value

    async def run(self) -> None:
        """Look at the memory until cancelled; then no test is out any more."""
        try:
            while True:
                if self._limits().memory_growth_mib is not None:
                    await self._weigh()
                await asyncio.sleep(MEMORY_S)
        finally:
            if self._testing is not None:
                await end_tasks(self._testing)

    def suspect(self) -> None:
        """A request failed as if the engine were gone: it serves no more until it has passed the test."""
        self.take(health.Suspected(now_ms=_now_ms()))

    def answered(self) -> None:
        """The engine has sent a token or an answer: it does not hang."""
        self._answered_at = time.monotonic()

    def take(self, event: health.Event) -> None:
        """Have an event decided on, and carry out what comes of it."""
        self._state, orders = health.step(self._state, event, self._limits())
        if self.down or (isinstance(event, health.Seen) and event.restarted):
            self._usual, self.memory_mib = None, None
        if self._state.serves != self._serves:
            # Before the orders: what is given back must not be taken again here.
            self._serves = self._state.serves
            self._changed(self._serves, _WORDS.get(self._state.phase, ""))
        for order in orders:
            self._carry_out(order)

    def _carry_out(self, order: health.Order) -> None:
        match order:
            case health.Test():
                if self._testing is not None:
                    self._testing.cancel()
                self._testing = asyncio.get_running_loop().create_task(self._try(), name="engine-test")
            case health.EndRequests(fault=fault):
                _log.error(
                    "The engine was taken out; the requests that it holds are given back, or answered as "
                    "failed where tokens were sent.",
                    key="engine_taken_out",
                    fault=fault.value,
                    url=self._engine.url,
                )
                self._ended()
            case health.Restart(fault=fault):
                self.restarts += 1
                _log.error(
                    "The engine has to be started again; it serves when it has passed its test.",
                    key="engine_restart_wanted",
                    fault=fault.value,
                    url=self._engine.url,
                    restarts=self.restarts,
                )
                self._restart()
            case health.GiveUp(fault=fault):
                _log.error(
                    "The engine was started again as often as the policy allows (health.restarts) and stays "
                    "out. See its own log.",
                    key="engine_restarts_used_up",
                    fault=fault.value,
                    url=self._engine.url,
                )

    async def _try(self) -> None:
        """The test, and what came of it."""
        limit_s = self._limits().test_ms / 1000.0
        began = time.monotonic()
        before = await self._counters()
        try:
            answer = await self._test.ask(limit_s)
        except EngineError as error:
            # One that has just refused a request because it is full may well have done nothing since.
            since = began if error.code == "engine_timeout" else began - limit_s
            progress = self._answered_at >= since or bool(await self._moved(before, 0.0))
            if error.code == "engine_timeout" or (error.code == "engine_busy" and progress):
                self.take(health.Unanswered(now_ms=_now_ms(), progress=progress))
            else:
                self.take(health.Failed(now_ms=_now_ms()))
            return
        except Exception:  # noqa: BLE001 - the task's edge: without an event the engine would never serve
            self._say_once("test")
            self.take(health.Failed(now_ms=_now_ms()))
            return
        self.answered()
        doubted = self._state.phase in (health.Phase.DOUBTED, health.Phase.OUT)
        moved = await self._moved(before, MOVED_S) if doubted else None
        right = answer is None or self._usual is None or not health.wrong_answer(self._usual, answer)
        if self._usual is None:
            self._usual = answer
        self.take(health.Answered(now_ms=_now_ms(), right=right, moved=moved))

    async def _counters(self) -> EngineStats | None:
        try:
            return await self._engine.stats()
        except EngineError:
            return None
        except Exception:  # noqa: BLE001 - metrics that break their reading are unknown, as everywhere
            self._say_once("metrics")
            return None

    async def _moved(self, before: EngineStats | None, within_s: float) -> bool | None:
        """Whether a counter has moved since, or does within that time; None: they cannot be read."""
        deadline = time.monotonic() + within_s
        while True:
            now = await self._counters()
            moved = None if before is None or now is None else _grew(before, now)
            if moved or time.monotonic() >= deadline:
                return moved
            await asyncio.sleep(_LOOK_S)

    async def _weigh(self) -> None:
        try:
            self.memory_mib = await asyncio.to_thread(self._memory)
        except Exception:  # noqa: BLE001 - the loop's edge; said in the log, and it is unknown
            self._say_once("memory")
            self.memory_mib = None

    def _say_once(self, what: str) -> None:
        if what not in self._broken:
            self._broken.add(what)
            _log.exception(
                "The engine could not be tested or looked at in a way that nothing here foresees.",
                key="engine_test_broke",
                what=what,
                url=self._engine.url,
            )


_WORDS = {
    health.Phase.UNPROVEN: "it has to pass its test",
    health.Phase.DRAINING: "it has to be started again, and what it holds may end",
    health.Phase.OUT: "it has to be started again",
    health.Phase.ASLEEP: "it was put to sleep",
    health.Phase.DOWN: "it does not answer its health check",
}
"""Why an engine cannot be used."""


def _now_ms() -> float:
    return time.monotonic() * 1000.0


def _grew(before: EngineStats, now: EngineStats) -> bool | None:
    """Whether one of the counters has; None: none is reported."""
    pairs = [
        (getattr(before, name), getattr(now, name))
        for name in ("prompt_tokens_total", "generation_tokens_total", "iterations_total")
    ]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return any(b > a for a, b in known) if known else None
