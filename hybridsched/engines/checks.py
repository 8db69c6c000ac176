"""What tells a working engine from one that only answers: the model it serves, the shape of its answers."""

from __future__ import annotations

import re
from typing import Any

from hybridsched.engines.protocol import EngineError, EngineInfo

_MISSING = re.compile(r"\bmodel\b.*\bdoes not exist\b", re.IGNORECASE | re.DOTALL)
_SHOWN = 5


def check_serves(info: EngineInfo, model: str, url: str) -> None:
    """Refuse an engine that does not serve `model` under that name.

    An engine behind the same address can be another one after a restart, and its health check says nothing
    of that. Call it whenever the engine comes up, and after an answer for which `model_missing` is true.

    Raises:
        EngineError: engine_wrong_model, naming what it serves; retryable, as the right one may come back.
    """
    if model in info.models:
        return
    served = ", ".join(info.models[:_SHOWN]) or "no model at all"
    if len(info.models) > _SHOWN:
        served += f" and {len(info.models) - _SHOWN} more"
    raise EngineError(
        f"engine {url} serves {served}, not {model}; start it with that model or with "
        f"--served-model-name {model}, or give the worker the right --model or --engine",
        code="engine_wrong_model",
        retryable=True,
    )


def model_missing(status: int | None, body: dict[str, Any] | None) -> bool:
    """Whether a refusal says that the engine does not serve the model that the request names.

    It is the engine's fault where the worker serves that model, and the request's where it names another.
    """
    if status != 404 or not body:
        return False
    error = body.get("error")
    details = error if isinstance(error, dict) else body
    if details.get("param") == "model" or "model_not_found" in (details.get("code"), details.get("type")):
        return True
    return _MISSING.search(str(details.get("message") or error or "")) is not None


def answer_problem(path: str, body: Any) -> str:
    """What a successful answer lacks to be one; empty when it is whole.

    Asks for no more than the endpoint's API promises of every answer that does not stream.
    """
    if not isinstance(body, dict):
        return "it is no JSON object"
    if isinstance(body.get("error"), dict):
        return "it is an error under a status that says success"
    if not isinstance(body.get("usage"), dict):
        return "it has no usage"
    if path.endswith("/embeddings"):
        vectors = body.get("data")
        if not isinstance(vectors, list) or not vectors:
            return "it has no data"
        if not all(
            isinstance(one, dict) and isinstance(one.get("embedding"), (list, str)) for one in vectors
        ):
            return "an entry of its data has no embedding"
        return ""
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        return "it has no choices"
    chat = path.endswith("/chat/completions")
    for choice in choices:
        if not isinstance(choice, dict):
            return "a choice is no JSON object"
        if chat and not isinstance(choice.get("message"), dict):
            return "a choice has no message"
        if not chat and not isinstance(choice.get("text"), str):
            return "a choice has no text"
    return ""


def bad_answer(url: str, path: str, status: int, problem: str) -> EngineError:
    """The error for an answer that makes no sense: the engine's fault, or that of what stands before it."""
    return EngineError(
        f"engine {url} answered {status} on {path} with what is no answer: {problem}; see whether that "
        "address is an engine's",
        code="engine_bad_answer",
        retryable=True,
        status=status,
    )
