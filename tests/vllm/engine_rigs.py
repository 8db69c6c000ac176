"""The engines of the contract suite, all with the same limits: a fake, the simulated vLLM, the real one
twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hybridsched.engines.fake import FakeEngine
from hybridsched.engines.in_process.engine import VllmProcessEngine
from hybridsched.engines.protocol import Completion, Engine
from hybridsched.engines.simulated.scheduler import Limits
from hybridsched.engines.vllm_http import VllmHttpEngine
from tests.contract.engine_servers import MODEL, SimulatedServer
from tests.helpers import await_until
from tests.vllm.engines import RealServers, environment

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"

KINDS = ("fake", "simulated", "vllm-process", "vllm-http")
"""In this order the HTTP engine still runs for the tests that follow the suite with the same flags."""

SEQS, CONTEXT, QUEUE = 4, 4096, 160
CPU_BLOCK = 128
"""Tokens of a KV block of vLLM on a CPU; on a GPU, and simulated, it has 16."""
KV_TOKENS = 48 * CPU_BLOCK
LONG = 3500
"""Tokens of an answer that is still running whenever a test looks."""

FLAGS = (
    *("--max-num-seqs", str(SEQS), "--max-model-len", str(CONTEXT), "--max-num-queued-reqs", str(QUEUE)),
    *("--scheduling-policy", "priority", "--enable-prompt-tokens-details"),
)
"""Of both servers, simulated and real."""
REAL_FLAGS = (*FLAGS, "--num-gpu-blocks-override", str(KV_TOKENS // CPU_BLOCK))
SIMULATED_FLAGS = (*FLAGS, "--kv-tokens", str(KV_TOKENS))


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that runs, and how to get a client of it."""

    kind: str
    connect: Callable[[], Engine]
    """A client for one test, which closes it where it is not the engine itself."""
    block: int


@asynccontextmanager
async def host(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Host]:
    """The engine of this kind; one of a real vLLM alone at a time."""
    if kind == "fake":
        limits = Limits(
            max_num_seqs=SEQS, max_model_len=CONTEXT, kv_tokens=KV_TOKENS, scheduling_policy="priority"
        )
        yield Host(
            kind=kind, connect=lambda: FakeEngine(model=MODEL, limits=limits, max_queued=QUEUE), block=16
        )
    elif kind == "simulated":
        server = SimulatedServer(*SIMULATED_FLAGS)
        yield Host(kind=kind, connect=lambda: VllmHttpEngine(server.url), block=16)
        server.stop()
    else:
        servers: RealServers = request.getfixturevalue("real_servers")
        if kind == "vllm-http":
            url = servers.get(*REAL_FLAGS).url
            yield Host(kind=kind, connect=lambda: VllmHttpEngine(url), block=CPU_BLOCK)
            return
        servers.stop()
        folder: Path = request.getfixturevalue("tmp_path_factory").mktemp("vllm-process")
        engine = process_engine(servers, folder)
        await engine.start()
        yield Host(kind=kind, connect=lambda: Lent(engine), block=CPU_BLOCK)
        await engine.close()


def process_engine(servers: RealServers, folder: Path, **settings: Any) -> VllmProcessEngine:
    """A real vLLM in a child process, with the suite's limits."""
    return VllmProcessEngine(
        servers.python,
        servers.models["grouped-query"],
        served_as=MODEL,
        settings={
            "dtype": "float32",
            "enforce_eager": True,
            "max_num_seqs": SEQS,
            "max_model_len": CONTEXT,
            "num_gpu_blocks_override": KV_TOKENS // CPU_BLOCK,
            "scheduling_policy": "priority",
            **settings,
        },
        env=environment(folder),
        max_queued=QUEUE,
    )


class Lent:
    """An engine that outlives the test that uses it."""

    def __init__(self, engine: VllmProcessEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def close(self) -> None: ...


# -- requests


def ids(count: int, seed: int = 0) -> list[int]:
    """Token ids that every engine's vocabulary has; another seed gives another prompt from its first token
    on."""
    return [20 + (seed * 7919 + i * 31 + i * i * 17) % 480 for i in range(count)]


def completion(prompt: object, tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    } | more


def chat(text: str, tokens: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        "model": MODEL,
        "messages": messages,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    } | more


def start(
    engine: Engine, body: dict[str, Any], request_id: str, path: str = COMPLETIONS
) -> asyncio.Task[Completion]:
    return asyncio.create_task(engine.complete(path, body, request_id=request_id, timeout_s=120))


async def finish(
    engine: Engine, body: dict[str, Any], request_id: str, path: str = COMPLETIONS
) -> Completion:
    return await engine.complete(path, body, request_id=request_id, timeout_s=120)


async def collect(engine: Engine, path: str, body: dict[str, Any], request_id: str) -> list[dict[str, Any]]:
    stream = engine.stream(path, body, request_id=request_id, idle_timeout_s=60)
    return [json.loads(chunk.data) async for chunk in stream]


async def until(engine: Engine, check: Callable[[float, float], bool], what: str) -> None:
    """Wait for (running, waiting) of the engine's gauges."""

    async def look() -> bool:
        stats = await engine.stats()
        assert stats.running is not None
        assert stats.waiting is not None
        return check(stats.running, stats.waiting)

    if isinstance(engine, FakeEngine):
        # It makes an iteration in each turn of the loop: looked at as often, whatever the clock says.
        for _ in range(100_000):
            if await look():
                return
            await asyncio.sleep(0)
    await await_until(look, what=what, timeout_s=60)


async def quiet(engine: Engine) -> None:
    await until(engine, lambda running, waiting: running == 0 and waiting == 0, "an idle engine")


async def produced(engine: Engine, since: float, tokens: int) -> None:
    """Wait until the engine has produced `tokens` tokens more than `since`."""

    async def look() -> bool:
        return ((await engine.stats()).generation_tokens_total or 0) >= since + tokens

    await await_until(look, what=f"{tokens} tokens", timeout_s=60)


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def token_ids(answer: Completion) -> list[int]:
    found: list[int] = answer.body["choices"][0]["token_ids"]
    return found


def prompt_ids(answer: Completion, path: str) -> list[int]:
    found: list[int] = (answer.body["choices"][0] if path == COMPLETIONS else answer.body)["prompt_token_ids"]
    return found
