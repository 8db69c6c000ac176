"""Between the threads that take chunks and the event loop of their lane."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from hybridsched.log import get_logger
from hybridsched.workers.offline_chunks import ChunkInHand
from hybridsched.workers.offline_lines import LineExecutor

_log = get_logger("offline")


class LaneLink:
    """What the threads need of the lane, each call safe from any thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        executor: LineExecutor,
        *,
        event: Callable[[dict[str, Any]], None],
        measured: Callable[[ChunkInHand, float], None],
    ) -> None:
        """`measured(chunk, seconds)` is told of every finished chunk, on the loop."""
        self._loop = loop
        self._executor = executor
        self._event = event
        self._measured = measured
        self.gate = threading.Event()
        """Set while the lane's gate is open."""
        self.stopping = threading.Event()
        self.closed_since_s = time.monotonic()
        self.chunks: set[ChunkInHand] = set()
        """In hand; changed on the loop only."""
        self.fed = threading.Event()
        """Set to make the feeder look at once."""
        self._lock = threading.Lock()
        self._taker: int | None = None

    def may_take(self) -> bool:
        """Whether the calling thread may take a chunk now: one at a time, while the lines in hand could not
        fill the budget. A chunk that waits for its last long lines must not leave the engine empty.
        """
        with self._lock:
            if self._taker is not None or self._executor.lines >= max(1, self._executor.budget.max_inflight):
                return False
            self._taker = threading.get_ident()
            return True

    def taken(self, taker: int) -> None:
        """That thread has its chunk's lines in hand, or found none to take."""
        with self._lock:
            if self._taker == taker:
                self._taker = None

    def lane_is(self, is_open: bool) -> None:
        """The gate opened or closed (called on the loop)."""
        if is_open:
            self.gate.set()
        elif self.gate.is_set():
            self.closed_since_s = time.monotonic()
            self.gate.clear()

    def begin(self, chunk: ChunkInHand) -> None:
        """Hand a chunk's lines to the executor."""
        taker = threading.get_ident()

        def act() -> None:
            self.chunks.add(chunk)
            self._executor.submit(list(chunk.runs))
            self.taken(taker)

        self._loop.call_soon_threadsafe(act)

    def write(self, chunk: ChunkInHand) -> None:
        """Try again to write what a full disk refused."""
        self._loop.call_soon_threadsafe(chunk.write)

    def finish(self, chunk: ChunkInHand, took_s: float) -> None:
        """A chunk has been acknowledged."""

        def act() -> None:
            self.chunks.discard(chunk)
            self._measured(chunk, took_s)
            totals = chunk.totals
            self._event(
                {
                    "t": "chunk",
                    "batch": chunk.batch,
                    "chunk": chunk.chunk_no,
                    "lines": totals.lines,
                    "mono_s": time.monotonic(),
                    "took_s": took_s,
                    "tokens": totals.prompt_tokens + totals.output_tokens,
                    "prompt_tokens": totals.prompt_tokens,
                    "output_tokens": totals.output_tokens,
                    "recomputed": totals.recomputed,
                }
            )

        self._loop.call_soon_threadsafe(act)

    def withdraw(self, chunk: ChunkInHand, *, keep: bool) -> None:
        """Take a chunk's lines out of hand, with `keep` their tokens into its journal. Waits for it."""
        done = threading.Event()

        def act() -> None:
            self._executor.withdraw(chunk)
            self.chunks.discard(chunk)
            if keep:
                chunk.keep()
            done.set()

        self._loop.call_soon_threadsafe(act)
        if not done.wait(10):
            _log.error("The lane's loop does not react; a chunk is given back as it is.", key="loop_stuck")
