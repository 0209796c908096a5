"""Published prefixes: found under their salt only, after the step that wrote them, and evicted in order."""

from __future__ import annotations

import pytest

from engine.kv.blocks import OutOfBlocks
from engine.kv.cache import KvCache
from engine.kv.prefix import PrefixCursor

BLOCK = 4


class Holder:
    """A sequence as the cache sees it."""

    def __init__(self, cache: KvCache, token_ids: list[int], salt: str = "a") -> None:
        self.cache = cache
        self.token_ids = token_ids
        self.table: list[int] = []
        self.cursor = PrefixCursor(salt)
        self.computed = 0

    def start(self) -> Holder:
        """Attaches what is published and gets blocks for the rest."""
        match = self.cache.match(self.token_ids, self.cursor.salt, len(self.token_ids) - 1)
        self.cache.attach(self.table, self.cursor, match)
        self.computed = match.tokens
        self.cache.extend(self.table, -(-len(self.token_ids) // BLOCK) - len(self.table))
        return self

    def compute(self, tokens: int | None = None) -> Holder:
        """A forward pass over `tokens` (None: all) tokens, then publishing."""
        self.computed = len(self.token_ids) if tokens is None else self.computed + tokens
        self.cache.publish(self.table, self.cursor, self.token_ids, self.computed)
        return self

    def free(self) -> None:
        self.cache.free(self.table, self.cursor)
        self.computed = 0


def check(cache: KvCache, *holders: Holder) -> None:
    cache.check([(holder.table, holder.cursor) for holder in holders])
    assert cache.num_blank + cache.num_cached + cache.num_referenced + cache.num_fenced == cache.num_blocks


def prompt(*blocks: int, rest: int = 0) -> list[int]:
    """Whole blocks, each told by its number, and `rest` more tokens."""
    return [block * 10 + index for block in blocks for index in range(BLOCK)] + [7] * rest


# ---------------------------------------------------------------- finding


def test_what_is_published_is_found_in_whole_blocks() -> None:
    cache = KvCache(16, BLOCK)
    first = Holder(cache, prompt(1, 2, 3, rest=2)).start().compute()
    assert cache.match(first.token_ids, "a", 14).blocks == first.table[:3]
    assert cache.cached_tokens(prompt(1, 2, 9, rest=1), "a") == 8
    assert cache.cached_tokens([*prompt(1, 2)[:-1], 99, 5], "a") == 4
    assert cache.cached_tokens(prompt(2, 3, rest=1), "a") == 0, "a block was found without its parent"
    check(cache, first)


def test_the_same_block_after_another_beginning_is_another_block() -> None:
    cache = KvCache(16, BLOCK)
    Holder(cache, prompt(1, 5, rest=1)).start().compute()
    Holder(cache, prompt(2, 5, rest=1)).start().compute()
    one = cache.match(prompt(1, 5), "a", 8)
    two = cache.match(prompt(2, 5), "a", 8)
    assert (one.tokens, two.tokens) == (8, 8)
    assert not set(one.blocks) & set(two.blocks)


def test_a_full_hit_leaves_a_token_to_compute() -> None:
    cache = KvCache(16, BLOCK)
    Holder(cache, prompt(1, 2, 3)).start().compute()
    again = Holder(cache, prompt(1, 2, 3)).start()
    assert again.computed == 8, "the last token has to be computed, and with it its block"
    assert len(again.table) == 3
    longer = Holder(cache, prompt(1, 2, 3, rest=1)).start()
    assert longer.computed == 12
    assert cache.match(prompt(1), "a", 0).tokens == 0
    assert cache.match([], "a", -1).tokens == 0


def test_nothing_is_found_before_the_forward_pass_that_writes_it() -> None:
    cache = KvCache(16, BLOCK)
    first = Holder(cache, prompt(1, 2, rest=1)).start()
    assert cache.cached_tokens(first.token_ids, "a") == 0
    first.compute(BLOCK + 1)
    assert cache.cached_tokens(first.token_ids, "a") == BLOCK, "a block in the middle of being written"
    first.compute(BLOCK)
    assert cache.cached_tokens(first.token_ids, "a") == 2 * BLOCK


def test_more_cannot_be_published_than_can_be_computed() -> None:
    cache = KvCache(16, BLOCK)
    first = Holder(cache, prompt(1, 2)).start()
    with pytest.raises(ValueError, match="12 tokens cannot be computed: 8 are known"):
        cache.publish(first.table, first.cursor, first.token_ids, 12)
    first.token_ids += prompt(3)
    with pytest.raises(ValueError, match="2 blocks of 4 hold them"):
        cache.publish(first.table, first.cursor, first.token_ids, 12)
    assert cache.num_published == 0
    check(cache, first)


def test_publishing_goes_on_where_it_stood() -> None:
    cache = KvCache(16, BLOCK)
    first = Holder(cache, prompt(1, 2, 3)).start()
    for computed, published in ((3, 0), (4, 1), (5, 1), (11, 2), (12, 3)):
        cache.publish(first.table, first.cursor, first.token_ids, computed)
        assert cache.num_published == published
    # Blocks that were published already are not looked at again: their tokens could be anything.
    first.token_ids[:8] = [0] * 8
    cache.publish(first.table, first.cursor, first.token_ids, 12)
    assert cache.counts.published_blocks == 3


def test_a_known_match_is_taken_further_and_given_up_where_it_was_evicted() -> None:
    cache = KvCache(4, BLOCK)
    first = Holder(cache, prompt(1, 2, 3, rest=1)).start().compute(4)
    asked = prompt(1, 2, 3, rest=1)
    known = cache.match(asked, "a", 12)
    assert known.tokens == 4
    first.compute(8)
    known = cache.match(asked, "a", 12, known)
    assert known.tokens == 12
    assert known.blocks == cache.match(asked, "a", 12).blocks
    first.free()
    blocker: list[int] = []
    cache.extend(blocker, 2)
    assert not known.is_current
    with pytest.raises(ValueError, match="out of date"):
        cache.attach([], PrefixCursor("a"), known)
    with pytest.raises(ValueError, match="out of date"):
        cache.shortage(known, 4)
    assert cache.match(asked, "a", 12, known).tokens == 8
    assert cache.match(asked, "a", 4, known).tokens == 4
    assert cache.match(asked, "b", 12, known).tokens == 0, "a match under another salt was believed"


def test_without_prefix_caching_nothing_is_kept() -> None:
    cache = KvCache(8, BLOCK, prefix_caching=False)
    first = Holder(cache, prompt(1, 2, rest=1)).start().compute()
    assert cache.match(first.token_ids, "a", 8).tokens == 0
    first.free()
    assert (cache.num_blank, cache.num_cached) == (8, 0)
    check(cache)


# ---------------------------------------------------------------- salts


def test_a_salt_keeps_tenants_apart() -> None:
    cache = KvCache(16, BLOCK)
    mine = Holder(cache, prompt(1, 2, rest=1), "a").start().compute()
    assert cache.cached_tokens(mine.token_ids, "b") == 0
    with pytest.raises(ValueError, match="another salt"):
        cache.attach([], PrefixCursor("b"), cache.match(mine.token_ids, "a", 8))
    theirs = Holder(cache, list(mine.token_ids), "b").start().compute()
    assert not set(mine.table) & set(theirs.table)
    assert cache.counts.duplicate_blocks == 0
    check(cache, mine, theirs)


def test_a_salt_cannot_pass_for_tokens_nor_tokens_for_a_salt() -> None:
    cache = KvCache(16, BLOCK)
    # "abcd" as little-endian bytes is the token 0x64636261.
    Holder(cache, [1, 2, 3, 4, 0x64636261, 6, 7, 8, 9], "").start().compute()
    assert cache.cached_tokens([1, 2, 3, 4, 5], "abcd") == 0
    Holder(cache, [1, 2, 3, 4, 5], "abcd").start().compute()
    assert cache.cached_tokens([1, 2, 3, 4, 0x64636261, 0], "") == 4
    assert cache.counts.hit_tokens == 0


def test_one_salt_shared_on_purpose_shares() -> None:
    cache = KvCache(16, BLOCK)
    one = Holder(cache, prompt(1, 2, rest=1), "shared").start().compute()
    two = Holder(cache, prompt(1, 2, rest=1), "shared").start()
    assert one.table[:2] == two.table[:2]
    assert cache.counts.hit_tokens == 8


@pytest.mark.parametrize("token", [-3, 2**32])
def test_a_token_that_is_no_32_bit_number_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="token ids must lie between"):
        KvCache(8, BLOCK).match([1, 2, token, 4], "a", 4)


# ---------------------------------------------------------------- letting go


def test_a_finished_sequences_blocks_are_cached_and_come_back() -> None:
    cache = KvCache(8, BLOCK)
    first = Holder(cache, prompt(1, 2, rest=3)).start().compute()
    kept = first.table[:2]
    first.free()
    assert (cache.num_blank, cache.num_cached, cache.num_referenced, cache.num_free) == (6, 2, 0, 8)
    again = Holder(cache, prompt(1, 2, rest=3)).start()
    assert again.table[:2] == kept
    assert (again.computed, cache.counts.revived_blocks, cache.num_cached) == (8, 2, 0)
    check(cache, again)


def test_blank_blocks_go_before_cached_ones_and_the_deepest_cached_one_before_its_parents() -> None:
    cache = KvCache(6, BLOCK)
    first = Holder(cache, prompt(1, 2, 3)).start().compute()
    blocks = list(first.table)
    first.free()
    taken: list[int] = []
    cache.extend(taken, 3)
    assert not set(taken) & set(blocks)
    assert cache.counts.evicted_blocks == 0
    for depth in (2, 1, 0):
        cache.extend(taken, 1)
        assert taken[-1] == blocks[depth]
        assert cache.cached_tokens(prompt(1, 2, 3, rest=1), "a") == depth * BLOCK
    assert cache.counts.evicted_blocks == 3
    with pytest.raises(OutOfBlocks, match="1 blocks wanted, 0 free"):
        cache.extend(taken, 1)
    assert len(taken) == 6


def test_what_was_let_go_first_is_evicted_first() -> None:
    cache = KvCache(4, BLOCK)
    old = Holder(cache, prompt(1, 2)).start().compute()
    new = Holder(cache, prompt(3, 4)).start().compute()
    old.free()
    new.free()
    # Wanted again, the old one is the younger of the two.
    again = Holder(cache, prompt(1, rest=1)).start()
    assert again.computed == 4
    assert cache.cached_tokens(prompt(1, 2, rest=1), "a") == 4, "the deepest of the oldest went first"
    again.free()
    taken: list[int] = []
    cache.extend(taken, 2)
    assert cache.cached_tokens(prompt(3, rest=1), "a") == 4
    cache.extend(taken, 1)
    assert cache.cached_tokens(prompt(3, rest=1), "a") == 0
    assert cache.cached_tokens(prompt(1, rest=1), "a") == 4


def test_a_parent_is_never_evicted_before_its_children() -> None:
    cache = KvCache(6, BLOCK)
    parent = Holder(cache, prompt(1, 2)).start().compute()
    child = Holder(cache, prompt(1, 2, 3, rest=1)).start().compute()
    assert child.table[:2] == parent.table
    parent.free()
    assert cache.num_cached == 0, "blocks that another table names are not cached"
    check(cache, child)
    child.free()
    taken: list[int] = []
    cache.extend(taken, 3)
    for depth in (2, 1, 0):
        cache.extend(taken, 1)
        assert cache.cached_tokens(prompt(1, 2, 3, rest=1), "a") == depth * BLOCK


def test_an_allocation_that_does_not_fit_evicts_nothing() -> None:
    cache = KvCache(4, BLOCK)
    first = Holder(cache, prompt(1, 2)).start().compute()
    first.free()
    held: list[int] = []
    cache.extend(held, 1)
    with pytest.raises(OutOfBlocks):
        cache.extend(held, 4)
    assert (len(held), cache.num_cached, cache.counts.evicted_blocks) == (1, 2, 0)
    with pytest.raises(ValueError, match="negative"):
        cache.extend(held, -1)


def test_a_cold_start_forgets_what_nobody_names() -> None:
    cache = KvCache(8, BLOCK)
    gone = Holder(cache, prompt(1, 2)).start().compute()
    stays = Holder(cache, prompt(3, 4)).start().compute()
    gone.free()
    assert cache.num_cached == 2
    cache._evict(2)
    assert cache.cached_tokens(prompt(1, rest=1), "a") == 0
    assert cache.cached_tokens(prompt(3, rest=1), "a") == 4
    check(cache, stays)


def test_freeing_twice_is_harmless_and_a_foreign_cursor_is_refused() -> None:
    cache = KvCache(8, BLOCK)
    first = Holder(cache, prompt(1, 2)).start().compute()
    second = Holder(cache, prompt(3, 4)).start().compute()
    with pytest.raises(ValueError, match="not this block table's"):
        cache.free(first.table, second.cursor)
    with pytest.raises(ValueError, match="not this block table's"):
        cache.publish(first.table, second.cursor, prompt(3, 4, 5), 4)
    check(cache, first, second)
    first.free()
    first.free()
    assert cache.num_cached == 2
    check(cache, second)


# ---------------------------------------------------------------- duplicates


def test_of_two_that_computed_the_same_one_block_remains() -> None:
    cache = KvCache(8, BLOCK)
    one = Holder(cache, prompt(1, 2, rest=1)).start()
    two = Holder(cache, prompt(1, 2, rest=2)).start()
    assert not set(one.table) & set(two.table)
    one.compute()
    two.compute()
    assert two.table[:2] == one.table[:2]
    assert two.table[2] != one.table[2]
    assert (cache.counts.duplicate_blocks, cache.num_referenced, cache.num_blank) == (2, 4, 4)
    check(cache, one, two)


def test_the_recomputed_last_block_of_a_full_hit_is_a_duplicate_and_what_follows_is_published() -> None:
    cache = KvCache(8, BLOCK)
    Holder(cache, prompt(1, 2)).start().compute().free()
    again = Holder(cache, prompt(1, 2)).start().compute()
    assert (cache.counts.duplicate_blocks, cache.counts.revived_blocks) == (1, 2)
    again.token_ids += prompt(3)
    cache.extend(again.table, 1)
    again.compute()
    assert cache.cached_tokens(prompt(1, 2, 3, rest=1), "a") == 12
    check(cache, again)
    again.free()
    assert (cache.num_blank, cache.num_cached) == (5, 3)


def test_a_duplicate_never_keeps_its_owner_from_the_last_block() -> None:
    # Had the second one kept its own first block, the published one could not be evicted before what it
    # published below it, and it could not be given all the blocks that it was promised.
    cache = KvCache(4, BLOCK)
    one = Holder(cache, prompt(1)).start()
    two = Holder(cache, prompt(1, 2)).start()
    one.compute()
    two.compute()
    one.free()
    cache.extend(two.table, 2)
    assert len(two.table) == 4
    check(cache, two)


# ---------------------------------------------------------------- the fence


def test_behind_the_fence_blocks_are_neither_free_nor_cached() -> None:
    cache = KvCache(6, BLOCK)
    first = Holder(cache, prompt(1, 2, rest=1)).start().compute()
    cache.fence(1)
    first.free()
    assert (cache.num_blank, cache.num_cached, cache.num_fenced, cache.num_free) == (3, 0, 3, 3)
    taken: list[int] = []
    with pytest.raises(OutOfBlocks):
        cache.extend(taken, 4)
    cache.lift_fence(1)
    assert (cache.num_blank, cache.num_cached, cache.num_fenced, cache.num_free) == (4, 2, 0, 6)
    cache.extend(taken, 5)
    assert cache.cached_tokens(prompt(1, 2, rest=1), "a") == 4, "the deepest was to be evicted first"


def test_what_lies_behind_the_fence_can_be_wanted_again() -> None:
    cache = KvCache(6, BLOCK)
    first = Holder(cache, prompt(1, 2, rest=1)).start().compute()
    blocks = list(first.table)
    cache.fence(1)
    first.free()
    again = Holder(cache, prompt(1, 2, rest=1)).start()
    assert again.table[:2] == blocks[:2]
    assert again.table[2] != blocks[2], "a block that a step may still write was handed out"
    assert cache.num_fenced == 1
    check(cache, again)
    cache.lift_fence(1)
    check(cache, again)


def test_a_block_waits_for_every_step_in_flight_when_it_was_let_go() -> None:
    cache = KvCache(3, BLOCK)
    early, late = Holder(cache, [7]).start(), Holder(cache, [8]).start()
    cache.fence(1)
    early.free()
    cache.fence(2)
    late.free()
    assert cache.num_fenced == 2
    cache.lift_fence(1)
    assert (cache.num_fenced, cache.num_free) == (1, 2), "what only the first step could write is free"
    cache.lift_fence(2)
    assert (cache.num_fenced, cache.num_free) == (0, 3)
    check(cache)


def test_the_fences_go_in_the_order_of_the_steps() -> None:
    cache = KvCache(2, BLOCK)
    with pytest.raises(ValueError, match="not the oldest in flight"):
        cache.lift_fence(1)
    cache.fence(5)
    with pytest.raises(ValueError, match="step 5 begins after step 5"):
        cache.fence(5)


# ---------------------------------------------------------------- what fits


def test_the_shortage_counts_shared_and_revived_blocks_once() -> None:
    cache = KvCache(8, BLOCK)
    nothing = cache.match([], "a", 0)
    one = Holder(cache, prompt(1, 2, rest=1)).start().compute()
    two = Holder(cache, prompt(1, 2, 3, rest=1)).start().compute()
    # 1 and 2 are shared; one has 1 block of its own, two has 2; 3 blocks are blank.
    assert cache.num_free == 3
    assert cache.shortage(nothing, 4) == 1
    assert cache.shortage(nothing, 4, [one.table]) == 0
    assert cache.shortage(nothing, 8, [one.table, two.table]) == 0
    match = cache.match(prompt(1, 2, 9, rest=1), "a", 12)
    assert match.tokens == 8
    # Named by others, the match costs nothing; its holders' going gains only what is not wanted.
    assert cache.shortage(match, 6) == 1
    assert cache.shortage(match, 6, [one.table]) == 0
    assert cache.shortage(match, 8, [one.table, two.table]) == 0
    assert cache.shortage(match, 9, [one.table, two.table]) == 1
    one.free()
    two.free()
    # Cached, it counts among the free ones until it is attached.
    assert cache.num_free == 8
    assert cache.shortage(match, 8) == 0
    assert cache.shortage(match, 9) == 1
    check(cache)


# ---------------------------------------------------------------- the rest


def test_locality_is_that_of_the_first_blocks_under_one_salt() -> None:
    cache = KvCache(4, BLOCK)
    same = cache.locality(prompt(1, 2), "a")
    assert cache.locality(prompt(1, 3, 4), "a") == same
    assert cache.locality(prompt(1, 2), "b") != same
    assert cache.locality(prompt(2, 1), "a") != same
    assert cache.locality(prompt(1, 2), "a", blocks=2) != cache.locality(prompt(1, 3), "a", blocks=2)
    assert cache.locality([1], "a") != cache.locality([1, 2], "a")
    # The same in every process: a decision can be reproduced.
    assert same == 2713397271148928112


@pytest.mark.parametrize(
    ("sizes", "field"),
    [((0, 4, 0), "num_blocks"), ((4, 0, 0), "block_tokens"), ((4, 4, -1), "num_host_blocks")],
)
def test_sizes_that_make_no_sense_are_named(sizes: tuple[int, int, int], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        KvCache(sizes[0], sizes[1], num_host_blocks=sizes[2])


def test_the_audit_notices_a_block_of_two_tables_and_a_table_whose_blocks_are_not_its_tokens() -> None:
    cache = KvCache(8, BLOCK)
    one = Holder(cache, prompt(1, 3, rest=1)).start().compute()
    alias = Holder(cache, prompt(2, rest=1)).start()
    own, alias.table[0] = alias.table[0], one.table[2]
    with pytest.raises(AssertionError):
        check(cache, one, alias)
    alias.table[0] = own
    check(cache, one, alias)
    one.table.reverse()
    with pytest.raises(AssertionError, match="cursor's path"):
        check(cache, one, alias)


def test_many_blocks_cost_what_is_touched() -> None:
    cache = KvCache(100_000, 16)
    table: list[int] = []
    cursor = PrefixCursor("a")
    token_ids = list(range(16 * 1000))
    for _ in range(100):
        cache.extend(table, 1000)
        cache.publish(table, cursor, token_ids, len(token_ids))
        cache.free(table, cursor)
        token_ids = [token_id + 1 for token_id in token_ids]
    assert cache.num_cached == 100_000
    # One at a time, as a decode takes them: each finds the oldest without a walk over those evicted before.
    for _ in range(50_000):
        cache.extend(table, 1)
    assert cache.counts.evicted_blocks == 50_000


# ---------------------------------------------------------------- one more for many


def test_a_block_for_each_of_many_tables_is_what_each_alone_would_get() -> None:
    def grown(at_once: bool) -> tuple[list[list[int]], int]:
        cache = KvCache(7, BLOCK)
        gone = Holder(cache, prompt(1, 2, 3)).start().compute()
        gone.free()
        holders = [Holder(cache, prompt(number)).start() for number in (4, 5, 6)]
        assert (cache.num_blank, cache.num_cached) == (1, 3)
        tables = [holder.table for holder in holders]
        if at_once:
            cache.extend_each(tables)
        else:
            for table in tables:
                cache.extend(table, 1)
        again = Holder(cache, prompt(7)).start()
        check(cache, *holders, again)
        return [*tables, again.table], cache.counts.evicted_blocks

    assert grown(at_once=True) == grown(at_once=False)
    assert grown(at_once=True)[1] == 3, "blank ones first, then cached ones"


def test_too_few_blocks_for_many_tables_change_nothing() -> None:
    cache = KvCache(3, BLOCK)
    holders = [Holder(cache, prompt(number)).start() for number in (1, 2)]
    with pytest.raises(OutOfBlocks, match="2 blocks wanted, 1 free"):
        cache.extend_each([holder.table for holder in holders])
    assert [len(holder.table) for holder in holders] == [1, 1]
    check(cache, *holders)
