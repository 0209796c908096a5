"""Mutants of learned policies and of the knobs that they turn, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

SWITCH = "gateway/flow/learned/switch.py"
SWITCH_TEST = "tests/unit/gateway/flow/learned/test_switch.py"
ACTIONS = "gateway/pools/learned_actions.py"
ACTIONS_TEST = "tests/unit/gateway/pools/test_learned_actions.py"
IN_FORCE_TEST = "tests/integration/test_policy_in_force.py"
KNOBS_TEST = "tests/property/test_engine_knobs.py"

_BROKEN: list[Broken] = [
    (
        "gateway/flow/learned/table_file.py",
        "a table is used outside of what it was fitted on",
        "        if entry is None or not entry.share or not self.fitted.covers(situation):\n",
        "        if entry is None:\n",
        f"{SWITCH_TEST}::test_outside_of_what_was_fitted_it_is_hybrid_at_once",
    ),
    (
        SWITCH,
        "a switch has no hysteresis",
        "        if state == self._state or state != before or now_s - self._since_s < HOLDS_S:\n",
        "        if state == self._state:\n",
        f"{SWITCH_TEST}::test_what_was_taken_on_is_held_and_a_load_at_a_border_does_not_swing",
    ),
    (
        SWITCH,
        "what was taken on is not held",
        "        if state == self._state or state != before or now_s - self._since_s < HOLDS_S:\n",
        "        if state == self._state or state != before:\n",
        f"{SWITCH_TEST}::test_what_was_taken_on_is_held_and_a_load_at_a_border_does_not_swing",
    ),
    (
        "gateway/flow/learned/table_file.py",
        "a table is searched at each look",
        "        entry = self.indexed[state]\n",
        "        entry = self.by_state()[state]\n",
        f"{SWITCH_TEST}::test_each_look_looks_up_once_and_builds_nothing",
    ),
    (
        "gateway/flow/learned/table_file.py",
        "a table of another version is read",
        "            if head.version != VERSION:\n",
        "            if head.version > 1000:\n",
        "tests/unit/gateway/flow/learned/test_table_file.py::test_what_is_no_table_of_this_version_is_refused",
    ),
    (
        ACTIONS,
        "a table for another model is used",
        "        self._tell(misfit(self._table, self._model, announced))\n",
        "        self._tell(misfit(self._table, self._table.model, announced))\n",
        f"{ACTIONS_TEST}::test_a_table_for_something_else_is_said_once_and_not_used",
    ),
    (
        ACTIONS,
        "outside of the fit the operator's settings are forgotten",
        "        return self._rests() if self.switch.is_outside else actions.knobs(), why\n",
        "        return actions.knobs(), why\n",
        f"{ACTIONS_TEST}::test_outside_of_what_was_fitted_the_settings_count_at_once",
    ),
    (
        ACTIONS,
        "another policy leaves the knobs where a table put them",
        "            self._due = OTHER_OWN if is_wanted else NOT_LEARNED\n",
        "            self._due = None\n",
        f"{ACTIONS_TEST}::test_another_policy_puts_the_knobs_back",
    ),
    (
        "gateway/cluster/policy_in_force.py",
        "engines are told of a file that only gateways have",
        '        options.pop("learned_table", None)\n',
        "",
        f"{IN_FORCE_TEST}::test_a_learned_table_is_read_by_every_gateway_and_by_no_engine",
    ),
    (
        "gateway/cluster/policy_in_force.py",
        "a table that cannot be used is stored",
        "        self._require_served(learned_table_of(asked.name, options))\n",
        "",
        f"{IN_FORCE_TEST}::test_a_learned_table_that_cannot_be_used_changes_nothing",
    ),
    (
        "engine/scheduling/knobs.py",
        "a knob makes new choices",
        "    for name, number in numbers.items():\n"
        "        setattr(choice, name, number)\n"
        "    return choice\n",
        "    return fresh\n",
        "tests/unit/engine/scheduling/test_knobs.py::test_the_numbers_of_choices_are_turned_and_the_choices_stay",
    ),
    (
        "engine/scheduling/knobs.py",
        "a knob beyond its bounds is turned",
        "    check_knobs(knobs)\n    changes",
        "    changes",
        "tests/unit/engine/core/test_core.py::test_a_token_budget_makes_chunks_smaller_but_leaves_a_token_for_everybody",
    ),
    (
        "engine/process/loop.py",
        "knobs outlast the gateway that turned them",
        "        if session is self._knobs_of:\n",
        "        if session is not self._knobs_of:\n",
        "tests/integration/test_engine_client.py::test_a_token_budget_is_in_force_until_the_gateway_that_set_it_is_gone",
    ),
    (
        "engine/virtual/fast_replica.py",
        "a simulated run does not see a knob turn",
        "        # With other knobs what did not fit may fit.\n        self._settled = False\n",
        "",
        f"{KNOBS_TEST}::test_runs_of_steps_end_where_a_knob_turns",
    ),
]

LEARNED_POLICY_MUTATIONS = mutations_of("learned policy", _BROKEN)
