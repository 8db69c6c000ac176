"""Pauses that cut a character in two, and servers that are gone without a word."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from hybridsched.engines.protocol import EngineError
from hybridsched.workers import offline_plan as plan
from hybridsched.workers.offline_lines import LOSSES
from tests.unit.line_machine import BUDGET, Sink, expected, finish, machine, pause, prompt_of
from tests.unit.step_engine import Request, StepEngine

HALF = "\ufffd"


def read(ids: Sequence[int], *, special: bool = False) -> str:
    """How tokens read: by their rest by three the first half of a character, its other half, or a word.

    A token that ten divides is special: it shows only where `special` asks for it. One that seven divides is
    of the vocabulary's padding and reads as nothing anywhere.
    """
    out, at = [], 0
    shown = [one for one in ids if one % 7 and (special or one % 10)]
    while at < len(shown):
        one = shown[at]
        if one % 10 == 0:
            out.append(f"<|{one}|>")
        elif one % 3 == 2:
            out.append(f" w{one}")
        elif one % 3 == 0 and at + 1 < len(shown) and shown[at + 1] % 3 == 1 and shown[at + 1] % 10:
            out.append(f" <{one}+{shown[at + 1]}>")
            at += 1
        else:
            out.append(HALF)
        at += 1
    return "".join(out)


class Halves(StepEngine):
    """As vLLM: the text of an answer that is ended early lacks what is no whole character yet."""

    def __init__(self, *, detokenizes: bool = True) -> None:
        super().__init__()
        self.asked = 0
        self._detokenizes = detokenizes

    def _answer(self, request_id: str, request: Request) -> dict[str, Any]:
        answer = super()._answer(request_id, request)
        text = read(request.made)
        answer["choices"][0]["text"] = text.rstrip(HALF) if request.reason == "abort" else text
        return answer

    async def detokenize(self, model: str | None, token_ids: Sequence[int]) -> str:
        self.asked += 1
        if not self._detokenizes:
            raise EngineError("no such route", code="not_found", retryable=False, status=404)
        return read(token_ids, special=True)


def words(ids: Sequence[int]) -> str:
    return "".join(f" w{one}" for one in ids)


class Words(StepEngine):
    """Every token is a word."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    async def detokenize(self, model: str | None, token_ids: Sequence[int]) -> str:
        self.asked += 1
        return words(token_ids)


async def run_with_pauses(engine: StepEngine, count: int = 30) -> Sink:
    sink, rng = Sink(), random.Random(5)
    async with machine(engine) as executor:
        executor.submit(
            sink.run(i, {"model": "m", "prompt": prompt_of(i, 20), "max_tokens": 30, "temperature": 0})
            for i in range(count)
        )
        executor.admit(BUDGET)
        while len(sink.results) < count:
            await pause(executor, engine, after_steps=rng.randint(1, 9))
            executor.admit(BUDGET)
    return sink


def texts(sink: Sink) -> list[str]:
    return [sink.results[i].body["choices"][0]["text"] for i in sorted(sink.results)]  # type: ignore[index]


async def test_a_pause_in_the_middle_of_a_character_loses_nothing() -> None:
    engine = Halves()
    sink = await run_with_pauses(engine)
    assert texts(sink) == [read(expected(prompt_of(i, 20), 30)[1]) for i in range(30)]
    assert all(result.output_tokens == 30 for result in sink.results.values())
    assert engine.asked < len(engine.sent) * plan.SEAM_TOKENS, "a token by itself is asked for once"


async def test_a_pause_behind_a_whole_token_costs_one_call_at_most() -> None:
    engine = Words()
    sink = await run_with_pauses(engine)
    assert texts(sink) == [words(expected(prompt_of(i, 20), 30)[1]) for i in range(30)]
    assert 0 < engine.asked <= len(engine.sent)


async def test_without_detokenize_the_seam_is_as_the_engine_left_it() -> None:
    engine = Halves(detokenizes=False)
    sink = await run_with_pauses(engine)
    assert all(result.output_tokens == 30 for result in sink.results.values())
    assert engine.asked == 1, "it is asked once"


@pytest.mark.parametrize("healed", [True, False])
@pytest.mark.parametrize(("lost", "times"), [(True, LOSSES), (False, 3)])
async def test_a_line_meets_more_losses_of_the_server_than_failures_of_its_model(
    lost: bool, times: int, healed: bool
) -> None:
    """Killed from outside, a server is gone without a word; a line brings down what runs the model."""
    engine, sink = StepEngine(), Sink()
    met = 0

    def fault(path: str, body: dict[str, Any]) -> None:
        nonlocal met
        if body["prompt"][0] == 77 and not (healed and met == times - 1):
            met += 1
            raise EngineError("gone", code="engine_died", retryable=True, lost=lost)

    engine.fault = fault
    async with machine(engine) as executor:
        executor.submit([sink.run(1, {"prompt": [77, 1], "max_tokens": 4})])
        executor.admit(BUDGET)
        await finish(sink, 1)
    assert met == (times - 1 if healed else times)
    assert (sink.results[1].error_code is None) is healed
