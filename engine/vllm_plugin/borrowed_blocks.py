"""`BorrowedBlocks`: counts of KV blocks that another server owns.

Inside vLLM the blocks are vLLM's: tables here only have the right length, and the number of free blocks is
vLLM's before each step, less what was handed out since. vLLM's own prefix cache is used as it is (`found`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.kv.cache import KvCache
from engine.kv.host import SwapOut
from engine.kv.prefix import Match, PrefixCursor

BLOCK = 0
"""Stands for a block in a table: which one it is, only vLLM knows."""


class BorrowedBlocks(KvCache):
    """Implements what the sequence table uses of a `KvCache`, with numbers in place of blocks."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        super().__init__(1, block_tokens, prefix_caching=False)
        self._num_blocks = num_blocks
        self._free = num_blocks
        self._found: dict[PrefixCursor, int] = {}

    def begin_step(self, free_blocks: int) -> None:
        """`free_blocks`: those that vLLM has free, less those that tables have here and not yet there."""
        self._free = max(0, min(free_blocks, self._num_blocks))

    def found(self, cursor: PrefixCursor, tokens: int) -> None:
        """Notes that vLLM found `tokens` more tokens of a sequence in its prefix cache."""
        self._found[cursor] = tokens

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free(self) -> int:
        return self._free

    @property
    def num_blank(self) -> int:
        """The same: which blocks are cached, only vLLM knows."""
        return self._free

    @property
    def num_referenced(self) -> int:
        return self._num_blocks - self._free

    def cached_tokens(self, token_ids: Sequence[int], salt: str) -> int:
        """Not known before vLLM looks."""
        return 0

    def locality(self, token_ids: Sequence[int], salt: str, *, blocks: int = 1) -> int:
        """Not known: the prompts' tokens are not looked at."""
        return 0

    def shortage(self, match: Match, count: int, yielded: Sequence[list[int]] = ()) -> int:
        return count - self._free - sum(map(len, yielded))

    def extend(self, table: list[int], count: int) -> None:
        table += [BLOCK] * count
        self._free -= count

    def extend_each(self, tables: Sequence[list[int]]) -> None:
        for table in tables:
            table.append(BLOCK)
        self._free -= len(tables)

    def publish(
        self, table: list[int], cursor: PrefixCursor, token_ids: Sequence[int], computed_tokens: int
    ) -> None:
        """vLLM does."""

    def adopt(
        self,
        table: list[int],
        cursor: PrefixCursor,
        token_ids: Sequence[int],
        computed_tokens: int,
        most_tokens: int,
    ) -> int:
        return min(self._found.pop(cursor, 0), most_tokens - computed_tokens)

    def free(self, table: list[int], cursor: PrefixCursor) -> None:
        self._free += len(table)
        self._found.pop(cursor, None)
        table.clear()

    def swap_out(self, table: list[int], cursor: PrefixCursor, computed_tokens: int) -> SwapOut | None:
        return None

    def check(
        self, holders: Iterable[tuple[list[int], PrefixCursor]], swapped: Iterable[SwapOut] = ()
    ) -> None:
        """Raises AssertionError where more blocks are free than there are."""
        assert 0 <= self._free <= self._num_blocks, f"{self._free} of {self._num_blocks} blocks are free"
