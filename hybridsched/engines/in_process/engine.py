"""`Engine` over a `vllm.LLM` in a child process, which the Python of vLLM's own environment runs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hybridsched.engines.in_process import bodies
from hybridsched.engines.metrics_text import engine_info, engine_stats
from hybridsched.engines.protocol import Completion, EngineError, EngineInfo, EngineStats, StreamChunk

_CHILD = Path(__file__).with_name("child.py")
_CONTROL_TIMEOUT_S = 5.0
_STOP_S = 10.0
_MAX_LINE_BYTES = 256 * 1024 * 1024
_SHOWN = 2000
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_News = dict[str, Any]


class VllmProcessEngine:
    """A model in a child process: chunk in, results out, over two pipes. No port, no server, nothing to reach
    it by.

    Use it within one event loop; `start` it first and `close` it last. When the process ends by itself, what
    was in flight fails with `engine_died` and later calls with `engine_unreachable`; `start` may be called
    again.
    """

    def __init__(
        self,
        python: Path,
        model: Path | str,
        *,
        served_as: str,
        settings: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        max_queued: int | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        """`python`: of an environment that has vLLM. `settings`: arguments of `vllm.LLM`, such as
        max_num_seqs.

        More than `max_queued` in flight are refused with `engine_busy`."""
        self._python = python
        self._settings = {**(settings or {}), "model": str(model)}
        self._served_as = served_as
        self._env = dict(env or {})
        self._max_queued = max_queued
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._inbox: dict[str, asyncio.Queue[_News | None]] = {}
        self._max_model_len = 0

    @property
    def url(self) -> str:
        pid = self._process.pid if self._process is not None else "not started"
        return f"process:{pid}"

    @property
    def alive(self) -> bool:
        """Whether the child runs and takes work."""
        return self._process is not None and self._process.returncode is None and self._reader is not None

    async def start(self) -> None:
        """Start the child and load the model.

        Raises:
            EngineError: it did not come up (engine_unreachable), in vLLM's own words.
        """
        await self.close()
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | self._env
        # In one process: a step, and so an abort or a pause, is ours to time.
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        try:
            self._process = await asyncio.create_subprocess_exec(
                str(self._python),
                str(_CHILD),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=env,
                limit=_MAX_LINE_BYTES,
                start_new_session=True,
            )
        except OSError as error:
            raise self._gone(f"its Python cannot be started: {error}") from error
        self._send(self._settings)
        told: dict[str, Any] = {}
        try:
            async with asyncio.timeout(self._start_timeout_s):
                told = await self._next_message() or {}
        except TimeoutError:
            told = {"failed": f"it was not ready within {self._start_timeout_s:g} s"}
        if not told.get("ready"):
            await self.close()
            raise self._gone(
                str(told.get("failed") or "its process ended while it loaded the model")[:_SHOWN]
            )
        self._max_model_len = told["max_model_len"]
        self._reader = asyncio.create_task(self._read(), name="vllm-process")

    # -- requests

    async def complete(
        self, path: str, body: dict[str, Any] | bytes, *, request_id: str, timeout_s: float
    ) -> Completion:
        """See `Engine.complete`."""
        given = _decode(body) if isinstance(body, bytes) else body
        orders, refused = self._orders(path, {**given, "stream": False, "stream_options": None}, request_id)
        if refused is not None:
            return refused
        parts = [bodies.Part() for _ in orders]
        try:
            async with asyncio.timeout(timeout_s):
                self._begin(orders)
                for order, part in zip(orders, parts, strict=True):
                    while part.finish_reason is None:
                        news = await self._news(order["id"])
                        if "error" in news:
                            told = news["error"]
                            return Completion(
                                status=400, body=bodies.error_body(400, told["message"], told["param"])
                            )
                        part.add(news)
        except TimeoutError as error:
            raise self._silent(timeout_s) from error
        finally:
            self._leave(orders, parts)
        return Completion(status=200, body=bodies.answer(path, given, request_id, self._served_as, parts))

    async def stream(
        self, path: str, body: dict[str, Any] | bytes, *, request_id: str, idle_timeout_s: float
    ) -> AsyncIterator[StreamChunk]:
        """See `Engine.stream`."""
        given = {**(_decode(body) if isinstance(body, bytes) else body), "stream": True}
        orders, refused = self._orders(path, given, request_id)
        if refused is not None:
            raise _refusal(refused.status, refused.body)
        head = bodies.head(path, request_id, self._served_as, stream=True)
        parts = [bodies.Part() for _ in orders]
        options = given.get("stream_options") or {}
        try:
            self._begin(orders)
            for index, (order, part) in enumerate(zip(orders, parts, strict=True)):
                first = True
                while part.finish_reason is None:
                    try:
                        async with asyncio.timeout(idle_timeout_s):
                            news = await self._news(order["id"])
                    except TimeoutError as error:
                        raise self._silent(idle_timeout_s) from error
                    if "error" in news:
                        told = news["error"]
                        raise _refusal(400, bodies.error_body(400, told["message"], told["param"]))
                    part.add(news)
                    yield StreamChunk(data=_encode(bodies.event(path, given, head, index, news, first=first)))
                    first = False
            if options.get("include_usage"):
                yield StreamChunk(data=_encode({**head, "choices": [], "usage": bodies.usage(parts)}))
        finally:
            self._leave(orders, parts)

    async def abort(self, path: str, request_ids: Sequence[str]) -> None:
        """See `Engine.abort`."""
        if path == bodies.COMPLETIONS:
            ids = [f"cmpl-{i}-0" for i in request_ids]
        elif path == bodies.CHAT:
            ids = [f"chatcmpl-{i}" for i in request_ids]
        else:
            ids = []
        if ids:
            await self._call("abort", ids=ids)

    async def tokenize(self, path: str, body: dict[str, Any]) -> list[int]:
        """See `Engine.tokenize`."""
        try:
            orders = bodies.orders(path, body, "tokenize")
        except bodies.BodyError as error:
            raise EngineError(str(error), code="bad_request", retryable=False) from error
        if len(orders) != 1:
            raise EngineError("only one prompt is tokenized at a time", code="bad_request", retryable=False)
        order = orders[0]
        wanted = ("prompt", "messages", "template_kwargs", "add_special_tokens")
        ids: list[int] = await self._call("tokenize", **{k: order[k] for k in wanted if k in order})
        return ids

    async def detokenize(self, model: str | None, token_ids: Sequence[int]) -> str:
        """See `Detokenizes.detokenize`."""
        return str(await self._call("detokenize", ids=list(token_ids)))

    # -- state

    async def info(self) -> EngineInfo:
        """See `Engine.info`."""
        models = {"data": [{"id": self._served_as, "max_model_len": self._max_model_len}]}
        return engine_info(models, (await self._metrics()).encode())

    async def healthy(self) -> bool:
        """Whether the child answers between two of its steps."""
        try:
            await self._metrics()
        except EngineError:
            return False
        return True

    async def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return engine_stats((await self._metrics()).encode())

    async def _metrics(self) -> str:
        return str(await self._call("metrics"))

    async def pause(self) -> None:
        """See `Engine.pause`."""
        await self._call("pause")

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self._call("resume")

    async def stands_still(self) -> bool:
        """See `Engine.stands_still`."""
        return bool(await self._call("stands_still"))

    async def can_sleep(self) -> bool:
        """See `Engine.can_sleep`."""
        return bool(await self._call("can_sleep"))

    async def sleep(self, level: int, *, timeout_s: float) -> None:
        """See `Engine.sleep`."""
        await self._call("sleep", timeout_s=timeout_s, level=level)

    async def wake(self, *, timeout_s: float) -> None:
        """See `Engine.wake`."""
        await self._call("wake", timeout_s=timeout_s)

    async def close(self) -> None:
        """End the child: its input ends, and after a while it is killed."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None

    # -- parts

    def _orders(
        self, path: str, body: dict[str, Any], request_id: str
    ) -> tuple[list[dict[str, Any]], Completion | None]:
        model = body.get("model")
        if model not in (None, self._served_as):
            told = bodies.error_body(404, f"The model `{model}` does not exist.", "model")
            return [], Completion(status=404, body=told)
        try:
            return bodies.orders(path, body, request_id), None
        except bodies.BodyError as error:
            return [], Completion(status=400, body=bodies.error_body(400, str(error), error.param))

    def _begin(self, orders: list[dict[str, Any]]) -> None:
        if self._max_queued is not None and len(self._inbox) + len(orders) > self._max_queued:
            raise EngineError(
                f"engine {self.url} has {len(self._inbox)} requests in flight, of at most {self._max_queued}",
                code="engine_busy",
                retryable=True,
                status=503,
            )
        for order in orders:
            self._inbox[order["id"]] = asyncio.Queue()
            self._send(order)

    async def _news(self, order_id: str) -> _News:
        news = await self._inbox[order_id].get()
        if news is None:
            raise self._died()
        return news

    def _leave(self, orders: list[dict[str, Any]], parts: list[bodies.Part]) -> None:
        """The caller has all it wanted: end what still runs, as a server does for a client that left."""
        left = []
        for order, part in zip(orders, parts, strict=True):
            if self._inbox.pop(order["id"], None) is not None and part.finish_reason is None:
                left.append(order["id"])
        if left and self.alive:
            with contextlib.suppress(EngineError):
                self._send({"do": "abort", "call": -1, "ids": left})

    async def _call(self, do: str, *, timeout_s: float = _CONTROL_TIMEOUT_S, **more: Any) -> Any:
        if not self.alive:
            raise self._gone("its process does not run")
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            self._send({"do": do, "call": number, **more})
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise self._silent(timeout_s) from error
        finally:
            self._calls.pop(number, None)

    def _send(self, message: dict[str, Any]) -> None:
        process = self._process
        if process is None or process.stdin is None or process.stdin.is_closing():
            raise self._gone("its process does not run")
        process.stdin.write(_encode(message) + b"\n")

    async def _next_message(self) -> dict[str, Any] | None:
        process = self._process
        if process is None or process.stdout is None:
            return None
        line = await process.stdout.readline()
        return _decode(line) if line else None

    async def _read(self) -> None:
        """Hand each message of the child to who waits for it, until the child ends."""
        try:
            while (message := await self._next_message()) is not None:
                if "id" in message:
                    queue = self._inbox.get(message["id"])
                    if queue is not None:
                        queue.put_nowait(message)
                    continue
                waiter = self._calls.get(message["call"])
                if waiter is None or waiter.done():
                    continue
                if "error" in message:
                    waiter.set_exception(_refusal(400, message))
                else:
                    waiter.set_result(message["value"])
        finally:
            self._reader = None
            for queue in self._inbox.values():
                queue.put_nowait(None)
            for waiter in self._calls.values():
                if not waiter.done():
                    waiter.set_exception(self._died())

    def _gone(self, why: str) -> EngineError:
        return EngineError(f"engine {self.url}: {why}", code="engine_unreachable", retryable=True)

    def _died(self) -> EngineError:
        return EngineError(
            f"engine {self.url} ended in the middle of an answer", code="engine_died", retryable=True
        )

    def _silent(self, seconds: float) -> EngineError:
        return EngineError(
            f"engine {self.url} said nothing within {seconds:g} s", code="engine_timeout", retryable=True
        )


def _refusal(status: int, body: dict[str, Any]) -> EngineError:
    code = "not_found" if status == 404 else "bad_request"
    message = str(body["error"]["message"])[:_SHOWN]
    return EngineError(message, code=code, retryable=False, status=status, body=body)
