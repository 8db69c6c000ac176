"""An engine in memory, under the control of a test: it steps when told, and dies, hangs or refuses on demand.

It schedules, counts and answers with the code of the simulated vLLM, on a clock of its own and without HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from hybridsched.engines.metrics_text import engine_info, engine_stats
from hybridsched.engines.protocol import Completion, EngineError, EngineInfo, EngineStats, StreamChunk
from hybridsched.engines.simulated import api, tokens
from hybridsched.engines.simulated.calls import CHAT, COMPLETIONS, Call, Calls
from hybridsched.engines.simulated.engine import EngineLoop
from hybridsched.engines.simulated.perf import DEFAULT_PROFILE, load_profile
from hybridsched.engines.simulated.scheduler import Limits


class _HandTimer:
    """Fires when `step` says so, or at the next turn of the event loop when `auto`."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.when: float | None = None
        self.now = 0.0
        self.auto = True
        self._scheduled = False

    def start(self) -> None: ...

    def at(self, when: float) -> None:
        self.when = when
        if self.auto and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if self.auto:
            self.fire()

    def fire(self) -> bool:
        if self.when is None:
            return False
        self.now = max(self.now, self.when)
        self.when = None
        self.callback()
        return True

    def cancel(self) -> None:
        self.when = None

    def close(self) -> None:
        self.cancel()


class FakeEngine:
    """`Engine` in memory.

    With `auto` (the default) it runs an iteration at each turn of the event loop; else only at `step()`.
    Iterations take what the profile says on the fake's own clock, which is all that its metrics show.
    """

    def __init__(
        self,
        *,
        model: str = "fake",
        limits: Limits | None = None,
        auto: bool = True,
        max_queued: int | None = None,
        runner: str = "generate",
        url: str = "fake://engine",
    ) -> None:
        def timer(callback: Callable[[], None]) -> _HandTimer:
            self._timer = _HandTimer(callback)
            self._timer.auto = auto
            return self._timer

        self._loop = EngineLoop(
            limits or Limits(),
            load_profile(DEFAULT_PROFILE),
            model=model,
            speed=1.0,
            log=None,
            clock=lambda: self._timer.now,
            timer=timer,
        )
        self._calls = Calls(self._loop, (model,), runner=runner, max_queued=max_queued, prompt_details=True)
        self._url = url
        self.requests: list[tuple[str, str]] = []
        """(path, request id) of every completion and stream, in order."""
        self.aborts: list[tuple[str, ...]] = []
        """Request ids of every abort call."""
        self.next_errors: list[EngineError] = []
        """Raised by the next requests, one each, before they are accepted."""
        self.stats_override: EngineStats | None = None
        """Given by `stats` instead of the measured ones."""
        self.reachable = True
        self.hanging = False
        self.closed = False

    @property
    def url(self) -> str:
        return self._url

    @property
    def in_flight(self) -> int:
        """Sequences accepted and not ended."""
        return self._loop.in_flight

    @property
    def now_s(self) -> float:
        """The fake's own clock."""
        return self._timer.now

    # -- script -----------------------------------------------------------------------------------------

    def step(self, iterations: int = 1) -> int:
        """Run up to `iterations` iterations now. Returns how many there was work for."""
        return sum(1 for _ in range(iterations) if self._timer.fire())

    def set_auto(self, auto: bool) -> None:
        """Switch between stepping by itself and by hand."""
        self._timer.auto = auto
        if auto and self._timer.when is not None:
            self._timer.at(self._timer.when)

    def die(self) -> None:
        """As SIGKILL: requests in flight fail with engine_died, later calls with engine_unreachable."""
        self.reachable = False
        self._loop.kill(tell=True)

    def hang(self) -> None:
        """As SIGTERM on vLLM: nothing answers any more, callers meet their own time limits."""
        self.hanging = True
        self._timer.auto = False

    def serve_instead(self, model: str) -> None:
        """From now on it serves that model, as an engine that was started anew at the same address."""
        self._calls.models = (model,)

    # -- Engine -----------------------------------------------------------------------------------------

    async def info(self) -> EngineInfo:
        await self._reach()
        data = [
            {"id": m, "max_model_len": self._loop.scheduler.limits.max_model_len} for m in self._calls.models
        ]
        return engine_info({"data": data}, self._metrics())

    async def healthy(self) -> bool:
        return self.reachable and not self.hanging

    async def stats(self) -> EngineStats:
        await self._reach()
        return self.stats_override if self.stats_override is not None else engine_stats(self._metrics())

    async def complete(
        self, path: str, body: dict[str, Any] | bytes, *, request_id: str, timeout_s: float
    ) -> Completion:
        try:
            call = await self._accept(path, body, request_id)
        except api.ApiError as error:
            return Completion(status=error.status, body=error.body())
        try:
            async with asyncio.timeout(timeout_s):
                value = await self._calls.whole(call)
        except TimeoutError as error:
            raise self._silent(timeout_s) from error
        except api.ApiError as error:
            raise EngineError(str(error), code="engine_died", retryable=True) from error
        finally:
            self._calls.leave(call)
        return Completion(status=200, body=value or {})

    async def stream(
        self, path: str, body: dict[str, Any] | bytes, *, request_id: str, idle_timeout_s: float
    ) -> AsyncIterator[StreamChunk]:
        if isinstance(body, dict):
            body = {**body, "stream": True}
        try:
            call = await self._accept(path, body, request_id)
        except api.ApiError as error:
            code = "not_found" if error.status == 404 else "bad_request"
            raise EngineError(str(error), code=code, retryable=False, status=error.status) from error
        events = self._calls.events(call)
        try:
            while True:
                try:
                    async with asyncio.timeout(idle_timeout_s):
                        raw, last = await anext(events)
                except TimeoutError as error:
                    raise self._silent(idle_timeout_s) from error
                except StopAsyncIteration:
                    return
                if call.answer.died:
                    raise EngineError(
                        "the engine died in the middle of an answer", code="engine_died", retryable=True
                    )
                for event in raw.split(b"\n\n"):
                    if event and event != b"data: [DONE]":
                        yield StreamChunk(data=event[6:])
                if last:
                    return
        finally:
            self._calls.leave(call)

    async def abort(self, path: str, request_ids: Sequence[str]) -> None:
        self.aborts.append(tuple(request_ids))
        if not request_ids or path not in (CHAT, COMPLETIONS):
            return
        await self._reach()
        shape = "chatcmpl-{}" if path == CHAT else "cmpl-{}-0"
        self._loop.abort([shape.format(i) for i in request_ids])

    async def tokenize(self, path: str, body: dict[str, Any]) -> list[int]:
        await self._reach()
        try:
            if path == CHAT:
                messages = msgspec.convert(body.get("messages"), list[api.Message])
                return api.chat_ids(messages, add_generation_prompt=body.get("add_generation_prompt", True))
            prompts = api.prompts_of(
                body.get("prompt" if path == COMPLETIONS else "input"), special=True, name="prompt"
            )
        except (api.ApiError, msgspec.ValidationError) as error:
            raise EngineError(str(error), code="bad_request", retryable=False) from error
        return prompts[0]

    async def detokenize(self, model: str | None, token_ids: Sequence[int]) -> str:
        await self._reach()
        return tokens.decode(token_ids)

    async def pause(self) -> None:
        await self._reach()
        await self._loop.pause("keep", clear_cache=False)

    async def resume(self) -> None:
        await self._reach()
        self._loop.resume()

    async def stands_still(self) -> bool:
        await self._reach()
        return self._loop.scheduler.paused

    async def can_sleep(self) -> bool:
        await self._reach()
        return True

    async def sleep(self, level: int, *, timeout_s: float) -> None:
        await self._reach()
        await self._loop.pause("keep", clear_cache=level > 0)

    async def wake(self, *, timeout_s: float) -> None:
        await self.resume()

    async def close(self) -> None:
        self.closed = True

    # -- parts ------------------------------------------------------------------------------------------

    async def _reach(self) -> None:
        await asyncio.sleep(0)
        if not self.reachable:
            raise EngineError(
                f"engine {self._url} cannot be reached", code="engine_unreachable", retryable=True
            )
        if self.hanging:
            raise self._silent(0.0)

    async def _accept(self, path: str, body: dict[str, Any] | bytes, request_id: str) -> Call:
        self.requests.append((path, request_id))
        if self.next_errors:
            raise self.next_errors.pop(0)
        await asyncio.sleep(0)
        if not self.reachable:
            raise EngineError(
                f"engine {self._url} cannot be reached", code="engine_unreachable", retryable=True
            )
        call = self._calls.prepare(
            path, body if isinstance(body, bytes) else msgspec.json.encode(body), request_id
        )
        try:
            self._calls.accept(call)
        except api.ApiError as error:
            code = "engine_busy" if error.status == 503 else "engine_died"
            raise EngineError(str(error), code=code, retryable=True, status=error.status) from error
        return call

    def _silent(self, seconds: float) -> EngineError:
        return EngineError(
            f"engine {self._url} said nothing within {seconds:g} s", code="engine_timeout", retryable=True
        )

    def _metrics(self) -> bytes:
        return self._loop.metrics.render(clock_lag_s=0.0, clock_jumps=0).encode()
