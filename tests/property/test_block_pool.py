"""Whatever is allocated, shared and freed: free + cached + referenced is the total, and nothing aliases."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.kv.blocks import BlockPool, OutOfBlocks

TOTAL = 12


class Pool(RuleBasedStateMachine):
    """Tables are lists of blocks; the model is how many tables name each block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.live: list[list[int]] = []

    tables = Bundle("tables")

    def references(self) -> Counter[int]:
        return Counter(block for table in self.live for block in table)

    @rule(target=tables, count=st.integers(0, 6))
    def allocate(self, count: int) -> list[int]:
        free = TOTAL - len(self.references())
        try:
            table = self.pool.allocate(count)
        except OutOfBlocks:
            assert count > free
            return []
        assert count <= free
        assert not set(table) & set(self.references()), "a block that is in use was handed out"
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
        self.pool.free(table)

    @invariant()
    def books_agree(self) -> None:
        self.pool.check(self.live)
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_referenced == TOTAL
        assert self.pool.num_referenced == len(self.references())


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
