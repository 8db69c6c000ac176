"""vLLM, real or simulated, over HTTP. Nothing of vLLM is imported."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from hybridsched.engines.checks import answer_problem, bad_answer
from hybridsched.engines.metrics_text import engine_info, engine_stats
from hybridsched.engines.protocol import Completion, EngineError, EngineInfo, EngineStats, StreamChunk

_CONTROL_TIMEOUT_S = 5.0
"""For calls that answer at once: health, metrics, aborts. A pause may take one iteration."""
_SERVER_INFO_TIMEOUT_S = 30.0
"""vLLM gathers what it says of its machine at the first asking, by running other programs."""
_KEEP_ALIVE_S = 2.0
"""Below vLLM's 5 s, so that we close an idle connection before it does: a POST on a connection that the
server is closing fails, and nothing here sends twice."""
_END_TIMEOUT_S = 0.5
_MAX_EVENT_BYTES = 64 * 1024 * 1024
"""Longest line of a stream: an answer without an end must not fill the memory."""
_MAX_ANSWER_BYTES = 256 * 1024 * 1024
_MAX_MESSAGE = 2000
"""Characters of an engine's own words that are passed on: they go into logs and answers."""
_SSE_LINES = (b":", b"event:", b"id:", b"retry:")
"""Lines of a stream, besides data, that have a meaning; none of them is of use here."""
_MAX_CONNECTIONS = 1024
_JSON_HEADERS = {"Content-Type": "application/json"}
_PATH_CHAT, _PATH_COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class VllmHttpEngine:
    """`Engine` over vLLM's own HTTP API. Use it within one event loop and close it."""

    def __init__(self, base_url: str, *, api_key: str | None = None, connect_timeout_s: float = 2.0) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"engine URL {base_url!r} must begin with http:// or https://")
        self._url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        return self._url

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=_MAX_CONNECTIONS, keepalive_timeout=_KEEP_ALIVE_S),
                headers=self._headers,
                auto_decompress=False,
                skip_auto_headers=("Accept-Encoding", "User-Agent"),
            )
        return self._session

    # -- requests ---------------------------------------------------------------------------------------

    async def complete(
        self, path: str, body: dict[str, Any] | bytes, *, request_id: str, timeout_s: float
    ) -> Completion:
        """See `Engine.complete`. The answer comes in one piece, so `timeout_s` bounds all of it."""
        async with self._request("POST", path, body, request_id=request_id, timeout_s=timeout_s) as response:
            raw = await self._read(response, path)
        answer = _answer_body(raw, path, response.status)
        if response.status >= 500:
            raise _server_error(response.status, answer, self._url)
        if response.status < 400 and (problem := _answer_problem(path, raw, answer)):
            raise bad_answer(self._url, path, response.status, problem)
        return Completion(status=response.status, body=answer)

    async def stream(
        self, path: str, body: dict[str, Any] | bytes, *, request_id: str, idle_timeout_s: float
    ) -> AsyncIterator[StreamChunk]:
        """See `Engine.stream`. An answer of 4xx raises `EngineError`, as an error inside the stream does."""
        if isinstance(body, dict) and not body.get("stream"):
            body = {**body, "stream": True}
        async with self._request(
            "POST", path, body, request_id=request_id, timeout_s=None, idle_timeout_s=idle_timeout_s
        ) as response:
            if response.status >= 400:
                answer = _answer_body(await self._read(response, path), path, response.status)
                if response.status >= 500:
                    raise _server_error(response.status, answer, self._url)
                code = "not_found" if response.status == 404 else "bad_request"
                raise EngineError(
                    _message(answer), code=code, retryable=False, status=response.status, body=answer
                )
            if response.status != 200:
                raise bad_answer(self._url, path, response.status, "it is no stream of events")
            async for data in _events(response.content, self._url, path):
                yield StreamChunk(data=data)

    async def abort(self, path: str, request_ids: Sequence[str]) -> None:
        """See `Engine.abort`. Completions must hold one prompt each; embeddings cannot be ended."""
        if not request_ids:
            return
        if path == _PATH_COMPLETIONS:
            ids = [f"cmpl-{i}-0" for i in request_ids]
        elif path == _PATH_CHAT:
            ids = [f"chatcmpl-{i}" for i in request_ids]
        else:
            return
        await self._call("POST", "/abort_requests", {"request_ids": ids})

    async def tokenize(self, path: str, body: dict[str, Any]) -> list[int]:
        """See `Engine.tokenize`. Raises `EngineError` bad_request where the body has no single prompt."""
        asked: dict[str, Any] = {"model": body["model"]} if body.get("model") else {}
        if path == _PATH_CHAT:
            asked["messages"] = body.get("messages")
            for name in ("add_generation_prompt", "chat_template_kwargs", "tools"):
                if name in body:
                    asked[name] = body[name]
        else:
            prompt = body.get("prompt" if path == _PATH_COMPLETIONS else "input")
            if isinstance(prompt, list) and prompt and all(isinstance(t, int) for t in prompt):
                return list(prompt)
            if isinstance(prompt, list) and len(prompt) == 1:
                prompt = prompt[0]
            if not isinstance(prompt, str):
                raise EngineError(
                    "a prompt to tokenize must be one string or one list of token ids, "
                    f"not {type(prompt).__name__}",
                    code="bad_request",
                    retryable=False,
                )
            asked["prompt"] = prompt
            if "add_special_tokens" in body:
                asked["add_special_tokens"] = body["add_special_tokens"]
        answer = await self._call("POST", "/tokenize", asked)
        tokens = answer.get("tokens")
        if not isinstance(tokens, list):
            raise EngineError("/tokenize gave no tokens", code="bad_request", retryable=False)
        return tokens

    async def detokenize(self, model: str | None, token_ids: Sequence[int]) -> str:
        """See `Detokenizes.detokenize`."""
        asked: dict[str, Any] = {"tokens": list(token_ids)} | ({"model": model} if model else {})
        text = (await self._call("POST", "/detokenize", asked)).get("prompt")
        if not isinstance(text, str):
            raise EngineError("/detokenize gave no text", code="bad_request", retryable=False)
        return text

    # -- state ------------------------------------------------------------------------------------------

    async def info(self) -> EngineInfo:
        """See `Engine.info`."""
        models = await self._call("GET", "/v1/models")
        return engine_info(models, await self._text("/metrics"))

    async def healthy(self) -> bool:
        """See `Engine.healthy`."""
        try:
            async with self._request("GET", "/health", None, timeout_s=_CONTROL_TIMEOUT_S) as response:
                await self._read(response, "/health")
                return response.status == 200
        except EngineError:
            return False

    async def version(self) -> str:
        """What it says of its version; empty where it says nothing."""
        try:
            return str((await self._call("GET", "/version")).get("version") or "")
        except EngineError:
            return ""

    async def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return engine_stats(await self._text("/metrics"))

    async def pause(self) -> None:
        """See `Engine.pause`.

        By a sleep of level 0 where the engine has it: that keeps the KV cache as it is and says so at once.
        `/pause` says so 20 ms later, and without `clear_cache=false` every request begins again with its
        prompt.
        """
        try:
            await self._call("POST", "/sleep?level=0&mode=keep")
        except EngineError as error:
            if error.code not in ("not_found", "bad_request"):
                raise
            await self._call("POST", "/pause?mode=keep&clear_cache=false")

    async def resume(self) -> None:
        """See `Engine.resume`. Whichever way it was paused, and by whomever."""
        if await self._asleep():
            await self._call("POST", "/wake_up")
        await self._call("POST", "/resume")

    async def sleep(self, level: int, *, timeout_s: float) -> None:
        """See `Engine.sleep`."""
        if not await self.can_sleep():
            raise EngineError(
                f"engine {self._url} frees no memory by a sleep: it was started without --enable-sleep-mode, "
                "its platform has none, or it does not say (/server_info, with VLLM_SERVER_DEV_MODE=1)",
                code="not_supported",
                retryable=False,
            )
        await self._call("POST", f"/sleep?level={level}&mode=keep", timeout_s=timeout_s)

    async def wake(self, *, timeout_s: float) -> None:
        """See `Engine.wake`."""
        await self._call("POST", "/wake_up", timeout_s=timeout_s)
        await self._call("POST", "/resume")

    async def stands_still(self) -> bool:
        """See `Engine.stands_still`."""
        return await self._asleep() or await self._says("/is_paused", "is_paused")

    async def can_sleep(self) -> bool:
        """See `Engine.can_sleep`. Without sleep mode vLLM takes a sleep, says that it sleeps, and frees
        nothing."""
        try:
            told = await self._call(
                "GET", "/server_info?config_format=json", timeout_s=_SERVER_INFO_TIMEOUT_S
            )
        except EngineError as error:
            if error.code in ("not_found", "bad_request"):
                return False
            raise
        config = told.get("vllm_config")
        model = config.get("model_config") if isinstance(config, dict) else None
        return isinstance(model, dict) and model.get("enable_sleep_mode") is True

    async def _asleep(self) -> bool:
        return await self._says("/is_sleeping", "is_sleeping")

    async def _says(self, path: str, what: str) -> bool:
        try:
            return (await self._call("GET", path)).get(what) is True
        except EngineError as error:
            if error.code == "not_found":
                return False
            raise

    async def close(self) -> None:
        """See `Engine.close`."""
        if self._session is not None:
            await self._session.close()

    # -- parts ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None,
        *,
        timeout_s: float | None,
        idle_timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One exchange, with every way it can fail named as an `EngineError`. Never repeats it."""
        raw = body if isinstance(body, bytes) or body is None else _encode(body)
        headers = {**_JSON_HEADERS, "X-Request-Id": request_id} if request_id else _JSON_HEADERS
        silence = idle_timeout_s if idle_timeout_s is not None else timeout_s
        timeout = aiohttp.ClientTimeout(
            total=timeout_s, sock_connect=self._connect_timeout_s, sock_read=silence
        )
        try:
            async with self._client().request(
                method, self._url + path, data=raw, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                if 300 <= response.status < 400:
                    # A prompt goes to the address that the operator gave and nowhere else.
                    told = response.headers.get("Location", "nowhere")[:_MAX_MESSAGE]
                    raise bad_answer(self._url, path, response.status, f"it sends us on to {told!r}")
                yield response
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise EngineError(
                f"engine {self._url} cannot be reached: {error or 'no answer to connect'}",
                code="engine_unreachable",
                retryable=True,
            ) from error
        except TimeoutError as error:
            raise EngineError(
                f"engine {self._url} said nothing on {path} within {silence:g} s",
                code="engine_timeout",
                retryable=True,
            ) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineError(
                f"engine {self._url} went away during {path}: {error or type(error).__name__}",
                code="engine_died",
                retryable=True,
                lost=True,
            ) from error

    async def _read(self, response: aiohttp.ClientResponse, path: str) -> bytes:
        """All of an answer. One without an end must not fill the memory."""
        parts, size = [], 0
        while part := await response.content.readany():
            parts.append(part)
            size += len(part)
            if size > _MAX_ANSWER_BYTES:
                raise bad_answer(
                    self._url, path, response.status, f"it has more than {_MAX_ANSWER_BYTES} bytes"
                )
        return b"".join(parts)

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = _CONTROL_TIMEOUT_S,
    ) -> dict[str, Any]:
        """A control call: its JSON answer, or `EngineError` for anything but 200."""
        async with self._request(method, path, body, timeout_s=timeout_s) as response:
            raw = await self._read(response, path)
        answer = _answer_body(raw, path, response.status)
        if response.status >= 500:
            raise _server_error(response.status, answer, self._url)
        if response.status >= 400:
            code = "not_found" if response.status == 404 else "bad_request"
            raise EngineError(
                f"engine {self._url} refused {path} ({response.status}): {_message(answer)}",
                code=code,
                retryable=False,
                status=response.status,
            )
        return answer

    async def _text(self, path: str) -> bytes:
        async with self._request("GET", path, None, timeout_s=_CONTROL_TIMEOUT_S) as response:
            raw = await self._read(response, path)
        if response.status != 200:
            raise EngineError(
                f"engine {self._url} answered {response.status} on {path}",
                code="not_found" if response.status == 404 else "engine_died",
                retryable=response.status >= 500,
                status=response.status,
            )
        return raw


async def _events(content: aiohttp.StreamReader, url: str, path: str) -> AsyncIterator[bytes]:
    """Payloads of server-sent events until [DONE]. A stream that ends without it means the engine died, one
    with other lines than events that something else answers.

    The lines are split here, since a chunk of the transport may hold many events or a part of one.
    """
    rest = b""
    while True:
        piece = await content.readany()
        if not piece:
            raise EngineError(
                f"engine {url} ended a streamed answer without [DONE]", code="engine_died", retryable=True
            )
        rest += piece
        *lines, rest = rest.split(b"\n")
        if len(rest) > _MAX_EVENT_BYTES:
            raise bad_answer(url, path, 200, f"an event of more than {_MAX_EVENT_BYTES} bytes")
        for line in lines:
            if not line.startswith(b"data:"):
                if line.strip() and not line.startswith(_SSE_LINES):
                    raise bad_answer(url, path, 200, f"a line that is no event ({line[:80]!r})")
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                await _to_end(content)
                return
            if data.startswith(b'{"error"'):
                raise _stream_error(data, url)
            yield data


async def _to_end(content: aiohttp.StreamReader) -> None:
    """Read what follows [DONE], the end of the body, so that the connection can be used again."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(_END_TIMEOUT_S):
            while await content.readany():
                continue


def _stream_error(data: bytes, url: str) -> EngineError:
    answer = _answer_body(data, "stream", 500)
    error = answer.get("error")
    status = error.get("code") if isinstance(error, dict) else None
    if isinstance(status, int) and 400 <= status < 500:
        return EngineError(_message(answer), code="bad_request", retryable=False, status=status)
    return EngineError(
        f"engine {url} failed in the middle of an answer: {_message(answer)}",
        code="engine_died",
        retryable=True,
        status=status if isinstance(status, int) else None,
    )


def _server_error(status: int, answer: dict[str, Any], url: str) -> EngineError:
    code = "engine_busy" if status in (503, 529) else "engine_died"
    return EngineError(
        f"engine {url} answered {status}: {_message(answer)}", code=code, retryable=True, status=status
    )


def _answer_problem(path: str, raw: bytes, answer: dict[str, Any]) -> str:
    problem = answer_problem(path, answer)
    return f"{problem} (it begins {raw[:80]!r})" if problem else ""


def _answer_body(raw: bytes, path: str, status: int) -> dict[str, Any]:
    """The JSON object in `raw`. What is none (a proxy's page, an empty body, one nested without end) becomes
    an error object."""
    try:
        value = _decode(raw) if raw else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    text = raw[:200].decode("utf-8", "replace")
    return {"error": {"message": f"{path} gave no JSON object: {text}", "type": "invalid", "code": status}}


def _message(answer: dict[str, Any]) -> str:
    error = answer.get("error")
    try:
        if isinstance(error, dict):
            said = str(error.get("message") or error)
        else:
            said = str(error or answer.get("detail") or answer or "no reason given")
    except RecursionError:
        said = "an error nested too deep to be read"
    return said[:_MAX_MESSAGE]
