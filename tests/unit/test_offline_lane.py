"""The lane between its gate and its executor: how fast it acts, and what it reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from hybridsched.core.reasons import Reason
from hybridsched.core.values import Budget, Gate, GateState
from hybridsched.workers.offline_lane import Lane
from hybridsched.workers.offline_lines import LineExecutor
from tests.helpers import await_until
from tests.unit.line_machine import FAST, Sink, admits, prompt_of
from tests.unit.step_engine import StepEngine

OPEN = Gate(
    lane="r0",
    state=GateState.OPEN,
    reason=Reason.IDLE,
    budget=Budget(max_inflight=8, chunk_tokens=1000, slice_tokens=0),
)


def closed(grace_ms: float = 0.0) -> Gate:
    return Gate(lane="r0", state=GateState.CLOSED, reason=Reason.ONLINE_ARRIVED, grace_ms=grace_ms)


class Rig:
    def __init__(self) -> None:
        self.engine = StepEngine()
        self.sink = Sink()
        self.events: list[dict[str, Any]] = []
        self.opens: list[bool] = []
        self.executor = LineExecutor(
            self.engine, admits=admits, settings=FAST, on_change=lambda: self.lane.executor_changed()
        )
        self.lane = Lane("r0", self.executor, event=self.events.append, on_open=self.opens.append)

    def submit(self, count: int, max_tokens: int) -> None:
        self.executor.submit(
            self.sink.run(i, {"prompt": prompt_of(i, 20), "max_tokens": max_tokens}) for i in range(count)
        )

    def kinds(self) -> list[str]:
        return [event["t"] for event in self.events]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    made.executor.info = await made.engine.info()
    stepping = asyncio.create_task(made.engine.run(0.002))
    yield made
    await made.executor.close()
    stepping.cancel()
    with suppress(asyncio.CancelledError):
        await stepping


async def test_a_close_without_grace_sends_the_abort_at_once_and_reports_quiet(rig: Rig) -> None:
    rig.lane.gate_changed(OPEN)
    rig.submit(5, 1000)
    await await_until(lambda: len(rig.engine.requests) == 5)
    rig.lane.gate_changed(closed())
    for _ in range(3):  # turns of the loop, no time: nothing may be awaited before the abort
        await asyncio.sleep(0)
    assert [len(ids) for ids in rig.engine.abort_posts] == [5]
    await rig.lane.until_quiet()
    quiet = rig.events[-1]
    assert rig.kinds() == ["resume", "quiet"]
    assert (quiet["rung"], quiet["ended"], quiet["lane"]) == ("iteration", 5, "r0")
    assert quiet["kept_tokens"] > 0
    assert rig.opens == [True, False]
    assert rig.lane.peak() == 5


async def test_with_grace_what_runs_may_end_by_itself(rig: Rig) -> None:
    rig.lane.gate_changed(OPEN)
    rig.submit(60, 5)
    while not rig.engine.requests:
        await asyncio.sleep(0)
    rig.lane.gate_changed(closed(grace_ms=5000))
    await rig.lane.until_quiet()
    assert rig.events[-1]["rung"] == "boundary"
    assert not rig.engine.abort_posts
    assert rig.executor.inflight == 0
    assert rig.executor.waiting > 0, "nothing new was admitted"


async def test_when_the_grace_is_over_the_rest_is_ended(rig: Rig) -> None:
    rig.lane.gate_changed(OPEN)
    rig.submit(2, 1000)
    await await_until(lambda: len(rig.engine.requests) == 2)
    rig.lane.gate_changed(closed(grace_ms=10))
    await rig.lane.until_quiet()
    assert (rig.events[-1]["rung"], rig.events[-1]["ended"]) == ("iteration", 2)


async def test_an_opening_while_answers_are_awaited_resumes_after_them(rig: Rig) -> None:
    rig.lane.gate_changed(OPEN)
    rig.submit(3, 200)
    await await_until(lambda: len(rig.engine.requests) == 3)
    rig.lane.gate_changed(closed())
    rig.lane.gate_changed(OPEN)
    assert not rig.lane.is_open
    await await_until(lambda: rig.kinds() == ["resume", "quiet", "resume"])
    await await_until(lambda: len(rig.sink.results) == 3)
    assert all(result.output_tokens == 200 for result in rig.sink.results.values())


async def test_a_stop_is_the_last_word(rig: Rig) -> None:
    rig.lane.gate_changed(OPEN)
    rig.submit(3, 1000)
    await await_until(lambda: len(rig.engine.requests) == 3)
    rig.lane.stop()
    await rig.lane.until_quiet()
    rig.lane.gate_changed(OPEN)
    assert not rig.lane.is_open
    assert not rig.engine.requests
