"""What goes to the engine and what comes back, as bytes. Pure.

Bodies stay raw JSON member by member: a prompt of thousands of token ids is copied, never decoded.
"""

from __future__ import annotations

from typing import Any

import msgspec

PATHS = ("/v1/chat/completions", "/v1/completions")
"""Where online requests may go."""

STRIPPED = ("priority", "request_id")
"""Members that a client may not set: its place in the engine's own queue, and the id that aborts go by."""

_PRIVATE = ("hs_", "hybridsched")
"""Members that begin so are the scheduler's own and never reach an engine."""

_RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODE = msgspec.json.Encoder()


class BodyError(ValueError):
    """The body cannot be sent to an engine. The message says what was given and what is allowed."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A body that is ready for the engine."""

    body: bytes
    hide_usage: bool
    """The client did not ask for the usage event that we have the engine send: keep it from the stream."""
    sequences: int
    """Sequence slots that the request takes in the engine (`n`)."""


def prepare(body: bytes, *, stream: bool, priority: int | None = None) -> Prepared:
    """The body as the engine gets it: scheduling members removed, streaming as the request's accept says.

    `priority` is set when given; only an engine that schedules by priority may get one.

    Raises:
        BodyError: it is not a JSON object, or `n` or `stream_options` are not what OpenAI's API allows.
    """
    try:
        members = _RAW.decode(body)
    except RecursionError:
        raise BodyError("the request body is nested too deep; send an OpenAI-style body") from None
    except ValueError as error:  # no JSON, or a name that is no UTF-8
        raise BodyError(f"the request body is no JSON object ({error}); send an OpenAI-style body") from None
    out: dict[str, Any] = {
        name: value
        for name, value in members.items()
        if name not in STRIPPED and not name.startswith(_PRIVATE)
    }
    if priority is not None:
        out["priority"] = priority
    hide = False
    asked: dict[str, Any] = {}
    if "stream_options" in members:
        asked = _stream_options(members["stream_options"])
    if stream:
        out["stream"] = True
        hide = asked.get("include_usage") is not True
        out["stream_options"] = asked | {"include_usage": True}
    else:
        out.pop("stream", None)
        out.pop("stream_options", None)
    try:
        ready = _ENCODE.encode(out)
    except (ValueError, OverflowError, RecursionError) as error:
        raise BodyError(f"the request body cannot be sent on ({error}); send an OpenAI-style body") from None
    return Prepared(body=ready, hide_usage=hide, sequences=_sequences(members.get("n")))


def _stream_options(raw: msgspec.Raw) -> dict[str, Any]:
    try:
        return msgspec.json.decode(raw, type=dict[str, Any] | None) or {}
    except (ValueError, RecursionError):
        raise BodyError('stream_options must be an object such as {"include_usage": true}') from None


def _sequences(raw: msgspec.Raw | None) -> int:
    if raw is None:
        return 1
    try:
        n = msgspec.json.decode(raw, type=int | None)
    except (ValueError, RecursionError):
        raise BodyError(f"n is {bytes(raw)[:40]!r}; it must be a whole number from 1") from None
    if n is None:
        return 1
    if n < 1:
        raise BodyError(f"n is {n}; it must be a whole number from 1")
    return n


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    text: str | None = None
    delta: msgspec.Raw = msgspec.Raw()
    token_ids: msgspec.Raw = msgspec.Raw()


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None


class _Delta(msgspec.Struct):
    """Every member of a chat delta in which a model's output can stand."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    refusal: str | None = None


_EVENT = msgspec.json.Decoder(_Event)
_DELTA = msgspec.json.Decoder(_Delta)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What one server-sent event says."""

    has_output: bool
    """It carries tokens (not only a role, a finish reason or usage)."""
    finish_reason: str | None
    usage: dict[str, Any] | None
    usage_only: bool
    """The extra event that `include_usage` adds: no choices, only usage."""
    error: dict[str, Any] | None
    """An error inside the stream: vLLM sends it in a 200 answer when its engine process dies."""
    problem: str = ""
    """What keeps it from being an event of an answer; empty when nothing does."""


def read_event(data: bytes) -> Event:
    """Read one event of a stream. One that is no part of an answer has a `problem` and nothing else."""
    try:
        event = _EVENT.decode(data)
    except RecursionError:
        return _no_event("an event is nested too deep")
    except ValueError as why:
        return _no_event(f"an event cannot be read ({why}): {data[:80]!r}")
    if event.choices is None and event.usage is None and event.error is None:
        return _no_event(f"an event has no choices: {data[:80]!r}")
    choices = event.choices or []
    error = event.error
    if error is not None and not isinstance(error, dict):
        error = {"message": str(error)}
    return Event(
        has_output=any(_has_output(choice) for choice in choices),
        finish_reason=next((c.finish_reason for c in choices if c.finish_reason), None),
        usage=event.usage,
        usage_only=not choices and event.usage is not None,
        error=error,
    )


def _no_event(problem: str) -> Event:
    return Event(
        has_output=False, finish_reason=None, usage=None, usage_only=False, error=None, problem=problem
    )


def _has_output(choice: _Choice) -> bool:
    if choice.text:
        return True
    raw = bytes(choice.delta)
    if raw and raw != b"null":
        try:
            delta = _DELTA.decode(raw)
        except (ValueError, RecursionError):
            return True
        return bool(
            delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls or delta.refusal
        )
    return bytes(choice.token_ids) not in (b"", b"null", b"[]")


def group(events: list[bytes]) -> bytes:
    """Events as the JSON array that a reply entry holds."""
    return b"[" + b",".join(events) + b"]"


def finish_of(body: dict[str, Any]) -> tuple[str | None, dict[str, Any] | None]:
    """Finish reason and usage of a whole answer."""
    choices = body.get("choices")
    reason = None
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        reason = choices[0].get("finish_reason")
    usage = body.get("usage")
    return (reason if isinstance(reason, str) else None), (usage if isinstance(usage, dict) else None)


def error_message(body: dict[str, Any]) -> str:
    """The sentence in an engine's error body, which nests it in several ways."""
    error: Any = body.get("error", body)
    while isinstance(error, dict) and isinstance(error.get("error"), dict | str):
        error = error["error"]
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error)
