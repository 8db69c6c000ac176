"""Requests and replies as a service sees them, and what a request is estimated to cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hybridsched.client.errors import Cancelled, Expired, Failed
from hybridsched.store.online_values import End, EndStatus, Request

ASSUMED_MAX_TOKENS = 256
"""Output tokens assumed for the cost of a request that sets no limit. Only an estimate for spreading load."""

BYTES_PER_TOKEN = 4
"""Of text whose tokens are not known; a common rule of thumb for English under byte-pair encodings."""


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
        ValueError: no model is named, or the timeout is not above 0.
    """
    whole = dict(body)
    model = model or whole.get("model")
    if not model:
        raise ValueError("the request names no model; give model=NAME, or a body with one")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s}; give the seconds to the deadline, more than 0")
    whole["model"] = model
    if stream:
        whole["stream"] = True
        whole.setdefault("stream_options", {"include_usage": True})
    else:
        whole.pop("stream", None)
    prompt = estimate_prompt_tokens(whole)
    return Request(
        id=request_id,
        model=model,
        body=msgspec.json.encode(whole),
        reply=reply,
        timeout_ms=timeout_s * 1000,
        path=path,
        stream=stream,
        priority=priority,
        prompt_tokens=prompt,
        cost=prompt + estimate_max_tokens(whole),
        max_waiting=max_waiting,
    )


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
    return Reply(
        id=request_id,
        body=msgspec.json.decode(good.body),
        finish_reason=good.finish_reason,
        usage=good.usage,
        replica=good.replica,
    )
