"""Which sequences run, wait and are preempted, in small cases worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import pytest

from engine.core.plan import Plan
from engine.core.scheduler import schedule
from engine.core.sequence_table import SequenceTable
from engine.entry import COUNTER_SCALE
from engine.kv.cache import KvCache
from engine.scheduling.admit.reserve import prompt_only
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import make_policy
from engine.scheduling.step_counters import Standings
from engine.sequence import Sequence, SequenceStatus
from tests.support.builders import set_counter, submit

PROMPT_ONLY = replace(make_policy("vtc"), admit=prompt_only())
"""Sets no memory aside, so that evictions are easy to bring about."""


def make_table(num_blocks: int = 100, **changes: object) -> SequenceTable:
    values: dict[str, object] = {"max_batched_tokens": 32, "max_sequences": 4}
    of_policy = {
        name: changes.pop(name) for name in ("max_displacements", "paused_keep_s") if name in changes
    }
    policy = replace(PROMPT_ONLY, options=PolicyOptions(**of_policy))  # type: ignore[arg-type]
    return SequenceTable(policy, KvCache(num_blocks, 4), ServiceCounters(), **{**values, **changes})  # type: ignore[arg-type]


def add(
    table: SequenceTable,
    name: str,
    *,
    tenant: str = "t",
    prompt: int = 4,
    max_tokens: int = 40,
    lease: int | None = None,
    tier: int = 1,
    weight: float = 1.0,
    now_s: float = 0.0,
) -> Sequence:
    ids = [1 + len(table.sequences)] * prompt
    lease = max_tokens if lease is None else lease
    asked = submit(
        name, tenant_id=tenant, prompt_token_ids=ids, max_tokens=max_tokens, lease_tokens=lease, tier=tier,
        weight=weight,
    )  # fmt: skip
    sequence = Sequence.of(asked, "g", now_s)
    table.add(sequence)
    return sequence


def run(table: SequenceTable, now_s: float = 0.0) -> Plan:
    """Runs a step: computes the plan; every sequence that caught up emits a token."""
    plan = schedule(table, now_s)
    table.check()
    chosen = [
        9 if sequence.computed_tokens + tokens == sequence.total_tokens else None
        for sequence, tokens in plan.shares.items()
    ]
    table.commit(plan.shares, chosen)
    for sequence, token_id in zip(plan.shares, chosen, strict=True):
        if token_id is not None and sequence.emitted_tokens == sequence.submit.max_tokens:
            table.finish(sequence)
        elif token_id is not None and not sequence.may_emit:
            table.pause(sequence, now_s)
    table.check()
    return plan


def head_of(table: SequenceTable) -> str | None:
    head = table.waiting.peek(0.0)
    return head and head.entry_id


def shares(plan: Plan) -> dict[str, int]:
    return {sequence.sequence_id: tokens for sequence, tokens in plan.shares.items()}


# ---------------------------------------------------------------- budget and order


def test_a_prompt_is_computed_in_chunks_then_one_token_a_step() -> None:
    table = make_table(max_batched_tokens=8)
    add(table, "a", prompt=20)
    assert [shares(run(table)) for _ in range(5)] == [{"a": 8}, {"a": 8}, {"a": 4}, {"a": 1}, {"a": 1}]


def test_a_decode_never_waits_for_a_prompt() -> None:
    table = make_table(max_batched_tokens=8)
    add(table, "a", prompt=4)
    run(table)
    add(table, "b", prompt=30)
    assert [shares(run(table)) for _ in range(3)] == [{"a": 1, "b": 7}] * 3


def test_the_head_of_the_line_is_not_skipped_when_it_does_not_fit() -> None:
    table = make_table(num_blocks=8)
    add(table, "runs", tenant="a", prompt=16)
    run(table)
    big = add(table, "big", tenant="b", prompt=20, max_tokens=2)
    small = add(table, "small", tenant="b", prompt=4)
    run(table)
    assert (big.state, small.state) == (SequenceStatus.WAITING, SequenceStatus.WAITING)


def test_the_prompt_is_charged_before_the_next_one_is_admitted() -> None:
    table = make_table(max_batched_tokens=100, max_sequences=3)
    for number in range(3):
        add(table, f"a{number}", tenant="a", prompt=10, now_s=number)
        add(table, f"b{number}", tenant="b", prompt=10, now_s=number + 0.5)
    plan = run(table)
    assert [sequence.sequence_id for sequence in plan.admitted] == ["a0", "b0", "a1"]


def test_a_prompt_is_charged_when_it_starts_an_answer_as_it_comes_both_by_weight() -> None:
    table = make_table(max_batched_tokens=8)
    add(table, "a", tenant="a", prompt=10, weight=2.0)
    run(table)
    assert table.counters.value("a") == 10 * COUNTER_SCALE // 2
    run(table)
    assert table.counters.value("a") == (10 + 2) * COUNTER_SCALE // 2
    run(table)
    assert table.counters.value("a") == (10 + 4) * COUNTER_SCALE // 2


def test_the_watermark_is_left_free_while_others_run_and_used_by_one_alone() -> None:
    table = make_table(num_blocks=10, watermark_blocks=3)
    add(table, "a", prompt=16)
    waits = add(table, "b", prompt=16)
    run(table)
    assert waits.state is SequenceStatus.WAITING  # 4 + 4 of 10 would leave 2
    table = make_table(num_blocks=4, watermark_blocks=2)
    alone = add(table, "a", prompt=13, max_tokens=4)
    run(table)
    assert alone.state is SequenceStatus.RUNNING


# ---------------------------------------------------------------- eviction


def two_that_fill_the_pool(table: SequenceTable) -> tuple[Sequence, Sequence]:
    first = add(table, "first", tenant="a", prompt=12)
    second = add(table, "second", tenant="b", prompt=12)
    run(table)  # 3 blocks each, and every slot of them is used
    return first, second


def test_the_tenant_that_had_most_gives_way_and_returns_to_the_head_of_its_line() -> None:
    table = make_table(num_blocks=6)
    first, second = two_that_fill_the_pool(table)
    table.counters.charge("b", 1.0, 100)
    add(table, "behind", tenant="b", prompt=4)
    another = add(table, "another", tenant="c", prompt=4)
    set_counter(table, "c", 0)  # it would be next
    plan = run(table)
    assert plan.preempted == [second]
    assert shares(plan) == {"first": 1}
    assert (second.state, second.block_table, second.computed_tokens) == (SequenceStatus.WAITING, [], 0)
    assert second.emitted_tokens == 1, "what was emitted stays emitted"
    line = [entry.entry_id for entry in table.waiting.entries() if entry.tenant_id == "b"]
    assert line == ["second", "behind"]
    assert table.pool.num_free > 1
    assert another.state is SequenceStatus.WAITING, "none is admitted in a step that preempts"
    assert first.state is SequenceStatus.RUNNING


def test_recomputation_is_not_charged() -> None:
    table = make_table(num_blocks=6)
    first, second = two_that_fill_the_pool(table)
    table.counters.charge("b", 1.0, 100)
    run(table)
    charged = table.counters.value("b")
    table.finish(first)
    run(table)
    assert second.computed_tokens == 13
    assert second.recomputed_tokens == 4, "the rest was still in the prefix cache"
    assert table.counters.value("b") == charged + 2 * COUNTER_SCALE, "one emitted token, no prompt"


def test_a_victim_that_already_had_its_share_gives_it_back_uncharged() -> None:
    table = make_table(num_blocks=7, max_batched_tokens=8)
    add(table, "prefill", tenant="b", prompt=16)
    run(table)
    runs = add(table, "runs", tenant="a", prompt=12, tier=0)
    while runs.emitted_tokens == 0:
        run(table)
    charged = table.counters.value("b")
    before = table.sequences["prefill"].ever_computed_tokens
    while table.preemptions == 0:
        run(table)
    again = table.sequences["prefill"]
    assert again.state is SequenceStatus.WAITING
    gained = again.ever_computed_tokens - before
    assert table.counters.value("b") - charged <= (gained + 2 * again.emitted_tokens) * COUNTER_SCALE


def test_the_last_runner_never_gives_way() -> None:
    table = make_table(num_blocks=6)
    alone = add(table, "alone", prompt=4, max_tokens=21)  # needs all 6 blocks at its end
    for _ in range(21):
        assert shares(run(table)) == {"alone": 4 if alone.emitted_tokens == 1 and _ == 0 else 1}
    assert table.preemptions == 0
    assert alone.state is SequenceStatus.FINISHED


def test_a_lower_tier_never_takes_from_a_higher_one() -> None:
    table = make_table(num_blocks=6)
    batch = add(table, "batch", tenant="poor", prompt=12, tier=2)
    interactive = add(table, "interactive", tenant="rich", prompt=12, tier=0)
    table.counters.charge("rich", 1.0, 10_000)
    run(table)
    plan = run(table)
    assert plan.preempted == [batch], "it asked for memory, and itself was the only one to give it"
    assert interactive.state is SequenceStatus.RUNNING


class HighestTierVictim:
    """An eviction policy of the wrong kind."""

    name = "highest-tier"
    claims = frozenset[str]()

    def victim(self, candidates: SequenceOf[Sequence], counters: Standings) -> Sequence:
        return min(candidates, key=lambda sequence: sequence.tier)


def test_no_eviction_policy_can_take_from_a_higher_tier() -> None:
    table = make_table(num_blocks=6)
    table.policy = replace(PROMPT_ONLY, evict=HighestTierVictim())
    batch = add(table, "batch", tenant="b", prompt=12, tier=2)
    interactive = add(table, "interactive", tenant="i", prompt=11, tier=0)
    run(table)
    assert run(table).preempted == [batch]
    assert interactive.state is SequenceStatus.RUNNING


def displacements_of_the_fair_victim(max_displacements: int) -> int:
    """How often a sequence is preempted whose tenant has always had most, while others keep arriving."""
    table = make_table(num_blocks=12, max_sequences=3)
    # Where prompts are divided between tenants the others would be lifted to it.
    options = PolicyOptions(admit="prompt-only", compose="decode-first", max_displacements=max_displacements)
    table.set_policy(make_policy("vtc", options))
    rich = add(table, "rich", tenant="rich", prompt=9, max_tokens=40)
    for number in range(200):
        table.counters.set("rich", 10**12)
        table.standings.hear(rich.tier, "rich", 10**12, 0)
        if len(table.sequences) < 3:
            # Not behind those that came before: `rich` is next whenever there is room for it.
            table.standings.hear(1, f"o{number}", 0, 0)
            add(table, f"other{number}", tenant=f"o{number}", prompt=9, max_tokens=24, tier=1)
        if rich.state is SequenceStatus.WAITING and table.pool.num_free >= 4:
            table.counters.set("rich", 0)
        run(table, now_s=number)
        assert rich.times_displaced <= max_displacements
        if rich.state is SequenceStatus.FINISHED:
            return rich.times_displaced
    raise AssertionError("it never finished")


def test_a_sequence_gives_way_a_bounded_number_of_times() -> None:
    assert displacements_of_the_fair_victim(100) > 2, "else it would not be preempted more often"
    assert displacements_of_the_fair_victim(2) == 2
    assert displacements_of_the_fair_victim(1) == 1


def test_an_immune_sequence_is_admitted_with_all_it_can_need() -> None:
    table = make_table(num_blocks=12)
    immune = add(table, "immune", prompt=5, max_tokens=20)
    immune.times_displaced = 3
    run(table)
    assert len(immune.block_table) == 6  # 5 + 20 - 1 tokens


# ---------------------------------------------------------------- leases


def test_a_used_up_lease_pauses_and_a_top_up_resumes_with_the_kv_kept() -> None:
    table = make_table()
    sequence = add(table, "a", prompt=4, lease=2)
    run(table)
    run(table)
    assert sequence.state is SequenceStatus.PAUSED
    assert not table.has_runnable
    assert shares(run(table)) == {}
    kept = list(sequence.block_table)
    table.top_up(sequence, 3)
    assert table.has_runnable
    assert shares(run(table)) == {"a": 1}
    assert sequence.block_table[: len(kept)] == kept
    assert (sequence.emitted_tokens, sequence.state) == (3, SequenceStatus.PAUSED)
    table.top_up(sequence, 2)
    assert sequence.lease_tokens == 3, "a lease never shrinks"


def test_one_paused_for_long_makes_room_one_paused_just_now_does_not() -> None:
    table = make_table(num_blocks=6, paused_keep_s=2.0)
    paused = add(table, "paused", tenant="p", prompt=12, lease=1)
    run(table, now_s=0.0)
    add(table, "runs", tenant="r", prompt=4)
    run(table, now_s=0.5)
    starts = add(table, "starts", tenant="p", prompt=12)
    run(table, now_s=1.0)
    assert (paused.state, starts.state) == (SequenceStatus.PAUSED, SequenceStatus.WAITING)
    run(table, now_s=2.5)
    assert (paused.state, starts.state) == (SequenceStatus.PREEMPTED, SequenceStatus.RUNNING)
    assert paused.block_table == []


def test_one_that_rests_for_its_lease_makes_room_for_another_tenant_at_once() -> None:
    table = make_table(num_blocks=6, paused_keep_s=2.0)
    rests = add(table, "rests", tenant="slow", prompt=12, lease=1)
    run(table, now_s=0.0)
    add(table, "runs", tenant="r", prompt=4)
    run(table, now_s=0.5)
    starts = add(table, "starts", tenant="s", prompt=12)
    run(table, now_s=0.5)
    assert (rests.state, starts.state) == (SequenceStatus.PREEMPTED, SequenceStatus.RUNNING)


def test_with_nothing_running_a_paused_one_makes_room_at_once() -> None:
    table = make_table(num_blocks=6)
    paused = add(table, "paused", prompt=12, lease=1)
    run(table)
    starts = add(table, "starts", prompt=16)
    run(table)
    assert (paused.state, starts.state) == (SequenceStatus.PREEMPTED, SequenceStatus.RUNNING)


def test_one_that_lost_its_kv_while_paused_waits_for_its_lease_outside_the_queue() -> None:
    table = make_table(num_blocks=6)
    paused = add(table, "paused", prompt=12, lease=1, max_tokens=4)
    run(table)
    starts = add(table, "starts", prompt=16, max_tokens=1)
    run(table)
    assert starts.state is SequenceStatus.FINISHED
    assert not table.has_runnable
    add(table, "younger", prompt=4, max_tokens=1)
    table.top_up(paused, 4)
    assert paused.state is SequenceStatus.WAITING
    assert head_of(table) == "paused", "it keeps its place in its tenant's line"
    while table.has_runnable:
        run(table)
    assert (paused.emitted_tokens, paused.state) == (4, SequenceStatus.FINISHED)


# ---------------------------------------------------------------- tiers


def test_a_higher_tier_takes_a_lower_ones_place_and_gives_it_back() -> None:
    table = make_table(max_sequences=2)
    batch = [add(table, f"batch{number}", prompt=4, tier=2) for number in range(2)]
    run(table)
    urgent = add(table, "urgent", tenant="u", prompt=4, tier=0, max_tokens=2)
    plan = run(table)
    assert plan.paused == [batch[1]]
    assert plan.preempted == []
    assert shares(plan) == {"batch0": 1, "urgent": 4}
    assert batch[1].state is SequenceStatus.PAUSED
    assert batch[1].computed_tokens == 4, "its KV is kept"
    run(table)
    assert urgent.state is SequenceStatus.FINISHED
    assert shares(run(table)) == {"batch0": 1, "batch1": 1}


def test_one_that_loses_its_place_is_not_charged_for_the_share_it_had() -> None:
    table = make_table(max_sequences=1, max_batched_tokens=8)
    batch = add(table, "batch", tenant="b", prompt=9, tier=2)
    run(table)  # one token of its prompt is left
    charged = table.counters.value("b")
    add(table, "urgent", tenant="u", prompt=4, tier=0)
    assert run(table).paused == [batch]
    assert batch.computed_tokens == 8
    assert table.counters.value("b") == charged


def test_a_long_prompt_of_a_lower_tier_does_not_hold_up_a_higher_tier() -> None:
    table = make_table(max_batched_tokens=8, num_blocks=100)
    add(table, "batch", tenant="b", prompt=100, tier=2)
    add(table, "decodes", tenant="d", prompt=1, tier=2)
    table.counters.set("b", 0)
    run(table)
    add(table, "urgent", tenant="u", prompt=6, tier=0)
    plan = run(table)
    assert shares(plan)["urgent"] == 6
    assert sum(shares(plan).values()) == 8, "what is left goes to the long prompt"


def test_the_higher_tier_comes_back_first() -> None:
    table = make_table(max_sequences=1)
    batch = add(table, "batch", prompt=4, tier=2, lease=1)
    run(table)
    standard = add(table, "standard", prompt=4, tier=1, lease=1)
    run(table)
    for sequence in (batch, standard):
        table.top_up(sequence, 9)
    plan = run(table)
    assert shares(plan) == {"standard": 1}
    assert plan.paused == []


def test_equals_never_take_each_others_place() -> None:
    table = make_table(max_sequences=2)
    for number in range(2):
        add(table, f"runs{number}", tenant="rich", prompt=4)
    run(table)
    table.counters.charge("rich", 1.0, 10_000)
    poor = add(table, "poor", tenant="poor", prompt=4)
    plan = run(table)
    assert plan.paused == []
    assert poor.state is SequenceStatus.WAITING


def test_to_start_a_higher_tier_takes_memory_from_lower_ones_only() -> None:
    table = make_table(num_blocks=6)
    batch = add(table, "batch", tenant="b", prompt=10, tier=2)
    standard = add(table, "standard", tenant="s", prompt=10, tier=1)
    run(table)
    urgent = add(table, "urgent", tenant="u", prompt=12, tier=0)
    run(table)
    assert batch.state is SequenceStatus.WAITING
    assert standard.state is urgent.state is SequenceStatus.RUNNING
    peer = add(table, "peer", tenant="p", prompt=12, tier=1)
    run(table)
    assert peer.state is SequenceStatus.WAITING


def test_nobody_is_evicted_for_a_start_that_still_would_not_fit() -> None:
    table = make_table(num_blocks=8)
    add(table, "standard", tenant="s", prompt=16, tier=1)
    batch = add(table, "batch", tenant="b", prompt=10, tier=2)
    run(table)
    peer = add(table, "peer", tenant="p", prompt=20, tier=1)
    run(table)
    assert (peer.state, batch.state) == (SequenceStatus.WAITING, SequenceStatus.RUNNING)


def test_a_displaced_one_goes_on_when_the_one_ahead_of_it_cannot_start() -> None:
    """Work conservation: a place that no other sequence can use is not kept empty."""
    table = make_table(num_blocks=12, max_sequences=2)
    urgent = add(table, "urgent", tenant="u", prompt=20, tier=0, max_tokens=12)
    batch = add(table, "batch", tenant="b", prompt=4, tier=2)
    run(table)
    add(table, "short", tenant="v", prompt=4, tier=0, max_tokens=2)
    assert run(table).paused == [batch]
    add(table, "large", tenant="w", prompt=28, tier=0)
    run(table)  # `short` is done; `large` does not fit beside `urgent`, whatever `batch` gives
    run(table)
    assert shares(run(table)) == {"urgent": 1, "batch": 1}
    assert urgent.state is SequenceStatus.RUNNING


# ---------------------------------------------------------------- leaving


@pytest.mark.parametrize("state", ["waiting", "running", "prefilling", "paused", "preempted"])
def test_a_sequence_can_be_finished_in_any_state_and_leaves_nothing(state: str) -> None:
    table = make_table(num_blocks=6, max_batched_tokens=8)
    sequence = add(table, "a", prompt=12, lease=1 if state in ("paused", "preempted") else 9, max_tokens=9)
    if state == "prefilling":
        run(table)
        assert 0 < sequence.computed_tokens < 12
    elif state != "waiting":
        run(table)
        run(table)
    if state == "preempted":
        other = add(table, "b", prompt=16, max_tokens=1)
        while other.state is not SequenceStatus.FINISHED:
            run(table)
    expected = SequenceStatus.RUNNING if state == "prefilling" else SequenceStatus(state)
    assert sequence.state is expected
    table.finish(sequence)
    table.check()
    assert table.pool.num_free == 6
    assert not table.has_runnable
    assert table.sequences == {}


def test_another_policy_keeps_everybody_in_line() -> None:
    table = make_table(max_sequences=1)
    add(table, "runs", tenant="x")
    run(table)
    for number in range(4):
        add(table, f"s{number}", tenant="ab"[number % 2], now_s=number)
    table.counters.charge("a", 1.0, 50)
    table.set_policy(make_policy("fcfs"))
    table.check()
    assert head_of(table) == "s0"
    table.set_policy(make_policy("vtc"))
    assert head_of(table) == "s1"
