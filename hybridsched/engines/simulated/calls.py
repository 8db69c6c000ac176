"""From a request's body to sequences, and from sequences to its answer. Knows no HTTP."""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import msgspec

from hybridsched.engines.simulated import api
from hybridsched.engines.simulated.answers import (
    DEATH,
    UNUSED_ANSWER,
    choice,
    death_event,
    encode_json,
    events,
    usage,
    vector,
)
from hybridsched.engines.simulated.engine import EngineLoop
from hybridsched.engines.simulated.sequence import Seq
from hybridsched.engines.simulated.sinks import Answer, ChoiceSink

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
OFFLINE_PREFIX = "hsoff-"
"""Request ids of our own offline work. Only the iteration log looks at it."""
_BUSY = (
    "The engine is currently busy and cannot accept new requests. "
    "Please try again later or on a different instance."
)
_EMBEDDING_DIM = 256

_completion = msgspec.json.Decoder(api.CompletionBody).decode
_chat = msgspec.json.Decoder(api.ChatBody).decode
_embedding = msgspec.json.Decoder(api.EmbeddingBody).decode
_Body = TypeVar("_Body")


def parse(decode: Callable[[bytes], _Body], raw: bytes) -> _Body:
    """Decode a body, or raise `ApiError` 400 that names the field."""
    try:
        return decode(raw)
    except msgspec.MsgspecError as error:
        raise api.unreadable(str(error)) from error


class Call:
    """One request on its way: its sequences, and what waits for them."""

    __slots__ = ("answer", "body", "external", "model", "path", "seqs", "streaming")

    def __init__(
        self, path: str, body: api.Common | api.EmbeddingBody, external: str, model: str, *, streaming: bool
    ) -> None:
        self.path = path
        self.body = body
        self.external = external
        self.model = model
        self.streaming = streaming
        self.answer = Answer(streaming=streaming)
        self.seqs: list[Seq] = []


class Calls:
    """Checks and runs calls on one engine."""

    def __init__(
        self,
        engine: EngineLoop,
        models: tuple[str, ...],
        *,
        runner: str,
        max_queued: int | None,
        prompt_details: bool,
    ) -> None:
        """`prompt_details`: say in each usage how many prompt tokens the prefix cache had."""
        self.engine = engine
        self.models = models
        self.runner = runner
        self.max_queued = max_queued
        self.prompt_details = prompt_details
        self.draining = False
        """Shutting down: what is in flight may end, nothing new begins."""

    def check_model(self, model: str | None, runner: str) -> str:
        """The model's name, or an `ApiError` when it is not served or cannot do this."""
        if model and model not in self.models:  # an empty name is none
            raise api.ApiError(
                404, f"The model `{model}` does not exist.", kind="NotFoundError", param="model"
            )
        if runner != self.runner:
            raise api.NO_SUCH_PATH  # vLLM has no such route for a model that cannot do it
        return model or self.models[0]

    # -- body to sequences ------------------------------------------------------------------------------

    def prepare(self, path: str, raw: bytes, request_id: str) -> Call:
        """The call in `raw`, checked and not yet accepted.

        Raises:
            ApiError: the body, the model or a parameter is not acceptable.
        """
        if path == COMPLETIONS:
            return self._prepare_completion(raw, request_id)
        if path == CHAT:
            return self._prepare_chat(raw, request_id)
        return self._prepare_embedding(raw, request_id)

    def _prepare_completion(self, raw: bytes, request_id: str) -> Call:
        body = parse(_completion, raw)
        model = self.check_model(body.model, "generate")
        api.check_sampling(body)
        if body.logprobs is not None or body.echo:
            name = "echo" if body.echo else "logprobs"
            raise api.bad_request(f"{name} is not supported by the simulated engine", name)
        call = Call(COMPLETIONS, body, f"cmpl-{request_id}", model, streaming=bool(body.stream))
        for prompt in api.prompts_of(body.prompt, special=body.add_special_tokens, name="prompt"):
            engine_id = f"{call.external}-{len(call.seqs)}"
            self._add(call, engine_id, request_id, prompt, body, body.max_tokens, default=16)
        return call

    def _prepare_chat(self, raw: bytes, request_id: str) -> Call:
        body = parse(_chat, raw)
        model = self.check_model(body.model, "generate")
        api.check_sampling(body)
        if body.logprobs:
            raise api.bad_request("logprobs is not supported by the simulated engine", "logprobs")
        if not body.messages:
            raise api.bad_request("messages must hold at least one message")
        call = Call(CHAT, body, f"chatcmpl-{request_id}", model, streaming=bool(body.stream))
        prompt = api.chat_ids(body.messages, add_generation_prompt=body.add_generation_prompt)
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        self._add(call, call.external, request_id, prompt, body, asked, default=None)
        return call

    def _add(
        self,
        call: Call,
        engine_id: str,
        request_id: str,
        prompt: list[int],
        body: api.Common,
        asked: int | None,
        *,
        default: int | None,
    ) -> None:
        limit = api.output_limit(
            asked,
            prompt_tokens=len(prompt),
            max_model_len=self.engine.scheduler.limits.max_model_len,
            default=default,
        )
        if body.min_tokens > limit:
            raise api.bad_request(
                f"min_tokens must be less than or equal to max_tokens={limit}, got {body.min_tokens}."
            )
        call.seqs.append(
            Seq(
                engine_id,
                prompt,
                max_tokens=limit,
                min_tokens=body.min_tokens,
                ignore_eos=body.ignore_eos,
                stop_token_ids=frozenset(body.stop_token_ids or ()),
                priority=body.priority,
                offline=request_id.startswith(OFFLINE_PREFIX),
                sink=ChoiceSink(call.answer, len(call.seqs), api.stops_of(body)),
            )
        )

    def _prepare_embedding(self, raw: bytes, request_id: str) -> Call:
        body = parse(_embedding, raw)
        model = self.check_model(body.model, "pooling")
        dim = body.dimensions
        if dim is not None and not 1 <= dim <= _EMBEDDING_DIM:
            raise api.bad_request(f"dimensions must be 1 to {_EMBEDDING_DIM}, got {dim}", "dimensions")
        if body.encoding_format not in ("float", "base64"):
            raise api.bad_request(
                f"encoding_format must be float or base64, got {body.encoding_format!r}", "encoding_format"
            )
        limit = self.engine.scheduler.limits.max_model_len
        call = Call(EMBEDDINGS, body, f"embd-{request_id}", model, streaming=False)
        for prompt in api.prompts_of(body.input, special=body.add_special_tokens, name="input"):
            if len(prompt) > limit:
                raise api.too_long(len(prompt), limit)
            index = len(call.seqs)
            call.seqs.append(
                Seq(
                    f"{call.external}-{index}",
                    prompt,
                    max_tokens=1,
                    priority=body.priority,
                    offline=request_id.startswith(OFFLINE_PREFIX),
                    pooling=True,
                    sink=ChoiceSink(call.answer, index, ()),
                )
            )
        return call

    # -- running ----------------------------------------------------------------------------------------

    def accept(self, call: Call) -> None:
        """Give the call to the engine.

        Raises:
            ApiError: 500 while shutting down, 503 when the queue limit is reached.
        """
        if self.draining:
            raise api.ApiError(500, "cannot schedule new futures after shutdown", kind="InternalServerError")
        engine = self.engine
        if self.max_queued is not None and engine.in_flight + len(call.seqs) > self.max_queued:
            engine.metrics.rejections += 1
            raise api.ApiError(503, _BUSY, kind="Service Unavailable")
        engine.submit(call.seqs)

    def leave(self, call: Call) -> None:
        """The answer is complete, or its client gone: end what still runs, and let go of the tokens.

        Prompts are large and sequences and their sinks point at each other: cut, they are freed at once.
        """
        call.answer.leave()
        for seq in call.seqs:
            self.engine.abandon(seq)
            seq.sink.seq = None

    async def whole(self, call: Call) -> dict[str, Any] | None:
        """The answer of an accepted call that does not stream; None when the client left.

        Raises:
            ApiError: 500, the engine died.
        """
        await call.answer.wait()
        if call.answer.died:
            raise api.ApiError(500, DEATH, kind="InternalServerError")
        if call.answer.gone:
            return None
        return (
            _embeddings(call)
            if isinstance(call.body, api.EmbeddingBody)
            else _completions(call, details=self.prompt_details)
        )

    async def events(self, call: Call) -> AsyncIterator[tuple[bytes, bool]]:
        """Server-sent events of an accepted call that streams, and whether they are the last.

        What gathers while the reader is busy comes as one event for each choice. Ends early when the client
        left.
        """
        body = call.body
        if isinstance(body, api.EmbeddingBody):
            raise TypeError("embeddings do not stream")
        chat = call.path == CHAT
        options = body.stream_options or api.StreamOptions()
        with_ids = bool(body.return_token_ids)
        head = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
            encode_json(call.external),
            b"chat.completion.chunk" if chat else b"text_completion",
            int(time.time()),
            encode_json(call.model),
        )
        answer = call.answer
        started: set[int] = set()
        while True:
            await answer.wait()
            if answer.gone:
                return
            changed, answer.changed = answer.changed, {}
            parts: list[bytes] = []
            for index, sink in changed.items():
                first = index not in started
                started.add(index)
                parts += events(
                    head,
                    sink,
                    chat=chat,
                    with_ids=with_ids,
                    first=first,
                    options=options,
                    details=self.prompt_details,
                )
            over = answer.over
            if answer.died:
                parts.append(death_event())
            elif answer.open == 0:
                if options.include_usage:
                    parts.append(
                        head
                        + b'],"usage":'
                        + encode_json(usage(call.seqs, details=self.prompt_details))
                        + b"}\n\n"
                    )
                parts.append(b"data: [DONE]\n\n")
            yield b"".join(parts), over
            if over:
                return


def _completions(call: Call, *, details: bool) -> dict[str, Any]:
    body = call.body
    with_ids = isinstance(body, api.Common) and bool(body.return_token_ids)
    chat = call.path == CHAT
    value: dict[str, Any] = {
        "id": call.external,
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": call.model,
        "choices": [choice(seq, chat=chat, with_ids=with_ids) for seq in call.seqs],
        "service_tier": None,
        "system_fingerprint": "hybridsched-simulated",
        "usage": usage(call.seqs, details=details) | {"completion_tokens_details": None},
        **UNUSED_ANSWER,
    }
    if chat:
        value["prompt_text"] = None
        value["prompt_logprobs"] = None
        value["prompt_token_ids"] = call.seqs[0].prompt if with_ids else None
    return value


def _embeddings(call: Call) -> dict[str, Any]:
    body = call.body
    as_text = isinstance(body, api.EmbeddingBody) and body.encoding_format == "base64"
    dim = (body.dimensions if isinstance(body, api.EmbeddingBody) else None) or _EMBEDDING_DIM
    data = []
    for index, seq in enumerate(call.seqs):
        numbers = vector(seq, dim)
        value: object = base64.b64encode(array("f", numbers).tobytes()).decode() if as_text else numbers
        data.append({"index": index, "object": "embedding", "embedding": value})
    used = sum(len(seq.prompt) for seq in call.seqs)
    return {
        "id": call.external,
        "object": "list",
        "created": int(time.time()),
        "model": call.model,
        "data": data,
        "usage": {"prompt_tokens": used, "total_tokens": used, "completion_tokens": 0},
    }
