"""The HTTP server: hot routes as plain ASGI, the rest by Starlette, and vLLM's ways of dying."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hybridsched.engines.simulated import api, tokens
from hybridsched.engines.simulated.calls import CHAT, COMPLETIONS, EMBEDDINGS, Calls, parse
from hybridsched.engines.simulated.cork import CorkedProtocol
from hybridsched.engines.simulated.generate import Generation, Receive, Scope, Send, send_json
from hybridsched.engines.simulated.metrics import CONTENT_TYPE
from hybridsched.engines.simulated.scheduler import PAUSE_MODES

VERSION = "0.32.0"
"""The vLLM whose API this is."""
KEEP_ALIVE_S = 5
"""vLLM's default."""
WAKE_S = {0: 0.0, 1: 0.82, 2: 2.58}
"""Seconds of the engine's clock that waking from a sleep level takes: Phi-3-vision on an A100, table in
blog.vllm.ai/2025/10/26/sleep-mode.html."""
_DEATH_S = 2.0
"""How long the API process outlives its engine (seen on vLLM 0.32)."""

_HOT = frozenset({COMPLETIONS, CHAT, EMBEDDINGS})

_abort_body = msgspec.json.Decoder(api.AbortBody).decode
_tokenize_body = msgspec.json.Decoder(api.TokenizeBody).decode
_detokenize_body = msgspec.json.Decoder(api.DetokenizeBody).decode


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class App:
    """The ASGI application."""

    def __init__(self, calls: Calls, *, track_load: bool, sleep_mode: bool) -> None:
        self.calls = calls
        self.engine = calls.engine
        self._generation = Generation(calls)
        self.track_load = track_load
        self.sleep_mode = sleep_mode
        """Whether a sleep frees memory; without it sleep only pauses, as vLLM's does."""
        self.sleeping: int | None = None
        routes = [
            ("/v1/models", self.models, "GET"),
            ("/tokenize", self.tokenize, "POST"),
            ("/detokenize", self.detokenize, "POST"),
            ("/health", self.health, "GET"),
            ("/ping", self.health, "GET"),
            ("/ping", self.health, "POST"),
            ("/version", self.version, "GET"),
            ("/load", self.server_load, "GET"),
            ("/metrics", self.metrics, "GET"),
            ("/pause", self.pause, "POST"),
            ("/resume", self.resume, "POST"),
            ("/is_paused", self.is_paused, "GET"),
            ("/sleep", self.sleep, "POST"),
            ("/wake_up", self.wake_up, "POST"),
            ("/is_sleeping", self.is_sleeping, "GET"),
            ("/abort_requests", self.abort_requests, "POST"),
            ("/server_info", self.server_info, "GET"),
        ]
        self._cold = Starlette(
            routes=[Route(path, handler, methods=[method]) for path, handler, method in routes],
            exception_handlers={api.ApiError: _api_error, HTTPException: _http_error},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in _HOT:
            try:
                if scope["method"] != "POST":
                    raise api.NO_SUCH_METHOD
                await self._generation(scope, receive, send)
            except api.ApiError as error:
                await send_json(send, error.status, error.body())
            return
        await self._cold(scope, receive, send)

    # -- information ------------------------------------------------------------------------------------

    async def models(self, _request: Request) -> Response:
        limit = self.engine.scheduler.limits.max_model_len
        data = [
            {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "hybridsched-simulated",
                "root": self.engine.profile.model,
                "parent": None,
                "max_model_len": limit,
            }
            for name in self.calls.models
        ]
        return _json({"object": "list", "data": data})

    async def health(self, _request: Request) -> Response:
        return Response(status_code=503 if self.engine.dead else 200)

    async def version(self, _request: Request) -> Response:
        return _json({"version": VERSION, "simulated": True, "profile": self.engine.profile.name})

    async def server_info(self, request: Request) -> Response:
        """The one setting that our adapter looks for, at its place in vLLM's whole configuration."""
        config: object = {"model_config": {"enable_sleep_mode": self.sleep_mode}}
        if request.query_params.get("config_format", "text") != "json":
            config = f"enable_sleep_mode={self.sleep_mode}"
        return _json({"vllm_config": config, "vllm_env": {}, "system_env": {}})

    async def server_load(self, _request: Request) -> Response:
        return _json({"server_load": self._generation.load if self.track_load else 0})

    async def metrics(self, _request: Request) -> Response:
        text = self.engine.metrics.render(clock_lag_s=self.engine.lag_s, clock_jumps=self.engine.lag_jumps)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def tokenize(self, request: Request) -> Response:
        body = parse(_tokenize_body, await request.body())
        self.calls.check_model(body.model, self.calls.runner)
        if body.messages is not None:
            ids = api.chat_ids(body.messages, add_generation_prompt=body.add_generation_prompt)
        elif body.prompt is not None:
            ids = api.prompts_of(body.prompt, special=body.add_special_tokens, name="prompt")[0]
        else:
            raise api.bad_request("tokenize needs `prompt` or `messages`", "prompt")
        strings = [tokens.decode((t,)) for t in ids] if body.return_token_strs else None
        limit = self.engine.scheduler.limits.max_model_len
        return _json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        body = parse(_detokenize_body, await request.body())
        self.calls.check_model(body.model, self.calls.runner)
        ids = api.prompts_of(list(body.tokens), special=False, name="tokens")[0]
        return _json({"prompt": tokens.decode(ids)})

    # -- control ----------------------------------------------------------------------------------------

    async def pause(self, request: Request) -> Response:
        await self.engine.pause(_mode(request), clear_cache=_flag(request, "clear_cache", default=True))
        return _json({"status": "paused"})

    async def resume(self, _request: Request) -> Response:
        self.engine.resume()
        return _json({"status": "resumed"})

    async def is_paused(self, _request: Request) -> Response:
        return _json({"is_paused": self.engine.scheduler.paused})

    async def sleep(self, request: Request) -> Response:
        given = request.query_params.get("level", "1")
        if given not in ("0", "1", "2"):
            raise api.bad_query(f"level must be 0, 1 or 2, got {given!r}", "level")
        level = int(given)
        await self.engine.pause(_mode(request), clear_cache=level > 0)
        self.sleeping = level
        self.engine.metrics.sleep_level = level
        return _json({"status": "sleeping", "level": level})

    async def wake_up(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags") or None
        if self.sleeping is not None:
            await asyncio.sleep(WAKE_S[self.sleeping] / self.engine.speed)
            self.sleeping = None
            self.engine.metrics.sleep_level = None
            self.engine.resume()
        return _json({"status": "awake", "tags": tags})

    async def is_sleeping(self, _request: Request) -> Response:
        return _json({"is_sleeping": self.sleeping is not None})

    async def abort_requests(self, request: Request) -> Response:
        raw = await request.body()
        ids = parse(_abort_body, raw).request_ids if raw else []
        if not ids:
            return _json({"status": "aborted", "aborted": self.engine.abort_all()})
        self.engine.abort(ids)
        # vLLM says how many ids it was given, not how many requests it ended by them.
        return _json({"status": "aborted", "aborted": len(ids)})


async def _api_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, api.ApiError):
        raise error
    return _json(error.body(), error.status)


async def _http_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return _json({"detail": error.detail}, error.status_code)


def _mode(request: Request) -> str:
    mode = request.query_params.get("mode", "abort")
    if mode not in PAUSE_MODES:
        raise api.bad_query(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}", "mode")
    return mode


def _flag(request: Request, name: str, *, default: bool) -> bool:
    value = request.query_params.get(name)
    if value is None:
        return default
    if value.lower() not in ("true", "false", "1", "0"):
        raise api.bad_query(f"{name} must be true or false, got {value!r}", name)
    return value.lower() in ("true", "1")


class Server(uvicorn.Server):
    """uvicorn with vLLM's behaviour at SIGTERM, and a simulated death of the engine core at SIGUSR1.

    Default: the engine stops at once, new connections are refused, and open answers hang without a byte until
    their clients leave. With `shutdown_timeout` what is in flight may end first, new requests get 500.
    """

    def __init__(self, config: uvicorn.Config, app: App, *, shutdown_timeout: float, ready: str) -> None:
        super().__init__(config)
        self._app = app
        self._shutdown_timeout = shutdown_timeout
        self._ready = ready
        self._ending: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._app.engine.start()
        await super().startup(sockets)
        loop.add_signal_handler(signal.SIGUSR1, self._engine_death)
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
        sys.stdout.write(self._ready + "\n")
        sys.stdout.flush()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._ending is not None or self.should_exit:
            self.force_exit = self.should_exit = True
            return
        with contextlib.suppress(RuntimeError):  # no loop any more: the server is already leaving
            asyncio.get_running_loop().call_soon_threadsafe(self._begin_exit)
            return
        self.should_exit = True

    def _begin_exit(self) -> None:
        self._ending = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        engine = self._app.engine
        if self._shutdown_timeout > 0:
            self._app.calls.draining = True
            deadline = time.monotonic() + self._shutdown_timeout
            while engine.in_flight and time.monotonic() < deadline:  # noqa: ASYNC110 - two conditions, once
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.05)
            for connection in list(self.server_state.connections) if engine.in_flight else ():
                connection.transport.close()
        engine.kill(tell=False)
        self.should_exit = True

    def _engine_death(self) -> None:
        self._app.engine.kill(tell=True)
        self.should_exit = True
        asyncio.get_running_loop().call_later(_DEATH_S, self._force)

    def _force(self) -> None:
        self.force_exit = True


def serve(
    app: App, *, host: str, port: int, shutdown_timeout: float, ready: str = "", sock: socket.socket
) -> int:
    """Serve until a signal. Returns the exit status."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=CorkedProtocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        access_log=False,
        log_level="error",
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        headers=[("server", "hybridsched-simulated-vllm")],
    )
    server = Server(config, app, shutdown_timeout=shutdown_timeout, ready=ready)

    async def main() -> None:
        try:
            await server.serve(sockets=[sock])
        finally:
            app.engine.close()

    asyncio.run(main())
    return 0


def describe(extra: dict[str, Any]) -> str:
    """The one line on stdout that says the server is up."""
    return msgspec.json.encode({"simulated": True, "ready": True, **extra}).decode()
