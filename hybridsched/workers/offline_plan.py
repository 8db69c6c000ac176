"""What may be done with one batch line: which requests run it, and how parts of an answer become one.

Pure: bodies in, bodies out. A line that is ended at an iteration boundary comes back with its tokens so far.
Whether it can go on from there *exactly* is decided here, by an allow list: a parameter that is not known to
survive the seam makes the line run again whole.
"""

from __future__ import annotations

from typing import Any

import msgspec

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

DEFAULT_COMPLETION_TOKENS = 16
"""What /v1/completions takes for `max_tokens` when it is absent (the OpenAI API's default, vLLM's too)."""

OFFLINE_PRIORITY = 1000
"""Lower number = earlier under `--scheduling-policy priority`; ignored by an engine that is first come first
served. Online requests carry 0, 1 or 2."""

_MAX_TOKEN_ID = 2**31
"""Ids of tokens lie below this: engines hold them as 32-bit numbers."""

_CHARS_PER_TOKEN = 4
"""A rule of thumb for English text; only for planning, the engine's own count replaces it."""

# Carried from the user's body to the continuation: they mean the same in the second part as in the first.
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",  # counts prompt and output alike, so the seam does not show
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "seed",
)
_IDENTITY = ("model", "user", "cache_salt")
_HARMLESS = frozenset(
    {*_SAMPLING, *_IDENTITY, "max_tokens", "min_tokens", "return_token_ids"}
    | {"stream", "stream_options", "priority", "request_id", "metadata", "store", "service_tier"}
    | {"parallel_tool_calls"}
)
_PROMPTS = {
    COMPLETIONS: frozenset({"prompt", "add_special_tokens"}),
    CHAT: frozenset(
        {"messages", "max_completion_tokens", "chat_template", "chat_template_kwargs", "documents"}
        | {"add_generation_prompt", "continue_final_message", "add_special_tokens"}
    ),
}
# Harmless only with the value that means "not used".
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),  # 0 is not False: it asks for the sampled token's own
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "use_beam_search": (False,),
}
_OURS = ("stream", "stream_options", "priority", "request_id")


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How one line may be run."""

    path: str
    continuable: bool
    """Whether an aborted answer can go on from its tokens with exactly the result of one run."""
    why_not: str = ""
    """The parameter that forbids it."""
    abortable: bool
    """Whether `/abort_requests` ends all of it; otherwise the connection is closed, which does."""
    sliceable: bool
    """Whether its prompt may go in by slices through the prefix cache."""
    prompt_ids: list[int] | None = None
    """The prompt where it is given as token ids."""
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    """The user's limit of output tokens; None: up to the model's length."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a line that was ended before its end."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    body: dict[str, Any]
    """The first part's answer, for the shape of the final one."""


def shape_of(path: str, body: dict[str, Any]) -> Shape:
    """Classify one line. Never raises on odd bodies: what is not understood is run whole, as it is."""
    if path not in _PROMPTS:
        return Shape(path=path, continuable=False, why_not=path, abortable=False, sliceable=False)
    why = _forbidding_key(path, body)
    prompt = body.get("prompt") if path == COMPLETIONS else None
    ids = prompt if isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt) else None
    single = body.get("n") in (None, 1) and body.get("best_of") in (None, 1)
    if path == COMPLETIONS and ids is None and not isinstance(prompt, str):
        single, why = False, why or "prompt"
    if path == CHAT and not _text_only(body.get("messages")):
        why = why or "messages"
    limit = body.get("max_completion_tokens") if path == CHAT else None
    if limit is None:
        limit = body.get("max_tokens")
    if limit is None and path == COMPLETIONS:
        limit = DEFAULT_COMPLETION_TOKENS
    if limit is not None and type(limit) is not int:
        limit, why = None, why or "max_tokens"
    stop = body.get("stop")
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else ()
    if (stop is not None and not stops and stop != []) or not all(isinstance(s, str) for s in stops):
        stops, why = (), why or "stop"
    return Shape(
        path=path,
        continuable=not why,
        why_not=why,
        abortable=single,
        sliceable=single and why not in ("prompt", "messages", "truncate_prompt_tokens", "prompt_embeds"),
        prompt_ids=ids,
        stops=stops,
        max_tokens=limit,
    )


def _forbidding_key(path: str, body: dict[str, Any]) -> str:
    allowed = _PROMPTS[path]
    for key, value in body.items():
        if value is None or key in allowed:
            continue
        if key == "seed" and body.get("temperature") != 0:
            return "seed"  # the random stream would start anew at the seam
        if key in _HARMLESS or any(type(value) is type(v) and value == v for v in _NEUTRAL.get(key, ())):
            continue
        return key
    return ""


def _text_only(messages: Any) -> bool:
    if not isinstance(messages, list):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else message
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list) or not all(
            isinstance(part, dict) and part.get("type") == "text" for part in content
        ):
            return False
    return True


def estimate_prompt_tokens(shape: Shape, body: dict[str, Any], raw_bytes: int) -> int:
    """Prompt tokens for planning: exact for token ids, else from the length of the text."""
    if shape.prompt_ids is not None:
        return len(shape.prompt_ids)
    prompt = body.get("prompt")
    size = len(prompt) if isinstance(prompt, str) else raw_bytes
    return max(1, size // _CHARS_PER_TOKEN)


def own_request(shape: Shape, body: dict[str, Any]) -> dict[str, Any]:
    """The user's own request as it is sent: not streamed, our priority, token ids returned where useful."""
    sent = {key: value for key, value in body.items() if key not in _OURS}
    sent["priority"] = OFFLINE_PRIORITY  # vLLM takes it for embeddings too
    if shape.continuable:
        sent["return_token_ids"] = True
    return sent


def slice_request(body: dict[str, Any], prompt_ids: list[int], upto: int) -> dict[str, Any]:
    """A request that computes the first `upto` prompt tokens into the prefix cache, and one token."""
    sent = {key: body[key] for key in _IDENTITY if body.get(key) is not None}
    sent.update(prompt=prompt_ids[:upto], max_tokens=1, temperature=0, priority=OFFLINE_PRIORITY)
    return sent


def continuation_request(body: dict[str, Any], kept: Kept, remaining: int) -> dict[str, Any]:
    """The request that goes on from the kept tokens and produces at most `remaining` more."""
    sent = {key: body[key] for key in (*_IDENTITY, *_SAMPLING) if body.get(key) is not None}
    sent.update(
        prompt=kept.prompt_ids + kept.token_ids,
        max_tokens=remaining,
        priority=OFFLINE_PRIORITY,
        return_token_ids=True,
    )
    least = body.get("min_tokens")
    if isinstance(least, int) and least > len(kept.token_ids):
        sent["min_tokens"] = least - len(kept.token_ids)
    return sent


def remaining_tokens(shape: Shape, kept: Kept, max_model_len: int | None) -> int | None:
    """How many tokens a continuation may still produce; None when that cannot be known."""
    limits = []
    if shape.max_tokens is not None:
        limits.append(shape.max_tokens - len(kept.token_ids))
    if max_model_len is not None:
        limits.append(max_model_len - len(kept.prompt_ids) - len(kept.token_ids))
    if shape.max_tokens is None and max_model_len is None:
        return None
    return max(0, min(limits))


def kept_problem(answer: dict[str, Any], most: int | None) -> str:
    """What keeps the tokens of an answer that was ended early from being tokens of ours; empty: nothing.

    `most`: output tokens that were asked for; None: no limit.
    """
    for choice in answer.get("choices") or ():
        ids = choice.get("token_ids")
        if ids is None:
            continue
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < _MAX_TOKEN_ID for i in ids):
            return "token_ids that are none"
        if most is not None and len(ids) > max(1, most):
            return f"{len(ids):,} token_ids, of at most {most:,} that were asked for"
    return ""


def keep(
    shape: Shape, answer: dict[str, Any], earlier: Kept | None, known_ids: list[int] | None
) -> Kept | None:
    """What an answer with finish_reason `abort` leaves to go on from; None when the seam would not be exact.

    `earlier` is what was kept before, `known_ids` the prompt's ids where they are known already.
    """
    if not shape.continuable:
        return earlier
    choice = (answer.get("choices") or [{}])[0]
    ids = choice.get("token_ids")
    text = _text_of(choice)
    if not ids:
        return earlier
    prompt_ids = earlier.prompt_ids if earlier else known_ids
    if prompt_ids is None:
        prompt_ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    if not isinstance(prompt_ids, list) or not prompt_ids or not text or _seam_unsafe(text, shape.stops):
        return earlier
    return Kept(
        prompt_ids=prompt_ids,
        token_ids=(earlier.token_ids if earlier else []) + ids,
        text=(earlier.text if earlier else "") + text,
        body=earlier.body if earlier else _without_parts(answer),
    )


SEAM_TOKENS = 8
"""Tokens from whose text one sees whether the last character is whole: one of UTF-8 has at most four bytes, a
token at least one."""

FRAGMENT = "\ufffd"
"""What bytes that are no whole character read as."""


def whole_characters(text: str) -> bool:
    """Whether tokens that read so end with a whole character.

    An engine holds back the text of one that is not, so what is kept would lack it; and one that goes on from
    the middle of a character writes another text than one that never stopped: vLLM writes the prompt again.
    """
    return not text.endswith(FRAGMENT)


def ends_with(text: str, alone: str) -> bool:
    """Whether a text ends with a token that reads `alone` by itself, and is whole by itself."""
    return alone != "" and FRAGMENT not in alone and text.endswith(alone)


def shows(text: str, alone: str) -> bool:
    """Whether a token that reads `alone` by itself can be seen in a text.

    A special one cannot, nor one of a vocabulary's padding; a part of a character is taken to.
    """
    return FRAGMENT in alone or (alone != "" and alone in text)


def one_token_less(kept: Kept) -> Kept | None:
    """The same without its last token, whose text was held back; None when none is left."""
    if len(kept.token_ids) <= 1:
        return None
    return msgspec.structs.replace(kept, token_ids=kept.token_ids[:-1])


def _text_of(choice: dict[str, Any]) -> str | None:
    """The plain text of a choice; None when a parser of the engine has taken it apart."""
    if "message" not in choice:
        text = choice.get("text")
        return text if isinstance(text, str) else None
    message = choice["message"]
    if message.get("reasoning_content") or message.get("reasoning") or message.get("tool_calls"):
        return None
    content = message.get("content")
    return content if isinstance(content, str) else None


def _seam_unsafe(text: str, stops: tuple[str, ...]) -> bool:
    """Whether a character or a stop string may be cut by the seam: then its other half would be missed."""
    if text.endswith(FRAGMENT):
        return True
    return any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))


def _without_parts(answer: dict[str, Any]) -> dict[str, Any]:
    choice = dict((answer.get("choices") or [{}])[0])
    _blank_ids(choice)
    choice.pop("text", None)
    if "message" in choice:
        choice["message"] = {**choice["message"], "content": ""}
    rest = {k: v for k, v in answer.items() if k != "choices"}
    _blank_ids(rest)
    return {**rest, "choices": [choice]}


def final_body(
    body: dict[str, Any], kept: Kept | None, answer: dict[str, Any] | None, finish_reason: str = "length"
) -> dict[str, Any]:
    """One normal answer for the user: kept text and last part joined, usage in all.

    `answer` None means that the kept tokens are already all there are; `finish_reason` says why then.
    """
    wants_ids = bool(body.get("return_token_ids"))
    if kept is None:
        if answer is None:
            raise ValueError("a final body needs kept tokens or an answer; both are missing")
        return answer if wants_ids else _strip_ids(answer)
    last: dict[str, Any] = (answer.get("choices") or [{}])[0] if answer is not None else {}
    more_ids = list(last.get("token_ids") or ())
    text = kept.text + (_text_of(last) or "" if last else "")
    choice = dict(kept.body["choices"][0])
    choice["finish_reason"] = last.get("finish_reason", finish_reason)
    choice["stop_reason"] = last.get("stop_reason")
    if "message" in choice:
        choice["message"] = {**choice["message"], "content": text}
    else:
        choice["text"] = text
    joined = {**kept.body, "choices": [choice]}
    if wants_ids:
        choice["token_ids"] = kept.token_ids + more_ids
        (joined if "message" in choice else choice)["prompt_token_ids"] = kept.prompt_ids
    usage = dict(kept.body.get("usage") or {})
    made = len(kept.token_ids) + completion_tokens(answer)
    usage.update(
        prompt_tokens=len(kept.prompt_ids), completion_tokens=made, total_tokens=len(kept.prompt_ids) + made
    )
    joined["usage"] = usage
    return joined


def _strip_ids(answer: dict[str, Any]) -> dict[str, Any]:
    _blank_ids(answer)
    for choice in answer.get("choices") or ():
        _blank_ids(choice)
    return answer


def _blank_ids(part: dict[str, Any]) -> None:
    """As the engine leaves its fields for token ids where nobody asks for them: there, and null."""
    for key in ("token_ids", "prompt_token_ids"):
        if key in part:
            part[key] = None


def completion_tokens(answer: dict[str, Any] | None) -> int:
    """Output tokens of one answer."""
    if answer is None:
        return 0
    return int((answer.get("usage") or {}).get("completion_tokens") or 0)


def prompt_tokens(answer: dict[str, Any]) -> int:
    """Prompt tokens of one answer (of its own part)."""
    return int((answer.get("usage") or {}).get("prompt_tokens") or 0)


def cached_tokens(answer: dict[str, Any]) -> int | None:
    """Prompt tokens served by the prefix cache; None when the engine does not say.

    vLLM says it with `--enable-prompt-tokens-details`.
    """
    details = (answer.get("usage") or {}).get("prompt_tokens_details")
    if not isinstance(details, dict) or details.get("cached_tokens") is None:
        return None
    return int(details["cached_tokens"])
