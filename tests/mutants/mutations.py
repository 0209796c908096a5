"""Mutants of rules, and the test that has to notice each.

Each mutation replaces a piece of the code that occurs exactly once. `make mutants` applies them one at a time
to a copy of the tree and expects the named tests to fail there; `docs/invariants.md` lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One rule, broken."""

    name: str
    path: str
    before: str
    after: str
    tests: str
    """What has to fail: a pytest node or file."""


Broken = tuple[str, str, str, str, str]
"""File, what goes wrong, what stands there, what stands there instead, the test."""


def mutations_of(area: str, broken: Sequence[Broken]) -> list[Mutation]:
    """The mutations of one area, which begins their names."""
    return [
        Mutation(f"{area}: {name}", path, before, after, tests) for path, name, before, after, tests in broken
    ]


HISTORIES = "tests/property/test_engine_histories.py::test_random_histories"
SCHEDULER = "tests/unit/engine/core/test_scheduler.py"

MUTATIONS = [
    Mutation(
        "skip the lift",
        "engine/scheduling/order/by_tenant.py",
        "            self._comes(tenant_id, preempted=front)\n",
        "",
        "tests/unit/engine/scheduling/order/test_vtc.py",
    ),
    Mutation(
        "charge recomputation",
        "engine/core/sequence_table.py",
        "        sequence.match = None\n",
        "        sequence.match = None\n        sequence.charged_prompt_tokens = 0\n",
        f"{SCHEDULER}::test_recomputation_is_not_charged",
    ),
    Mutation(
        "skip the head that does not fit",
        "engine/core/scheduler.py",
        "            if tokens == 0 or not self._room_to_start(batch, sequence, match):\n",
        "            if tokens == 0 or not self._room_to_start(batch, sequence, match):\n"
        "                order.remove(entry.entry_id)\n"
        "                order.add(entry)\n"
        "                if order.peek(self._now_s) is not entry:\n"
        "                    continue\n",
        f"{SCHEDULER}::test_the_head_of_the_line_is_not_skipped_when_it_does_not_fit",
    ),
    Mutation(
        "publish before the forward pass",
        "engine/core/scheduler.py",
        "        self.plan.room.take(sequence, tokens)\n",
        "        self.plan.room.take(sequence, tokens)\n"
        "        self._table.pool.publish(\n"
        "            sequence.block_table, sequence.cursor, sequence.token_ids,\n"
        "            sequence.computed_tokens + tokens,\n"
        "        )\n",
        "tests/property/test_kv_prefix_histories.py",
    ),
    Mutation(
        "drop the tenant's salt",
        "engine/kv/prefix.py",
        "return key + salt.encode() if depth == 0 else key",
        "return key",
        "tests/unit/engine/kv/test_cache.py",
    ),
    Mutation(
        "leave no token to compute on a full hit",
        "engine/core/sequence_table.py",
        "sequence.total_tokens - 1\n        sequence.match",
        "sequence.total_tokens\n        sequence.match",
        "tests/property/test_kv_prefix_histories.py",
    ),
    Mutation(
        "nobody is ever immune",
        "engine/core/scheduler.py",
        "            victim.times_displaced += victim.state is SequenceStatus.RUNNING\n",
        "",
        f"{SCHEDULER}::test_a_sequence_gives_way_a_bounded_number_of_times",
    ),
    Mutation(
        "memory that comes free soon is not waited for",
        "engine/scheduling/evict/base.py",
        "        return free_in_s <= back_s\n",
        "        return False\n",
        "tests/unit/engine/core/test_memory_wait.py",
    ),
    Mutation(
        "a KV cache that cannot hold one context is served with",
        "engine/process/capacity.py",
        "    if num_blocks < least_blocks:\n",
        "    if num_blocks < 1:\n",
        "tests/unit/engine/process/test_capacity.py",
    ),
    Mutation(
        "copy in before copying out",
        "engine/core/core.py",
        "            if plan.copies.out:\n"
        "                self._runner.copy_out(plan.copies.out)\n"
        "            if plan.copies.back:\n"
        "                self._runner.copy_in(plan.copies.back)\n",
        "            if plan.copies.back:\n"
        "                self._runner.copy_in(plan.copies.back)\n"
        "            if plan.copies.out:\n"
        "                self._runner.copy_out(plan.copies.out)\n",
        "tests/property/test_kv_prefix_histories.py",
    ),
    Mutation(
        "charge what was found in the cache",
        "engine/sequence.py",
        "        self.cached_tokens += max(0, min(tokens, self.prompt_tokens) - self.ever_computed_tokens)\n",
        "",
        HISTORIES,
    ),
    Mutation(
        "hand out blocks behind the fence",
        "engine/kv/blocks.py",
        "if self._is_fenced:\n                    self._fenced",
        "if False:\n                    self._fenced",
        "tests/unit/engine/kv/test_blocks.py",
    ),
    Mutation(
        "take memory from a higher tier",
        "engine/core/scheduler.py",
        "            if runner.tier >= sequence.tier and runner.times_displaced",
        "            if runner.times_displaced",
        f"{SCHEDULER}::test_no_eviction_policy_can_take_from_a_higher_tier",
    ),
    Mutation(
        "take over one token too many of what another computed",
        "engine/kv/cache.py",
        "        gained = cursor.blocks * self.block_tokens - computed_tokens\n",
        "        gained = cursor.blocks * self.block_tokens - computed_tokens + 1\n",
        "tests/integration/test_exactness_paths.py",
    ),
    Mutation(
        "trust what should have come back when its copies failed",
        "engine/core/sequence_table.py",
        "            elif arriving.isdisjoint(sequence.block_table):\n"
        "                continue\n"
        "            else:\n"
        "                self._drop(sequence)\n",
        "            else:\n                continue\n",
        "tests/unit/engine/kv/test_moves.py",
    ),
    Mutation(
        "bring one host block too few back",
        "engine/kv/host.py",
        "        self._back.update(zip(device_blocks, swapped.blocks[first:], strict=True))\n",
        "        self._back.update(zip(device_blocks[1:], swapped.blocks[first + 1 :], strict=True))\n",
        "tests/integration/test_exactness_paths.py",
    ),
    Mutation(
        "lease a token more than is covered",
        "gateway/budget/lease.py",
        "    room = covered - kept\n",
        "    room = covered - kept + 1\n",
        "tests/unit/gateway/budget/test_lease.py",
    ),
    Mutation(
        "empty a bucket in one go",
        "gateway/budget/lease.py",
        "2 * (size.of(limit.meter) - nothing.of(limit.meter))",
        "(size.of(limit.meter) - nothing.of(limit.meter))",
        "tests/integration/test_rate_shape.py",
    ),
    Mutation(
        "run more streams than the rate feeds",
        "gateway/budget/stream_limiter.py",
        "            if running and running + sequences > most:\n",
        "            if False:\n",
        "tests/integration/test_rate_shape.py::test_a_hundred_streams_of_a_slow_tenant_leave_the_others_alone",
    ),
    Mutation(
        "read on before the first words are taken",
        "gateway/upstream/openai/sequence.py",
        "                self._connection.pause()\n",
        "                pass\n",
        "tests/integration/test_openai_upstream.py::test_the_first_words_are_taken_before_more_is_read",
    ),
    Mutation(
        "take for written what a request is charged to before it is",
        "tenants/ledger/ledger.py",
        "        if is_new and not new_row.is_known and new_row.counter_set is not None:\n",
        "        if not new_row.is_known and new_row.counter_set is not None:\n",
        "tests/integration/test_ledger.py::test_a_set_is_not_taken_for_written_before_it_is",
    ),
    Mutation(
        "let what a request is charged to be changed unseen",
        "tenants/ledger/counter_sets.py",
        "        if set_id.__wrapped__(tuple(members.get((gateway_id, name), ()))) != name\n",
        "        if (gateway_id, name) not in members\n",
        "tests/integration/test_verify.py::test_what_requests_are_charged_to_is_not_changed_unseen",
    ),
    Mutation(
        "settle while a top-up is under way",
        "gateway/budget/top_up.py",
        "            await asyncio.wait([asking], timeout=self._accounts_wait_s)\n",
        "",
        "tests/integration/test_lifecycle.py::test_a_top_up_under_way_is_over_before_the_request_is_settled",
    ),
    Mutation(
        "let a sequence that rests keep its memory",
        "engine/core/scheduler.py",
        "            or (not paused.may_emit and paused.tenant_id != sequence.tenant_id)\n",
        "",
        f"{SCHEDULER}::test_one_that_rests_for_its_lease_makes_room_for_another_tenant_at_once",
    ),
    Mutation(
        "charge device time of recomputation",
        "engine/core/gpu_time.py",
        "        if again > 0:\n",
        "        if again < 0:\n",
        "tests/unit/engine/core/test_gpu_time.py",
    ),
    Mutation(
        "ignore the weights",
        "engine/scheduling/counters.py",
        "    return round(cost * COUNTER_SCALE / weight)",
        "    return round(cost * COUNTER_SCALE)",
        "tests/unit/engine/scheduling/order/test_vtc.py",
    ),
    Mutation(
        "a client that waits for a core is no bottleneck",
        "ops/bench/versus/figures.py",
        "wanted_s = last.ran_s - first.ran_s + last.waited_s - first.waited_s",
        "wanted_s = last.ran_s - first.ran_s",
        "tests/unit/ops/bench/test_versus.py::test_a_client_is_busy_while_it_runs_or_waits_for_a_core",
    ),
    Mutation(
        "a window without the lighter tenant counts as fair",
        "ops/bench/plugin/token_windows.py",
        'float("inf")',
        "3.0",
        "tests/unit/ops/bench/test_plugin.py::test_a_window_without_the_lighter_tenant_is_no_small_deviation",
    ),
]
