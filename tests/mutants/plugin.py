"""Mutants of fair steps inside vLLM, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

STEPS = "engine/vllm_plugin/fair_steps.py"
STEPS_TEST = "tests/unit/engine/vllm_plugin/test_fair_steps.py"

_BROKEN: list[Broken] = [
    (
        STEPS,
        "who is not chosen is not skipped",
        "                request.next_decode_eligible_step = self.current_step + 2\n",
        "                request.next_decode_eligible_step = 0\n",
        f"{STEPS_TEST}::test_tokens_are_shared_by_weight_in_every_step",
    ),
    (
        STEPS,
        "a prompt takes what the step has",
        "        return min(num_new_tokens, self._caps.get(request.request_id, num_new_tokens))\n",
        "        return num_new_tokens\n",
        f"{STEPS_TEST}::test_prompts_are_divided_by_weight_inside_a_step",
    ),
    (
        STEPS,
        "tokens that were not planned are taken as they are",
        "            if tokens > planned and not (planned and self._aligns_chunks):\n",
        "            if tokens < 0:\n",
        f"{STEPS_TEST}::test_a_difference_between_plan_and_step_is_never_silent",
    ),
    (
        "engine/vllm_plugin/planner.py",
        "tokens under way are not counted",
        "        first_times = table.commit(tokens, [0 if got.emits else None for got in given.values()])\n",
        "        first_times = table.commit(tokens, [None for got in given.values()])\n",
        f"{STEPS_TEST}::test_a_lease_is_never_exceeded_and_goes_on_when_topped_up",
    ),
    (
        "engine/vllm_plugin/planner.py",
        "one tenant keeps every place",
        "        is_owed = seats * sum(weights.values()) < slots * head.weight\n",
        "        is_owed = False\n",
        f"{STEPS_TEST}::test_a_tenant_below_its_share_gets_places_though_all_are_taken",
    ),
]

PLUGIN_MUTATIONS = mutations_of("plugin", _BROKEN)
