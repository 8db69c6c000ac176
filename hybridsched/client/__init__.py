"""What an online service imports: send a request to a pool, get its answer or its tokens.

    async with AsyncClient("redis://host:6379/0", pool="prod") as client:
        reply = await client.complete(model="llama", messages=[{"role": "user", "content": "Hi"}])
        print(reply.body["choices"][0]["message"]["content"])

        async with client.stream(model="llama", messages=[...]) as chunks:
            async for chunk in chunks:
                ...
        print(chunks.usage)

`Client` is the same without `await`, for any number of threads. Do not carry either across a fork.
Every failure of a request is a `RequestError`; Redis trouble is a `StoreError`, after some patience.
"""

from __future__ import annotations

from hybridsched.client.asynchronous import AsyncClient
from hybridsched.client.errors import (
    Cancelled,
    ClientClosed,
    Conflict,
    Expired,
    Failed,
    NotServed,
    QueueFull,
    RequestError,
    RetryBudgetExhausted,
)
from hybridsched.client.requests import Reply, estimate_max_tokens, estimate_prompt_tokens
from hybridsched.client.streaming import AsyncStream
from hybridsched.client.synchronous import Client, Stream
from hybridsched.store.errors import StoreError, StoreRefused, StoreUnavailable, StoreUrlError

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Client",
    "ClientClosed",
    "Conflict",
    "Expired",
    "Failed",
    "NotServed",
    "QueueFull",
    "Reply",
    "RequestError",
    "RetryBudgetExhausted",
    "StoreError",
    "StoreRefused",
    "StoreUnavailable",
    "StoreUrlError",
    "Stream",
    "estimate_max_tokens",
    "estimate_prompt_tokens",
]
