"""A sequence that is to give way waits with its keys and values where memory comes free sooner than they
could be brought back."""

from __future__ import annotations

from engine.core.sequence_table import SequenceTable
from engine.messages import StepTime
from engine.sequence import Sequence, SequenceStatus
from tests.unit.engine.core.test_scheduler import add, make_table, run, shares


def step_time(base_s: float) -> StepTime:
    """A second a token."""
    return StepTime(base_s, 1.0, 0.0, 0.0, samples=1, relative_error=0.0)


DEAR_TOKENS = step_time(base_s=0.001)
"""Computing 12 tokens again takes 12 s, a step of one token 1 s."""


def full_table(predicted: int) -> tuple[SequenceTable, Sequence, Sequence]:
    """Both fill the pool after the first step; `ends` needs no other block for its three tokens, `asks` needs
    one in the next step, and is of the tenant that had most."""
    table = make_table(num_blocks=6)
    table.step_time = DEAR_TOKENS
    ends = add(table, "ends", tenant="poor", prompt=10, max_tokens=3)
    ends.predicted_output_tokens = predicted
    asks = add(table, "asks", tenant="rich", prompt=12, max_tokens=5)
    table.counters.charge("rich", 1.0, 10_000)
    run(table)
    return table, ends, asks


def test_it_waits_for_the_end_of_one_that_needs_no_other_block() -> None:
    table, ends, asks = full_table(predicted=3)
    plan = run(table)
    assert (plan.paused, plan.preempted, shares(plan)) == ([asks], [], {"ends": 1})
    assert (asks.state, asks.computed_tokens, asks.times_displaced) == (SequenceStatus.PAUSED, 12, 0)
    while ends.emitted_tokens != 3:
        run(table)
    assert shares(run(table)) == {"asks": 1}
    while asks.state is not SequenceStatus.FINISHED:
        run(table)
    assert table.preemptions == 0
    rules = [(each.kind, each.rule) for each in table.decisions.last() if each.sequence_id == "asks"]
    assert ("pause", "memory comes free soon") in rules


def test_it_gives_way_where_no_end_is_near_enough() -> None:
    table, _, asks = full_table(predicted=1)
    plan = run(table)
    assert (plan.paused, plan.preempted) == ([], [asks])
    assert asks.times_displaced == 1


def test_it_gives_way_where_it_comes_back_sooner() -> None:
    table, _, asks = full_table(predicted=3)
    table.step_time = step_time(base_s=10.0)
    assert run(table).preempted == [asks]
