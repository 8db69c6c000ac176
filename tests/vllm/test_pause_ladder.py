"""The rungs of the pause ladder on every engine: what is interrupted ends as if it never was."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hybridsched.core.values import Budget
from hybridsched.engines.protocol import Engine, EngineError
from hybridsched.engines.waking import Woken, check, take_proof, wake_or_restart
from hybridsched.workers.offline_lines import LineExecutor
from hybridsched.workers.offline_run import LineResult, LineRun
from hybridsched.workers.offline_wire import LineSettings
from tests.helpers import await_until
from tests.vllm.engine_rigs import (
    CHAT,
    COMPLETIONS,
    LONG,
    MODEL,
    Host,
    chat,
    completion,
    finish,
    ids,
    produced,
    quiet,
    start,
    token_ids,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

TOKENS = 120
"""Output tokens of a line: enough to be interrupted several times."""
WHOLE = [*range(6, 100), *range(194, 228), *range(262, 309), *range(352, 391), *range(399, 431)]
"""Tokens of the tiny model that are whole characters by themselves, and no special ones."""
BUDGET = Budget(max_inflight=4, chunk_tokens=100_000, slice_tokens=0)


class Sink:
    def __init__(self) -> None:
        self.results: dict[int, LineResult] = {}

    def finished(self, run: LineRun, result: LineResult) -> None:
        assert run.number not in self.results, "a line ended twice"
        self.results[run.number] = result


def admits(tokens: int, running: int, running_tokens: int, budget: Budget) -> bool:
    return running < budget.max_inflight


def lines() -> list[tuple[str, dict[str, Any]]]:
    """Text, token ids and chat; with token ids in the answer and without; of any tokens and of whole ones."""
    out: list[tuple[str, dict[str, Any]]] = []
    for i in range(4):
        more: dict[str, Any] = {"return_token_ids": True} if i % 2 else {}
        if i > 1:
            more["allowed_token_ids"] = WHOLE
        out.append((COMPLETIONS, completion(f"the gate {i} opens", TOKENS, **more)))
        out.append((COMPLETIONS, completion(ids(150, seed=60 + i), TOKENS, **more)))
        out.append((CHAT, chat(f"say {i}", TOKENS, **more)))
    return out


def said(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What a user sees of an answer, without its id and its time."""
    choice = body["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    return {
        "text": text,
        "finish_reason": choice["finish_reason"],
        "token_ids": choice.get("token_ids"),
        "completion_tokens": body["usage"]["completion_tokens"],
        "prompt_tokens": body["usage"]["prompt_tokens"],
    }


async def test_interrupted_lines_give_the_answers_of_uninterrupted_ones(
    engine_host: Host, engine: Engine
) -> None:
    asked = lines()
    wanted = [
        said(path, (await finish(engine, body, f"w{i}", path)).body) for i, (path, body) in enumerate(asked)
    ]
    sink = Sink()
    settings = LineSettings(young_s=0.0, line_timeout_s=120)
    executor = LineExecutor(engine, admits=admits, settings=settings)
    executor.info = await engine.info()
    executor.submit(
        LineRun(batch="b", number=i, custom_id=f"c{i}", path=path, body=body, sink=sink, order=(i,))
        for i, (path, body) in enumerate(asked)
    )
    pauses = 0
    while len(sink.results) < len(asked):
        made = (await engine.stats()).generation_tokens_total or 0
        executor.admit(BUDGET)

        async def enough(made: float = made) -> bool:
            now = (await engine.stats()).generation_tokens_total or 0
            return now >= made + 70 or len(sink.results) == len(asked)

        await await_until(enough, timeout_s=120, what="some tokens")
        await executor.end_inflight()
        assert executor.inflight == 0
        await quiet(engine)
        pauses += 1
    await executor.close()
    assert pauses > 1 or engine_host.kind == "fake"  # which may be done before anybody looks
    for i, (path, _) in enumerate(asked):
        result = sink.results[i]
        assert result.body is not None, result
        got = said(path, result.body)
        assert got["text"] == wanted[i]["text"], (i, got, wanted[i])
        assert got == wanted[i], i


async def test_a_pause_that_keeps_loses_nothing(engine: Engine) -> None:
    """The rung of lanes that have the engine to themselves."""
    before = await engine.stats()
    body = completion(ids(300, seed=80), LONG, return_token_ids=True)
    task = start(engine, body, "own")
    await produced(engine, before.generation_tokens_total or 0, 20)
    for _ in range(3):
        assert not await engine.stands_still()
        await engine.pause()
        assert await engine.stands_still()
        stopped = await engine.stats()
        await engine.resume()
        await produced(engine, stopped.generation_tokens_total or 0, 10)
    after = await engine.stats()
    await engine.abort(COMPLETIONS, ["own"])
    kept = token_ids(await task)
    assert after.preemptions_total == before.preemptions_total, "it begins again with its prompt"
    assert (after.prompt_tokens_total or 0) - (before.prompt_tokens_total or 0) == 300
    whole = await finish(engine, {**body, "max_tokens": len(kept)}, "whole")
    assert kept == token_ids(whole)
    await quiet(engine)


async def test_a_sleep_frees_memory_or_is_refused(engine_host: Host, engine: Engine) -> None:
    """No engine of these has a GPU; the fake sleeps as one would."""
    proof = await take_proof(engine, MODEL, ids(20, seed=90), timeout_s=60)
    assert await engine.can_sleep() is (engine_host.kind == "fake")
    if engine_host.kind != "fake":
        with pytest.raises(EngineError, match="sleep") as refused:
            await engine.sleep(1, timeout_s=60)
        assert not refused.value.retryable
        await check(engine, proof, timeout_s=60)
        return
    restarts: list[str] = []

    async def restart() -> None:
        restarts.append("again")

    await engine.sleep(1, timeout_s=60)
    assert await wake_or_restart(engine, proof, restart, timeout_s=60) is Woken.AWAKE
    assert restarts == []


async def test_an_engine_that_wakes_with_other_answers_is_started_anew(
    engine_host: Host, engine: Engine
) -> None:
    proof = await take_proof(engine, MODEL, ids(20, seed=91), timeout_s=60)
    spoilt = type(proof)(body=proof.body, token_ids=[*proof.token_ids[:-1], proof.token_ids[-1] + 1])
    with pytest.raises(EngineError, match="answers wrongly") as wrong:
        await check(engine, spoilt, timeout_s=60)
    assert wrong.value.retryable
    restarts: list[str] = []

    async def restart() -> None:
        restarts.append("again")

    with pytest.raises(EngineError, match="answers wrongly"):
        await wake_or_restart(engine, spoilt, restart, timeout_s=60)
    assert restarts == ["again"]
    await asyncio.sleep(0)
    await quiet(engine)
