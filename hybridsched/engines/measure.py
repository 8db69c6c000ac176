"""A short load on one engine, for its profile: requests of one length, all at once.

No benchmark: it says what order of tokens a second this engine gives on this device. Prompts differ from
the first token on, so that no prefix is shared.
"""

from __future__ import annotations

import asyncio
import time
import uuid

from hybridsched.core.engine_values import EnginePlan
from hybridsched.core.values import Value
from hybridsched.engines.protocol import Completion, Engine, EngineError

PATH = "/v1/completions"
_REQUESTS = 32
_PROMPT_TOKENS = 128
_OUTPUT_TOKENS = 64
_LIMIT_S = 120.0
_FIRST_TOKEN = 10
"""Below it are the special tokens of most vocabularies."""
_TOKENS = 200
"""Different tokens in the prompts; every vocabulary has these."""


class Measured(Value, frozen=True, kw_only=True):
    """What came of it."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    output_tokens_per_s: float


async def measure(engine: Engine, model: str, plan: EnginePlan) -> Measured:
    """Load the engine once and count.

    Raises:
        EngineError: a request failed, or an answer does not say how many tokens it has.
    """
    requests = min(_REQUESTS, plan.max_num_seqs)
    output = max(1, min(_OUTPUT_TOKENS, plan.max_model_len // 2))
    prompt = max(1, min(_PROMPT_TOKENS, plan.max_model_len - output - 1))
    await _ask(engine, model, 0, prompt, 1)  # compiles and warms up what the first request does
    began = time.monotonic()
    answers = await asyncio.gather(
        *(_ask(engine, model, at, prompt, output) for at in range(1, requests + 1))
    )
    seconds = time.monotonic() - began
    return Measured(
        requests=requests,
        prompt_tokens=prompt,
        output_tokens=output,
        seconds=seconds,
        output_tokens_per_s=sum(answers) / seconds,
    )


async def _ask(engine: Engine, model: str, at: int, prompt: int, output: int) -> int:
    """One request; the tokens that it produced."""
    ids = [_FIRST_TOKEN + (at * 7 + place * (at + 1)) % _TOKENS for place in range(prompt)]
    body = {"model": model, "prompt": ids, "max_tokens": output, "ignore_eos": True, "temperature": 0.0}
    answer = await engine.complete(PATH, body, request_id=f"measure-{uuid.uuid4().hex}", timeout_s=_LIMIT_S)
    return _output_tokens(answer)


def _output_tokens(answer: Completion) -> int:
    usage = answer.body.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if answer.status != 200 or not isinstance(count, int):
        raise EngineError(
            f"the engine answered {answer.status} without a count of tokens",
            code="engine_bad_answer",
            retryable=False,
            status=answer.status,
        )
    return count
