"""The hot routes as plain ASGI: a framework's routing would cost as much as the engine does."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from hybridsched.engines.simulated.answers import encode_json
from hybridsched.engines.simulated.calls import Calls
from hybridsched.engines.simulated.cork import CONNECTION, CorkedProtocol

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

LABEL = (b"x-hybridsched-simulated", b"1")
_JSON = (b"content-type", b"application/json")
_SSE = [(b"content-type", b"text/event-stream; charset=utf-8"), LABEL]


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


def request_id(scope: Scope) -> str:
    """The client's X-Request-Id, or one of our own."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return str(value.decode("latin-1"))
    return uuid.uuid4().hex


class Generation:
    """Answers completions, chat completions and embeddings."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.load = 0
        """Requests being answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises `ApiError` for what is refused."""
        calls = self.calls
        call = calls.prepare(scope["path"], await read_body(receive), request_id(scope))
        calls.accept(call)
        connection: CorkedProtocol = scope["extensions"][CONNECTION]["protocol"]
        connection.left = lambda: calls.leave(call)
        self.load += 1
        try:
            if call.streaming:
                await send({"type": "http.response.start", "status": 200, "headers": _SSE})
                async for events, last in calls.events(call):
                    await send({"type": "http.response.body", "body": events, "more_body": not last})
            else:
                value = await calls.whole(call)
                if value is not None:
                    await send_json(send, 200, value)
        finally:
            self.load -= 1
            connection.left = None
            calls.leave(call)
