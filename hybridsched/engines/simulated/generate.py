"""The hot routes: completions, chat completions and embeddings, as plain ASGI."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from array import array
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

import msgspec

from hybridsched.engines.simulated import api
from hybridsched.engines.simulated.answers import (
    DEATH,
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

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

OFFLINE_PREFIX = "hsoff-"
"""Request ids of our own offline work. Only the iteration log looks at it."""
LABEL = (b"x-hybridsched-simulated", b"1")
_JSON = (b"content-type", b"application/json")
_SSE = [(b"content-type", b"text/event-stream; charset=utf-8"), LABEL]
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
        raise api.bad_request(str(error)) from error


async def read_body(receive: Receive) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    while message.get("more_body"):
        message = await receive()
        body += message.get("body", b"")
    return body


async def send_json(send: Send, status: int, value: object) -> None:
    body = encode_json(value)
    headers = [_JSON, (b"content-length", b"%d" % len(body)), LABEL]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Generation:
    """Turns HTTP requests into sequences and sequences into answers."""

    def __init__(
        self, engine: EngineLoop, models: tuple[str, ...], *, runner: str, max_queued: int | None
    ) -> None:
        self.engine = engine
        self.models = models
        self.runner = runner
        self.max_queued = max_queued
        self.draining = False
        self.load = 0

    # -- routes -----------------------------------------------------------------------------------------

    async def completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = parse(_completion, await read_body(receive))
        model = self.check(body.model, "generate")
        api.check_sampling(body)
        if body.logprobs is not None or body.echo:
            name = "echo" if body.echo else "logprobs"
            raise api.bad_request(f"{name} is not supported by the simulated engine", name)
        prompts = api.prompts_of(body.prompt, special=body.add_special_tokens, name="prompt")
        limit = self.engine.scheduler.limits.max_model_len
        answer = Answer(streaming=bool(body.stream))
        external = f"cmpl-{_request_id(scope)}"
        seqs = [
            self._seq(
                f"{external}-{i}",
                prompt,
                body,
                api.output_limit(body.max_tokens, prompt_tokens=len(prompt), max_model_len=limit, default=16),
                ChoiceSink(answer, i, api.stops_of(body)),
            )
            for i, prompt in enumerate(prompts)
        ]
        await self._answer(receive, send, seqs, answer, body, external, model, chat=False)

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = parse(_chat, await read_body(receive))
        model = self.check(body.model, "generate")
        api.check_sampling(body)
        if body.logprobs:
            raise api.bad_request("logprobs is not supported by the simulated engine", "logprobs")
        if not body.messages:
            raise api.bad_request("messages must hold at least one message", "messages")
        prompt = api.chat_ids(body.messages, add_generation_prompt=body.add_generation_prompt)
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        limit = api.output_limit(
            asked,
            prompt_tokens=len(prompt),
            max_model_len=self.engine.scheduler.limits.max_model_len,
            default=None,
        )
        answer = Answer(streaming=bool(body.stream))
        external = f"chatcmpl-{_request_id(scope)}"
        seqs = [self._seq(external, prompt, body, limit, ChoiceSink(answer, 0, api.stops_of(body)))]
        await self._answer(receive, send, seqs, answer, body, external, model, chat=True)

    async def embeddings(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = parse(_embedding, await read_body(receive))
        model = self.check(body.model, "pooling")
        dim = _EMBEDDING_DIM if body.dimensions is None else body.dimensions
        if not 1 <= dim <= _EMBEDDING_DIM:
            raise api.bad_request(f"dimensions must be 1 to {_EMBEDDING_DIM}, got {dim}", "dimensions")
        if body.encoding_format not in ("float", "base64"):
            raise api.bad_request(
                f"encoding_format must be float or base64, got {body.encoding_format!r}", "encoding_format"
            )
        prompts = api.prompts_of(body.input, special=body.add_special_tokens, name="input")
        limit = self.engine.scheduler.limits.max_model_len
        answer = Answer(streaming=False)
        request_id = _request_id(scope)
        external = f"embd-{request_id}"
        seqs = []
        for i, prompt in enumerate(prompts):
            if len(prompt) > limit:
                api.output_limit(None, prompt_tokens=len(prompt), max_model_len=limit, default=1)
            seqs.append(
                Seq(
                    f"{external}-{i}",
                    prompt,
                    max_tokens=1,
                    priority=body.priority,
                    offline=request_id.startswith(OFFLINE_PREFIX),
                    pooling=True,
                    sink=ChoiceSink(answer, i, ()),
                )
            )
        if not await self._run(receive, seqs, answer):
            return
        used = sum(len(p) for p in prompts)
        data = []
        for seq in seqs:
            numbers = vector(seq, dim)
            value: object = numbers
            if body.encoding_format == "base64":
                value = base64.b64encode(array("f", numbers).tobytes()).decode()
            data.append({"index": seq.sink.index, "object": "embedding", "embedding": value})
        await send_json(
            send,
            200,
            {
                "id": external,
                "object": "list",
                "created": int(time.time()),
                "model": model,
                "data": data,
                "usage": {"prompt_tokens": used, "total_tokens": used, "completion_tokens": 0},
            },
        )

    # -- steps ------------------------------------------------------------------------------------------

    def check(self, model: str | None, runner: str) -> str:
        """The model's name, or an `ApiError` when it is not served or cannot do this."""
        if model is not None and model not in self.models:
            raise api.ApiError(
                404, f"The model `{model}` does not exist.", kind="NotFoundError", param="model"
            )
        if runner != self.runner:
            what = "Embeddings" if runner == "pooling" else "Completions"
            raise api.bad_request(f"The model does not support {what} API")
        return model or self.models[0]

    def _seq(
        self, request_id: str, prompt: list[int], body: api._Common, max_tokens: int, sink: ChoiceSink
    ) -> Seq:
        if body.min_tokens > max_tokens:
            raise api.bad_request(
                f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {body.min_tokens}.",
                "min_tokens",
            )
        return Seq(
            request_id,
            prompt,
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            ignore_eos=body.ignore_eos,
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            priority=body.priority,
            offline=request_id.split("-", 1)[1].startswith(OFFLINE_PREFIX),
            sink=sink,
        )

    def _admit(self, seqs: list[Seq], answer: Answer, receive: Receive) -> asyncio.Task[None]:
        if self.draining:
            raise api.ApiError(500, "cannot schedule new futures after shutdown", kind="InternalServerError")
        engine = self.engine
        if self.max_queued is not None and engine.in_flight + len(seqs) > self.max_queued:
            engine.metrics.rejections += 1
            raise api.ApiError(503, _BUSY, kind="ServiceUnavailableError")
        engine.submit(seqs)
        return asyncio.ensure_future(self._watch(receive, seqs, answer))

    async def _watch(self, receive: Receive, seqs: list[Seq], answer: Answer) -> None:
        """Until the connection closes or the answer is complete; then nothing may go on running."""
        while (await receive())["type"] != "http.disconnect":
            continue
        answer.leave()
        for seq in seqs:
            self.engine.abandon(seq)

    async def _run(self, receive: Receive, seqs: list[Seq], answer: Answer) -> bool:
        """Run to the end. False: the client left."""
        watch = self._admit(seqs, answer, receive)
        self.load += 1
        try:
            await answer.wait()
        finally:
            self.load -= 1
            if not answer.gone:
                watch.cancel()
        if answer.died:
            raise api.ApiError(500, DEATH, kind="InternalServerError")
        return not answer.gone

    async def _answer(
        self,
        receive: Receive,
        send: Send,
        seqs: list[Seq],
        answer: Answer,
        body: api._Common,
        external: str,
        model: str,
        *,
        chat: bool,
    ) -> None:
        if body.stream:
            await self._stream(receive, send, seqs, answer, body, external, model, chat=chat)
            return
        if not await self._run(receive, seqs, answer):
            return
        with_ids = bool(body.return_token_ids)
        picked = [choice(seq, chat=chat, with_ids=with_ids) for seq in seqs]
        value: dict[str, Any] = {
            "id": external,
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "choices": picked,
            "service_tier": None,
            "system_fingerprint": "hybridsched-simulated",
            "usage": usage(seqs),
        }
        if chat:
            value["prompt_logprobs"] = None
            value["prompt_token_ids"] = seqs[0].prompt if with_ids else None
        await send_json(send, 200, value)

    async def _stream(
        self,
        receive: Receive,
        send: Send,
        seqs: list[Seq],
        answer: Answer,
        body: api._Common,
        external: str,
        model: str,
        *,
        chat: bool,
    ) -> None:
        watch = self._admit(seqs, answer, receive)
        self.load += 1
        options = body.stream_options or api.StreamOptions()
        with_ids = bool(body.return_token_ids)
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
            encode_json(external),
            kind.encode(),
            int(time.time()),
            encode_json(model),
        )
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _SSE})
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
                    parts += events(head, sink, chat=chat, with_ids=with_ids, first=first, options=options)
                if answer.died:
                    parts.append(death_event())
                elif answer.open == 0:
                    if options.include_usage:
                        parts.append(head + b'],"usage":' + encode_json(usage(seqs)) + b"}\n\n")
                    parts.append(b"data: [DONE]\n\n")
                over = answer.over and not answer.gone
                await send({"type": "http.response.body", "body": b"".join(parts), "more_body": not over})
                if over:
                    return
        finally:
            self.load -= 1
            if not answer.gone:
                watch.cancel()
                for seq in seqs:
                    self.engine.abandon(seq)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return str(value.decode("latin-1"))
    return uuid.uuid4().hex
