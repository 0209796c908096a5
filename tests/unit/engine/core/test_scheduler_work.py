"""How often a step iterates over the running sequences.

Counted, not timed. The pick of the next one is bounded in `tests/property/test_orders.py`; this is the rest
of a step, whose cost must not grow with the number of admissions times the number of running ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.core.scheduler import schedule
from engine.core.sequence_table import SequenceTable
from engine.kv.cache import KvCache
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.policy import make_policy
from engine.sequence import Sequence
from tests.support.scheduling_states import make_sequence

BLOCK_TOKENS = 4
RUNNING = 12
MAX_PASSES = 3
"""For decodes that need a block, for the tokens handed out, and for the attended context."""


class CountingList(list[Sequence]):
    """A list that counts its iterations."""

    passes = 0

    def __iter__(self) -> Iterator[Sequence]:
        self.passes += 1
        return super().__iter__()


def passes_by_step(num_blocks: int, arrivals: int) -> list[tuple[int, int, int]]:
    """Steps in which all that run decode, at first `RUNNING`, and `arrivals` newcomers wait: iterations
    over the running ones, number admitted, number waiting afterwards."""
    cache = KvCache(num_blocks, BLOCK_TOKENS)
    table = SequenceTable(
        make_policy("hybrid"), cache, ServiceCounters(), max_batched_tokens=1000, max_sequences=64
    )
    running = table.running = CountingList()

    def add(name: str) -> None:
        table.add(make_sequence(name, tenant=name, prompt=4, computed=0, predicted=20, max_tokens=40))

    def execute(plan: Any) -> None:
        table.commit(plan.shares, [1] * len(plan.shares))

    for number in range(RUNNING):
        add(f"first-{number}")
    execute(schedule(table, 0.0))
    assert len(running) == RUNNING
    assert not table.prefills
    for number in range(arrivals):
        add(f"later-{number}")
    found = []
    for step in range(1, 6):
        running.passes = 0
        plan = schedule(table, step / 10)
        found.append((running.passes, len(plan.admitted), len(table.waiting)))
        execute(plan)
    return found


@pytest.mark.parametrize("arrivals", [0, 1, 9])
def test_with_memory_for_all_an_admission_does_not_iterate_over_the_running(arrivals: int) -> None:
    found = passes_by_step(num_blocks=1000, arrivals=arrivals)
    assert found[0][1] == arrivals
    assert max(passes for passes, _, _ in found) == MAX_PASSES


def test_where_memory_is_short_the_running_are_visited_once_per_question() -> None:
    found = passes_by_step(num_blocks=85, arrivals=30)
    assert found[0][1] > 1, "several are admitted in one step"
    assert found[-1][2] > 0, "and some must wait for memory"
    # What they are promised in all; what small ones may take of it.
    assert max(passes for passes, _, _ in found) <= MAX_PASSES + 3
