"""Between the OpenAI bodies that batch lines carry and what the child process takes and gives. Pure."""

from __future__ import annotations

import base64
import struct
import time
from typing import Any

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"

# Parameters of vLLM's SamplingParams that the HTTP API takes under the same names.
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "allowed_token_ids",
)
_KNOWN = frozenset(
    {*_SAMPLING, "model", "prompt", "messages", "input", "max_tokens", "max_completion_tokens", "priority"}
    | {"return_token_ids", "stream", "stream_options", "add_special_tokens", "user", "request_id", "metadata"}
    | {
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "encoding_format",
        "logit_bias",
    }
    | {"dimensions", "store", "service_tier", "parallel_tool_calls"}
)
# Accepted where they say what is done anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
}


class BodyError(ValueError):
    """A body that the engine in process cannot run; `param` names the field."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def error_body(status: int, message: str, param: str | None) -> dict[str, Any]:
    """An error object in vLLM's shape."""
    kind = "NotFoundError" if status == 404 else "BadRequestError"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def orders(path: str, body: dict[str, Any], request_id: str) -> list[dict[str, Any]]:
    """The child's orders for one body, one for each prompt; each lacks only what the engine knows.

    Raises:
        BodyError: a field that is not understood, or a value that cannot be.
    """
    for key, value in body.items():
        neutral = any(type(value) is type(v) and value == v for v in _NEUTRAL.get(key, ()))
        if value is not None and key not in _KNOWN and not neutral:
            raise BodyError(f"{key} is not supported by an engine in process; send it to one over HTTP", key)
    common: dict[str, Any] = {
        "do": "embed" if path == EMBEDDINGS else "complete",
        "priority": _whole(body, "priority") or 0,
        "stream": bool(body.get("stream")),
        "short": path == COMPLETIONS,
        "params": _pooling(body) if path == EMBEDDINGS else _sampling(path, body),
        "add_special_tokens": body.get("add_special_tokens", True) is not False,
    }
    if path == CHAT:
        return [{**common, "id": f"chatcmpl-{request_id}", **_conversation(body)}]
    name = "input" if path == EMBEDDINGS else "prompt"
    shape = "embd" if path == EMBEDDINGS else "cmpl"
    return [
        {**common, "id": f"{shape}-{request_id}-{index}", "prompt": prompt}
        for index, prompt in enumerate(prompts_of(body.get(name), name))
    ]


def prompts_of(value: Any, name: str) -> list[str | list[int]]:
    """The prompts in `value`: one text, one list of token ids, or a list of either.

    Raises:
        BodyError: none of these.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(one) is int for one in value):
            return [value]
        if all(isinstance(one, str) for one in value) or all(
            isinstance(one, list) and one and all(type(i) is int for i in one) for one in value
        ):
            return list(value)
    raise BodyError(f"{name} must be a text, a list of token ids, or a list of one kind of these", name)


def _conversation(body: dict[str, Any]) -> dict[str, Any]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BodyError("messages must hold at least one message", "messages")
    plain = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
                raise BodyError("only text is taken by an engine in process", "messages")
            content = "\n".join(part["text"] for part in content)
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BodyError("each message needs a role and a content", "messages")
        plain.append({**message, "content": content or ""})
    kwargs = body.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise BodyError("chat_template_kwargs must be an object", "chat_template_kwargs")
    named = ("add_generation_prompt", "continue_final_message")
    return {"messages": plain, "template_kwargs": {**kwargs, **{k: body[k] for k in named if k in body}}}


def _sampling(path: str, body: dict[str, Any]) -> dict[str, Any]:
    params = {key: body[key] for key in _SAMPLING if body.get(key) is not None}
    limit = body.get("max_completion_tokens") if path == CHAT else None
    limit = body.get("max_tokens") if limit is None else limit
    if limit is not None:
        if type(limit) is not int or limit < 1:
            raise BodyError(f"max_tokens must be at least 1, got {limit!r}.", "max_tokens")
        params["max_tokens"] = limit
    bias = body.get("logit_bias")
    if bias is not None:
        try:
            params["logit_bias"] = {int(token): float(by) for token, by in bias.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise BodyError("logit_bias must map token ids to numbers", "logit_bias") from error
    return params


def _pooling(body: dict[str, Any]) -> dict[str, Any]:
    if body.get("encoding_format", "float") not in ("float", "base64"):
        raise BodyError("encoding_format must be float or base64", "encoding_format")
    dimensions = _whole(body, "dimensions")
    return {} if dimensions is None else {"dimensions": dimensions}


def _whole(body: dict[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is not None and type(value) is not int:
        raise BodyError(f"{name} must be a whole number, got {value!r}", name)
    return value


class Part:
    """What has come back of one order."""

    def __init__(self) -> None:
        self.prompt_ids: list[int] = []
        self.token_ids: list[int] = []
        self.text: list[str] = []
        self.finish_reason: str | None = None
        self.stop_reason: Any = None
        self.cached_tokens: int | None = None
        self.embedding: list[float] | None = None

    def add(self, news: dict[str, Any]) -> None:
        """Take up a message of the child."""
        if news["prompt_token_ids"] is not None:
            self.prompt_ids = news["prompt_token_ids"]
        self.token_ids += news["token_ids"]
        self.text.append(news["text"])
        self.finish_reason, self.stop_reason = news["finish_reason"], news["stop_reason"]
        self.cached_tokens, self.embedding = news["cached_tokens"], news["embedding"]


def usage(parts: list[Part]) -> dict[str, Any]:
    """Tokens of all parts together, as vLLM counts them."""
    prompt = sum(len(part.prompt_ids) for part in parts)
    made = sum(len(part.token_ids) for part in parts)
    counted = {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}
    known = [part.cached_tokens for part in parts if part.cached_tokens is not None]
    return counted | {"prompt_tokens_details": {"cached_tokens": sum(known)} if known else None}


def head(path: str, request_id: str, model: str, *, stream: bool) -> dict[str, Any]:
    """The fields that every answer begins with."""
    if path == EMBEDDINGS:
        return {"id": f"embd-{request_id}", "object": "list", "created": int(time.time()), "model": model}
    chat = path == CHAT
    kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
    own = f"chatcmpl-{request_id}" if chat else f"cmpl-{request_id}"
    return {"id": own, "object": kind, "created": int(time.time()), "model": model}


def answer(path: str, body: dict[str, Any], request_id: str, model: str, parts: list[Part]) -> dict[str, Any]:
    """The whole answer to a body, in the API's shape."""
    first = head(path, request_id, model, stream=False)
    if path == EMBEDDINGS:
        packed = body.get("encoding_format") == "base64"
        data = [
            {"index": index, "object": "embedding", "embedding": _vector(part, packed=packed)}
            for index, part in enumerate(parts)
        ]
        return first | {"data": data, "usage": usage(parts)}
    with_ids = bool(body.get("return_token_ids"))
    choices = []
    for index, part in enumerate(parts):
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": part.finish_reason}
        choice |= {"stop_reason": part.stop_reason, "token_ids": part.token_ids if with_ids else None}
        text = "".join(part.text)
        if path == CHAT:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
        else:
            choice |= {"text": text, "prompt_token_ids": part.prompt_ids if with_ids else None}
        choices.append(choice)
    whole = first | {"choices": choices, "usage": usage(parts)}
    if path == CHAT:
        whole["prompt_token_ids"] = parts[0].prompt_ids if with_ids else None
    return whole


def _vector(part: Part, *, packed: bool) -> list[float] | str | None:
    """The numbers, or their 32-bit floats, little end first, as base64."""
    if not packed or part.embedding is None:
        return part.embedding
    return base64.b64encode(struct.pack(f"<{len(part.embedding)}f", *part.embedding)).decode()


def event(
    path: str, body: dict[str, Any], head: dict[str, Any], index: int, news: dict[str, Any], *, first: bool
) -> dict[str, Any]:
    """One event of a streamed answer, for what is new of its choice `index`."""
    with_ids = bool(body.get("return_token_ids"))
    choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": news["finish_reason"]}
    if path == CHAT:
        choice["delta"] = {"content": news["text"]} | ({"role": "assistant"} if first else {})
    else:
        choice["text"] = news["text"]
    if news["finish_reason"] is not None:
        choice["stop_reason"] = news["stop_reason"]
    whole = {**head, "choices": [choice]}
    if with_ids:
        choice["token_ids"] = news["token_ids"]
        if first:
            (whole if path == CHAT else choice)["prompt_token_ids"] = news["prompt_token_ids"]
    return whole
