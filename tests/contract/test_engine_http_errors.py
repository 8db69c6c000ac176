"""Answers that no healthy engine gives, from a scripted server: what `VllmHttpEngine` makes of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from hybridsched.engines.checks import check_serves, model_missing
from hybridsched.engines.protocol import EngineError, EngineInfo
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
    whole = b'{"choices":[{"text":"t"}],"usage":{"prompt_tokens":1}}'
    script.respond = plain("200 OK", whole)
    answer = await engine.complete(PATH, BODY, request_id="the-id", timeout_s=1)
    assert answer.body == json.loads(whole)
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


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"OK",
        b"<html>welcome</html>",
        b"[1, 2]",
        b"{}",
        b"\xff\xfe",
        b'{"choices":[{"text":"\xff"}],"usage":{}}',
        b'{"usage":{}}',
        b'{"choices":[],"usage":{}}',
        b'{"choices":{},"usage":{}}',
        b'{"choices":["text"],"usage":{}}',
        b'{"choices":[{"text":null}],"usage":{}}',
        b'{"choices":[{"text":"t"}]}',
        b'{"choices":[{"text":"t"}],"usage":7}',
        b'{"error":{"message":"in truth it failed"}}',
        b'{"choices":[{"text":"t","logprobs":' + b"[" * 100_000 + b"]" * 100_000 + b'}],"usage":{}}',
    ],
)
async def test_success_with_a_body_that_is_no_answer_is_the_engines_fault(
    scripted: Scripted, body: bytes
) -> None:
    script, engine = scripted
    script.respond = plain("200 OK", body)
    with pytest.raises(EngineError) as failed:
        await engine.complete(PATH, BODY, request_id="r", timeout_s=5)
    assert failed.value.code == "engine_bad_answer"
    assert failed.value.retryable
    assert failed.value.status == 200


@pytest.mark.parametrize(
    ("body", "whole"),
    [
        (b'{"data":[{"embedding":[0.5]}],"usage":{"prompt_tokens":1}}', True),
        (b'{"data":[{"embedding":"AAAA"}],"usage":{"prompt_tokens":1}}', True),
        (b'{"data":[],"usage":{}}', False),
        (b'{"data":[{}],"usage":{}}', False),
        (b'{"data":[{"embedding":[0.5]}]}', False),
    ],
)
async def test_embeddings_must_hold_vectors(scripted: Scripted, body: bytes, whole: bool) -> None:
    script, engine = scripted
    script.respond = plain("200 OK", body)
    asked = engine.complete("/v1/embeddings", BODY, request_id="r", timeout_s=1)
    if whole:
        assert (await asked).status == 200
        return
    with pytest.raises(EngineError) as failed:
        await asked
    assert failed.value.code == "engine_bad_answer"


async def test_endless_nesting_in_a_refusal_is_a_refusal(scripted: Scripted) -> None:
    script, engine = scripted
    script.respond = plain("400 Bad Request", b"[" * 100_000 + b"]" * 100_000)
    answer = await engine.complete(PATH, BODY, request_id="r", timeout_s=5)
    assert answer.status == 400
    assert "no JSON object" in answer.body["error"]["message"]


@pytest.mark.parametrize(
    ("status", "body", "missing"),
    [
        (404, {"error": {"message": "The model `x` does not exist.", "param": "model", "code": 404}}, True),
        (404, {"object": "error", "message": "The model `x` does not exist.", "code": 404}, True),
        (404, {"error": {"message": "no", "code": "model_not_found"}}, True),
        (404, {"error": "model 'x' does not exist"}, True),
        (404, {"detail": "Not Found"}, False),
        (404, {}, False),
        (404, None, False),
        (400, {"error": {"message": "The model `x` does not exist.", "param": "model"}}, False),
        (None, {"error": {"param": "model"}}, False),
    ],
)
def test_a_missing_model_is_told_from_a_missing_page(
    status: int | None, body: dict[str, Any] | None, missing: bool
) -> None:
    assert model_missing(status, body) is missing


def test_what_an_engine_serves_is_said_in_short() -> None:
    def said(*models: str) -> str:
        info = EngineInfo(models=models, max_model_len=None, kv_tokens=None, block_size=None)
        with pytest.raises(EngineError) as wrong:
            check_serves(info, "ours", "http://e")
        return str(wrong.value)

    assert "serves a, b, not ours" in said("a", "b")
    assert "serves no model at all, not ours" in said()
    assert "and 3 more, not ours" in said(*"abcdefgh")


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


@pytest.mark.parametrize(
    "body", [b"<html><h1>Welcome</h1></html>\n", b'{"choices":[{"text":"a"}],"usage":{}}\n', b"\xff\xfe\n"]
)
@pytest.mark.parametrize("first", [b"", b'data: {"choices":[]}\n\n'])
async def test_a_line_of_a_stream_that_is_no_event_is_the_engines_fault(
    scripted: Scripted, body: bytes, first: bytes
) -> None:
    server, engine = scripted
    server.respond = pieces(first + body, b"data: [DONE]\n\n")
    with pytest.raises(EngineError) as caught:
        await streamed(engine)
    assert (caught.value.code, caught.value.retryable) == ("engine_bad_answer", True)


@pytest.mark.parametrize("status", ["204 No Content", "206 Partial Content", "302 Found"])
async def test_a_success_that_is_no_200_is_no_stream(scripted: Scripted, status: str) -> None:
    server, engine = scripted
    server.respond = plain(status, b"")
    with pytest.raises(EngineError) as caught:
        await streamed(engine)
    assert caught.value.code == "engine_bad_answer"


async def test_comments_and_other_fields_of_a_stream_are_skipped(scripted: Scripted) -> None:
    server, engine = scripted
    server.respond = pieces(b': ping\nevent: x\nid: 1\nretry: 5\r\n\r\ndata: {"a":1}\n\ndata: [DONE]\n\n')
    assert await streamed(engine) == [b'{"a":1}']


async def test_an_event_without_an_end_does_not_fill_the_memory(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridsched.engines.vllm_http._MAX_EVENT_BYTES", 1000)
    server, engine = scripted
    server.respond = pieces(*[b"data: " + b"x" * 400] * 4)
    with pytest.raises(EngineError) as caught:
        await streamed(engine)
    assert caught.value.code == "engine_bad_answer"


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


async def test_an_answer_without_an_end_does_not_fill_the_memory(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridsched.engines.vllm_http._MAX_ANSWER_BYTES", 1000)
    server, engine = scripted
    server.respond = pieces(*[b"x" * 400] * 4)
    for ask in (
        lambda: engine.complete(PATH, BODY, request_id="r", timeout_s=5.0),
        engine.info,
        engine.stats,
    ):
        with pytest.raises(EngineError) as caught:
            await ask()
        assert caught.value.code == "engine_bad_answer"


async def test_the_engines_words_are_passed_on_in_short(scripted: Scripted) -> None:
    server, engine = scripted
    server.respond = plain("400 Bad Request", json.dumps({"error": {"message": "m" * 100_000}}).encode())
    with pytest.raises(EngineError) as caught:
        await streamed(engine)
    assert len(str(caught.value)) == 2000


@pytest.mark.parametrize("status", ["301 X", "302 X", "307 X", "308 X", "304 X"])
@pytest.mark.parametrize("call", ["complete", "stream", "healthy", "stats", "info", "abort"])
async def test_a_redirect_is_not_followed(
    scripted: tuple[ScriptedServer, VllmHttpEngine], status: str, call: str
) -> None:
    script, engine = scripted

    async def respond(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {status}\r\nLocation: {engine.url}/elsewhere\r\nContent-Length: 0\r\n\r\n"
        writer.write(head.encode())

    async def stream() -> None:
        async for _ in engine.stream(PATH, BODY, request_id="r", idle_timeout_s=5):
            continue

    script.respond = respond
    if call == "healthy":
        assert not await engine.healthy()
    else:
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "complete": lambda: engine.complete(PATH, BODY, request_id="r", timeout_s=5),
            "stream": stream,
            "stats": engine.stats,
            "info": engine.info,
            "abort": lambda: engine.abort(PATH, ["r"]),
        }
        with pytest.raises(EngineError, match="sends us on to 'http") as caught:
            await calls[call]()
        assert caught.value.code == "engine_bad_answer", "it counts, unlike an engine that is away"
        assert caught.value.retryable
    assert len(script.requests) == 1
