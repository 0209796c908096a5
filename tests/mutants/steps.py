"""Mutants of token-fair steps, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

COMPOSE = "engine/scheduling/compose"
COUNTERS = "engine/scheduling/step_counters.py"
COUNTERS_TEST = "tests/unit/engine/scheduling/test_step_counters.py"
CORE_TEST = "tests/unit/engine/core/test_core.py"
OWED_TEST = "tests/unit/engine/core/test_owed_place.py"
STEPS_TEST = "tests/unit/engine/core/test_token_fair_steps.py"
TOGETHER_TEST = "tests/property/test_step_fairness.py"
TURNS_TEST = "tests/unit/engine/scheduling/compose/test_token_fair.py"

_BROKEN: list[Broken] = [
    (
        "engine/core/scheduler.py",
        "victims go by a second counter",
        "        return self._policy.evict.victim(candidates, self._table.standings.of_tier(tier))\n",
        "        return self._policy.evict.victim(candidates, self._table.counters)\n",
        f"{OWED_TEST}::test_the_victim_is_who_had_most_not_who_was_charged_most",
    ),
    (
        f"{COMPOSE}/turns.py",
        "credits are forgotten",
        "ranks.append((standings.value(tenant_id) + given.get(tenant_id, 0), number, tenant_id))",
        "ranks.append((given.get(tenant_id, 0), number, tenant_id))",
        TURNS_TEST,
    ),
    (
        f"{COMPOSE}/turns.py",
        "turns do not look at weights",
        "    cost = sequence.token_charge or scaled(OUTPUT_TOKEN_COST, sequence.submit.weight)\n",
        "    cost = scaled(OUTPUT_TOKEN_COST, 1.0)\n",
        TURNS_TEST,
    ),
    (
        f"{COMPOSE}/turns.py",
        "a gap has no bound",
        "    chosen = _overdue(lines, slots)\n",
        "    chosen: list[Sequence] = []\n",
        f"{TURNS_TEST}::test_a_tenant_far_behind_does_not_starve_the_others",
    ),
    (
        f"{COMPOSE}/prompt_shares.py",
        "the cap is ignored",
        "            claim.most = sum(min(_left(each), self.cap_tokens) for each in claim.prompts)\n",
        "            claim.most = sum(_left(each) for each in claim.prompts)\n",
        f"{STEPS_TEST}::test_a_prompt_is_capped_while_another_tenant_has_one",
    ),
    (
        f"{COMPOSE}/prompt_shares.py",
        "weights are ignored in prompts",
        "                    max(1, scaled(INPUT_TOKEN_COST, sequences[0].submit.weight)),\n",
        "                    scaled(INPUT_TOKEN_COST, 1.0),\n",
        f"{STEPS_TEST}::test_prompts_share_by_weight_within_a_chunk",
    ),
    (
        f"{COMPOSE}/prompt_shares.py",
        "short newcomers starve their tenant's long prompt",
        "        wanted[begun] = min(_left(begun), -(-tokens // FIRST_PART))\n",
        "        wanted[begun] = 0\n",
        f"{TURNS_TEST}::test_a_tenants_prompt_that_was_begun_first_has_a_quarter_beside_shorter_ones",
    ),
    (
        COUNTERS,
        "the steps go by a counter of their own",
        "        return self._offsets.get((tier, tenant_id), 0) + self.serial(tier, tenant_id)\n",
        "        return self.serial(tier, tenant_id)\n",
        TOGETHER_TEST,
    ),
    (
        "gateway/flow/controller.py",
        "the queue does not take over what the steps lifted",
        "                self.queue.raise_by(tenant_id, tier, amount)\n",
        "                pass\n",
        f"{TOGETHER_TEST}::test_a_tenant_that_was_served_whole_has_saved_nothing_up",
    ),
    (
        COUNTERS,
        "a token counts twice",
        "        self._offsets[key] = had - heard\n",
        "        self._offsets[key] = had\n",
        COUNTERS_TEST,
    ),
    (
        COUNTERS,
        "a restarted gateway's tenants owe all that they had before",
        "            heard = self._unheard.setdefault(key, self.serial(tier, tenant_id))\n",
        "            heard = 0\n",
        COUNTERS_TEST,
    ),
    (
        COUNTERS,
        "what came after a first word is lost",
        "            heard = self._unheard.setdefault(key, self.serial(tier, tenant_id))\n",
        "            heard = self.serial(tier, tenant_id)\n",
        COUNTERS_TEST,
    ),
    (
        "engine/core/tenant_charges.py",
        "a charge ahead is taken for service",
        "submit.had, submit.heard)",
        "submit.counter, submit.heard)",
        f"{CORE_TEST}::test_a_gateway_has_charged_ahead_so_that_no_token_counts_twice",
    ),
    (
        "engine/core/tenant_charges.py",
        "what a gateway charged ahead is charged again",
        "if tenant_id not in self._told]",
        "if tenant_id]",
        f"{CORE_TEST}::test_a_gateway_has_charged_ahead_so_that_no_token_counts_twice",
    ),
    (
        COUNTERS,
        "a tenant served whole saves up in a contest",
        "        for tenant_id in whole:\n            self.lift(tier, tenant_id, lowest)\n",
        "",
        COUNTERS_TEST,
    ),
    (
        COUNTERS,
        "a tenant served whole saves up before a contest",
        "        for tenant_id in tenants:\n"
        "            self.lift(tier, tenant_id, anchored.get(tenant_id, level))\n",
        "",
        COUNTERS_TEST,
    ),
    (
        COUNTERS,
        "a lift is told again",
        "        raised, self._raised = self._raised, {}\n",
        "        raised = self._raised\n",
        COUNTERS_TEST,
    ),
    (
        "engine/process/sessions.py",
        "a lift is told to every gateway",
        "                lifted.add(tenant_id)\n",
        "",
        "tests/unit/engine/process/test_sessions.py",
    ),
]

STEP_MUTATIONS = mutations_of("steps", _BROKEN)
