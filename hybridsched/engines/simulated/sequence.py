"""One sequence in the engine: its tokens, where they are in the cache, and when things happened to it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from hybridsched.engines.simulated import tokens
from hybridsched.engines.simulated.kv import BLOCK_SIZE


class Status(IntEnum):
    HELD = 0
    """Arrived while the engine was paused."""
    WAITING = 1
    RUNNING = 2
    FINISHED = 3


class Seq:
    """A request inside the scheduler. Times are on the caller's clock, in its unit."""

    __slots__ = (
        "arrival",
        "blocks",
        "cached_tokens",
        "computed",
        "finish_reason",
        "finished_at",
        "first_scheduled_at",
        "first_token_at",
        "hashes",
        "ignore_eos",
        "last_token_at",
        "max_tokens",
        "min_tokens",
        "offline",
        "order",
        "output",
        "pooling",
        "preemptions",
        "priority",
        "prompt",
        "request_id",
        "sink",
        "state",
        "status",
        "stop_token_ids",
        "tail",
        "total",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        arrival: float = 0.0,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        stop_token_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        offline: bool = False,
        pooling: bool = False,
        sink: Any = None,
    ) -> None:
        if not prompt:
            raise ValueError("a prompt needs at least one token")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        self.request_id = request_id
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.ignore_eos = ignore_eos
        self.stop_token_ids = stop_token_ids
        self.priority = priority
        self.offline = offline
        self.pooling = pooling
        """Prefill only: finishes without a token (embeddings)."""
        self.sink = sink
        """The caller's own; never looked at here."""
        self.arrival = arrival
        self.order = 0
        self.status = Status.WAITING
        self.output: list[int] = []
        self.blocks: list[int] = []
        self.computed = 0
        self.total = len(prompt)
        self.cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache at the first admission."""
        self.preemptions = 0
        self.finish_reason: str | None = None
        self.first_scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at = 0.0
        self.finished_at: float | None = None

        full = len(prompt) // BLOCK_SIZE
        items = tuple(prompt)
        link = 0
        hashes: list[int] = []
        for at in range(0, full * BLOCK_SIZE, BLOCK_SIZE):
            link = hash((link, items[at : at + BLOCK_SIZE]))  # tokens.chain, inlined
            hashes.append(link)
        self.hashes = hashes
        """One per full block of prompt and output."""
        self.tail = list(items[full * BLOCK_SIZE :])
        state = link
        for token in self.tail:
            state = tokens.fold(state, token)
        self.state = state

    def append_next(self) -> int:
        """Invent the next token, append it, and return it."""
        token = tokens.choose(self.state)
        self.output.append(token)
        self.total += 1
        tail = self.tail
        tail.append(token)
        if len(tail) == BLOCK_SIZE:
            link = tokens.chain(self.hashes[-1] if self.hashes else 0, tuple(tail))
            self.hashes.append(link)
            self.tail = []
            self.state = link
        else:
            self.state = tokens.fold(self.state, token)
        return token
