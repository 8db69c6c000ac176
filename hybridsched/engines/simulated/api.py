"""Request bodies as vLLM takes them, its error objects, and the checks between the two."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from hybridsched.engines.simulated import tokens

TokenId = Annotated[int, msgspec.Meta(ge=0)]


class ApiError(Exception):
    """An answer other than success, in vLLM's shape."""

    def __init__(self, status: int, message: str, *, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}


class NoSuchPathError(ApiError):
    """What the web framework under vLLM says of a path that it does not have."""

    def body(self) -> dict[str, Any]:
        return {"detail": str(self)}


NO_SUCH_PATH = NoSuchPathError(404, "Not Found", kind="NotFoundError")
NO_SUCH_METHOD = NoSuchPathError(405, "Method Not Allowed", kind="NotFoundError")

_AT = re.compile(r" - at `\$(.*)`$")
_BYTE = re.compile(r"\(byte (\d+)\)$")


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, kind="BadRequestError", param=param)


def unreadable(message: str) -> ApiError:
    """The refusal of a body that is no JSON, or has a field of another type; `message` is the decoder's.

    vLLM checks bodies before it looks at what they ask for, and names the place as `body.field.index`.
    """
    at, byte = _AT.search(message), _BYTE.search(message)
    place = "body"
    if at is not None:
        place += at[1].replace("[", ".").replace("]", "")
    elif byte is not None:
        place += f".{byte[1]}"
    return ApiError(400, message, kind="Bad Request", param=place)


def bad_query(message: str, name: str) -> ApiError:
    """The refusal of a query parameter."""
    return ApiError(400, message, kind="Bad Request", param=f"query.{name}")


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Common(msgspec.Struct):
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    return_token_ids: bool | None = None
    priority: int = 0
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None


class CompletionBody(Common):
    prompt: str | list[TokenId | str | list[TokenId]] | None = None
    logprobs: int | None = None
    echo: bool | None = False
    add_special_tokens: bool = True


class Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatBody(Common):
    messages: list[Message] = msgspec.field(default_factory=list)
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    add_generation_prompt: bool = True


class EmbeddingBody(msgspec.Struct):
    model: str | None = None
    input: str | list[TokenId | str | list[TokenId]] | None = None
    dimensions: int | None = None
    encoding_format: str = "float"
    priority: int = 0
    add_special_tokens: bool = True


class TokenizeBody(msgspec.Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class DetokenizeBody(msgspec.Struct):
    tokens: list[TokenId]
    model: str | None = None


class AbortBody(msgspec.Struct):
    request_ids: list[str] = msgspec.field(default_factory=list)


def prompts_of(
    value: str | list[int | str | list[int]] | None, *, special: bool, name: str
) -> list[list[int]]:
    """The token ids of each prompt in a `prompt` or `input` value.

    Raises:
        ApiError: empty, mixed, or a token id outside the vocabulary.
    """
    if isinstance(value, str):
        return [_text(value, special)]
    if not value:
        raise bad_request(
            f"{name} must be a non-empty string, list of token ids, or list of prompts",
            name if value is None else None,
        )
    first = value[0]
    if isinstance(first, int):
        return [_ids(value, name)]
    out: list[list[int]] = []
    for item in value:
        if isinstance(item, str):
            out.append(_text(item, special))
        elif isinstance(item, list):
            out.append(_ids(item, name))
        else:
            raise _mixed(value, name)
    return out


def _text(text: str, special: bool) -> list[int]:
    return [tokens.BOS, *tokens.encode(text)] if special else tokens.encode(text)


def _ids(value: list[Any], name: str) -> list[int]:
    if not value:
        raise bad_request(f"{name} must not be an empty list of token ids")
    try:
        high = max(value)  # fails on a mixture; that none is negative was seen to when decoding
    except TypeError:
        high = None
    if not isinstance(high, int):
        raise _mixed(value, name)
    if high >= tokens.VOCAB_SIZE:
        raise bad_request(f"Token id {high} is out of vocabulary (0 to {tokens.VOCAB_SIZE - 1})")
    return value


def _mixed(value: list[Any], name: str) -> ApiError:
    at = next(i for i, one in enumerate(value) if type(one) is not type(value[0]))
    return ApiError(
        400,
        f"{name} mixes token ids with prompts; give one kind",
        kind="Bad Request",
        param=f"body.{name}.{at}",
    )


def chat_ids(messages: list[Message], *, add_generation_prompt: bool) -> list[int]:
    """Token ids of a conversation under the simulated chat template."""
    pairs: list[tuple[str, str]] = []
    for message in messages:
        content = message.content
        if isinstance(content, list):
            parts = [p.get("text") for p in content if p.get("type") in (None, "text")]
            if len(parts) != len(content) or not all(isinstance(p, str) for p in parts):
                raise bad_request("only text content parts are supported by the simulated engine", "messages")
            content = "\n".join(str(p) for p in parts)
        pairs.append((message.role, content or ""))
    return tokens.chat_prompt(pairs, add_generation_prompt=add_generation_prompt)


def check_sampling(body: Common) -> None:
    """Refuse what vLLM refuses, and what the simulation cannot do.

    Raises:
        ApiError: with the parameter's name.
    """
    n = 1 if body.n is None else body.n
    if n < 1:
        raise bad_request(f"n must be at least 1, got {n}.")
    if n > 1:
        raise bad_request(f"n must be 1 on the simulated engine, got {n}; send {n} requests instead.", "n")
    if body.temperature is not None and body.temperature < 0:
        raise bad_request(f"temperature must be non-negative, got {body.temperature}.", "temperature")
    if body.top_p is not None and not 0 < body.top_p <= 1:
        raise bad_request(f"top_p must be in (0, 1], got {body.top_p}.", "top_p")
    if body.min_tokens < 0:
        raise bad_request(f"min_tokens must be greater than or equal to 0, got {body.min_tokens}.")
    if body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs is not supported by the simulated engine", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")


def too_long(prompt_tokens: int, max_model_len: int) -> ApiError:
    return bad_request(
        f"This model's maximum context length is {max_model_len} tokens. However, your request has "
        f"{prompt_tokens} input tokens. Please reduce the length of the input messages.",
        "input_tokens",
    )


def output_limit(asked: int | None, *, prompt_tokens: int, max_model_len: int, default: int | None) -> int:
    """How many tokens a request may produce. `default` None means: up to the model's context.

    Raises:
        ApiError: below 1, or prompt and output exceed the context.
    """
    if prompt_tokens > max_model_len:
        raise too_long(prompt_tokens, max_model_len)
    if prompt_tokens == max_model_len:
        raise bad_request("max_tokens must be at least 1, got 0.", "max_tokens")
    if asked is None:
        room = max_model_len - prompt_tokens
        return room if default is None else min(default, room)
    if asked < 1:
        raise bad_request(f"max_tokens must be at least 1, got {asked}.", "max_tokens")
    if prompt_tokens + asked > max_model_len:
        raise bad_request(
            f"'max_tokens' or 'max_completion_tokens' is too large: {asked}. This model's maximum context "
            f"length is {max_model_len} tokens and your request has {prompt_tokens} input tokens "
            f"({asked} > {max_model_len} - {prompt_tokens}).",
            "max_tokens",
        )
    return asked


def stops_of(body: Common) -> tuple[str, ...]:
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
