"""Requests and replies as a service sees them, and what a request is estimated to cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hybridsched.client.errors import Cancelled, Expired, Failed
from hybridsched.store.online_values import End, EndStatus, Request
from hybridsched.store.replies import bad_answer

ASSUMED_MAX_TOKENS = 256
"""Output tokens assumed for the cost of a request that sets no limit. Only an estimate for spreading load."""

MAX_TIMEOUT_S = 7 * 86_400.0
"""The longest time to a deadline that a client may ask for: a week."""

BYTES_PER_TOKEN = 4
"""Of text whose tokens are not known; a common rule of thumb for English under byte-pair encodings."""


_NUMBER = (int, float)


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one request."""

    id: str
    body: Any
    """The engine's response body, parsed."""
    finish_reason: str | None
    usage: dict[str, Any] | None
    replica: str | None


def estimate_prompt_tokens(body: Mapping[str, Any]) -> int:
    """Prompt tokens of a body: exact for lists of token ids, else its text's UTF-8 bytes / 4. At least 1."""
    prompt = body.get("prompt", body.get("messages", ()))
    return max(1, _tokens(prompt))


def _tokens(part: Any) -> int:
    if isinstance(part, str):
        return -(-len(part.encode()) // BYTES_PER_TOKEN)
    if isinstance(part, Mapping):
        return _tokens(part.get("content", part.get("text", ())))
    if isinstance(part, list | tuple):
        return len(part) if part and isinstance(part[0], int) else sum(map(_tokens, part))
    return 0


def estimate_max_tokens(body: Mapping[str, Any]) -> int:
    """Output tokens that the body allows, or `ASSUMED_MAX_TOKENS`."""
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return limit if isinstance(limit, int) and limit > 0 else ASSUMED_MAX_TOKENS


def build_request(
    body: Mapping[str, Any],
    *,
    model: str | None,
    path: str,
    timeout_s: float,
    priority: int,
    request_id: str,
    stream: bool,
    reply: str,
    max_waiting: int,
) -> Request:
    """The request that carries `body`, with its estimates.

    Raises:
        ValueError: something in it cannot be sent; the message says what, and what is allowed.
    """
    whole = dict(body)
    model = model or whole.get("model")
    if not model:
        raise ValueError("the request names no model; give model=NAME, or a body with one")
    if not isinstance(model, str):
        raise ValueError(f"model is {model!r}; give its name as text")  # noqa: TRY004 - one kind for all
    if not (isinstance(path, str) and path.startswith("/") and path.isascii() and path.isprintable()):
        raise ValueError(f"path is {path!r}; give one like '/v1/chat/completions'")
    if not isinstance(request_id, str):
        raise ValueError(f"request_id is {request_id!r}; give text")  # noqa: TRY004 - one kind for all
    timeout_s = seconds("timeout_s", timeout_s)
    whole["model"] = model
    if stream:
        whole["stream"] = True
        whole.setdefault("stream_options", {"include_usage": True})
    else:
        whole.pop("stream", None)
    encoded, prompt = _measured(whole)
    return Request(
        id=request_id,
        model=model,
        body=encoded,
        reply=reply,
        timeout_ms=timeout_s * 1000,
        path=path,
        stream=stream,
        priority=priority,
        prompt_tokens=prompt,
        cost=prompt + estimate_max_tokens(whole),
        max_waiting=max_waiting,
    )


def seconds(name: str, value: Any, *, most: float = MAX_TIMEOUT_S) -> float:
    """`value`, if it is a time that can be waited for.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, _NUMBER) or isinstance(value, bool) or not 0 < value <= most:
        raise ValueError(f"{name} is {value!r}; give seconds as a number above 0 and at most {most:g}")
    return float(value)


def _measured(body: dict[str, Any]) -> tuple[bytes, int]:
    """The body's JSON, and its prompt tokens.

    Raises:
        ValueError: it cannot be written as JSON.
    """
    try:
        return msgspec.json.encode(body), estimate_prompt_tokens(body)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the body cannot be written as JSON: {error}") from error
    except RecursionError:
        raise ValueError("the body cannot be written as JSON: it is nested too deep") from None


def checked(request_id: str, end: End) -> End:
    """The end, if it is a good one.

    Raises:
        RequestError: it is not.
    """
    message = end.message or "no reason was given"
    if end.status is EndStatus.EXPIRED:
        raise Expired(request_id, message)
    if end.status is EndStatus.CANCELLED:
        raise Cancelled(request_id, message)
    if end.status is EndStatus.FAILED:
        raise Failed(request_id, end.code or "unknown", message, end.http_status)
    return end


def to_reply(request_id: str, end: End) -> Reply:
    """The reply that a good end carries.

    Raises:
        RequestError: it is not a good one.
    """
    good = checked(request_id, end)
    try:
        body = msgspec.json.decode(good.body)
    except (ValueError, RecursionError) as error:
        checked(request_id, bad_answer(f"its body is no JSON that can be read ({error})"))
        raise
    return Reply(
        id=request_id,
        body=body,
        finish_reason=good.finish_reason,
        usage=good.usage,
        replica=good.replica,
    )
