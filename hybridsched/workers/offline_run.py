"""One batch line on its way through the engine: its state across pauses, and what is computed twice."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from hybridsched.core.orphans import PREFIX
from hybridsched.engines.checks import model_missing
from hybridsched.engines.protocol import Completion, EngineError
from hybridsched.workers import offline_plan as plan

DEFAULT_BLOCK = 16
"""Tokens of a KV block where the engine does not say (vLLM's default)."""


class LineResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a line ended. Exactly one of `body` and `error_code` is there."""

    request_id: str
    status_code: int | None = None
    """HTTP status of the engine's answer; None when there was none."""
    body: dict[str, Any] | None = None
    error_code: str | None = None
    error_message: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0


class LineSink(Protocol):
    """Whoever handed in a line."""

    def finished(self, run: LineRun, result: LineResult) -> None:
        """The line has ended; called once, on the event loop."""
        ...


class LineRun:
    """State of one line. Only the executor changes it."""

    def __init__(
        self,
        *,
        batch: str,
        number: int,
        custom_id: str,
        path: str,
        body: dict[str, Any],
        sink: LineSink,
        order: tuple[int, ...],
        raw_bytes: int = 0,
        kept: plan.Kept | None = None,
    ) -> None:
        self.batch = batch
        self.number = number
        self.custom_id = custom_id
        self.path = path
        self.body = body
        self.sink = sink
        self.order = order
        self.shape = plan.shape_of(path, body)
        if kept is not None and not kept.prompt_ids and self.shape.prompt_ids is not None:
            kept = msgspec.structs.replace(kept, prompt_ids=self.shape.prompt_ids)
        self.kept = kept if kept is not None and kept.prompt_ids and self.shape.continuable else None
        self.prompt_ids = self.kept.prompt_ids if self.kept else self.shape.prompt_ids
        self.prompt_estimate = (
            len(self.prompt_ids)
            if self.prompt_ids is not None
            else plan.estimate_prompt_tokens(self.shape, body, raw_bytes)
        )
        self.request_id = f"{PREFIX}{batch}-{number}"
        """The id of its last request; before the first one, where it comes from."""
        self.attempt = 0
        """Requests sent for this line, slices included."""
        self.deaths = 0
        """How often the engine failed while it ran."""
        self.blamed = False
        """One of those failures was one that a line can cause: the engine said that it failed, or hung."""
        self.last_error: EngineError | None = None
        """With what the engine failed the last time."""
        self.counts_as_death = False
        """Set before its connection is closed because the engine no longer answers."""
        self.told_to_end = False
        """Whether the engine was asked to end its request in flight."""
        self.closed_young = False
        """Set before its connection is closed because the request was too young for an abort to find it."""
        self.dropped = False
        """Set when its sink wants it no more: it ends without a result."""
        self.fed = 0
        """Leading tokens taken to be in the prefix cache."""
        self.computed = 0
        """Leading tokens (prompt and output) that the engine has computed for this line."""
        self.paused = self.kept is not None
        """Whether it was ended since its last answer, so that its cache may be gone."""
        self.recomputed = 0
        """Tokens computed again: they had been computed before."""
        if self.kept:
            self.computed = len(self.kept.prompt_ids) + len(self.kept.token_ids) - 1

    def sent_as(self, request_id: str) -> None:
        """Another request for the line is on its way, under this id."""
        self.attempt += 1
        self.told_to_end = False
        self.request_id = request_id

    def planned_tokens(self, max_model_len: int | None) -> int:
        """KV cache the line may come to need: prompt and most output, in tokens."""
        prompt = self.prompt_estimate
        if self.shape.max_tokens is not None:
            return prompt + self.shape.max_tokens
        return max(prompt, max_model_len or 0)

    def prompt_now(self) -> list[int] | None:
        """Token ids that the next request begins with, where they are known."""
        if self.kept is not None:
            return self.kept.prompt_ids + self.kept.token_ids
        return self.prompt_ids

    def learn_prompt(self, ids: list[int]) -> None:
        self.prompt_ids = ids
        self.prompt_estimate = len(ids)

    def account(self, answer: dict[str, Any], *, block: int) -> float | None:
        """Take up what an answer says of computed and cached tokens.

        Returns the share of the expected prefix that the cache still had, when the line was paused before
        and the engine says; else None. An engine that says nothing is counted as having had nothing.
        """
        prompt, made = plan.prompt_tokens(answer), plan.completion_tokens(answer)
        if prompt == 0:
            return None
        expected = min(self.computed, prompt)
        cached = plan.cached_tokens(answer)
        share = None
        if expected and (made or not _aborted(answer)):
            if cached is not None:
                self.recomputed += max(0, expected - cached)
                if self.paused and expected >= 2 * block:
                    share = min(1.0, cached / expected)
            elif self.paused:
                self.recomputed += expected
        if made:
            self.computed = max(self.computed, prompt + made - 1)
        return share

    def suspend(self, *, cache_trusted: bool, block: int) -> None:
        """It was ended before its end, and waits to go on."""
        self.paused = True
        self.fed = self.computed - self.computed % block if cache_trusted else 0

    def drop_kept(self) -> None:
        """Give up its tokens and run it whole. What was generated counts as computed again."""
        if self.kept is not None:
            self.recomputed += len(self.kept.token_ids)
            self.computed = len(self.kept.prompt_ids)
            self.kept = None
        self.fed = min(self.fed, self.computed)


def _aborted(answer: dict[str, Any]) -> bool:
    return any(choice.get("finish_reason") == "abort" for choice in answer.get("choices") or ())


def failure(run: LineRun, code: str, message: str, *, status: int | None = None) -> LineResult:
    """The end of a line in an error."""
    return LineResult(request_id=run.request_id, status_code=status, error_code=code, error_message=message)


def engine_failed(run: LineRun, error: EngineError | None) -> LineResult:
    """The end of a line that the engine does not survive, or answers with nonsense each time."""
    if error is not None and error.code == "engine_bad_answer":
        message = (
            f"the engine gave {run.deaths} times what is no answer, and answers other requests well; "
            f"the line is not tried again ({error})"
        )
        return failure(run, "engine_bad_answer", message, status=error.status)
    message = (
        f"the engine failed {run.deaths} times while it ran this line, at last with nothing else in it; "
        "the line is not tried again"
    )
    return failure(run, "engine_failed", message)


def refusal(run: LineRun, answer: Completion, model: str | None) -> LineResult:
    """How a line ends that the engine has refused with a 4xx. `model`: what the engine has to serve.

    Raises:
        EngineError: it is not the line that is refused: our access, a full engine, or an engine that does
            not serve what it has to.
    """
    error = answer.body.get("error")
    details = error if isinstance(error, dict) else answer.body
    message = str(details.get("message") or error or f"HTTP {answer.status}")
    if answer.status in (401, 403):
        raise EngineError(
            f"the engine refused our access ({message}); give the worker its API key",
            code="engine_unreachable",
            retryable=True,
            status=answer.status,
        )
    if answer.status in (408, 429):
        raise EngineError(message, code="engine_busy", retryable=True, status=answer.status)
    if model is not None and run.body.get("model") == model and model_missing(answer.status, answer.body):
        raise EngineError(
            f"the engine does not serve {model} any more ({message}); start it with that model again",
            code="engine_wrong_model",
            retryable=True,
            status=answer.status,
        )
    code = str(details.get("type") or details.get("code") or "bad_request")
    return failure(run, code, message, status=answer.status)
