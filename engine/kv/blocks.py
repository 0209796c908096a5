"""`BlockPool`: free KV blocks and reference counts, integers only.

A block is *free* (no content worth keeping), *cached* (unreferenced, but published and reusable),
*referenced* (at least one block table names it) or *fenced* (released while steps that may still write or
read it were in flight: until all of those are over). The four always sum to the total.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from engine.sizes import blocks_for as blocks_for


class OutOfBlocks(Exception):
    """Fewer blocks are free than requested; nothing was allocated."""


class BlockPool:
    """A fixed number of blocks. One writer: the scheduler."""

    def __init__(self, num_blocks: int) -> None:
        """Raises ValueError for a pool without blocks."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._references: list[int] = [0] * num_blocks
        self._published = bytearray(num_blocks)
        # Least recently released first. (Finding the first key of a plain dictionary walks over all keys
        # removed before it.)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._fenced: dict[int, int] = {}
        """Block -> the last step that was in flight when it was released; in the order of the steps."""
        self._in_flight: list[int] = []
        self._num_referenced = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        return self._num_referenced

    @property
    def num_fenced(self) -> int:
        return len(self._fenced)

    def references(self, block: int) -> int:
        return self._references[block]

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def is_published(self, block: int) -> bool:
        """Whether the block's content is kept once it is unreferenced."""
        return bool(self._published[block])

    def cached_blocks(self) -> list[int]:
        return list(self._cached)

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
        """Adds a reference to blocks that are referenced or published. Raises ValueError for a free one."""
        for block in blocks:
            if self._references[block] == 0:
                if not self._published[block]:
                    raise ValueError(f"block {block} is free and cannot be shared")
                self._cached.pop(block, None)
                self._fenced.pop(block, None)
                self._num_referenced += 1
            self._references[block] += 1

    def free(self, block_table: list[int]) -> None:
        """Releases and empties a table, deepest first. Raises ValueError, unchanged, for a free block."""
        references = self._references
        for block, count in Counter(block_table).items():
            if references[block] < count:
                raise ValueError(f"block {block} is freed more often than it is referenced")
        for block in reversed(block_table):
            left = references[block] = references[block] - 1
            if left == 0:
                self._num_referenced -= 1
                if self._in_flight:
                    self._fenced[block] = self._in_flight[-1]
                else:
                    self._release(block)
        block_table.clear()

    def _release(self, block: int) -> None:
        if self._published[block]:
            self._cached[block] = None
        else:
            self._free.append(block)

    def publish(self, block: int) -> None:
        """Keeps the block cached once it is unreferenced. Raises ValueError if it is unreferenced now."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is free and cannot be published")
        self._published[block] = 1

    def evict(self) -> int:
        """Frees and returns the least recently released cached block. Raises `OutOfBlocks` without one."""
        if not self._cached:
            raise OutOfBlocks("no block is cached")
        block, _ = self._cached.popitem(last=False)
        self._published[block] = 0
        self._free.append(block)
        return block

    def fence(self, step: int) -> None:
        """A step is in flight: blocks released from now on are held aside until it is over. Raises ValueError
        unless `step` is greater than those in flight."""
        if self._in_flight and step <= self._in_flight[-1]:
            raise ValueError(f"step {step} begins after step {self._in_flight[-1]}")
        self._in_flight.append(step)

    def lift_fence(self, step: int) -> None:
        """The oldest step in flight is over: blocks that waited for no later one become free or cached.
        Raises ValueError for another step."""
        if self._in_flight[:1] != [step]:
            raise ValueError(f"step {step} is not the oldest in flight ({self._in_flight})")
        self._in_flight.pop(0)
        for block in [block for block, last in self._fenced.items() if last <= step]:
            del self._fenced[block]
            self._release(block)

    @property
    def has_fence(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._in_flight)

    def check(self, block_tables: Iterable[Iterable[int]] | None = None) -> None:
        """Self-audit; with all tables given, each reference must be a table's. Raises AssertionError."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        unused = free | self._cached.keys() | self._fenced.keys()
        assert len(unused) == self.num_free + self.num_cached + self.num_fenced, "a block is in two places"
        assert all(self._references[block] == 0 for block in unused), "a free block is referenced"
        assert not any(self._published[block] for block in free), "a free block is published"
        assert all(self._published[block] for block in self._cached), "a cached block is not published"
        assert set(self._fenced.values()) <= {*self._in_flight}, "a block waits for a step that is over"
        referenced = sum(1 for count in self._references if count > 0)
        assert referenced == self._num_referenced, "the count of referenced blocks is wrong"
        leaked = self.num_blocks - len(unused) - referenced
        assert leaked == 0, f"{leaked} blocks leaked"
        if block_tables is not None:
            named = Counter(block for table in block_tables for block in table)
            counts = {block: count for block, count in enumerate(self._references) if count > 0}
            assert named == counts, "the reference counts are not those of the block tables"
