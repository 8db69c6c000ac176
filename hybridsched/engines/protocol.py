"""What the workers need of an engine, and the values that cross that border."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import msgspec


class EngineError(Exception):
    """An engine did not do what was asked. `retryable` says whether another attempt may succeed."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        retryable: bool,
        status: int | None = None,
        body: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        """engine_unreachable, engine_died, engine_timeout, engine_busy, bad_request or not_found."""
        self.retryable = retryable
        self.status = status
        """HTTP status where the engine gave one."""
        self.body = body
        """The engine's error body where it refused a stream."""


class StreamChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One server-sent event of a streamed answer. A chunk may hold several tokens."""

    data: bytes
    """The event's JSON, as the engine sent it."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    status: int
    body: dict[str, Any]
    """The engine's JSON body: a completion, chat completion, embedding, or an error object."""

    @property
    def aborted(self) -> bool:
        """Whether the engine ended the request early because it was told to."""
        choices = self.body.get("choices") or []
        return any(c.get("finish_reason") == "abort" for c in choices)


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics that decisions use. None: the engine does not report it."""

    running: float | None = None
    waiting: float | None = None
    kv_use: float | None = None
    """0..1"""
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    iterations_total: float | None = None
    """Count of `vllm:iteration_tokens_total`."""
    preemptions_total: float | None = None
    prefix_queries_total: float | None = None
    prefix_hits_total: float | None = None
    ttft_buckets: tuple[tuple[float, float], ...] = ()
    """(upper bound in seconds, cumulative count) of `vllm:time_to_first_token_seconds`."""
    tpot_buckets: tuple[tuple[float, float], ...] = ()
    """The same for `vllm:request_time_per_output_token_seconds`."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself."""

    models: tuple[str, ...]
    max_model_len: int | None
    kv_tokens: int | None
    """KV cache capacity in tokens (num_gpu_blocks x block_size of `vllm:cache_config_info`)."""
    block_size: int | None


class Engine(Protocol):
    """A running model server. Every method has its own time limit and raises `EngineError`."""

    @property
    def url(self) -> str: ...

    async def info(self) -> EngineInfo: ...

    async def healthy(self) -> bool:
        """Whether the health check answers; never raises."""
        ...

    async def stats(self) -> EngineStats: ...

    async def complete(
        self, path: str, body: dict[str, Any] | bytes, *, request_id: str, timeout_s: float
    ) -> Completion:
        """POST a request that does not stream to `path` (such as /v1/completions).

        A 4xx answer is returned as a `Completion` with its status and error body. Raises `EngineError`
        when the engine is unreachable, dies, is busy (503) or says nothing for `timeout_s`.
        """
        ...

    def stream(
        self, path: str, body: dict[str, Any] | bytes, *, request_id: str, idle_timeout_s: float
    ) -> AsyncIterator[StreamChunk]:
        """The same, streamed: events until [DONE]. `idle_timeout_s` bounds the silence between two events.

        Closing the iterator early disconnects, which ends the request in the engine.
        """
        ...

    async def abort(self, path: str, request_ids: Sequence[str]) -> int:
        """End requests at the next iteration; their callers get what was produced, finish_reason 'abort'.

        `request_ids` are the ids given to `complete` or `stream` for `path`. An empty sequence ends nothing
        (the engine's own endpoint would end all). Returns how many the engine says it ended.
        """
        ...

    async def tokenize(self, path: str, body: dict[str, Any]) -> list[int]:
        """Token ids of the prompt as the engine sees it for `path` with `body` (chat template applied)."""
        ...

    async def pause(self) -> None:
        """Stop the whole engine at the next iteration, keeping every request (own lanes)."""
        ...

    async def resume(self) -> None: ...

    async def close(self) -> None:
        """Release connections. The engine itself goes on."""
        ...
