"""Which KV blocks are free, and who refers to the others?

Integers only: block ids, reference counts, a free list. The tensors live with the model runner. A block is
*free*, *cached* (nobody refers to it, its content may be wanted again: prefix reuse) or *referenced*; the
three always sum to the total.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class OutOfBlocks(Exception):
    """More blocks were asked for than are free; nothing was allocated."""


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that `tokens` tokens fill, the last one perhaps in part."""
    return -(-tokens // block_tokens)


class BlockPool:
    """A fixed number of blocks. One writer: the scheduler."""

    def __init__(self, num_blocks: int) -> None:
        """Raises ValueError for a pool without blocks."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._references: list[int] = [0] * num_blocks
        self._num_referenced = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks nobody refers to whose content is kept: the rest."""
        return self.num_blocks - len(self._free) - self._num_referenced

    @property
    def num_referenced(self) -> int:
        """Blocks at least one table names."""
        return self._num_referenced

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, each with one reference. Raises `OutOfBlocks` and takes none."""
        if count < 0:
            raise ValueError(f"count must not be negative, not {count}")
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        self._num_referenced += count
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to blocks that are referenced already. Raises ValueError for a free one."""
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._references[block] += 1

    def free(self, block_table: list[int]) -> None:
        """Drops one reference to each block, the deepest first, and empties the table.

        Raises ValueError for a block that is free already; the table is then left as it was.
        """
        for block, count in Counter(block_table).items():
            if self._references[block] < count:
                raise ValueError(f"block {block} is freed more often than it is referenced")
        for block in reversed(block_table):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._num_referenced -= 1
                self._free.append(block)
        block_table.clear()

    def check(self, block_tables: Iterable[Iterable[int]] | None = None) -> None:
        """Self-audit; with all tables given, each reference must be a table's. Raises AssertionError."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert all(self._references[block] == 0 for block in free), "a free block is referenced"
        referenced = sum(1 for count in self._references if count > 0)
        assert referenced == self._num_referenced, "the count of referenced blocks is wrong"
        assert self.num_free + self.num_cached + self.num_referenced == self.num_blocks
        assert self.num_cached == 0, f"{self.num_cached} blocks leaked"
        if block_tables is not None:
            named = Counter(block for table in block_tables for block in table)
            counts = {block: count for block, count in enumerate(self._references) if count > 0}
            assert named == counts, "the reference counts are not those of the block tables"
