"""Lines through the executor: slices, pauses, continuation, and an engine that misbehaves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest

from hybridsched.core.orphans import request_id
from hybridsched.core.values import Budget
from hybridsched.engines.protocol import Completion, EngineError
from hybridsched.workers.offline_lines import LineExecutor
from hybridsched.workers.offline_run import LineResult, LineRun
from hybridsched.workers.offline_wire import LineSettings
from tests.helpers import await_until
from tests.unit.step_engine import Request, StepEngine, chat_ids, next_token, text_of

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


async def test_pauses_do_not_change_a_single_answer() -> None:
    engine, sink, rng = StepEngine(), Sink(), random.Random(7)
    async with machine(engine) as executor:
        executor.submit(
            sink.run(i, {"model": "m", "prompt": prompt_of(i, 40 + i), "max_tokens": 30, "temperature": 0})
            for i in range(40)
        )
        executor.admit(BUDGET)
        while len(sink.results) < 40:
            await pause(executor, engine, after_steps=rng.randint(1, 9))
            executor.admit(BUDGET)
            await asyncio.sleep(0)
    for i in range(40):
        text, _ = expected(prompt_of(i, 40 + i), 30)
        body = sink.results[i].body
        assert body is not None
        assert body["choices"][0]["text"] == text
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["choices"][0]["token_ids"] is None, "there and null, as where nobody asks for them"
        assert body["usage"]["prompt_tokens"] == 40 + i
        assert body["usage"]["completion_tokens"] == 30
        assert body["usage"]["total_tokens"] == 70 + i
    # Only what lies behind the last full block of 16 tokens is computed again after each pause.
    assert 0 < executor.recomputed_tokens < sum(run.attempt for run in sink.runs.values()) * 16
    assert engine.peak <= BUDGET.max_inflight


async def test_a_chat_line_goes_on_as_a_completion_and_reads_as_one_chat_answer() -> None:
    engine, sink = StepEngine(), Sink()
    body = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 12}
    async with machine(engine, interval_s=0.002) as executor:
        executor.submit([sink.run(1, body, "/v1/chat/completions")])
        executor.admit(BUDGET)
        await pause(executor, engine, after_steps=4)
        executor.admit(BUDGET)
        await finish(sink, 1)
    answer = sink.results[1].body
    assert answer is not None
    assert answer["object"] == "chat.completion"
    text, _ = expected(chat_ids(body), 12)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
    assert answer["usage"]["completion_tokens"] == 12
    assert [path for _, path, _ in engine.sent] == ["/v1/chat/completions", "/v1/completions"]
    assert engine.sent[1][2]["max_tokens"] < 12


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 2},
        {"logprobs": 0},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"presence_penalty": 0.5},
        {"seed": 3, "temperature": 0.7},
        {"something_new": 1},
    ],
)
async def test_what_cannot_be_continued_exactly_is_run_again_whole(extra: dict[str, Any]) -> None:
    engine, sink = StepEngine(), Sink()
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 50}], "max_tokens": 10, **extra}
    async with machine(engine, interval_s=0.002) as executor:
        executor.submit([sink.run(1, body, "/v1/chat/completions")])
        executor.admit(BUDGET)
        await pause(executor, engine, after_steps=5)
        executor.admit(BUDGET)
        await finish(sink, 1)
    answer = sink.results[1].body
    assert answer is not None
    assert answer["choices"][0]["message"]["content"] == expected(chat_ids(body), 10)[0]
    assert [path for _, path, _ in engine.sent] == ["/v1/chat/completions"] * 2
    assert "return_token_ids" not in engine.sent[0][2]
    if "n" not in extra:  # such a line is ended by closing its connection: its count never comes back
        assert executor.recomputed_tokens > 0


async def test_a_stop_string_that_the_seam_could_cut_is_not_missed() -> None:
    engine, sink = StepEngine(), Sink()
    prompt = prompt_of(3, 20)
    _, made = expected(prompt, 12)
    stop = text_of(made[7]) + text_of(made[8])  # it ends with the 9th token
    async with machine(engine, interval_s=0.0005) as executor:
        run = sink.run(1, {"model": "m", "prompt": prompt, "max_tokens": 12, "stop": stop})
        executor.submit([run])
        executor.admit(BUDGET)
        while not sink.results:  # a pause after about every step, so after the 8th as well
            await pause(executor, engine, after_steps=1)
            executor.admit(BUDGET)
            await asyncio.sleep(0)
            if run.attempt > 60:
                break
        await finish(sink, 1)
    body = sink.results[1].body
    assert body is not None
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["text"] == "".join(text_of(token) for token in made[:9])


async def test_long_prompts_go_in_by_slices_and_never_more_than_the_budget() -> None:
    engine, sink = StepEngine(), Sink()
    budget = Budget(max_inflight=6, chunk_tokens=10_000, slice_tokens=64)
    async with machine(engine, interval_s=0.003) as executor:
        executor.submit(
            [
                *(sink.run(i, {"prompt": prompt_of(i, 300), "max_tokens": 20}) for i in range(8)),
                sink.run(8, {"prompt": "t" * 400, "max_tokens": 20}),
            ]
        )
        executor.admit(budget)
        await finish(sink, 9)
    for i in range(8):
        body = sink.results[i].body
        assert body is not None
        assert body["choices"][0]["text"] == expected(prompt_of(i, 300), 20)[0]
    slices = [body for _, _, body in engine.sent if body["max_tokens"] == 1]
    assert len(slices) == 8 * 4 + 6
    assert {len(body["prompt"]) for body in slices} == {64, 128, 192, 256, 320, 384}
    assert engine.tokenized == 1
    assert max(engine.prefills) <= 2 * 64  # two may meet in one iteration when this machine is slow
    assert engine.peak <= 6
    assert executor.recomputed_tokens == 0


async def test_a_pause_amid_slices_goes_on_with_the_next_slice() -> None:
    engine, sink = StepEngine(), Sink()
    budget = Budget(max_inflight=4, chunk_tokens=10_000, slice_tokens=64)
    async with machine(engine, interval_s=0.002) as executor:
        executor.submit([sink.run(1, {"prompt": prompt_of(1, 600), "max_tokens": 5})])
        executor.admit(budget)
        await await_until(lambda: sum(1 for _, _, b in engine.sent if b["max_tokens"] == 1) >= 4)
        await executor.end_inflight()
        fed = len(engine.sent[-1][2]["prompt"])
        executor.admit(budget)
        await finish(sink, 1)
    lengths = [len(body["prompt"]) for _, _, body in engine.sent]
    assert sum(1 for length in lengths if length < fed) == fed // 64 - 1
    assert sink.results[1].body is not None
    assert sink.results[1].body["choices"][0]["text"] == expected(prompt_of(1, 600), 5)[0]


async def test_an_engine_without_tokenize_gets_text_prompts_whole() -> None:
    engine, sink = StepEngine(), Sink()
    engine.has_tokenize = False
    async with machine(engine) as executor:
        executor.submit(sink.run(i, {"prompt": "t" * 900, "max_tokens": 3}) for i in range(2))
        executor.admit(Budget(max_inflight=1, chunk_tokens=10_000, slice_tokens=64))
        await finish(sink, 2)
    assert engine.tokenized == 1
    assert len(engine.sent) == 2


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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1], "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/v1/embeddings", {"input": "x"}),
    ],
)
async def test_nobodys_priority_passes(path: str, body: dict[str, Any]) -> None:
    engine, sink = StepEngine(), Sink()
    async with machine(engine) as executor:
        executor.submit([sink.run(1, {**body, "priority": -5, "stream": False, "request_id": "x"}, path)])
        executor.admit(BUDGET)
        await finish(sink, 1)
    sent = engine.sent[0][2]
    assert sent["priority"] > 2
    assert "stream" not in sent
    assert "request_id" not in sent
    assert engine.sent[0][0] == request_id(executor.wire.tag, 0)
    assert engine.sent[0][0].startswith("hsoff-")


async def test_an_engine_that_does_not_report_its_cache_is_counted_as_having_had_none() -> None:
    engine, sink = StepEngine(), Sink()
    engine.reports_cache = False
    async with machine(engine, interval_s=0.001) as executor:
        executor.submit([sink.run(1, {"prompt": prompt_of(1, 64), "max_tokens": 30})])
        executor.admit(BUDGET)
        await pause(executor, engine, after_steps=5)
        executor.admit(BUDGET)
        await finish(sink, 1)
    assert executor.recomputed_tokens >= 64


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
