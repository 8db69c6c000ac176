"""Lines through the executor: slices, pauses, and continuation."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from hybridsched.core.orphans import request_id
from hybridsched.core.values import Budget
from tests.helpers import await_until
from tests.unit.line_machine import BUDGET, Sink, expected, finish, machine, pause, prompt_of
from tests.unit.step_engine import StepEngine, chat_ids, text_of


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
