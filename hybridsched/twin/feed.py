"""A batch in the twin: its lines in order, cut into chunks that lanes take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hybridsched.core.chunking import next_chunk_lines, next_chunk_tokens
from hybridsched.core.pacing import Grant
from hybridsched.core.policy import OfflinePolicy
from hybridsched.twin.lengths import Length


class Line:
    """One line on its way: what is done of it, across pauses. Tokens."""

    __slots__ = (
        "chunk",
        "computed",
        "fed",
        "grant",
        "kept",
        "number",
        "order",
        "output_tokens",
        "paused",
        "planned",
        "prompt_tokens",
        "recomputed",
        "results",
    )

    def __init__(self, number: int, length: Length) -> None:
        self.number = number
        self.prompt_tokens = length.prompt_tokens
        self.output_tokens = length.output_tokens
        self.planned = length.prompt_tokens + length.output_tokens
        """KV cache that it may come to need."""
        self.chunk: Chunk | None = None
        self.order = (0, number)
        self.kept = 0
        """Output of earlier requests that it goes on from."""
        self.fed = 0
        """Leading tokens taken to be in the engine's prefix cache."""
        self.computed = 0
        """Leading tokens that an engine has computed for it."""
        self.paused = False
        self.recomputed = 0
        self.results = 0
        """Times it has ended: once, in the end."""
        self.grant: Grant | None = None
        """Leave under which its request was sent."""

    @property
    def known(self) -> int:
        """Tokens that its next request begins with."""
        return self.prompt_tokens + self.kept


class Chunk:
    """Lines that are taken as one."""

    __slots__ = ("left", "lines", "sequence", "taken_s")

    def __init__(self, lines: list[Line]) -> None:
        self.lines = lines
        self.left = sum(1 for line in lines if not line.results)
        self.sequence = 0
        self.taken_s = 0.0


class Feed:
    """The batch of a pool. Chunks are planned a bounded number ahead, by whoever takes one."""

    def __init__(self, lengths: Sequence[Length], lanes: int, *, on_change: Callable[[], None]) -> None:
        """`on_change`: it has run empty, or is not empty any more."""
        self.lines = [Line(number, length) for number, length in enumerate(lengths)]
        self._tokens_per_line = sum(line.planned for line in self.lines) / max(1, len(self.lines))
        self._lanes = lanes
        self._on_change = on_change
        self._queue: deque[Chunk] = deque()
        self._queued = 0
        """Lines in it."""
        self._cursor = 0
        self._sequence = 0
        self.seen_empty = not self.lines
        """Whether lanes know that there is nothing to take: their feeders look now and then."""
        self.finished = 0
        """Lines that have a result."""

    @property
    def remaining(self) -> int:
        """Lines without a result."""
        return len(self.lines) - self.finished

    @property
    def backlog(self) -> int:
        """Lines that stand in the queue or are not planned yet."""
        return self._queued + len(self.lines) - self._cursor

    @property
    def empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._queue and self._cursor >= len(self.lines)

    def waiting(self) -> set[int]:
        """Numbers of the lines that stand in the queue or are not planned yet."""
        queued = {line.number for chunk in self._queue for line in chunk.lines if not line.results}
        return queued.union(range(self._cursor, len(self.lines)))

    def take(
        self, policy: OfflinePolicy, rate: float | None, *, parallel: int, kv_tokens: int, now_s: float
    ) -> Chunk | None:
        """The next chunk for a lane of that throughput (tokens/s), and more planned in its place."""
        self._plan(policy, rate, parallel, kv_tokens)
        if not self._queue:
            return None
        chunk = self._queue.popleft()
        self._queued -= chunk.left
        self._sequence += 1
        chunk.sequence = self._sequence
        chunk.taken_s = now_s
        for line in chunk.lines:
            line.order = (chunk.sequence, line.number)
        self._plan(policy, rate, parallel, kv_tokens)
        if self.empty:
            self._on_change()
        return chunk

    def give_back(self, chunk: Chunk) -> None:
        """A lane puts a chunk down: what is not finished of it goes on elsewhere, where it stands."""
        was_empty = self.empty
        rest = Chunk([line for line in chunk.lines if not line.results])
        for line in rest.lines:
            line.chunk = rest
            line.fed = 0
            line.paused = bool(line.kept)
            line.computed = line.known - 1 if line.kept else 0
        if rest.lines:
            self._queue.appendleft(rest)
            self._queued += rest.left
        if was_empty and not self.empty:
            self._on_change()

    def _plan(self, policy: OfflinePolicy, rate: float | None, parallel: int, kv_tokens: int) -> None:
        wanted = policy.chunks_ahead * self._lanes
        if len(self._queue) >= wanted or self._cursor >= len(self.lines):
            return
        per_line = self._tokens_per_line
        tokens = next_chunk_tokens(
            policy, rate, kv_tokens=kv_tokens, tokens_per_line=per_line, parallel=parallel
        )
        lines = next_chunk_lines(policy, rate, tokens_per_line=per_line, parallel=parallel)
        while len(self._queue) < wanted and self._cursor < len(self.lines):
            chunk = self._cut(tokens, lines, policy.chunk_min_lines)
            self._queue.append(chunk)
            self._queued += chunk.left

    def _cut(self, max_tokens: int, max_lines: int, min_lines: int) -> Chunk:
        start, tokens = self._cursor, 0
        at = start
        while at < len(self.lines):
            cost = self.lines[at].planned
            count = at - start
            if count and (count >= max_lines or (count >= min_lines and tokens + cost > max_tokens)):
                break
            tokens += cost
            at += 1
        self._cursor = at
        chunk = Chunk(self.lines[start:at])
        for line in chunk.lines:
            line.chunk = chunk
        return chunk
