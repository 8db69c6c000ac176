"""The test of an engine: a few small requests whose answers are known from before (`core.engine_health`)."""

from __future__ import annotations

import secrets
from typing import Any

from hybridsched.engines.protocol import Engine

_COMPLETIONS, _EMBEDDINGS = "/v1/completions", "/v1/embeddings"

PREFIX = "hstest-"
"""Every id of a test's request begins so."""

_PROMPTS = ([11, 23, 37, 41, 53], [61, 59, 43, 29, 17], [97, 71, 31, 13, 83], [19, 89, 67, 47, 79])
"""Token ids that every vocabulary has. Four prompts and one token each: an engine with other weights answers
most of them otherwise, one whose sums are rounded otherwise hardly two."""


class EngineProbe:
    """Asks one engine, which serves `model`.

    An engine that generates is asked for the likeliest next token of each prompt, one that does not for an
    embedding, whose numbers are not compared: there that it answers is all that is learnt.
    """

    def __init__(self, engine: Engine, *, model: str) -> None:
        self._engine = engine
        self._model = model
        self._tag = secrets.token_hex(4)
        self._count = 0
        self._generates = True

    async def ask(self, timeout_s: float) -> tuple[str, ...] | None:
        """The answers, one a prompt; None where the engine answers and there is nothing to compare.

        Raises:
            EngineError: it leaves one unanswered for `timeout_s` (engine_timeout), or fails with an error.
        """
        if self._generates:
            texts = []
            for prompt in _PROMPTS:  # one by one: an engine may take no more than one request
                text = await self._next_token(prompt, timeout_s)
                if text is None:
                    break
                texts.append(text)
            else:
                return tuple(texts)
        if not self._generates:
            await self._send(_EMBEDDINGS, {"model": self._model, "input": "a"}, timeout_s)
        return None

    async def _next_token(self, prompt: list[int], timeout_s: float) -> str | None:
        """The text of the token; None where it was refused, or ended by somebody's abort of all."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = await self._send(_COMPLETIONS, body, timeout_s)
        if answer is None:
            self._generates = False
            return None
        choice = answer["choices"][0]
        return None if choice.get("finish_reason") == "abort" else str(choice["text"])

    async def _send(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """The body of an answer; None for a refusal, which an engine gives without its model."""
        self._count += 1
        answer = await self._engine.complete(
            path, body, request_id=f"{PREFIX}{self._tag}-{self._count}", timeout_s=timeout_s
        )
        return answer.body if answer.status < 400 else None
