"""Whatever is allocated, shared, published, evicted and freed: every block is in one place, none aliases."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from engine.kv.blocks import BlockPool, OutOfBlocks

TOTAL = 12


class Pool(RuleBasedStateMachine):
    """Tables are lists of blocks; the model is how many tables name each block, and which are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.live: list[list[int]] = []
        self.published: set[int] = set()
        self.cached: list[int] = []
        self.fenced: dict[int, int] = {}
        """Block -> the last step in flight when it was let go."""
        self.in_flight: list[int] = []
        self.step = 0

    tables = Bundle("tables")

    def references(self) -> Counter[int]:
        return Counter(block for table in self.live for block in table)

    @rule(target=tables, count=st.integers(0, 6))
    def allocate(self, count: int) -> list[int]:
        free = TOTAL - len(self.references()) - len(self.cached) - len(self.fenced)
        try:
            table = self.pool.allocate(count)
        except OutOfBlocks:
            assert count > free
            return []
        assert count <= free
        assert not set(table) & set(self.references()), "a block that is in use was handed out"
        assert not set(table) & {*self.cached, *self.fenced}, "a block that is kept was handed out"
        self.live.append(table)
        return table

    @rule(target=tables, table=tables)
    def share(self, table: list[int]) -> list[int]:
        copy = list(table)
        self.pool.share(copy)
        self.live.append(copy)
        return copy

    @rule(table=consumes(tables))
    def free(self, table: list[int]) -> None:
        self.live = [other for other in self.live if other is not table]
        let_go = [block for block in reversed(table) if block not in self.references()]
        self.pool.free(table)
        if self.in_flight:
            self.fenced |= dict.fromkeys(let_go, self.in_flight[-1])
        else:
            self.cached += [block for block in let_go if block in self.published]

    @rule(table=tables)
    def publish(self, table: list[int]) -> None:
        for block in table:
            self.pool.publish(block)
            self.published.add(block)

    @rule(target=tables)
    def revive(self) -> list[int]:
        table = [block for block in [*self.cached, *self.fenced] if block in self.published][:2]
        self.pool.share(table)
        self.live.append(table)
        self.cached = [block for block in self.cached if block not in table]
        self.fenced = {block: step for block, step in self.fenced.items() if block not in table}
        return table

    @precondition(lambda self: self.cached)
    @rule()
    def evict(self) -> None:
        oldest = self.cached.pop(0)
        assert self.pool.evict() == oldest
        self.published.discard(oldest)

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def begin_a_step(self) -> None:
        self.step += 1
        self.in_flight.append(self.step)
        self.pool.fence(self.step)

    @precondition(lambda self: self.in_flight)
    @rule()
    def end_the_oldest_step(self) -> None:
        over = self.in_flight.pop(0)
        self.pool.lift_fence(over)
        let_go = [block for block, step in self.fenced.items() if step <= over]
        self.fenced = {block: step for block, step in self.fenced.items() if step > over}
        self.cached += [block for block in let_go if block in self.published]

    @invariant()
    def books_agree(self) -> None:
        self.pool.check(self.live)
        pool = self.pool
        assert pool.num_free + pool.num_cached + pool.num_referenced + pool.num_fenced == TOTAL
        assert pool.cached_blocks() == self.cached
        assert pool.num_fenced == len(self.fenced)
        assert self.pool.num_referenced == len(self.references())


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
