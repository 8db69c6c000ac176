"""The KV cache by counts: how many blocks are free, and how much of which prefix is still cached."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from hybridsched.engines.simulated.kv import BLOCK_SIZE


class CountedBlocks:
    """`engines.simulated.kv.BlockPool` without the blocks.

    What a request leaves behind is one entry, evicted from its end, oldest entry first, once no block without
    content is free. One prefix per key: blocks that a lookup leaves over count as without content afterwards.
    """

    __slots__ = ("_cached", "_entries", "_entry_of", "free", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = num_blocks
        """Blocks that can be given out: empty or cached without a user."""
        self._cached = 0
        self._entries: deque[_Entry] = deque()
        self._entry_of: dict[Hashable, _Entry] = {}

    @property
    def use(self) -> float:
        """Share of the blocks held by requests, 0..1."""
        return 1.0 - self.free / self.num_blocks

    def allocate(self, count: int) -> None:
        """Give out `count` blocks. The caller has checked `free`."""
        free = self.free - count
        self.free = free
        over = self._cached - free
        if over > 0:
            self._cached = free
            entry = self._entries[0]
            if entry.blocks > over:
                entry.blocks -= over
            else:
                self._evict(over)

    def _evict(self, over: int) -> None:
        entries = self._entries
        while over > 0:
            entry = entries[0]
            if entry.blocks > over:
                entry.blocks -= over
                return
            over -= entry.blocks
            entry.blocks = 0
            entries.popleft()
            if entry.key is not None and self._entry_of.get(entry.key) is entry:
                del self._entry_of[entry.key]

    def release(self, held: int, computed_tokens: int, key: Hashable) -> None:
        """Take back `held` blocks of so many tokens; with a key the full ones can be found again."""
        self.free += held
        full = computed_tokens // BLOCK_SIZE
        if full:
            self._cached += full
            entries = self._entries
            if key is None:
                if entries and entries[-1].key is None:
                    entries[-1].blocks += full  # nobody will ask for either: one entry is as good
                else:
                    entries.append(_Entry(full, None))
            else:
                self._entry_of[key] = entry = _Entry(full, key)
                entries.append(entry)
                if len(entries) > 2 * self.num_blocks:  # most of them were taken up again
                    self._entries = deque(e for e in entries if e.blocks)

    def lookup(self, key: Hashable, limit: int) -> int:
        """How many blocks of the prefix are cached, at most `limit`."""
        entry = self._entry_of.get(key)
        return 0 if entry is None else min(entry.blocks, limit)

    def take(self, key: Hashable, hits: int) -> None:
        """Use `hits` blocks found by `lookup`."""
        entry = self._entry_of.pop(key)
        self._cached -= entry.blocks
        entry.blocks = 0
        self.free -= hits

    def reset_cache(self) -> None:
        """Forget all cached content."""
        self._cached = 0
        self._entries.clear()
        self._entry_of.clear()


class _Entry:
    __slots__ = ("blocks", "key")

    def __init__(self, blocks: int, key: Hashable) -> None:
        self.blocks = blocks
        self.key = key
