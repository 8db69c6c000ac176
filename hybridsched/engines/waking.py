"""Waking a sleeping engine, with the proof that it answers as it did before it slept.

An engine that has woken says that all is well before any of its weights was used. What it computes then is
compared with what it computed before the sleep: one short greedy answer, token by token. An engine that fails
this is started anew, since nothing else mends weights that came back wrong.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any

import msgspec

from hybridsched.engines.protocol import Completion, Engine, EngineError

PROOF_TOKENS = 8
"""Output tokens of the proof: a wrong weight shows in the first; a few more catch a cache that came back
wrong."""
_PATH = "/v1/completions"


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine answered before it slept."""

    body: dict[str, Any]
    token_ids: list[int]


class Woken(StrEnum):
    """How an engine came back."""

    AWAKE = "awake"
    RESTARTED = "restarted"


async def take_proof(engine: Engine, model: str, prompt: list[int], *, timeout_s: float) -> Proof:
    """A short greedy answer to `prompt`, to compare with after the sleep.

    Raises:
        EngineError: the engine fails it, or refuses the prompt.
    """
    body = {
        "model": model, "prompt": prompt, "max_tokens": PROOF_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    return Proof(body=body, token_ids=await _answer(engine, body, timeout_s))


async def check(engine: Engine, proof: Proof, *, timeout_s: float) -> None:
    """Ask the proof's question again.

    Raises:
        EngineError: there is no answer, or another one (engine_bad_answer).
    """
    ids = await _answer(engine, proof.body, timeout_s)
    if ids != proof.token_ids:
        raise EngineError(
            f"engine {engine.url} woke and answers wrongly: {ids}, and before it slept {proof.token_ids}",
            code="engine_bad_answer",
            retryable=True,
        )


async def wake_or_restart(
    engine: Engine, proof: Proof, restart: Callable[[], Awaitable[None]], *, timeout_s: float
) -> Woken:
    """Wake the engine and check it; where it does not answer as before, call `restart` and check once more.

    Raises:
        EngineError: the restarted engine fails too.
    """
    try:
        await engine.wake(timeout_s=timeout_s)
        await check(engine, proof, timeout_s=timeout_s)
    except EngineError:
        await restart()
        await check(engine, proof, timeout_s=timeout_s)
        return Woken.RESTARTED
    return Woken.AWAKE


async def _answer(engine: Engine, body: dict[str, Any], timeout_s: float) -> list[int]:
    answer = await engine.complete(
        _PATH, body, request_id=f"hs-proof-{secrets.token_hex(6)}", timeout_s=timeout_s
    )
    ids = _ids(answer)
    if ids is None:
        raise EngineError(
            f"engine {engine.url} gave no token ids for a proof ({answer.status})",
            code="bad_request" if answer.status >= 400 else "engine_bad_answer",
            retryable=answer.status < 400,
            status=answer.status,
        )
    return ids


def _ids(answer: Completion) -> list[int] | None:
    choices = answer.body.get("choices") if answer.status < 400 else None
    ids = choices[0].get("token_ids") if choices else None
    return ids if isinstance(ids, list) else None
