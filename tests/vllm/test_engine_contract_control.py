"""What every engine must do when it is controlled: aborts, disconnects, limits, priorities, pauses, sleep.

The engines are those of test_engine_contract.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hybridsched.engines.protocol import Engine, EngineError
from tests.vllm.engine_rigs import (
    CHAT,
    COMPLETIONS,
    LONG,
    QUEUE,
    SEQS,
    Host,
    cancel,
    chat,
    completion,
    finish,
    ids,
    produced,
    prompt_ids,
    quiet,
    start,
    token_ids,
    until,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_abort_keeps_the_tokens_and_the_rest_continues_them(
    engine_host: Host, engine: Engine, path: str
) -> None:
    body: dict[str, Any] = (
        completion(ids(400, seed=7), LONG, return_token_ids=True)
        if path == COMPLETIONS
        else chat("tell", LONG, return_token_ids=True)
    )
    before = (await engine.stats()).generation_tokens_total or 0
    task = start(engine, body, "cut", path)
    await produced(engine, before, 20)
    await engine.abort(path, ["cut"])
    cut = await task
    assert cut.status == 200
    assert cut.aborted
    kept = token_ids(cut)
    assert 20 <= len(kept) < LONG
    assert cut.body["usage"]["completion_tokens"] == len(kept)
    seen = prompt_ids(cut, path)

    rest = await finish(engine, completion(seen + kept, 25, return_token_ids=True), "rest")
    whole = await finish(engine, {**body, "max_tokens": len(kept) + 25}, "whole", path)
    assert kept + token_ids(rest) == token_ids(whole)
    # What was computed is found in the cache by whole blocks; the last token of a prompt is always computed.
    cached = rest.body["usage"]["prompt_tokens_details"]["cached_tokens"]
    block = engine_host.block
    assert (len(seen) + len(kept) - 2) // block * block <= cached + block
    assert cached < len(seen) + len(kept)


async def test_an_abort_ends_a_waiting_request_with_nothing(engine: Engine) -> None:
    first = [start(engine, completion(ids(3, seed=i), LONG), f"first{i}") for i in range(SEQS)]
    await until(engine, lambda running, waiting: running == SEQS, "all places taken")
    second = start(engine, completion([24, 25, 26], 5, return_token_ids=True), "second")
    await until(engine, lambda running, waiting: waiting == 1, "one waiting")
    await engine.abort(COMPLETIONS, ["second"])
    ended = await second
    assert ended.aborted
    assert token_ids(ended) == []
    assert not any(task.done() for task in first)
    await cancel(*first)
    await quiet(engine)


async def test_aborting_nothing_or_a_stranger_ends_nothing(engine: Engine) -> None:
    task = start(engine, completion([27, 28, 29], LONG), "stays")
    await until(engine, lambda running, waiting: running == 1, "one running")
    await engine.abort(COMPLETIONS, [])
    await engine.abort(COMPLETIONS, ["stranger"])
    await engine.abort("/v1/embeddings", ["stays"])
    await until(engine, lambda running, waiting: running == 1, "one running")
    assert not task.done()
    await cancel(task)
    await quiet(engine)


async def test_many_aborts_at_once(engine: Engine) -> None:
    tasks = [
        start(engine, completion(ids(2, seed=i), LONG, return_token_ids=True), f"m{i}") for i in range(150)
    ]
    await until(engine, lambda running, waiting: running + waiting == 150, "all accepted")
    await engine.abort(COMPLETIONS, [f"m{i}" for i in range(150)])
    answers = await asyncio.gather(*tasks)
    assert all(a.aborted for a in answers)
    await quiet(engine)


async def test_a_client_that_leaves_ends_its_request(engine: Engine) -> None:
    task = start(engine, completion([21, 21, 21], LONG), "gone")
    stream = engine.stream(
        COMPLETIONS, completion([22, 22], LONG, stream=True), request_id="gone2", idle_timeout_s=60
    )
    await anext(stream)
    await until(engine, lambda running, waiting: running == 2, "two running")
    await stream.aclose()  # type: ignore[attr-defined]
    await until(engine, lambda running, waiting: running == 1, "one left")
    await cancel(task)
    await quiet(engine)


async def test_max_num_seqs_bounds_what_runs(engine: Engine) -> None:
    tasks = [start(engine, completion([20 + i], LONG), f"q{i}") for i in range(SEQS + 2)]
    await until(engine, lambda running, waiting: (running, waiting) == (SEQS, 2), "four and two")
    await cancel(*tasks)
    await quiet(engine)


async def test_a_full_queue_is_engine_busy(engine: Engine) -> None:
    tasks = [start(engine, completion(ids(2, seed=i), LONG), f"b{i}") for i in range(QUEUE)]
    await until(engine, lambda running, waiting: running + waiting == QUEUE, "a full queue")
    with pytest.raises(EngineError) as refused:
        await finish(engine, completion([23], 2), "too-many")
    assert refused.value.code == "engine_busy"
    assert refused.value.retryable
    assert refused.value.status == 503
    await cancel(*tasks)
    await quiet(engine)


async def test_priority_orders_waiting_and_preempts_nobody(engine: Engine) -> None:
    order: list[str] = []

    async def run(name: str, priority: int) -> None:
        await finish(engine, completion([20 + len(name)], 3, priority=priority), name)
        order.append(name)

    before = (await engine.stats()).preemptions_total
    holders = [
        start(engine, completion(ids(2, seed=i), LONG, priority=10), f"holder{i}") for i in range(SEQS)
    ]
    await until(engine, lambda running, waiting: running == SEQS, "all places taken")
    tasks = [asyncio.create_task(run("late", 5))]
    await until(engine, lambda running, waiting: waiting == 1, "one waiting")
    tasks.append(asyncio.create_task(run("urgent", -5)))
    await until(engine, lambda running, waiting: (running, waiting) == (SEQS, 2), "two waiting")
    await engine.abort(COMPLETIONS, ["holder0"])
    await asyncio.gather(*tasks)
    assert order == ["urgent", "late"]
    assert (await engine.stats()).preemptions_total == before
    await cancel(*holders)
    await quiet(engine)


async def test_kv_pressure_preempts_by_recomputation(engine: Engine) -> None:
    before = (await engine.stats()).preemptions_total or 0
    prompts = [ids(1200, seed=20 + i) for i in range(SEQS)]
    answers = await asyncio.gather(
        *(
            finish(engine, completion(prompt, 450, return_token_ids=True), f"k{at}")
            for at, prompt in enumerate(prompts)
        )
    )
    assert ((await engine.stats()).preemptions_total or 0) > before
    alone = await finish(engine, completion(prompts[-1], 450, return_token_ids=True), "alone")
    assert token_ids(answers[-1]) == token_ids(alone)


async def test_a_pause_freezes_the_engine_and_its_gauges(engine: Engine) -> None:
    before = await engine.stats()
    body = completion([25, 26], LONG, return_token_ids=True)
    task = start(engine, body, "frozen")
    await until(engine, lambda running, waiting: running == 1, "one running")
    await engine.pause()
    stopped = await engine.stats()
    late = start(engine, completion([26, 27], 2), "late")
    for _ in range(20):
        now = await engine.stats()
        assert now.generation_tokens_total == stopped.generation_tokens_total
        assert now.running == 1
        assert now.waiting == 0
    assert await engine.healthy()
    assert not task.done()
    assert not late.done()
    await engine.resume()
    assert (await late).status == 200
    await engine.abort(COMPLETIONS, ["frozen"])
    kept = token_ids(await task)
    assert len(kept) > (stopped.generation_tokens_total or 0) - (before.generation_tokens_total or 0)
    whole = await finish(engine, body | {"max_tokens": len(kept)}, "unfrozen")
    assert kept == token_ids(whole)
    await quiet(engine)


async def test_an_abort_during_a_pause_brings_the_tokens_back(engine: Engine) -> None:
    before = (await engine.stats()).generation_tokens_total or 0
    task = start(engine, completion([28, 30], LONG, return_token_ids=True), "paused-abort")
    await produced(engine, before, 5)
    await engine.pause()
    try:
        await engine.abort(COMPLETIONS, ["paused-abort"])
        ended = await asyncio.wait_for(task, 30)
    finally:
        await engine.resume()
    assert ended.aborted
    assert len(token_ids(ended)) >= 5
    await quiet(engine)


async def test_silence_beyond_the_limit_is_a_timeout(engine: Engine) -> None:
    await engine.pause()
    try:
        with pytest.raises(EngineError) as silent:
            await engine.complete(COMPLETIONS, completion([21], 2), request_id="z", timeout_s=0.2)
        assert silent.value.code == "engine_timeout"
        assert silent.value.retryable
    finally:
        await engine.resume()
    await quiet(engine)
