"""What the offline worker knows of its engine: whether it lives, what it holds, and how much may go to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from hybridsched.core.admission import Capacity, Denial, OfflineAdmission
from hybridsched.core.policy import PoolPolicy
from hybridsched.core.values import Budget
from hybridsched.engines.protocol import Engine, EngineError
from hybridsched.engines.vllm_http import VllmHttpEngine
from hybridsched.log import get_logger
from hybridsched.store.tasks import end_tasks
from hybridsched.workers.offline_lines import LineExecutor
from hybridsched.workers.offline_wire import LineSettings

_log = get_logger("offline")

CHECK_S = 1.0
"""Between two health checks of a healthy engine, seconds. They also keep the abort's connection warm: HTTP
servers close one that is silent for about 5 s."""

SILENT_CHECKS = 4
"""Failed checks in a row after which requests in flight are given up: an engine stopped by SIGTERM leaves its
connections open and never answers."""

_BACK_OFF_S = (0.05, 1.0)


class LaneAdmission:
    """Whether one more line may go to the engine: by policy, engine size and online's own requests."""

    def __init__(self, policy: PoolPolicy) -> None:
        self.online_inflight = 0
        """Online requests on the same engine, as its replica last said."""
        self._policy = policy
        self._engine = Capacity()
        self._admission = self._made()
        self._warned = False

    @property
    def policy(self) -> PoolPolicy:
        return self._policy

    @policy.setter
    def policy(self, policy: PoolPolicy) -> None:
        self._policy = policy
        self._admission = self._made()

    @property
    def kv_tokens(self) -> int | None:
        """KV cache of the engine in tokens, by its own word or the policy's."""
        return self._admission.capacity.kv_tokens

    def engine_is(self, capacity: Capacity) -> None:
        """What the engine says it holds."""
        self._engine = capacity
        self._admission = self._made()

    def _made(self) -> OfflineAdmission:
        return OfflineAdmission(
            policy=self._policy.offline, capacity=self._engine.or_policy(self._policy.engine)
        )

    def __call__(self, tokens: int, running: int, running_tokens: int, budget: Budget) -> bool:
        """See `offline_lines.Admits`."""
        capacity = self._admission.capacity
        if capacity.kv_tokens is not None:
            # A line that is too long for the engine must reach it: its answer is the user's error.
            tokens = min(tokens, int(capacity.kv_tokens * self._policy.offline.kv_share))
        if capacity.max_model_len is not None:
            tokens = min(tokens, capacity.max_model_len)
        answer = self._admission.may_admit(
            tokens=tokens,
            offline_inflight=running,
            offline_tokens=running_tokens,
            online_inflight=self.online_inflight,
            budget=budget,
        )
        if answer.reason is Denial.CAPACITY_UNKNOWN and not self._warned:
            self._warned = True
            _log.error(
                "Offline waits: neither the engine nor the policy says how large the KV cache is. Set "
                "engine.kv_tokens in the policy.",
                key="kv_capacity_unknown",
            )
        return answer.ok


class EngineWatch:
    """Checks the engine's health; lets lines start only while it answers, gives up requests it lost."""

    def __init__(
        self, control: Engine, executor: LineExecutor, admission: LaneAdmission, *, check_s: float = CHECK_S
    ) -> None:
        self._control = control
        self._executor = executor
        self._admission = admission
        self._check_s = check_s
        self._now = asyncio.Event()
        self.up = False
        executor.engine_up(False)

    def trouble(self, error: EngineError) -> None:
        """A request failed in a way that says something of the engine: look at once, wait till then."""
        if self.up:
            _log.warning(
                "The engine failed a request; its lines wait and run again when it answers its health check.",
                key="engine_trouble",
                url=self._control.url,
                code=error.code,
                error=str(error),
            )
        self.up = False
        self._executor.engine_up(False)
        self._now.set()

    async def run(self) -> None:
        """Watch for ever; cancel to end."""
        failures, back_off, last_said = 0, _BACK_OFF_S[0], 0.0
        while True:
            self._now.clear()
            if await self._healthy():
                failures, back_off = 0, _BACK_OFF_S[0]
                wait_s = self._check_s
            else:
                failures += 1
                if failures >= 2 or not self.up:
                    self.up = False
                    self._executor.engine_up(False)
                if failures >= SILENT_CHECKS and (lost := self._executor.drop_inflight()):
                    _log.warning(
                        "The engine no longer answers; its requests are given up and their lines run again.",
                        key="engine_silent",
                        url=self._control.url,
                        requests=lost,
                    )
                if time.monotonic() - last_said > 30:
                    last_said = time.monotonic()
                    _log.warning(
                        "The engine does not answer its health check; offline waits. See whether it runs.",
                        key="engine_down",
                        url=self._control.url,
                    )
                wait_s, back_off = back_off, min(back_off * 2, _BACK_OFF_S[1])
            try:
                async with asyncio.timeout(wait_s):
                    await self._now.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(back_off / 2)  # a failing engine must not be asked in a tight loop

    async def _healthy(self) -> bool:
        if not await self._control.healthy():
            return False
        if self.up:
            return True
        try:
            info = await self._control.info()
        except EngineError:
            return False
        self._admission.engine_is(Capacity(kv_tokens=info.kv_tokens, max_model_len=info.max_model_len))
        self.up = True
        self._executor.engine_up(True, info)
        return True


class LaneEngine:
    """An engine with everything that a lane needs around it. Use `lane_engine` to make one."""

    def __init__(
        self,
        engine: Engine,
        control: Engine,
        policy: PoolPolicy,
        *,
        settings: LineSettings | None = None,
        check_s: float = CHECK_S,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.admission = LaneAdmission(policy)
        self.executor = LineExecutor(
            engine,
            control=control,
            admits=self.admission,
            settings=settings,
            on_change=on_change,
            on_trouble=lambda error: self.watch.trouble(error),
        )
        self.watch = EngineWatch(control, self.executor, self.admission, check_s=check_s)


@asynccontextmanager
async def lane_engine(
    url: str,
    policy: PoolPolicy,
    *,
    api_key: str | None = None,
    settings: LineSettings | None = None,
    on_change: Callable[[], None] = lambda: None,
) -> AsyncIterator[LaneEngine]:
    """Clients, executor and watch for the engine at `url`; all are closed at the end."""
    engine, control = VllmHttpEngine(url, api_key=api_key), VllmHttpEngine(url, api_key=api_key)
    lane = LaneEngine(engine, control, policy, settings=settings, on_change=on_change)
    watching = asyncio.create_task(lane.watch.run(), name="engine-watch")
    try:
        yield lane
    finally:
        await lane.executor.close()
        await end_tasks(watching)
        await engine.close()
        await control.close()
