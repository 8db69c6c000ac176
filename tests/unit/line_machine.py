"""A line executor on a stepped engine, for tests: lines go in, their ends are kept, pauses come when told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from hybridsched.core.values import Budget
from hybridsched.engines.protocol import EngineError
from hybridsched.workers.offline_lines import LineExecutor
from hybridsched.workers.offline_run import LineResult, LineRun
from hybridsched.workers.offline_wire import LineSettings
from tests.helpers import await_until
from tests.unit.step_engine import StepEngine, next_token, text_of

BUDGET = Budget(max_inflight=8, chunk_tokens=10_000, slice_tokens=0)
FAST = LineSettings(
    abort_bound_s=1.5,  # a loaded machine may stand still for a tenth of a second
    abort_repeat_s=0.01,
    busy_wait_s=0.01,
    line_timeout_s=20,
    young_s=0.0,
    proof_back_off_s=(0.001, 0.01),
)
Ids = list[int]


class Sink:
    def __init__(self) -> None:
        self.results: dict[int, LineResult] = {}
        self.runs: dict[int, LineRun] = {}

    def finished(self, run: LineRun, result: LineResult) -> None:
        assert run.number not in self.results, "a line ended twice"
        self.results[run.number] = result
        self.runs[run.number] = run

    def run(self, number: int, body: dict[str, Any], path: str = "/v1/completions") -> LineRun:
        return LineRun(
            batch="b", number=number, custom_id=f"c{number}", path=path, body=body, sink=self, order=(number,)
        )


def admits(tokens: int, running: int, running_tokens: int, budget: Budget) -> bool:
    return running < budget.max_inflight


@asynccontextmanager
async def machine(engine: StepEngine, *, interval_s: float = 0.0) -> AsyncIterator[LineExecutor]:
    troubles: list[EngineError] = []
    executor = LineExecutor(engine, admits=admits, settings=FAST, on_trouble=troubles.append)
    executor.info = await engine.info()
    stepping = asyncio.create_task(engine.run(interval_s))
    try:
        yield executor
    finally:
        await executor.close()
        stepping.cancel()
        with suppress(asyncio.CancelledError):
            await stepping
    assert executor.inflight == 0


def expected(prompt: Ids, count: int) -> tuple[str, Ids]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    made = ids[len(prompt) :]
    return "".join(text_of(token) for token in made), made


def prompt_of(number: int, length: int) -> Ids:
    return [(number * 131 + i * 7) % 5000 for i in range(length)]


async def finish(sink: Sink, count: int) -> None:
    await await_until(lambda: len(sink.results) == count, what=f"{count} results")


async def pause(executor: LineExecutor, engine: StepEngine, *, after_steps: int) -> None:
    start = len(engine.prefills)
    async with asyncio.timeout(10):
        while len(engine.prefills) < start + after_steps:  # every step counts: no time may pass unseen
            await asyncio.sleep(0)
    await executor.end_inflight()
    assert executor.inflight == 0
    assert not engine.requests
