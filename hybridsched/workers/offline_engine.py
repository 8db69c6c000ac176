"""What the offline worker knows of its engine: whether it lives, what it holds, and how much may go to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from hybridsched.core.admission import Capacity, Denial, OfflineAdmission
from hybridsched.core.policy import PoolPolicy
from hybridsched.core.values import Budget
from hybridsched.engines.checks import check_serves
from hybridsched.engines.protocol import Engine, EngineError, EngineInfo
from hybridsched.engines.request_log import RequestLog
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

MODEL_CHECK_S = 5.0
"""Between two looks at what a healthy engine serves: it may have been replaced between two health checks."""

_BACK_OFF_S = (0.05, 1.0)
_SAY_EVERY_S = 30.0


class LaneAdmission:
    """Whether one more line may go to the engine: by policy, engine size and online's own requests."""

    def __init__(self, policy: PoolPolicy, *, own: bool = False) -> None:
        """`own`: the lane has the engine to itself, so no slot is kept free for online."""
        self.online_inflight = 0
        """Online requests on the same engine, as its replica last said."""
        self._own = own
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
        offline = self._policy.offline
        if self._own:
            offline = msgspec.structs.replace(offline, slots_for_online=0)
        return OfflineAdmission(policy=offline, capacity=self._engine.or_policy(self._policy.engine))

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
        self,
        control: Engine,
        executor: LineExecutor,
        admission: LaneAdmission,
        *,
        model: str | None = None,
        likely: str | None = None,
        check_s: float = CHECK_S,
    ) -> None:
        """`model`: what the engine has to serve. Without it, `likely` from when the engine has served it."""
        self._control = control
        self._executor = executor
        self._admission = admission
        self._likely = likely
        self._check_s = check_s
        self._now = asyncio.Event()
        self._checked_s = 0.0
        self.losses = 0
        """Health checks that failed so far: after one another process may answer."""
        self.up = False
        self.down = False
        """Whether it does not answer its health check, twice in a row at least."""
        self.problem = ""
        """Why an engine that answers cannot be used, as code and sentence; empty otherwise."""
        executor.model = model
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
                failures, back_off, self.down = 0, _BACK_OFF_S[0], False
                wait_s = self._check_s
            elif self.problem:
                # It answers, and is another engine than ours: what it runs for us ends by itself.
                failures, self.down = 0, False
                if time.monotonic() - last_said > _SAY_EVERY_S:
                    last_said = time.monotonic()
                    _log.error(
                        "Offline waits: the engine does not serve the model of its lane.",
                        key="engine_wrong_model",
                        error=self.problem,
                    )
                wait_s, back_off = back_off, min(back_off * 2, _BACK_OFF_S[1])
            else:
                failures += 1
                self.down = failures >= 2
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
                if time.monotonic() - last_said > _SAY_EVERY_S:
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
        """Whether the engine is there and ours. `problem` says so when it is there and not ours."""
        if not await self._control.healthy():
            self.losses += 1
            self.problem = ""
            return False
        if self.up and time.monotonic() - self._checked_s < MODEL_CHECK_S:
            return True
        try:
            info = await self._control.info()
        except EngineError:
            self.problem = ""
            return False
        self._checked_s = time.monotonic()
        try:
            self._check_model(info)
        except EngineError as error:
            self.problem = f"{error.code}: {error}"
            self.up = False
            self._executor.engine_up(False)
            return False
        self.problem = ""
        if self.up:
            return True
        self._admission.engine_is(Capacity(kv_tokens=info.kv_tokens, max_model_len=info.max_model_len))
        self.up = True
        self._executor.engine_up(True, info)
        return True

    def _check_model(self, info: EngineInfo) -> None:
        executor = self._executor
        if executor.model is None and self._likely in info.models:
            executor.model = self._likely
        if executor.model is not None:
            check_serves(info, executor.model, self._control.url)


class LaneEngine:
    """An engine with everything that a lane needs around it. Use `lane_engine` to make one."""

    def __init__(
        self,
        engine: Engine,
        control: Engine,
        policy: PoolPolicy,
        *,
        model: str | None = None,
        likely: str | None = None,
        settings: LineSettings | None = None,
        check_s: float = CHECK_S,
        on_change: Callable[[], None] = lambda: None,
        log: RequestLog | None = None,
        own: bool = False,
    ) -> None:
        self.control = control
        self.admission = LaneAdmission(policy, own=own)
        self.executor = LineExecutor(
            engine,
            control=control,
            admits=self.admission,
            settings=settings,
            on_change=on_change,
            on_trouble=lambda error: self.watch.trouble(error),
            log=log,
        )
        self.watch = EngineWatch(
            control, self.executor, self.admission, model=model, likely=likely, check_s=check_s
        )

    @property
    def problem(self) -> str:
        """Why lines wait for an engine that is there, as code and sentence; empty: they do not."""
        return self.watch.problem or self.executor.proof.problem


@asynccontextmanager
async def lane_engine(
    url: str,
    policy: PoolPolicy,
    *,
    model: str | None = None,
    likely: str | None = None,
    api_key: str | None = None,
    settings: LineSettings | None = None,
    on_change: Callable[[], None] = lambda: None,
    log: RequestLog | None = None,
    own: bool = False,
) -> AsyncIterator[LaneEngine]:
    """Clients, executor and watch for the engine at `url`; all are closed at the end.

    `model`, `likely`: see `EngineWatch`; `own`: see `LaneAdmission`.
    """
    engine, control = VllmHttpEngine(url, api_key=api_key), VllmHttpEngine(url, api_key=api_key)
    lane = LaneEngine(
        engine,
        control,
        policy,
        model=model,
        likely=likely,
        settings=settings,
        on_change=on_change,
        log=log,
        own=own,
    )
    watching = asyncio.create_task(lane.watch.run(), name="engine-watch")
    try:
        yield lane
    finally:
        await lane.executor.close()
        await end_tasks(watching)
        await engine.close()
        await control.close()
