"""Do the books of the KV cache agree with each other and with everybody who holds a part of it?"""

from __future__ import annotations

from collections.abc import Iterable

from engine.kv.blocks import BlockPool
from engine.kv.host import HostBlocks, SwapOut
from engine.kv.leaders import Leaders
from engine.kv.prefix import PrefixCursor, PrefixTree


def check_books(
    pool: BlockPool,
    tree: PrefixTree,
    host: HostBlocks,
    leaders: Leaders,
    holders: Iterable[tuple[list[int], PrefixCursor]],
    swapped: Iterable[SwapOut],
    block_tokens: int,
) -> None:
    """Raises AssertionError for a block that leaked, has two owners, or is not where the books say.

    `holders`: all tables with their cursors; `swapped`: all that lies in host memory. Takes time proportional
    to the whole cache.
    """
    held = list(holders)
    pool.check(table for table, _ in held)
    tree.check()
    host.check(swapped, block_tokens)
    leaders.check(cursor for _, cursor in held)
    _check_tables(tree, held)
    for block in range(pool.num_blocks):
        assert pool.is_published(block) == tree.holds(block), "a block is published, but not in the tree"
    before: set[int] = set()
    for block in pool.cached_blocks():
        assert before.issuperset(tree.below(block)), "a block is evicted before those below it"
        before.add(block)


def _check_tables(tree: PrefixTree, held: list[tuple[list[int], PrefixCursor]]) -> None:
    private: set[int] = set()
    for table, cursor in held:
        way = [] if cursor.node is None else tree.way(cursor.node)
        assert way == table[: cursor.blocks], "a table does not begin with its cursor's way"
        rest = table[cursor.blocks :]
        assert len(set(table)) == len(table), "a table names a block twice"
        assert not any(tree.holds(block) for block in rest), "a table names what it did not publish"
        assert private.isdisjoint(rest), "two tables name a block that is not published"
        private.update(rest)
