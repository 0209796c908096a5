"""Answers stay the same when KV moves to host memory or another engine, or is lost on the way.

A virtual runner with `audit`: each token is drawn from what lies in the KV slots.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import msgspec
import pytest

from engine.core.core import EngineConfig
from engine.core.scheduler import schedule
from engine.messages import SequenceOutcome, SequenceState
from engine.scheduling.admit.base import Batch, Defer
from engine.scheduling.admit.buckets import LengthBuckets
from engine.scheduling.evict.base import KvCosts
from engine.scheduling.evict.victims import FairVictim
from engine.scheduling.policy import make_policy
from engine.sequence import Sequence, SequenceStatus
from engine.virtual.replica import VirtualReplica
from tests.support import builders

BLOCK = 4
PROMPT = list(range(1, 19))


def make_replica(*, prefix_caching: bool = True, **changes: object) -> VirtualReplica:
    values: dict[str, object] = {"num_blocks": 24, "block_tokens": BLOCK, "num_host_blocks": 24}
    config = EngineConfig(max_batched_tokens=64, prefix_caching=prefix_caching)
    return VirtualReplica(config, audit=True, **{**values, **changes})  # type: ignore[arg-type]


def submit(replica: VirtualReplica, name: str = "s", **changes: Any) -> Sequence:
    values = {"prompt_token_ids": PROMPT, "max_tokens": 9}
    assert replica.submit(builders.submit(name, **(values | changes))) is None
    return replica.core.table.sequences[name]


def finish(replica: VirtualReplica, tokens: dict[str, list[int]]) -> dict[str, SequenceOutcome]:
    """Runs until all sequences have ended; appends emitted tokens to `tokens`."""
    outcomes: dict[str, SequenceOutcome] = {}
    for _ in range(500):
        if not replica.core.has_work():
            break
        outcomes |= step(replica, tokens)
    assert not replica.core.running()
    return outcomes


def step(replica: VirtualReplica, tokens: dict[str, list[int]]) -> dict[str, SequenceOutcome]:
    deltas = replica.step().deltas.get("virtual", [])
    replica.core.check()
    for delta in deltas:
        tokens.setdefault(delta.sequence_id, []).extend(delta.token_ids)
    return {delta.sequence_id: delta.outcome for delta in deltas if delta.outcome is not None}


def alone(**changes: object) -> list[int]:
    replica = make_replica()
    submit(replica, **changes)
    tokens: dict[str, list[int]] = {}
    finish(replica, tokens)
    return tokens["s"]


def swapped_out(replica: VirtualReplica, *, steps: int = 3) -> dict[str, list[int]]:
    """A sequence whose KV lies in host memory; what it had emitted before."""
    tokens: dict[str, list[int]] = {}
    sequence = submit(replica)
    for _ in range(steps):
        step(replica, tokens)
    # It may emit no more before it is topped up elsewhere: so it stays where it is.
    sequence.lease_tokens = sequence.emitted_tokens
    assert replica.core.table.preempt(sequence) == "swap"
    step(replica, tokens)
    assert sequence.state is SequenceStatus.SWAPPED
    return tokens


def import_topped_up(replica: VirtualReplica, state: SequenceState) -> None:
    submit = msgspec.structs.replace(state.submit, lease_tokens=9)
    assert replica.core.import_(msgspec.structs.replace(state, submit=submit)) is None


def test_a_swapped_sequence_takes_its_kv_along() -> None:
    here, there = make_replica(), make_replica()
    tokens = swapped_out(here)
    state = here.core.export("s")
    assert state is not None
    assert (len(state.kv), state.kv_tokens) == (1, len(PROMPT) + 2)
    here.core.check()
    assert here.core.table.pool.num_host_free == 24, "its host blocks are free again"
    import_topped_up(there, state)
    outcome = finish(there, tokens)["s"]
    assert tokens["s"] == alone()
    assert (outcome.recomputed_tokens, outcome.computed_tokens) == (0, len(PROMPT))
    assert there.core.snapshot("e").service["t"].computed_tokens == 0, "charged where it was computed"


def test_swapped_in_the_middle_of_a_recomputation_it_goes_without_and_is_recomputed_uncharged() -> None:
    here, there = make_replica(prefix_caching=False, swap_base_s=1.0), make_replica()
    tokens: dict[str, list[int]] = {}
    sequence = submit(here)
    step(here, tokens)
    step(here, tokens)
    assert here.core.table.preempt(sequence) == "preempt"
    here.core.table.swap_base_s = 0.0
    here.core.table.max_batched_tokens = 8
    step(here, tokens)
    assert sequence.computed_tokens == 8 < sequence.ever_computed_tokens
    sequence.lease_tokens = sequence.emitted_tokens
    assert here.core.table.preempt(sequence) == "swap"
    step(here, tokens)
    state = here.core.export("s")
    assert state is not None
    assert (state.kv, state.kv_tokens) == ([], len(PROMPT) + 1)
    import_topped_up(there, state)
    outcome = finish(there, tokens)["s"]
    assert tokens["s"] == alone()
    assert outcome.recomputed_tokens == len(PROMPT) + 1
    assert there.core.snapshot("e").service["t"].computed_tokens == 0


def failing(
    copy: Callable[[SequenceOf[tuple[int, int]]], None],
) -> Callable[[SequenceOf[tuple[int, int]]], None]:
    """Fails at its first call."""
    calls = 0

    def fails_first(pairs: SequenceOf[tuple[int, int]]) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("the device is gone for a moment")
        copy(pairs)

    return fails_first


class OneAtATime(LengthBuckets):
    """Suspends all running sequences, also those just resumed, for a sequence called `short`."""

    def joins(self, candidate: Sequence, batch: Batch) -> Defer | None:
        return Defer("one at a time") if batch.running else None

    def suspends(self, candidate: Sequence, batch: Batch) -> list[Sequence]:
        return list(batch.running) if candidate.sequence_id == "short" else []


def test_who_was_to_come_back_and_was_suspended_in_the_same_step_is_recomputed_if_the_copies_fail() -> None:
    replica = make_replica(prefix_caching=False)
    table = replica.core.table
    table.set_policy(dataclasses.replace(make_policy("fcfs"), admit=OneAtATime(), evict=FairVictim()))
    tokens: dict[str, list[int]] = {}
    # A step takes ten tokens: it is still computing its prompt.
    table.max_batched_tokens = 10
    long = submit(replica)
    step(replica, tokens)
    table.max_batched_tokens = 64
    short = submit(replica, "short", prompt_token_ids=[7, 8], max_tokens=1, lease_tokens=1)
    assert table.preempt(long) == "swap"
    replica.runner.copy_in = failing(replica.runner.copy_in)  # type: ignore[method-assign]
    # The long one starts again, and yields immediately to the short one, which fails with the step.
    outcomes = step(replica, tokens)
    assert [note.kind for note in table.decisions.last()][-3:] == ["admit", "suspend", "admit"]
    assert outcomes["short"].finish == "failed"
    assert short.state is SequenceStatus.FINISHED
    assert long.state is SequenceStatus.WAITING
    outcome = finish(replica, tokens)["s"]
    assert tokens["s"] == alone()
    assert outcome.recomputed_tokens == 10
    assert table.pool.num_host_free == 24


def test_what_lay_in_host_memory_is_recomputed_after_copies_failed() -> None:
    replica = make_replica()
    tokens: dict[str, list[int]] = {}
    resting, running = submit(replica), submit(replica, "other", prompt_token_ids=[5, 6, 7])
    step(replica, tokens)
    resting.lease_tokens = resting.emitted_tokens
    replica.runner.copy_out = failing(replica.runner.copy_out)  # type: ignore[method-assign]
    assert replica.core.table.preempt(resting) == "swap"
    outcomes = step(replica, tokens)
    assert {name: outcome.finish for name, outcome in outcomes.items()} == {"other": "failed"}
    assert running.state is SequenceStatus.FINISHED
    assert resting.state is SequenceStatus.PREEMPTED
    replica.core.top_up("s", 9)
    assert finish(replica, tokens)["s"].finish == "length"
    assert tokens["s"] == alone()


@pytest.mark.parametrize(("base_s", "expected"), [(0.0, "swap"), (1.0, "preempt")])
def test_what_any_copying_takes_counts_when_a_victim_gives_way(base_s: float, expected: str) -> None:
    replica = make_replica(swap_base_s=base_s)
    sequence = submit(replica)
    step(replica, {})
    assert replica.core.table.kv_costs == KvCosts(replica.core.table.step_time, BLOCK, 0.0, base_s)
    assert replica.core.table.preempt(sequence) == expected


def test_a_virtual_copy_takes_its_base_once_each_way() -> None:
    replica = make_replica(swap_base_s=2.0, swap_block_s=0.5)
    replica.runner.copy_out([(0, 0), (1, 1)])
    replica.runner.copy_in([(0, 5), (1, 6)])
    assert replica.clock.now_s == 2.0 + 2 * 0.5


def tables_after_adoption(seed: int) -> list[list[int]]:
    """Block tables of ten that took over a common beginning; their objects lie in memory in an order that
    follows from `seed`."""
    replica = make_replica(num_blocks=120)
    table = replica.core.table
    names = [f"s{number}" for number in range(10)]
    made = {}
    for name in random.Random(seed).sample(names, len(names)):
        number = names.index(name)
        ids = [*PROMPT[:9], 100 + number, *([50 + number] * 9)]
        made[name] = Sequence.of(builders.submit(name, prompt_token_ids=ids, max_tokens=9), "g", 0.0)
    for name in names:
        table.add(made[name])
    for now_s in range(9):
        plan = schedule(table, float(now_s))
        chosen = [
            9 if sequence.computed_tokens + tokens == sequence.total_tokens else None
            for sequence, tokens in plan.shares.items()
        ]
        table.commit(plan.shares, chosen)
        table.check()
    counts = table.pool.counts
    assert counts.adopted_tokens + counts.hit_tokens == 9 * 8
    assert counts.adopted_tokens >= 3 * 8, "hardly any was adopted"
    return [made[name].block_table for name in names]


def test_who_adopts_first_does_not_depend_on_where_objects_lie_in_memory() -> None:
    tables = tables_after_adoption(0)
    assert all(tables_after_adoption(seed) == tables for seed in range(1, 5))
