"""How an engine dies in the middle of a stream, simulated and real: the same tests for both.

Each test needs an engine of its own, which for the real one takes 20 s to start; they come after the
contract's tests, whose engine the first of them takes over.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol

import pytest

from hybridsched.engines.protocol import EngineError, StreamChunk
from hybridsched.engines.vllm_http import VllmHttpEngine
from tests.contract.engine_servers import SimulatedServer
from tests.helpers import await_until, wait_until
from tests.vllm.engine_rigs import (
    COMPLETIONS,
    LONG,
    REAL_FLAGS,
    SIMULATED_FLAGS,
    completion,
    start,
    until,
)

pytestmark = pytest.mark.timeout(600)

KINDS = ("simulated", "vllm")


class Server(Protocol):
    """A process that can be killed."""

    url: str

    @property
    def alive(self) -> bool: ...

    def signal(self, number: signal.Signals) -> None: ...

    def kill_core(self) -> None: ...


Make = Callable[..., Server]


@pytest.fixture(params=KINDS)
def make_server(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Servers that the test may kill, by their flags beside the suite's."""
    made: list[SimulatedServer] = []

    def make(*flags: str) -> Server:
        if request.param == "simulated":
            made.append(SimulatedServer(*SIMULATED_FLAGS, *flags))
            return made[-1]
        server: Server = request.getfixturevalue("real_servers").get(*REAL_FLAGS, *flags)
        return server

    yield make
    for server in made:
        server.stop()


async def running_stream(
    engine: VllmHttpEngine, tokens: int = LONG, *, silence_s: float = 3.0
) -> AsyncIterator[StreamChunk]:
    """A stream of which one event has come."""
    stream = engine.stream(
        COMPLETIONS, completion([21, 22], tokens, stream=True), request_id="open", idle_timeout_s=silence_s
    )
    await anext(stream)
    return stream


async def drain(stream: AsyncIterator[StreamChunk]) -> list[dict[str, Any]]:
    return [json.loads(chunk.data) async for chunk in stream]


async def unreachable(server: Server) -> None:
    """New connections are refused."""
    engine = VllmHttpEngine(server.url)

    async def refused() -> bool:
        try:
            await engine.stats()
        except EngineError as error:
            return error.code == "engine_unreachable"
        return False

    await await_until(refused, timeout_s=30, what="a refused connection")
    assert not await engine.healthy()
    await engine.close()


async def test_sigkill_is_engine_died_and_then_unreachable(make_server: Make) -> None:
    server = make_server()
    engine = VllmHttpEngine(server.url)
    stream = await running_stream(engine)
    whole = start(engine, completion([23], LONG), "whole")
    await until(engine, lambda running, waiting: running == 2, "two running")
    server.signal(signal.SIGKILL)
    with pytest.raises(EngineError) as died:
        await drain(stream)
    assert died.value.code == "engine_died"
    assert died.value.retryable
    with pytest.raises(EngineError) as died:
        await whole
    assert died.value.code == "engine_died"
    await unreachable(server)
    await engine.close()


async def test_the_death_of_the_engine_core_shows_inside_the_stream(make_server: Make) -> None:
    server = make_server()
    engine = VllmHttpEngine(server.url)
    stream = await running_stream(engine)
    whole = start(engine, completion([23], LONG), "whole")
    await until(engine, lambda running, waiting: running == 2, "two running")
    server.kill_core()
    with pytest.raises(EngineError) as died:
        await drain(stream)
    assert died.value.code == "engine_died"
    assert "EngineCore" in str(died.value)
    assert died.value.status == 500
    with pytest.raises(EngineError) as died:
        await whole
    assert died.value.code == "engine_died"
    await engine.close()
    wait_until(lambda: not server.alive, timeout_s=60, what="the server's exit")


async def test_sigterm_ends_a_stream_without_a_complete_answer(make_server: Make) -> None:
    """The real engine's core is told to abort all and is killed at once. What of that still reaches the
    stream is a race: an abort that nobody asked for, the core's death, or nothing at all until the client
    gives up. The simulated one shows the last, which is the worst."""
    server = make_server()
    engine = VllmHttpEngine(server.url)
    stream = await running_stream(engine)
    server.signal(signal.SIGTERM)
    try:
        chunks = await drain(stream)
    except EngineError as silent:
        ending = silent.code
    else:
        ending = chunks[-1]["choices"][0]["finish_reason"]
    assert ending in ("engine_timeout", "engine_died", "abort")
    await unreachable(server)
    await engine.close()
    await asyncio.to_thread(
        wait_until, lambda: not server.alive, timeout_s=60, what="the exit after the last client"
    )


async def test_sigterm_with_a_shutdown_timeout_drains(make_server: Make) -> None:
    server = make_server("--shutdown-timeout", "60")
    engine = VllmHttpEngine(server.url)
    stream = await running_stream(engine, 1500, silence_s=30)
    server.signal(signal.SIGTERM)

    async def refuses() -> bool:
        try:
            await engine.complete(COMPLETIONS, completion([21], 1), request_id="n", timeout_s=5)
        except EngineError:
            return True  # 500 while the stream runs, no connection when it is over
        return False

    try:
        refused = asyncio.create_task(await_until(refuses, timeout_s=30, what="the refusal of new requests"))
        chunks = await drain(stream)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        await refused
    finally:
        await engine.close()
    await asyncio.to_thread(wait_until, lambda: not server.alive, timeout_s=60, what="the server's exit")
