"""Answers in vLLM's JSON: choices, usage, server-sent events, embeddings."""

from __future__ import annotations

from typing import Any

import msgspec

from hybridsched.engines.simulated import api, tokens
from hybridsched.engines.simulated.sequence import Seq
from hybridsched.engines.simulated.sinks import ChoiceSink

DEATH = "EngineCore encountered an issue. See stack trace (above) for the root cause. (simulated)"

# Fields of vLLM's answers that are null in all of them here.
_UNUSED_MESSAGE = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
_UNUSED_DETAILS = dict.fromkeys(("created_cache_tokens", "multimodal_tokens"))
UNUSED_ANSWER = dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "metrics"))

encode_json = msgspec.json.Encoder().encode


def choice(seq: Seq, *, chat: bool, with_ids: bool) -> dict[str, Any]:
    sink: ChoiceSink = seq.sink
    out: dict[str, Any] = {"index": sink.index}
    if chat:
        out["message"] = {"role": "assistant", "content": sink.text()} | _UNUSED_MESSAGE
    else:
        out["text"] = sink.text()
        out["prompt_logprobs"] = None
        out["prompt_token_ids"] = seq.prompt if with_ids else None
    out["logprobs"] = None
    out["finish_reason"] = seq.finish_reason
    out["stop_reason"] = sink.stop_reason
    out["token_ids"] = seq.output if with_ids else None
    out["routed_experts"] = None
    return out


def usage(seqs: list[Seq], *, details: bool) -> dict[str, Any]:
    """Tokens of all sequences; with `details` also those that the prefix cache had."""
    prompt = sum(len(s.prompt) for s in seqs)
    made = sum(len(s.output) for s in seqs)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + made,
        "completion_tokens": made,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens or 0 for s in seqs)} | _UNUSED_DETAILS
        if details
        else None,
    }


def events(
    head: bytes,
    sink: ChoiceSink,
    *,
    chat: bool,
    with_ids: bool,
    first: bool,
    options: api.StreamOptions,
    details: bool,
) -> list[bytes]:
    """The server-sent events of one choice's news: one for all tokens that have gathered."""
    seq = sink.seq
    if seq is None:
        return []
    text, fresh, reason = sink.take()
    out: list[bytes] = []
    tail = b"]}\n\n"
    if options.include_usage and options.continuous_usage_stats:
        tail = b'],"usage":' + encode_json(usage([seq], details=details)) + b"}\n\n"
    if chat:
        if first:
            ids = b',"prompt_token_ids":%b,"prompt_text":null' % encode_json(seq.prompt if with_ids else None)
            role = (
                b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            )
            out.append(head + role % sink.index + b"]" + ids + b"}\n\n")
        body = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":%b' % (
            sink.index,
            encode_json(text),
            encode_json(reason),
        )
    else:
        body = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b' % (
            sink.index,
            encode_json(text),
            encode_json(reason),
        )
        body += b',"prompt_token_ids":' + encode_json(seq.prompt if with_ids and first else None)
    if reason is not None or not chat:
        body += b',"stop_reason":' + encode_json(sink.stop_reason)
    body += b',"token_ids":' + encode_json(fresh if with_ids else None)
    if text or fresh or reason is not None:
        out.append(head + body + b"}" + tail)
    return out


def death_event() -> bytes:
    error = api.ApiError(500, DEATH, kind="InternalServerError")
    return b"data: " + encode_json(error.body()) + b"\n\ndata: [DONE]\n\n"


def vector(seq: Seq, dim: int) -> list[float]:
    """A unit vector that depends on the input's tokens only."""
    state = tokens.fold(seq.state, len(seq.prompt))
    values = []
    for i in range(dim):
        state = tokens.fold(state, i)
        values.append((state >> 11) / (1 << 52) - 1.0)
    norm = sum(v * v for v in values) ** 0.5 or 1.0
    return [v / norm for v in values]
