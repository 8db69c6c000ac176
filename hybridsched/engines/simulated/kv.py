"""The KV cache as vLLM keeps it: blocks of 16 tokens, shared by prefix, evicted least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_SIZE = 16
"""vLLM's default on CUDA."""


class BlockPool:
    """Blocks with reference counts. A full block whose content is known stays findable after it is freed.

    Free blocks without content are given out first, then the least recently freed cached ones.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV cache needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._hash_of: list[int | None] = [None] * num_blocks
        self._block_of: dict[int, int] = {}
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self.free = num_blocks
        """Blocks that can be given out: empty or cached without a user."""

    @property
    def use(self) -> float:
        """Share of the blocks held by sequences, 0..1."""
        return 1.0 - self.free / self.num_blocks

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. The caller has checked `free`."""
        empty = self._empty
        if count <= len(empty):
            cut = len(empty) - count
            taken = empty[cut:]
            del empty[cut:]
        else:
            if count > self.free:
                raise ValueError(f"{count} blocks asked for, {self.free} are free")
            taken = empty[:]
            empty.clear()
            for _ in range(count - len(taken)):
                block, _none = self._evictable.popitem(last=False)
                known = self._hash_of[block]
                if known is not None:
                    del self._block_of[known]
                    self._hash_of[block] = None
                taken.append(block)
        refs = self._refs
        for block in taken:
            refs[block] = 1
        self.free -= count
        return taken

    def lookup(self, hashes: Sequence[int], limit: int) -> list[int]:
        """Blocks that hold the longest known prefix of `hashes`, at most `limit`. Takes no reference."""
        found: list[int] = []
        block_of = self._block_of
        for i in range(min(limit, len(hashes))):
            block = block_of.get(hashes[i])
            if block is None:
                break
            found.append(block)
        return found

    def free_after(self, hits: Sequence[int]) -> int:
        """How many blocks would be left free once `hits` were taken."""
        refs = self._refs
        return self.free - sum(1 for block in hits if refs[block] == 0)

    def take(self, hits: Sequence[int]) -> None:
        """Add a reference to blocks found by `lookup`."""
        refs = self._refs
        for block in hits:
            if refs[block] == 0:
                del self._evictable[block]
                self.free -= 1
            refs[block] += 1

    def register(self, block: int, content: int) -> None:
        """Make a computed full block findable. A second block of the same content stays unknown."""
        if content not in self._block_of and self._hash_of[block] is None:
            self._block_of[content] = block
            self._hash_of[block] = content

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each. The last blocks of a sequence become the first to be evicted."""
        refs = self._refs
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block] == 0:
                self.free += 1
                if self._hash_of[block] is None:
                    self._empty.append(block)
                else:
                    self._evictable[block] = None

    def reset_cache(self) -> None:
        """Forget all cached content. Blocks in use stay with their users."""
        for block in self._block_of.values():
            self._hash_of[block] = None
        self._block_of.clear()
        self._empty.extend(self._evictable)
        self._evictable.clear()

    def check(self) -> None:
        """Raise AssertionError when the books do not balance. For tests."""
        held = sum(1 for r in self._refs if r > 0)
        problems = [
            name
            for name, bad in (
                ("a reference count is negative", any(r < 0 for r in self._refs)),
                ("free does not match", self.free != self.num_blocks - held),
                ("free lists do not match", len(self._empty) + len(self._evictable) != self.free),
                ("a block is twice free", len({*self._empty, *self._evictable}) != self.free),
                ("the index is torn", any(self._hash_of[b] != h for h, b in self._block_of.items())),
            )
            if bad
        ]
        if problems:
            raise AssertionError("; ".join(problems))
