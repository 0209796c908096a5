"""How often does a step look at the sequences that run?

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
MOST_LOOKS = 3
"""Who decodes and needs a block; who gets a token; what context they attend to."""


class Looked(list[Sequence]):
    """A list that counts how often somebody goes through it."""

    looks = 0

    def __iter__(self) -> Iterator[Sequence]:
        self.looks += 1
        return super().__iter__()


def looks_by_step(num_blocks: int, arrivals: int) -> list[tuple[int, int, int]]:
    """Steps in which all that run decode, at first `RUNNING`, and `arrivals` newcomers wait: how often the
    running ones were looked at, how many were admitted, how many wait after it."""
    cache = KvCache(num_blocks, BLOCK_TOKENS)
    table = SequenceTable(
        make_policy("hybrid"), cache, ServiceCounters(), max_batched_tokens=1000, max_sequences=64
    )
    running = table.running = Looked()

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
        running.looks = 0
        plan = schedule(table, step / 10)
        found.append((running.looks, len(plan.admitted), len(table.waiting)))
        execute(plan)
    return found


@pytest.mark.parametrize("arrivals", [0, 1, 9])
def test_with_memory_for_all_an_admission_looks_at_nobody_who_runs(arrivals: int) -> None:
    found = looks_by_step(num_blocks=1000, arrivals=arrivals)
    assert found[0][1] == arrivals
    assert max(looks for looks, _, _ in found) == MOST_LOOKS


def test_where_memory_is_short_they_are_looked_at_once_for_each_question() -> None:
    found = looks_by_step(num_blocks=85, arrivals=30)
    assert found[0][1] > 1, "several are admitted in one step"
    assert found[-1][2] > 0, "and some must wait for memory"
    # What they are promised in all; what small ones may take of it.
    assert max(looks for looks, _, _ in found) <= MOST_LOOKS + 3
