"""Prompts with a common prefix compute it once, and a follower waits at most one step in vain."""

from __future__ import annotations

import pytest

from engine.kv.blocks import blocks_for
from engine.kv.cache import KvCache
from engine.kv.prefix import PrefixCursor

BLOCK = 4


class Runner:
    """A sequence that runs: admitted with blocks for its whole prompt."""

    def __init__(self, cache: KvCache, token_ids: list[int], salt: str = "a") -> None:
        self.cache = cache
        self.token_ids = token_ids
        self.table: list[int] = []
        self.cursor = PrefixCursor(salt)
        match = cache.match(token_ids, salt, len(token_ids) - 1)
        cache.attach(self.table, self.cursor, match)
        cache.extend(self.table, blocks_for(len(token_ids), BLOCK) - len(self.table))
        self.computed = match.tokens
        self.granted = 0

    def adopt(self) -> int:
        gained = self.cache.adopt(
            self.table, self.cursor, self.token_ids, self.computed, len(self.token_ids) - 1
        )
        self.computed += gained
        return gained

    def defers(self) -> bool:
        return self.cache.defer(self.cursor, self.token_ids, self.computed)

    def grant(self, tokens: int) -> None:
        self.granted = min(tokens, len(self.token_ids) - self.computed)
        self.cache.announce(self.cursor, self.token_ids, self.computed, self.granted)

    def execute(self) -> None:
        self.computed += self.granted
        self.granted = 0
        self.cache.publish(self.table, self.cursor, self.token_ids, self.computed)

    def free(self) -> None:
        self.cache.free(self.table, self.cursor)


def pair(tokens: int, *, prefix_caching: bool = True) -> tuple[KvCache, Runner, Runner]:
    """A leader and a follower with the same prompt."""
    cache = KvCache(32, BLOCK, prefix_caching=prefix_caching)
    return cache, Runner(cache, list(range(tokens))), Runner(cache, list(range(tokens)))


def check(cache: KvCache, *runners: Runner) -> None:
    cache.check([(runner.table, runner.cursor) for runner in runners])


def test_a_follower_waits_and_takes_over_what_its_leader_computed() -> None:
    cache = KvCache(32, BLOCK)
    common = list(range(3 * BLOCK))
    leader = Runner(cache, [*common, 90, 91])
    follower = Runner(cache, [*common, 80, 81, 82])
    steps = 0
    while leader.computed < len(leader.token_ids):
        leader.grant(BLOCK + 1)
        assert follower.defers() == (follower.computed < 3 * BLOCK)
        cache.close_step()
        leader.execute()
        assert follower.adopt() > 0 or follower.computed == 3 * BLOCK
        check(cache, leader, follower)
        steps += 1
    assert steps == 3
    assert follower.computed == 3 * BLOCK
    assert follower.table[:3] == leader.table[:3]
    assert (cache.counts.adopted_tokens, cache.counts.duplicate_blocks) == (12, 0)
    assert not follower.defers(), "its last token is its own to compute"
    # The blocks that it had for them are free again.
    assert cache.num_referenced == 5


def test_where_prompts_part_nobody_waits() -> None:
    cache = KvCache(32, BLOCK)
    leader = Runner(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    apart = Runner(cache, [1, 2, 3, 9, 5, 6, 7, 8, 9])
    other_salt = Runner(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9], "b")
    leader.grant(100)
    assert not leader.defers(), "it waits for itself"
    assert not apart.defers()
    assert not other_salt.defers()
    follower = Runner(cache, [1, 2, 3, 4, 5])
    assert follower.defers()


def test_a_candidate_waits_before_it_is_admitted_and_starts_with_the_leaders_blocks() -> None:
    cache = KvCache(32, BLOCK)
    token_ids = list(range(3 * BLOCK))
    leader = Runner(cache, list(token_ids))
    cursor = PrefixCursor("a")
    leader.grant(8)
    assert cache.defer(cursor, token_ids, 0, cache.match(token_ids, "a", 11))
    cache.close_step()
    leader.execute()
    leader.grant(8)
    match = cache.match(token_ids, "a", 11)
    assert match.tokens == 8
    # The next block would be its last: a token of it has to be computed, so nothing is gained by waiting.
    assert not cache.defer(cursor, token_ids, 0, match)
    longer = [*token_ids, 5]
    assert cache.defer(PrefixCursor("a"), longer, 0, cache.match(longer, "a", 12))


@pytest.mark.parametrize("end", ["freed", "retracted", "the step failed"])
def test_a_leader_that_is_gone_leads_nobody(end: str) -> None:
    cache, leader, follower = pair(9)
    leader.grant(9)
    if end == "freed":
        leader.free()
    elif end == "retracted":
        cache.retract(leader.cursor)
    else:
        cache.close_step()
    assert not follower.defers()
    follower.grant(9)
    cache.close_step()
    follower.execute()
    assert cache.num_published == 2


def test_a_follower_waits_in_vain_at_most_once_for_each_block() -> None:
    # Leader after leader gets tokens, lets the follower wait, and is cancelled before it has computed any.
    cache = KvCache(64, BLOCK)
    follower = Runner(cache, list(range(5 * BLOCK + 1)))
    waited = 0
    for _ in range(100):
        leader = Runner(cache, list(range(5 * BLOCK + 2)))
        leader.grant(100)
        if follower.defers():
            waited += 1
        else:
            follower.grant(BLOCK)
        cache.close_step()
        leader.free()
        follower.execute()
        if follower.computed == len(follower.token_ids):
            break
    assert follower.computed == len(follower.token_ids)
    assert waited == cache.counts.deferrals == 5


def test_only_a_block_that_is_completed_in_the_step_is_announced() -> None:
    cache, leader, follower = pair(9)
    leader.grant(3)
    assert not follower.defers()
    leader.execute()
    cache.close_step()
    leader.grant(1)
    assert follower.defers()


def test_the_first_to_get_tokens_leads_and_the_last_to_leave_does_not_unseat_it() -> None:
    cache = KvCache(32, BLOCK)
    first, second, third = (Runner(cache, list(range(9))) for _ in range(3))
    first.grant(9)
    second.grant(9)
    assert not first.defers()
    cache.retract(second.cursor)
    assert third.defers()


def test_a_block_begun_is_given_up_for_one_that_is_complete() -> None:
    cache, leader, follower = pair(12)
    follower.grant(3)
    follower.execute()
    own = follower.table[0]
    leader.grant(8)
    leader.execute()
    assert follower.adopt() == 5
    assert follower.computed == 8
    assert own not in follower.table
    check(cache, leader, follower)


def test_a_full_hit_while_running_leaves_a_token_to_compute() -> None:
    _cache, leader, follower = pair(8)
    leader.grant(8)
    leader.execute()
    assert follower.adopt() == 4
    assert len(follower.table) == 2
    assert follower.adopt() == 0


def test_a_table_shorter_than_the_gain_grows_by_it() -> None:
    cache = KvCache(32, BLOCK)
    leader = Runner(cache, list(range(13)))
    leader.grant(13)
    cursor = PrefixCursor("a")
    table: list[int] = []
    cache.extend(table, 1)
    leader.execute()
    assert cache.adopt(table, cursor, list(range(13)), 0, 12) == 12
    assert table == leader.table[:3]
    cache.check([(leader.table, leader.cursor), (table, cursor)])


def test_what_is_restored_and_not_yet_published_neither_adopts_nor_waits() -> None:
    cache, leader, restored = pair(13)
    restored.computed = 9  # its keys and values came from elsewhere
    leader.grant(8)
    assert not restored.defers()
    leader.execute()
    assert restored.adopt() == 0
    restored.grant(4)
    restored.execute()
    assert restored.table[:2] == leader.table[:2]
    check(cache, leader, restored)


def test_the_audit_notices_a_leader_that_is_gone_or_announced_something_else() -> None:
    cache = KvCache(32, BLOCK)
    leader = Runner(cache, list(range(9)))
    leader.grant(9)
    assert cache.is_step_open
    check(cache, leader)
    leader.cursor.announced = None
    with pytest.raises(AssertionError, match="did not announce"):
        check(cache, leader)
    leader.free()
    with pytest.raises(AssertionError, match="a leader is gone"):
        check(cache)
    cache.close_step()
    assert not cache.is_step_open
    check(cache)


def test_without_prefix_caching_nobody_waits() -> None:
    _cache, leader, follower = pair(9, prefix_caching=False)
    leader.grant(9)
    assert not follower.defers()
    leader.execute()
    assert follower.adopt() == 0
