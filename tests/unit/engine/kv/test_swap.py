"""Swapped-out KV returns to the right blocks, whatever else happens in the same step."""

from __future__ import annotations

import pytest

from engine.kv.blocks import OutOfBlocks
from engine.kv.cache import KvCache
from engine.kv.host import Copies, SwapOut
from engine.kv.prefix import PrefixCursor

BLOCK = 4


class Memory:
    """Device and host blocks with something in them, and the copies between."""

    def __init__(self, num_blocks: int, num_host_blocks: int) -> None:
        self.device = [f"device {block}" for block in range(num_blocks)]
        self.host = [f"host {block}" for block in range(num_host_blocks)]

    def copy(self, copies: Copies) -> None:
        for device, host in copies.out:
            self.host[host] = self.device[device]
        for host, device in copies.back:
            self.device[device] = self.host[host]

    def fill(self, table: list[int], name: str) -> None:
        for index, block in enumerate(table):
            self.device[block] = f"{name} {index}"

    def read(self, table: list[int]) -> list[str]:
        return [self.device[block] for block in table]


def start(cache: KvCache, memory: Memory, blocks: int, name: str) -> tuple[list[int], PrefixCursor]:
    table: list[int] = []
    cache.extend(table, blocks)
    memory.fill(table, name)
    return table, PrefixCursor("a")


def swapped_out(
    cache: KvCache, memory: Memory, blocks: int, tokens: int
) -> tuple[list[int], PrefixCursor, SwapOut]:
    """A sequence of so many blocks whose computed tokens go out."""
    table, cursor = start(cache, memory, blocks, "a")
    swapped = cache.swap_out(table, cursor, tokens)
    assert swapped is not None
    return table, cursor, swapped


def test_a_round_trip_brings_every_block_back() -> None:
    cache, memory = KvCache(4, BLOCK, num_host_blocks=3), Memory(4, 3)
    table, cursor, swapped = swapped_out(cache, memory, 3, 9)
    assert (table, swapped.tokens, len(swapped.blocks)) == ([], 9, 3)
    assert (cache.num_free, cache.num_host_free) == (4, 0)
    cache.check([], [swapped])
    other, other_cursor = start(cache, Memory(4, 3), 4, "b")
    memory.copy(cache.close_step())
    memory.fill(other, "b")
    cache.free(other, other_cursor)
    cache.swap_in(swapped, table)
    memory.copy(cache.close_step())
    assert memory.read(table) == ["a 0", "a 1", "a 2"]
    assert cache.num_host_free == 3
    cache.check([(table, cursor)], [swapped])
    assert (cache.counts.swapped_out_blocks, cache.counts.swapped_in_blocks) == (3, 3)


def test_only_computed_blocks_move() -> None:
    cache = KvCache(8, BLOCK, num_host_blocks=8)
    table, cursor = start(cache, Memory(8, 8), 5, "a")
    first = table[:2]
    swapped = cache.swap_out(table, cursor, 5)
    assert swapped is not None
    assert cache.close_step().out == list(zip(first, swapped.blocks, strict=True))
    assert cache.num_free == 8


def test_without_room_or_without_kv_nothing_is_swapped_out() -> None:
    cache = KvCache(8, BLOCK, num_host_blocks=2)
    table, cursor = start(cache, Memory(8, 2), 3, "a")
    assert cache.swap_out(table, cursor, 9) is None
    assert cache.swap_out(table, cursor, 0) is None
    assert (len(table), cache.num_host_free) == (3, 2)
    assert not cache.close_step()
    with pytest.raises(ValueError, match="13 computed tokens do not lie in 3 blocks"):
        cache.swap_out(table, cursor, 13)
    assert KvCache(8, BLOCK).swap_out(table[:0], PrefixCursor("a"), 0) is None


def test_a_host_block_given_back_is_not_filled_by_the_copies_of_the_same_step() -> None:
    # What goes out goes first: filled again in the same step, it would be overwritten before it is read.
    cache, memory = KvCache(8, BLOCK, num_host_blocks=3), Memory(8, 3)
    first, first_cursor = start(cache, memory, 2, "first")
    second, second_cursor = start(cache, memory, 2, "second")
    swapped = cache.swap_out(first, first_cursor, 8)
    assert swapped is not None
    memory.copy(cache.close_step())
    cache.swap_in(swapped, first)
    assert cache.swap_out(second, second_cursor, 8) is None, "there is room only after this step"
    memory.copy(cache.close_step())
    assert memory.read(first) == ["first 0", "first 1"]
    out = cache.swap_out(second, second_cursor, 8)
    assert out is not None
    cache.check([(first, first_cursor), (second, second_cursor)], [swapped, out])


def test_out_and_back_in_one_step() -> None:
    cache, memory = KvCache(6, BLOCK, num_host_blocks=4), Memory(6, 4)
    table, _cursor, swapped = swapped_out(cache, memory, 2, 8)
    taker, _ = start(cache, Memory(6, 4), 2, "b")
    cache.swap_in(swapped, table)
    memory.copy(cache.close_step())
    assert memory.read(table) == ["a 0", "a 1"]
    assert not set(taker) & set(table)


def test_a_block_let_go_before_its_content_arrived_does_not_get_it() -> None:
    cache, memory = KvCache(2, BLOCK, num_host_blocks=4), Memory(2, 4)
    table, cursor, swapped = swapped_out(cache, memory, 2, 8)
    other, other_cursor = start(cache, memory, 2, "b")
    out = cache.swap_out(other, other_cursor, 8)
    assert out is not None
    memory.copy(cache.close_step())
    # Brought back, preempted, and its blocks given to one that is brought back too.
    cache.swap_in(swapped, table)
    cache.free(table, cursor)
    cache.swap_in(out, other)
    copies = cache.close_step()
    assert len(copies.back) == 2
    memory.copy(copies)
    assert memory.read(other) == ["b 0", "b 1"]
    cache.check([(other, other_cursor)], [swapped, out])
    assert cache.num_host_free == 4


def test_nothing_is_copied_into_a_block_whose_owner_is_gone() -> None:
    # Its next owner may have content of its own by then, imported rather than computed.
    cache, memory = KvCache(4, BLOCK, num_host_blocks=4), Memory(4, 4)
    table, cursor, swapped = swapped_out(cache, memory, 2, 8)
    memory.copy(cache.close_step())
    cache.swap_in(swapped, table)
    cache.free(table, cursor)
    assert not cache.close_step()


def test_what_has_yet_to_arrive_is_neither_swapped_out_again_nor_published() -> None:
    cache = KvCache(4, BLOCK, num_host_blocks=8)
    table, cursor, swapped = swapped_out(cache, Memory(4, 8), 2, 8)
    cache.close_step()
    cache.swap_in(swapped, table)
    assert cache.swap_out(table, cursor, 8) is None
    with pytest.raises(ValueError, match="copies were not handed over"):
        cache.publish(table, cursor, list(range(9)), 8)
    cache.close_step()
    assert cache.swap_out(table, cursor, 8) is not None


def test_published_blocks_are_copied_too_and_what_is_still_published_need_not_be_copied_back() -> None:
    cache, memory = KvCache(5, BLOCK, num_host_blocks=5), Memory(5, 5)
    token_ids = list(range(10))
    table, cursor = start(cache, memory, 3, "a")
    cache.publish(table, cursor, token_ids, 10)
    swapped = cache.swap_out(table, cursor, 10)
    assert swapped is not None
    assert (len(swapped.blocks), cache.num_cached) == (3, 2)
    memory.copy(cache.close_step())
    taker: list[int] = []
    cache.extend(taker, 4)
    memory.fill(taker, "b")
    match = cache.match(token_ids, "a", swapped.tokens)
    assert match.tokens == 4, "the deeper one was evicted"
    cache.free(taker, PrefixCursor("a"))
    cache.attach(table, cursor, match)
    cache.swap_in(swapped, table)
    copies = cache.close_step()
    assert len(copies.back) == 2
    memory.copy(copies)
    assert memory.read(table) == ["a 0", "a 1", "a 2"]
    cache.publish(table, cursor, token_ids, 10)
    cache.check([(table, cursor)], [swapped])
    assert cache.num_published == 2


def test_what_comes_back_beside_its_published_self_is_a_duplicate() -> None:
    cache = KvCache(8, BLOCK, num_host_blocks=4)
    token_ids = list(range(9))
    table, cursor = start(cache, Memory(8, 4), 3, "a")
    cache.publish(table, cursor, token_ids, 9)
    published = table[:2]
    swapped = cache.swap_out(table, cursor, 9)
    assert swapped is not None
    cache.swap_in(swapped, table)
    cache.close_step()
    cache.publish(table, cursor, token_ids, 9)
    assert table[:2] == published
    assert cache.counts.duplicate_blocks == 2
    cache.check([(table, cursor)])


def test_dropping_gives_the_host_blocks_back_once() -> None:
    cache = KvCache(4, BLOCK, num_host_blocks=2)
    table, cursor, swapped = swapped_out(cache, Memory(4, 2), 2, 8)
    cache.drop(swapped)
    assert cache.num_host_free == 0, "its copies are still planned"
    cache.close_step()
    assert cache.num_host_free == 2
    cache.drop(swapped)
    assert cache.num_host_free == 2
    with pytest.raises(ValueError, match="cannot take 0 host blocks"):
        cache.swap_in(swapped, table)
    cache.check([(table, cursor)], [swapped])


def test_a_swap_in_that_does_not_fit_changes_nothing() -> None:
    cache = KvCache(4, BLOCK, num_host_blocks=4)
    table, _cursor, swapped = swapped_out(cache, Memory(4, 4), 3, 12)
    cache.close_step()
    taker, _ = start(cache, Memory(4, 4), 2, "b")
    with pytest.raises(OutOfBlocks):
        cache.swap_in(swapped, table)
    assert (table, len(swapped.blocks), swapped.tokens) == ([], 3, 12)
    with pytest.raises(ValueError, match="a table of 2 blocks cannot take 1"):
        cache.swap_in(SwapOut([0], 4), taker)


def test_the_audit_notices_host_blocks_that_nobody_holds() -> None:
    cache = KvCache(4, BLOCK, num_host_blocks=4)
    _table, _cursor, swapped = swapped_out(cache, Memory(4, 4), 3, 12)
    with pytest.raises(AssertionError, match="3 host blocks leaked"):
        cache.check([], [])
    with pytest.raises(AssertionError, match="two owners"):
        cache.check([], [swapped, swapped])
    swapped.tokens = 13
    with pytest.raises(AssertionError, match="13 tokens do not fill 3 host blocks"):
        cache.check([], [swapped])


def test_the_audit_notices_a_copy_to_or_from_a_host_block_that_is_nobodys() -> None:
    for place in ("put", "take"):
        cache = KvCache(4, BLOCK, num_host_blocks=4)
        table, cursor, swapped = swapped_out(cache, Memory(4, 4), 1, 4)
        assert cache.is_step_open
        if place == "take":
            cache.close_step()
            assert not cache.is_step_open
            cache.swap_in(swapped, table)
            cache._host._free += cache._host._released
            cache._host._released = []
        else:
            cache._host._free += swapped.blocks
            swapped.blocks, swapped.tokens = [], 0
        with pytest.raises(AssertionError, match="a free host block is"):
            cache.check([(table, cursor)], [swapped])
