"""The fake engine's script: steps by hand, death, hanging, refusals."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from hybridsched.engines.fake import FakeEngine
from hybridsched.engines.protocol import Completion, EngineError, EngineStats

PATH = "/v1/completions"


def start(
    engine: FakeEngine, tokens: int, name: str = "r", timeout_s: float = 30
) -> asyncio.Task[Completion]:
    body = {
        "model": "fake",
        "prompt": [1, 2, 3],
        "max_tokens": tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return asyncio.create_task(engine.complete(PATH, body, request_id=name, timeout_s=timeout_s))


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def made(answer: Completion) -> list[int]:
    ids: list[int] = answer.body["choices"][0]["token_ids"]
    return ids


async def test_by_hand_nothing_runs_before_a_step() -> None:
    engine = FakeEngine(auto=False)
    task = start(engine, 5)
    await turns()
    assert engine.in_flight == 1
    assert engine.step() == 1
    assert engine.now_s > 0
    assert (await engine.stats()).generation_tokens_total == 1
    assert engine.step(10) == 4
    assert len(made(await task)) == 5
    assert engine.step() == 0
    assert engine.requests == [(PATH, "r")]


async def test_an_abort_by_hand_takes_effect_at_the_next_step() -> None:
    engine = FakeEngine(auto=False)
    task = start(engine, 50)
    await turns()
    engine.step(3)
    await engine.abort(PATH, ["r", "r"])
    await engine.abort(PATH, ["r"])
    await turns()
    assert not task.done()
    engine.step()
    answer = await task
    assert answer.aborted
    assert len(made(answer)) == 4
    assert engine.aborts == [("r", "r"), ("r",)]


async def test_death_fails_what_is_in_flight_and_what_comes() -> None:
    engine = FakeEngine(auto=False)
    task = start(engine, 50)
    body: dict[str, Any] = {"model": "fake", "prompt": [4], "max_tokens": 50, "ignore_eos": True}
    stream = engine.stream(PATH, body, request_id="s", idle_timeout_s=30)
    first = asyncio.ensure_future(anext(stream))
    await turns()
    engine.step(2)
    await first
    engine.die()
    with pytest.raises(EngineError) as died:
        await task
    assert died.value.code == "engine_died"
    with pytest.raises(EngineError) as died:
        await anext(stream)
    assert died.value.code == "engine_died"
    with pytest.raises(EngineError) as gone:
        await engine.stats()
    assert gone.value.code == "engine_unreachable"
    assert not await engine.healthy()


async def test_a_late_reader_gets_several_tokens_in_one_event() -> None:
    engine = FakeEngine(auto=False)
    body = {"model": "fake", "prompt": [4], "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    stream = engine.stream(PATH, body, request_id="s", idle_timeout_s=30)
    reader = asyncio.ensure_future(anext(stream))
    await turns()
    engine.step()
    events = [json.loads((await reader).data)]
    engine.step(4)
    events += [json.loads(chunk.data) async for chunk in stream]
    assert [len(e["choices"][0]["token_ids"]) for e in events] == [1, 4]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_hanging_engine_meets_the_callers_limit() -> None:
    engine = FakeEngine()
    engine.hang()
    with pytest.raises(EngineError) as silent:
        await start(engine, 3, timeout_s=0.02)
    assert silent.value.code == "engine_timeout"
    assert not await engine.healthy()


async def test_scripted_errors_come_one_each_and_stats_can_be_given() -> None:
    engine = FakeEngine()
    engine.next_errors = [EngineError("busy", code="engine_busy", retryable=True, status=503)]
    with pytest.raises(EngineError, match="busy"):
        await start(engine, 2)
    assert (await start(engine, 2)).status == 200
    engine.stats_override = EngineStats(running=7)
    assert (await engine.stats()).running == 7
    await engine.close()
    assert engine.closed


async def test_switching_to_auto_goes_on_by_itself() -> None:
    engine = FakeEngine(auto=False)
    task = start(engine, 8)
    await turns()
    engine.step()
    engine.set_auto(True)
    assert len(made(await task)) == 8
