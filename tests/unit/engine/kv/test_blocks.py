"""KV blocks are never lost, handed out twice or freed too often."""

from __future__ import annotations

import pytest

from engine.kv.blocks import BlockPool, OutOfBlocks, blocks_for


def test_a_pool_hands_out_each_block_once() -> None:
    pool = BlockPool(5)
    tables = [pool.allocate(2), pool.allocate(3)]
    assert sorted(tables[0] + tables[1]) == [0, 1, 2, 3, 4]
    pool.check(tables)


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    pool = BlockPool(3)
    held = pool.allocate(2)
    with pytest.raises(OutOfBlocks, match="2 blocks wanted, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check([held])


def test_a_shared_block_is_free_only_after_its_last_reference() -> None:
    pool = BlockPool(2)
    first = pool.allocate(2)
    second = list(first)
    pool.share(second)
    pool.free(first)
    assert (pool.num_free, pool.num_referenced) == (0, 2)
    pool.check([second])
    pool.free(second)
    assert (pool.num_free, pool.num_referenced) == (2, 0)


def test_a_free_block_cannot_be_shared_or_freed() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="block 1 is free"):
        pool.share([1])
    with pytest.raises(ValueError, match="freed more often"):
        pool.free([0])
    table = pool.allocate(1)
    with pytest.raises(ValueError, match="freed more often"):
        pool.free([table[0], table[0]])
    pool.check([table])


def test_freeing_empties_the_table_so_that_a_second_free_is_harmless() -> None:
    pool = BlockPool(4)
    table = pool.allocate(4)
    pool.free(table)
    assert table == []
    pool.free(table)
    assert pool.num_free == 4


def test_the_deepest_block_is_the_first_to_be_reused_last() -> None:
    # Freed from the end, so that a prefix's first blocks are taken again last.
    pool = BlockPool(3)
    table = pool.allocate(3)
    deepest = table[-1]
    first = table[0]
    pool.free(table)
    assert pool.allocate(1) == [first]
    assert pool.allocate(2)[-1] == deepest


def test_the_audit_notices_a_table_that_nobody_counted() -> None:
    pool = BlockPool(3)
    table = pool.allocate(2)
    with pytest.raises(AssertionError, match="not those of the block tables"):
        pool.check([table, [table[0]]])
    with pytest.raises(AssertionError, match="not those of the block tables"):
        pool.check([])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_tokens_fill_whole_blocks(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 4) == blocks


def test_a_pool_needs_blocks() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)


def test_a_published_block_is_cached_when_nobody_refers_to_it_and_free_once_evicted() -> None:
    pool = BlockPool(4)
    table = pool.allocate(3)
    first, second, _ = table
    pool.publish(first)
    pool.publish(second)
    pool.free(table)
    assert (pool.num_free, pool.num_cached, pool.cached_blocks()) == (2, 2, [second, first])
    pool.check([])
    pool.share([first])
    assert (pool.num_referenced, pool.references(first), pool.cached_blocks()) == (1, 1, [second])
    assert pool.evict() == second
    assert (pool.num_free, pool.is_published(second), pool.is_published(first)) == (3, False, True)
    with pytest.raises(OutOfBlocks, match="no block is cached"):
        pool.evict()
    with pytest.raises(ValueError, match="free and cannot be published"):
        pool.publish(second)
    pool.check([[first]])


def test_behind_the_fence_a_block_is_held_aside() -> None:
    pool = BlockPool(3)
    table = pool.allocate(2)
    pool.publish(table[0])
    pool.fence(1)
    pool.free(table)
    assert (pool.num_free, pool.num_cached, pool.num_fenced, pool.num_referenced) == (1, 0, 2, 0)
    pool.check([])
    pool.lift_fence(1)
    assert (pool.num_free, pool.num_cached, pool.num_fenced) == (2, 1, 0)
    pool.check([])
