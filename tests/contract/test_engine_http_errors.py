"""Answers that no healthy engine gives, from a scripted server: what `VllmHttpEngine` makes of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from hybridsched.engines.protocol import EngineError
from hybridsched.engines.vllm_http import VllmHttpEngine

PATH = "/v1/completions"
BODY = {"model": "m", "prompt": "x", "max_tokens": 4}
Respond = Callable[[asyncio.StreamWriter], Awaitable[None]]


class ScriptedServer:
    """Reads a request, then lets `respond` write whatever it likes."""

    def __init__(self) -> None:
        self.respond: Respond = hold
        self.requests: list[bytes] = []
        self.connections = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = 0
                for line in head.split(b"\r\n"):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                self.requests.append(head + await reader.readexactly(length))
                await self.respond(writer)
                await writer.drain()


async def hold(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


def plain(status: str, body: bytes) -> Respond:
    async def respond(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(body), body))

    return respond


def pieces(*parts: bytes, close: bool = True, end: bool = True) -> Respond:
    """A chunked event stream; each part is one piece of the transport."""

    async def respond(writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for part in parts:
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
            await asyncio.sleep(0)
        if end:
            writer.write(b"0\r\n\r\n")
        if close:
            writer.close()

    return respond


@pytest.fixture
async def scripted() -> AsyncIterator[tuple[ScriptedServer, VllmHttpEngine]]:
    script = ScriptedServer()
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.ensure_future(script.handle(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    engine = VllmHttpEngine(f"http://127.0.0.1:{port}/", api_key="sesame")
    yield script, engine
    await engine.close()
    server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)


Scripted = tuple[ScriptedServer, VllmHttpEngine]


async def streamed(engine: VllmHttpEngine) -> list[bytes]:
    return [c.data async for c in engine.stream(PATH, BODY, request_id="r", idle_timeout_s=0.3)]


async def test_requests_carry_the_id_the_key_and_no_second_attempt(scripted: Scripted) -> None:
    script, engine = scripted
    script.respond = plain("200 OK", b'{"choices":[]}')
    answer = await engine.complete(PATH, BODY, request_id="the-id", timeout_s=1)
    assert answer.body == {"choices": []}
    assert b"X-Request-Id: the-id" in script.requests[0]
    assert b"Authorization: Bearer sesame" in script.requests[0]

    async def drop(writer: asyncio.StreamWriter) -> None:
        writer.close()

    script.respond = drop
    with pytest.raises(EngineError) as died:
        await engine.complete(PATH, BODY, request_id="two", timeout_s=1)
    assert died.value.code == "engine_died"
    assert sum(b"X-Request-Id: two" in r for r in script.requests) == 1


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        ("503 Service Unavailable", b'{"error":{"message":"busy"}}', "engine_busy"),
        ("500 Internal Server Error", b'{"error":{"message":"boom"}}', "engine_died"),
        ("502 Bad Gateway", b"<html>proxy</html>", "engine_died"),
        ("500 Internal Server Error", b"", "engine_died"),
    ],
)
async def test_server_errors_are_retryable_and_quote_the_reason(
    scripted: Scripted, status: str, body: bytes, code: str
) -> None:
    script, engine = scripted
    script.respond = plain(status, body)
    for call in (engine.complete(PATH, BODY, request_id="r", timeout_s=1), streamed(engine)):
        with pytest.raises(EngineError) as failed:
            await call
        assert failed.value.code == code
        assert failed.value.retryable
        assert failed.value.status == int(status[:3])
    if b"html" in body:
        assert "proxy" in str(failed.value)


async def test_a_4xx_is_an_answer_whole_and_an_error_streamed(scripted: Scripted) -> None:
    script, engine = scripted
    script.respond = plain("404 Not Found", b'{"detail":"Not Found"}')
    answer = await engine.complete(PATH, BODY, request_id="r", timeout_s=1)
    assert (answer.status, answer.body) == (404, {"detail": "Not Found"})
    with pytest.raises(EngineError) as refused:
        await streamed(engine)
    assert (refused.value.code, refused.value.retryable) == ("not_found", False)
    with pytest.raises(EngineError) as refused:
        await engine.stats()
    assert refused.value.code == "not_found"
    with pytest.raises(EngineError) as refused:
        await engine.pause()
    assert "Not Found" in str(refused.value)


async def test_silence_is_a_timeout_before_and_within_a_stream(scripted: Scripted) -> None:
    script, engine = scripted
    with pytest.raises(EngineError) as silent:
        await engine.complete(PATH, BODY, request_id="r", timeout_s=0.1)
    assert silent.value.code == "engine_timeout"
    script.respond = pieces(b'data: {"a":1}\n\n', close=False, end=False)
    stream = engine.stream(PATH, BODY, request_id="r", idle_timeout_s=0.1)
    assert (await anext(stream)).data == b'{"a":1}'
    with pytest.raises(EngineError) as silent:
        await anext(stream)
    assert silent.value.code == "engine_timeout"


async def test_events_may_be_cut_anywhere(scripted: Scripted) -> None:
    script, engine = scripted
    script.respond = pieces(
        b": comment\n\ndata: {", b'"a":"\xc3', b'\xa9"}\r\n\r\nda', b'ta:{"b":2}\n\n\ndata: [DO', b"NE]\n\n"
    )
    assert await streamed(engine) == ['{"a":"é"}'.encode(), b'{"b":2}']


async def test_the_connection_is_used_again_after_a_stream(scripted: Scripted) -> None:
    script, engine = scripted
    script.respond = pieces(b'data: {"a":1}\n\n', b"data: [DONE]\n\n", close=False)
    for _ in range(3):
        assert await streamed(engine) == [b'{"a":1}']
    assert script.connections == 1


async def test_a_stream_without_done_and_a_torn_one_are_deaths(scripted: Scripted) -> None:
    script, engine = scripted
    script.respond = pieces(b'data: {"a":1}\n\n')
    with pytest.raises(EngineError) as died:
        await streamed(engine)
    assert died.value.code == "engine_died"
    assert "[DONE]" in str(died.value)
    script.respond = pieces(b'data: {"a":1}\n\n', end=False)
    with pytest.raises(EngineError) as died:
        await streamed(engine)
    assert died.value.code == "engine_died"


@pytest.mark.parametrize(("status", "code"), [(500, "engine_died"), (400, "bad_request")])
async def test_an_error_inside_a_stream_is_raised(scripted: Scripted, status: int, code: str) -> None:
    script, engine = scripted
    error = b'{"error":{"message":"why","type":"t","param":null,"code":%d}}' % status
    script.respond = pieces(b'data: {"a":1}\n\n', b"data: " + error + b"\n\n", b"data: [DONE]\n\n")
    with pytest.raises(EngineError) as failed:
        await streamed(engine)
    assert failed.value.code == code
    assert failed.value.status == status
    assert "why" in str(failed.value)


async def test_nobody_there_is_unreachable() -> None:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    engine = VllmHttpEngine(f"http://127.0.0.1:{port}")
    with pytest.raises(EngineError) as gone:
        await engine.complete(PATH, BODY, request_id="r", timeout_s=1)
    assert gone.value.code == "engine_unreachable"
    assert gone.value.retryable
    assert not await engine.healthy()
    await engine.close()
    with pytest.raises(ValueError, match="http://"):
        VllmHttpEngine("localhost:8000")


async def test_metrics_that_lack_everything_are_unknown(scripted: Scripted) -> None:
    script, engine = scripted
    script.respond = plain("200 OK", b"# nothing here\n")
    stats = await engine.stats()
    assert stats.running is None
    assert stats.generation_tokens_total is None
    assert stats.ttft_buckets == ()
