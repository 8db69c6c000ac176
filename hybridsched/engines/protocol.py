"""What the workers need of an engine, and the values that cross that border."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, runtime_checkable

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
        lost: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code
        """engine_unreachable, engine_died, engine_timeout, engine_busy, engine_bad_answer,
        engine_wrong_model, bad_request, not_found or not_supported."""
        self.retryable = retryable
        self.status = status
        """HTTP status where the engine gave one."""
        self.body = body
        """The engine's error body where it refused a stream."""
        self.lost = lost
        """The connection broke without a word: the server is gone, and not only what runs the model."""


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
        choices = self.body.get("choices")
        if not isinstance(choices, list):
            return False
        return any(isinstance(c, dict) and c.get("finish_reason") == "abort" for c in choices)


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
    iteration_tokens: float | None = None
    """Its sum: output tokens, and prompts with the end of their prefill, cached tokens included."""
    cached_tokens_total: float | None = None
    """`vllm:prompt_tokens_cached_total`: those cached tokens, counted at the same time."""

    @property
    def computed_tokens(self) -> float | None:
        """Tokens that its iterations have computed, as of the prompts that are in; None: not reported."""
        if self.iteration_tokens is None or self.cached_tokens_total is None:
            return None
        return self.iteration_tokens - self.cached_tokens_total

    preemptions_total: float | None = None
    awake: float | None = None
    """0: it was put to sleep."""
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
    """KV cache capacity in tokens (kv_cache_size_tokens of `vllm:cache_config_info`; where a version does not
    say it, num_gpu_blocks x block_size)."""
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
        when the engine is unreachable, dies, is busy (503), says nothing for `timeout_s`, or says that all is
        well with a body that is no answer, or sends us to another address (`engine_bad_answer`).
        """
        ...

    def stream(
        self, path: str, body: dict[str, Any] | bytes, *, request_id: str, idle_timeout_s: float
    ) -> AsyncIterator[StreamChunk]:
        """The same, streamed: events until [DONE]. `idle_timeout_s` bounds the silence between two events.

        Closing the iterator early disconnects, which ends the request in the engine.
        """
        ...

    async def abort(self, path: str, request_ids: Sequence[str]) -> None:
        """End requests at the next iteration; their callers get what was produced, finish_reason 'abort'.

        `request_ids` are the ids given to `complete` or `stream` for `path`. An empty sequence ends nothing
        (the engine's own endpoint would end all), an unknown id nothing either: vLLM does not say which it
        knew.
        """
        ...

    async def tokenize(self, path: str, body: dict[str, Any]) -> list[int]:
        """Token ids of the prompt as the engine sees it for `path` with `body` (chat template applied)."""
        ...

    async def pause(self) -> None:
        """Stop the whole engine at the next iteration, keeping every request (own lanes)."""
        ...

    async def resume(self) -> None: ...

    async def stands_still(self) -> bool:
        """Whether it is paused or sleeps, by whomever. An engine that cannot say is not."""
        ...

    async def can_sleep(self) -> bool:
        """Whether a sleep frees memory here."""
        ...

    async def sleep(self, level: int, *, timeout_s: float) -> None:
        """Pause at the next iteration keeping every request, then free the GPU's memory: 1 keeps the weights
        in the host's memory, 2 drops them. Raises `EngineError` not_supported where that would free
        nothing."""
        ...

    async def wake(self, *, timeout_s: float) -> None:
        """Take the memory again and go on. See `waking.wake_or_restart` for the check that has to follow."""
        ...

    async def close(self) -> None:
        """Release connections; the engine itself goes on (one in a process of ours ends)."""
        ...


@runtime_checkable
class Detokenizes(Protocol):
    """An engine that can say what token ids read as."""

    async def detokenize(self, model: str | None, token_ids: Sequence[int]) -> str:
        """The text of token ids; what is no whole character reads U+FFFD. Raises `EngineError`."""
        ...
