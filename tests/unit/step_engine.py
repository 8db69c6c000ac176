"""An engine whose iterations the test controls. Greedy: the next token is a function of the whole prefix."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from hybridsched.engines.protocol import Completion, EngineError, EngineInfo, EngineStats, StreamChunk

BLOCK = 16
VOCABULARY = 5000


def next_token(ids: Sequence[int]) -> int:
    return zlib.crc32(repr(ids[-8:]).encode() + str(len(ids)).encode()) % VOCABULARY


def text_of(token: int) -> str:
    return f" w{token}"


def chat_ids(body: dict[str, Any]) -> list[int]:
    return [ord(c) % VOCABULARY for message in body["messages"] for c in str(message["content"])] + [7]


class Request:
    def __init__(self, path: str, body: dict[str, Any], ids: list[int], most: int) -> None:
        self.path, self.body, self.ids, self.most = path, body, ids, most
        self.made: list[int] = []
        self.cached = 0
        self.reason: str | None = None
        self.done = asyncio.Event()
        self.error: EngineError | None = None


class StepEngine:
    """`run()` steps for ever; or call `step()` by hand. A prompt is computed in its first step."""

    url = "http://step"

    def __init__(self, *, max_model_len: int = 4096) -> None:
        self.requests: dict[str, Request] = {}
        self.sent: list[tuple[str, str, dict[str, Any]]] = []
        self.cache: set[tuple[int, ...]] = set()
        self.max_model_len = max_model_len
        self.peak = 0
        self.prefills: list[int] = []
        """Prompt tokens computed in each step."""
        self.poison: int | None = None
        """A prompt that begins with this token kills the engine."""
        self.fault: Callable[[str, dict[str, Any]], Completion | None] = lambda path, body: None
        """Looked at for each request: what it answers instead, or raises."""
        self.models: tuple[str, ...] = ("m",)
        self.deaf = False
        """Aborts are taken and not carried out."""
        self.alive = True
        self.abort_posts: list[list[str]] = []
        self.tokenized = 0
        self.has_tokenize = True
        self.reports_cache = True

    async def info(self) -> EngineInfo:
        return EngineInfo(
            models=self.models, max_model_len=self.max_model_len, kv_tokens=100_000, block_size=BLOCK
        )

    async def healthy(self) -> bool:
        return self.alive

    async def stats(self) -> EngineStats:
        return EngineStats(running=len(self.requests))

    async def complete(
        self, path: str, body: dict[str, Any] | bytes, *, request_id: str, timeout_s: float
    ) -> Completion:
        data = msgspec.json.decode(body) if isinstance(body, bytes) else body
        self.sent.append((request_id, path, data))
        if not self.alive:
            raise EngineError("no engine", code="engine_unreachable", retryable=True)
        if (instead := self.fault(path, data)) is not None:
            return instead
        if data.get("temperature") == 99:
            return Completion(status=400, body={"error": {"message": "too hot", "type": "BadRequestError"}})
        if path == "/v1/embeddings":
            ids, most = [1, 2, 3], 1
        elif path == "/v1/chat/completions":
            ids = chat_ids(data)
            limit = data.get("max_completion_tokens") or data.get("max_tokens")
            most = limit or self.max_model_len - len(ids)
        else:
            prompt = data["prompt"]
            ids = prompt if isinstance(prompt, list) else [ord(c) % VOCABULARY for c in prompt]
            most = data.get("max_tokens") or 16
        if len(ids) + 1 > self.max_model_len:
            return Completion(status=400, body={"error": {"message": "too long", "type": "BadRequestError"}})
        request = Request(path, data, list(ids), most)
        assert request_id not in self.requests
        self.requests[request_id] = request
        self.peak = max(self.peak, len(self.requests))
        try:
            async with asyncio.timeout(timeout_s):
                await request.done.wait()
        except TimeoutError:
            raise EngineError("silence", code="engine_timeout", retryable=True) from None
        finally:
            self.requests.pop(request_id, None)
        if request.error is not None:
            raise request.error
        return Completion(status=200, body=self._answer(request_id, request))

    def _answer(self, request_id: str, request: Request) -> dict[str, Any]:
        if request.path == "/v1/embeddings":
            return {"object": "list", "data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 3}}
        text = "".join(text_of(token) for token in request.made)
        choice: dict[str, Any] = {"index": 0, "finish_reason": request.reason, "stop_reason": None}
        answer: dict[str, Any] = {"id": request_id, "model": "m", "choices": [choice]}
        chat = request.path == "/v1/chat/completions"
        if chat:
            choice["message"] = {"role": "assistant", "content": text}
            answer["object"] = "chat.completion"
        else:
            choice["text"] = text
            answer["object"] = "text_completion"
        if request.body.get("return_token_ids"):
            choice["token_ids"] = list(request.made)
            (answer if chat else choice)["prompt_token_ids"] = list(request.ids)
        prompt, made = len(request.ids), len(request.made)
        answer["usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": request.cached} if self.reports_cache else None,
        }
        return answer

    def step(self) -> None:
        """One iteration: every request gets a token; prompts are computed and cached."""
        prefill = 0
        for request in list(self.requests.values()):
            if request.reason or request.error:
                continue
            if self.poison is not None and request.ids[0] == self.poison:
                self.die()
                return
            if not request.made:
                most = (len(request.ids) - 1) // BLOCK * BLOCK
                request.cached = next(
                    (n for n in range(most, 0, -BLOCK) if tuple(request.ids[:n]) in self.cache), 0
                )
                prefill += len(request.ids) - request.cached
            request.made.append(next_token(request.ids + request.made))
            whole = request.ids + request.made[:-1]
            for n in range(BLOCK, len(whole) + 1, BLOCK):
                self.cache.add(tuple(whole[:n]))
            stop = request.body.get("stop")
            if stop and stop in "".join(text_of(token) for token in request.made):
                request.reason = "stop"
            elif len(request.made) >= request.most:
                request.reason = "length"
            if request.reason:
                request.done.set()
        self.prefills.append(prefill)

    async def run(self, interval_s: float = 0.0) -> None:
        while True:
            await asyncio.sleep(interval_s)
            if self.alive:
                self.step()

    def die(self) -> None:
        for request in self.requests.values():
            request.error = EngineError("dead", code="engine_died", retryable=True, status=500)
            request.done.set()

    async def abort(self, path: str, request_ids: Sequence[str]) -> int:
        self.abort_posts.append(list(request_ids))
        await asyncio.sleep(0)
        count = 0
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None and request.path == path and not self.deaf and not request.reason:
                request.reason = "abort"
                request.done.set()
                count += 1
        return count

    async def tokenize(self, path: str, body: dict[str, Any]) -> list[int]:
        self.tokenized += 1
        if not self.has_tokenize:
            raise EngineError("no such route", code="not_found", retryable=False, status=404)
        if path == "/v1/chat/completions":
            return chat_ids(body)
        return [ord(c) % VOCABULARY for c in body["prompt"]]

    def stream(
        self, path: str, body: dict[str, Any] | bytes, *, request_id: str, idle_timeout_s: float
    ) -> AsyncIterator[StreamChunk]:
        raise AssertionError("offline work does not stream")

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...
