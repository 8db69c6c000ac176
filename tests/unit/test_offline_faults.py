"""Lines on an engine that misbehaves: bad lines, deaths, lost aborts, ends and tokens that cannot be."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from hybridsched.core.values import Budget
from hybridsched.engines.protocol import Completion
from hybridsched.workers.offline_lines import LineExecutor
from tests.helpers import await_until
from tests.unit.line_machine import BUDGET, FAST, Sink, admits, expected, finish, machine, pause, prompt_of
from tests.unit.step_engine import Request, StepEngine


async def test_a_bad_line_fails_alone_with_the_engines_words() -> None:
    engine, sink = StepEngine(), Sink()
    async with machine(engine) as executor:
        executor.submit(
            [
                sink.run(1, {"prompt": [1, 2], "max_tokens": 2}),
                sink.run(2, {"prompt": [1, 2], "max_tokens": 2, "temperature": 99}),
                sink.run(3, {"prompt": prompt_of(1, 5000), "max_tokens": 2}),
            ]
        )
        executor.admit(Budget(max_inflight=8, chunk_tokens=10_000, slice_tokens=64))
        await finish(sink, 3)
    assert sink.results[1].body is not None
    assert (sink.results[2].status_code, sink.results[2].error_message) == (400, "too hot")
    assert sink.results[3].error_code == "BadRequestError"
    assert len(engine.sent) == 3, "no slice is computed for a prompt that is too long"


async def test_a_line_that_kills_the_engine_is_found_and_its_neighbours_live() -> None:
    engine, sink = StepEngine(), Sink()
    engine.poison = 4242
    async with machine(engine) as executor:
        lines = [sink.run(i, {"prompt": prompt_of(i, 20), "max_tokens": 4}) for i in range(12)]
        lines.insert(5, sink.run(99, {"prompt": [4242, 1], "max_tokens": 4}))
        executor.submit(lines)
        executor.admit(BUDGET)
        await finish(sink, 13)
    assert sink.results[99].error_code == "engine_failed"
    assert "3 times" in sink.results[99].error_message
    assert all(sink.results[i].body is not None for i in range(12))


async def test_lines_wait_while_the_engine_is_away_and_no_line_is_blamed() -> None:
    engine, sink = StepEngine(), Sink()
    down = asyncio.Event()
    async with machine(engine, interval_s=0.001) as executor:
        executor._on_trouble = lambda error: (executor.engine_up(False), down.set())
        executor.submit(sink.run(i, {"prompt": prompt_of(i, 20), "max_tokens": 40}) for i in range(6))
        executor.admit(BUDGET)
        await await_until(lambda: len(engine.requests) == 6)
        engine.alive = False
        engine.die()
        await down.wait()
        await await_until(lambda: executor.inflight == 0)
        sent = len(engine.sent)
        await asyncio.sleep(0.02)
        assert len(engine.sent) == sent, "nothing is sent to an engine that is away"
        engine.alive = True
        executor.engine_up(True)
        await finish(sink, 6)
    assert all(result.body is not None for result in sink.results.values())


async def test_an_abort_that_is_never_answered_closes_the_connection_and_runs_the_line_again() -> None:
    engine, sink = StepEngine(), Sink()
    engine.deaf = True
    async with machine(engine, interval_s=0.001) as executor:
        executor.submit([sink.run(1, {"prompt": prompt_of(1, 20), "max_tokens": 2000})])
        executor.admit(BUDGET)
        await await_until(lambda: engine.requests)
        ended = await executor.end_inflight()
        assert (ended.ended, ended.closed, ended.kept_tokens) == (1, 1, 0)
        assert not engine.requests
        assert len(engine.abort_posts) > 2, "an abort is repeated while answers are missing"
        engine.deaf = False
        engine.sent.clear()
        executor.admit(BUDGET)
        await await_until(lambda: engine.sent)
        assert engine.sent[0][2]["max_tokens"] == 2000


async def test_an_abort_that_overtakes_its_request_is_sent_again() -> None:
    engine, sink = StepEngine(), Sink()
    async with machine(engine, interval_s=0.002) as executor:
        executor.submit([sink.run(1, {"prompt": prompt_of(1, 20), "max_tokens": 2000})])
        executor.admit(BUDGET)
        await asyncio.sleep(0)  # the line's task is made, its request has not reached the engine
        ended = await executor.end_inflight()
        assert ended.closed == 0
        assert not engine.requests


async def test_a_request_too_young_for_an_abort_has_its_connection_closed() -> None:
    engine = StepEngine()
    settings = msgspec.structs.replace(FAST, young_s=60.0)
    executor = LineExecutor(engine, admits=admits, settings=settings)
    sink = Sink()
    executor.admit(BUDGET)
    executor.submit(
        sink.run(i, {"model": "m", "prompt": prompt_of(i, 40), "max_tokens": 30}) for i in range(2)
    )
    await await_until(lambda: len(engine.requests) == 2)
    ended = await executor.end_inflight()
    assert ended.closed == 0, "it was not given up: it had only just been sent"
    assert engine.abort_posts == []
    assert executor.inflight == 0
    assert executor.waiting == 2
    await executor.close()


LIES = {
    "no tokens": [-1, "x"],
    "more than asked for": list(range(500)),
    "none at all": None,
    "tokens that could be": [5],
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("length", [20, 300], ids=["whole", "slices"])
async def test_an_end_that_nobody_asked_for_is_the_engines_fault_and_comes_to_an_end(
    lie: str, length: int
) -> None:
    engine, sink = StepEngine(), Sink()
    prompt = prompt_of(1, length)
    choice = {"text": "a", "finish_reason": "abort", "token_ids": LIES[lie]}

    def fault(path: str, body: dict[str, Any]) -> Completion | None:
        if body["prompt"][:8] != prompt[:8]:
            return None
        return Completion(status=200, body={"choices": [choice], "usage": {"prompt_tokens": 3}})

    engine.fault = fault
    async with machine(engine) as executor:
        executor.submit(
            [
                sink.run(1, {"prompt": prompt, "max_tokens": 20}),
                sink.run(2, {"prompt": prompt_of(2, 20), "max_tokens": 4}),
            ]
        )
        executor.admit(Budget(max_inflight=8, chunk_tokens=10_000, slice_tokens=64))
        await finish(sink, 2)
    assert sink.results[1].error_code == "engine_bad_answer"
    assert "nobody had asked" in sink.results[1].error_message
    assert sink.results[2].body is not None
    assert len(engine.sent) < 20


@pytest.mark.parametrize("lie", ["no tokens", "more than asked for"])
async def test_tokens_that_cannot_be_are_not_kept(lie: str) -> None:
    class Liar(StepEngine):
        lies = 1

        def _answer(self, request_id: str, request: Request) -> dict[str, Any]:
            answer = super()._answer(request_id, request)
            if request.reason == "abort" and self.lies:
                self.lies -= 1
                answer["choices"][0]["token_ids"] = LIES[lie]
            return answer

    engine, sink = Liar(), Sink()
    async with machine(engine, interval_s=0.002) as executor:
        executor.submit([sink.run(1, {"prompt": prompt_of(1, 20), "max_tokens": 20})])
        executor.admit(BUDGET)
        await pause(executor, engine, after_steps=4)
        executor.admit(BUDGET)
        await finish(sink, 1)
        assert sink.runs[1].deaths == 1
    body = sink.results[1].body
    assert body is not None
    assert body["choices"][0]["text"] == expected(prompt_of(1, 20), 20)[0]


async def test_an_end_by_another_is_a_pause_once_the_gate_has_shut() -> None:
    """The engine's own side ends the requests of a worker that was frozen: its lines are not to blame."""
    engine, sink = StepEngine(), Sink()
    async with machine(engine, interval_s=0.002) as executor:
        run = sink.run(1, {"prompt": prompt_of(1, 20), "max_tokens": 20})
        executor.submit([run])
        executor.admit(BUDGET)
        await await_until(lambda: engine.prefills and engine.requests)
        for request in engine.requests.values():
            request.reason = "abort"
            request.done.set()
        await await_until(lambda: executor.inflight == 0)
        executor.stop_admitting()
        await await_until(lambda: executor.waiting == 1)
        executor.admit(BUDGET)
        await finish(sink, 1)
        assert run.deaths == 0
    body = sink.results[1].body
    assert body is not None
    assert body["choices"][0]["text"] == expected(prompt_of(1, 20), 20)[0]
