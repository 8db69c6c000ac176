"""Parts for tests of the online worker: simulated engines, workers here or in processes, a service."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import redis.asyncio

from hybridsched.engines.protocol import Engine
from hybridsched.engines.vllm_http import VllmHttpEngine
from hybridsched.ports import KeptPorts
from hybridsched.store.connection import async_client
from hybridsched.store.events import EventLog
from hybridsched.store.online import OnlineQueue
from hybridsched.store.online_values import Accepted, End, Request
from hybridsched.store.policy import PolicyStore
from hybridsched.store.replies import Ended, ReplyReader
from hybridsched.store.tasks import end_tasks
from hybridsched.store.telemetry import TelemetryStore
from hybridsched.workers.online import OnlineOptions, OnlineWorker
from hybridsched.workers.online_intake import IntakeOptions
from tests.helpers import await_until, wait_until

MODEL = "tiny"
POOL = "online"
QUICK = OnlineOptions(intake=IntakeOptions(lease_s=1.0), drain_s=5.0)
"""Short leases, so that a test of a dead worker does not wait for long."""


class EngineProcess:
    """A simulated vLLM in a process of its own."""

    def __init__(self, *flags: str, speed: float = 1.0) -> None:
        self._kept = KeptPorts([0])  # also while it is dead
        (self.port,) = self._kept.numbers
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            *[sys.executable, "-m", "hybridsched.engines.simulated", "--port", str(self.port)],
            *["--served-model-name", MODEL, "--speed", str(speed), *flags],
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> EngineProcess:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        wait_until(self._answers, timeout_s=30, what="the simulated engine")
        return self

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def __enter__(self) -> EngineProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill it, and give its port back."""
        self.kill()
        self._kept.close()


class WorkerProcess:
    """`hybridsched worker online` in a process of its own."""

    def __init__(self, redis_url: str, replica: str, engine_url: str) -> None:
        self.process = subprocess.Popen(
            [
                *[sys.executable, "-m", "hybridsched", "worker", "online", "--redis", redis_url],
                *["--pool", POOL, "--replica", replica, "--model", MODEL, "--engine", engine_url],
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@asynccontextmanager
async def worker(
    redis_url: str,
    replica: str,
    engine_at: str | Engine,
    *,
    options: OnlineOptions = QUICK,
    wait: bool = True,
) -> AsyncIterator[OnlineWorker]:
    """A worker in this process, stopped cleanly at the end."""
    client = async_client(redis_url)
    engine = VllmHttpEngine(engine_at) if isinstance(engine_at, str) else engine_at
    stop = asyncio.Event()
    async with aclosing(client), EventLog(client, POOL) as events:
        made = OnlineWorker(
            replica=replica,
            model=MODEL,
            engine=engine,
            queue=OnlineQueue(client, POOL),
            telemetry=TelemetryStore(client, POOL),
            policies=PolicyStore(client, POOL),
            events=events,
            options=options,
        )
        task = asyncio.create_task(made.run(stop))
        try:
            if wait:
                await await_until(lambda: made.intake.ready or task.done(), what=f"worker {replica}")
            yield made
        finally:
            stop.set()
            try:
                async with asyncio.timeout(20):
                    await task
            finally:
                await engine.close()


class Answer:
    """What a service has read for one request."""

    def __init__(self) -> None:
        self.chunks: list[dict[str, Any]] = []
        self.numbers: list[int] = []
        self.attempts: list[int] = []
        self.end: End | None = None

    @property
    def tokens(self) -> int:
        return sum(1 for c in self.chunks for choice in c.get("choices", []) if choice.get("text"))


class Service:
    """An online service: hands requests in and reads their answers."""

    def __init__(self, redis_url: str, *, reply: str = "") -> None:
        self.client: redis.asyncio.Redis = async_client(redis_url)
        self._reads = async_client(redis_url)
        self.queue = OnlineQueue(self.client, POOL)
        self.reply = reply or self.queue.keys.reply(uuid.uuid4().hex)
        self._reader = ReplyReader(self._reads, self.reply)
        self.answers: dict[str, Answer] = {}
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            for entry in await self._reader.read(200):
                answer = self.answers.setdefault(entry.id, Answer())
                answer.attempts.append(entry.attempt)
                if isinstance(entry, Ended):
                    answer.end = entry.end
                elif entry.number not in answer.numbers:
                    answer.numbers.append(entry.number)
                    answer.chunks += msgspec.json.decode(entry.chunks)

    async def ask(
        self,
        *,
        prompt: int = 32,
        tokens: int = 8,
        stream: bool = True,
        timeout_ms: float = 20_000,
        priority: int = 1,
        body: dict[str, Any] | None = None,
        request_id: str = "",
    ) -> str:
        """Hand one request in; returns its id."""
        request_id = request_id or uuid.uuid4().hex
        content = {
            "model": MODEL,
            "prompt": [7 + i % 900 for i in range(prompt)],
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        accepted: Accepted = await self.queue.accept(
            Request(
                id=request_id,
                model=MODEL,
                path="/v1/completions",
                body=json.dumps(content | (body or {})).encode(),
                stream=stream,
                reply=self.reply,
                timeout_ms=timeout_ms,
                priority=priority,
                prompt_tokens=prompt,
                cost=prompt + tokens,
            )
        )
        assert accepted.outcome.value == "accepted"
        self.answers.setdefault(request_id, Answer())
        return request_id

    async def end(self, request_id: str, *, timeout_s: float = 20.0) -> End:
        """The end of a request."""
        answer = self.answers[request_id]
        await await_until(lambda: answer.end is not None, timeout_s=timeout_s, what=f"end of {request_id}")
        assert answer.end is not None
        return answer.end

    async def first(self, request_id: str, *, count: int = 1) -> None:
        """Wait for its first tokens."""
        answer = self.answers[request_id]
        await await_until(lambda: answer.tokens >= count, what=f"tokens of {request_id}")

    async def close(self) -> None:
        await end_tasks(self._task)
        await self.client.aclose()
        await self._reads.aclose()
