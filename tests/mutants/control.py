"""Mutants of the control loop, and the test that has to notice each: bounds, reasons, swings, who decides."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

RULES = "gateway/flow/control_rules.py"
SCRIPT = "gateway/flow/shared/control.lua"
WHATEVER = (
    "tests/unit/gateway/flow/test_control_rules.py"
    "::test_whatever_the_traffic_knobs_stay_within_bounds_and_turn_once_a_minute"
)
ELECTION = "tests/integration/test_control_election.py"
SHARED = "tests/property/test_flow_shared.py"
KNOBS = "tests/property/test_flow_knobs.py"

_BROKEN: list[Broken] = [
    # ---- one loop
    (
        RULES,
        "a knob goes beyond its bound",
        "        return self.rest if isnan(value) else min(self.highest, max(self.lowest, value))\n",
        "        return value\n",
        WHATEVER,
    ),
    (
        RULES,
        "a move has no reason",
        'wanted.setdefault(knob, (goal, f"{rule.name} ({value:.2f})"))',
        'wanted.setdefault(knob, (goal, ""))',
        WHATEVER,
    ),
    (
        RULES,
        "a rule ends where it begins",
        "        return value >= (self.ends if held else self.begins)\n",
        "        return value >= self.begins\n",
        "tests/unit/gateway/flow/test_control_rules.py"
        "::test_a_rule_ends_below_another_threshold_than_it_begins_at",
    ),
    (
        RULES,
        "the loop swings",
        "            if now_s - max(last_s + rest_s, self._reversed_s) < self._reversal_s:\n",
        "            if now_s < 0:\n",
        WHATEVER,
    ),
    (
        "gateway/pools/control_loop.py",
        "advice turns knobs",
        "(self.control.in_force if is_acting else rests).items()",
        "self.control.values.items()",
        "tests/unit/gateway/pools/test_control_loop.py",
    ),
    (
        "gateway/dispatch/admission.py",
        "a burst that is over keeps out what there is room for",
        "        if is_doubtful(ahead, targets_s):\n",
        "        if False:\n",
        "tests/unit/gateway/dispatch/test_admission.py",
    ),
    # ---- promises
    (
        "gateway/flow/placement.py",
        "a reservation is shrunk by a knob",
        "                or (is_promised and self._promised_window.has_room(*asked))\n",
        "",
        KNOBS,
    ),
    (
        "gateway/flow/shared/lua/6_placement.lua",
        "a reservation is shrunk by a knob in the pool",
        "        or not by_order and window_has_room(replica, ticket, rank, kept_here, false, true) then\n",
        "      then\n",
        f"{SHARED}::test_a_reservation_in_the_pool_has_its_places_whatever_a_knob_says",
    ),
    (
        "gateway/dispatch/admission.py",
        "a redeemed quote is refused by a knob",
        "        factor = self.factor if call.binding is None else 1.0\n",
        "        factor = self.factor\n",
        "tests/unit/gateway/dispatch/test_admission.py",
    ),
    # ---- several gateways
    (
        SCRIPT,
        "an earlier holder decides",
        "local is_holder = holder == own and term == in_force and term > 0\n",
        "local is_holder = term > 0\n",
        ELECTION,
    ),
    (
        SCRIPT,
        "who was elected decides before it knows what is in force",
        "  if ARGV[8] ~= '' and not is_elected then\n",
        "  if ARGV[8] ~= '' then\n",
        ELECTION,
    ),
    (
        RULES,
        "turning back is forgotten with the one that decided",
        "LOWEST if state.reversed_ago_s is None else now_s - state.reversed_ago_s\n",
        "LOWEST\n",
        ELECTION,
    ),
    (
        "gateway/flow/shared/control_session.py",
        "what was not kept is in force",
        "            self.control.take_back(moves, before, now_s)\n",
        "",
        ELECTION,
    ),
    (
        "gateway/pools/control_loop.py",
        "an engine that lost a gateway forgets its knobs",
        "            is_repeated = self.is_shared and knob in ENGINE_KNOBS and is_off_rest\n",
        "            is_repeated = False\n",
        f"{ELECTION}::test_every_gateway_turns_its_own_knobs_and_says_it_again_to_engines",
    ),
    (
        "gateway/flow/shared/lua/1_state.lua",
        "knobs of one that is dead count for ever",
        "if knobs.until_us < now_us then\n",
        "if false then\n",
        f"{SHARED}::test_knobs_count_as_long_as_one_decides",
    ),
    (
        "gateway/flow/shared/lua/9_exchange.lua",
        "what waits does not age by the knob",
        "follow_ageing()\n",
        "",
        f"{SHARED}::test_what_waits_already_ages_by_the_knob",
    ),
]

CONTROL_MUTATIONS = mutations_of("control", _BROKEN)
