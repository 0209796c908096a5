"""Mutants of the fair queue, of chains of models, knobs and quotes."""

from __future__ import annotations

from tests.mutants.mutations import mutations_of

IDEAL = "tests/unit/gateway/explain/test_ideal_share.py"
LAG = "tests/unit/gateway/flow/test_lag.py"
OWED = "tests/unit/engine/core/test_owed_place.py"
PROMISES = "tests/property/test_flow_promises.py"
SHARED = "tests/property/test_flow_shared.py"
MEMBERS = "tests/property/test_flow_members.py"
WIRE = "tests/unit/gateway/flow/test_shared_protocol.py"
VIEWS = "tests/unit/gateway/flow/test_two_views.py"
LUA = "gateway/flow/shared/lua"
HOUSE = "tests/integration/test_two_gateways_fair.py"
POOL = "tests/property/test_flow_brakes.py"
DOMAIN = "tests/unit/gateway/domain/test_fallback.py"
WALK = "tests/unit/gateway/pools/test_chain_walk.py"
SCRIPT = "gateway/flow/shared/control.lua"
ELECTION = "tests/integration/test_control_election.py"
KNOBS = "tests/property/test_flow_knobs.py"
OWN_WORK = "tests/unit/gateway/explain/test_own_work.py"
QUOTED = "tests/integration/test_quoted_requests.py"

FLOW_MUTATIONS = mutations_of(
    [
        (
            f"{LUA}/6_placement.lua",
            "flow: the members' epoch is ignored",
            "if is_out(replica.id) or is_out(life_of(replica.id, lives[replica.id])) then",
            "if false then",
            MEMBERS,
        ),
        (
            f"{LUA}/6_placement.lua",
            "flow: an engine's life that is gone gets turns",
            " or is_out(life_of(replica.id, lives[replica.id]))",
            "",
            MEMBERS,
        ),
        (
            "gateway/flow/shared/protocol.py",
            "flow: a drain that dispatches at other gateways",
            'acts += [["member", each, self._unsaid.get(each)] for each in self._unsaid]',
            "pass",
            MEMBERS,
        ),
        (
            "gateway/dispatch/dispatcher.py",
            "flow: a drain that dispatches",
            "if upstream is None or upstream.is_drained:",
            "if upstream is None:",
            "tests/unit/gateway/dispatch/test_dispatcher.py",
        ),
        (
            "gateway/flow/shared/protocol.py",
            "flow: a turn that was put back is had again",
            " or turn.number <= self._turns.get(turn.entry_id, 0)",
            "",
            WIRE,
        ),
        (
            f"{LUA}/8_acts.lua",
            "flow: what was put back waits behind the others in the pool",
            "  ticket.front = back_since and add_to('fronts', 1)\n",
            "",
            SHARED,
        ),
        (
            f"{LUA}/4_lines.lua",
            "flow: who was put back was idle",
            "if is_fair() and not back_since then",
            "if is_fair() then",
            SHARED,
        ),
        (
            "ops/demo/audit.py",
            "flow: an audit takes the last end of a request for all",
            "end = ends.pop()",
            "end = ends[0]",
            "tests/property/test_flow.py",
        ),
        (
            "gateway/flow/in_flight.py",
            "flow: an idle tenant is owed service",
            "if ended is None or self._counters.served_cost - ended >= most:",
            "if ended is None:",
            LAG,
        ),
        (
            "gateway/flow/in_flight.py",
            "flow: lag has no bound",
            "return scaled(most, weight)",
            "return scaled(10**9, weight)",
            LAG,
        ),
        (
            "gateway/flow/in_flight.py",
            "flow: lag does not look at weights",
            "return scaled(most, weight)",
            "return scaled(most, 1.0)",
            LAG,
        ),
        (
            "gateway/flow/queue.py",
            "flow: everybody is owed service",
            "scaled(entry.predicted_cost, entry.weight) <= began",
            "scaled(entry.predicted_cost, entry.weight) <= began + 10**12",
            LAG,
        ),
        (
            "engine/core/places.py",
            "flow: who has had less gives way, too",
            "        and stands_above(runner)\n",
            "",
            OWED,
        ),
        (
            "engine/scheduling/bands.py",
            "flow: what comes up one by one takes every turn",
            "        to = max(to, self._finishes.get(tenant_id, to))\n",
            "",
            f"{PROMISES}::test_aged_work_that_comes_one_by_one_does_not_take_every_turn",
        ),
        (
            "gateway/flow/mclock.py",
            "flow: who was held back is owed all of it",
            "max(reserved.tag_s, now_s - self._burst_s)",
            "reserved.tag_s",
            f"{PROMISES}::test_a_tenant_that_was_held_back_is_owed_no_more_than_the_burst",
        ),
        (
            "gateway/flow/mclock.py",
            "flow: idle time earns reserved service",
            "            self.tag_s = max(self.tag_s, now_s)\n",
            "            pass\n",
            "tests/unit/gateway/flow/test_mclock.py",
        ),
        (
            "gateway/flow/mclock.py",
            "flow: a reservation for a tier is for all",
            "return sum(self.waiting) if self.tier is None else self.waiting[self.tier]",
            "return sum(self.waiting)",
            "tests/unit/gateway/flow/test_mclock.py",
        ),
        (
            f"{LUA}/1_state.lua",
            "flow: a tenant that is missing begins with nothing",
            "      return get(id, true) or error(hash .. ' has lost ' .. tostring(id))\n",
            "      return get(id)\n",
            f"{HOUSE}::test_a_tenant_that_is_missing_is_not_taken_for_a_new_one",
        ),
        (
            f"{LUA}/1_state.lua",
            "flow: what a failed call left is relied on",
            " or meta.busy == '1'",
            "",
            f"{HOUSE}::test_a_call_that_fails_half_way_costs_no_request",
        ),
        (
            f"{LUA}/4_lines.lua",
            "flow: a change of order forgives idle time in the pool",
            "  for place = 1, PLACES do\n    local firsts = {}\n",
            "  for place = 1, PLACES do\n    set_meta('left' .. place, '')\n    local firsts = {}\n",
            "tests/integration/test_two_gateways_fair.py",
        ),
        (
            f"{LUA}/9_exchange.lua",
            "flow: what was said twice counts twice",
            "if number > me.number then",
            "if true then",
            SHARED,
        ),
        (
            f"{LUA}/4_lines.lua",
            "flow: an idle tenant is owed service in the pool",
            "tenant.under_way > 0 or tenant.ended and number_of('served') - tenant.ended < most",
            "tenant.under_way > 0 or tenant.ended",
            SHARED,
        ),
        (
            f"{LUA}/7_turns.lua",
            "flow: who catches up ends what it is owed in the pool",
            "if not is_reserved and not owed and lane_of",
            "if not is_reserved and lane_of",
            SHARED,
        ),
        (
            f"{LUA}/8_acts.lua",
            "flow: what ended is still under way",
            "  tenant.under_way = math.max(0, tenant.under_way - 1)\n",
            "",
            SHARED,
        ),
        (
            "gateway/pools/request_actions.py",
            "flow: another gateway's tenants are answered about anybody's requests",
            "if run is None or ask.tenant_id not in (None, run.call.principal.tenant_id):",
            "if run is None:",
            "tests/integration/test_tier_moves.py",
        ),
        (
            "gateway/flow/in_flight.py",
            "flow: a token is counted twice in what a tenant had",
            "            part.ahead -= amount\n",
            "            part.ahead -= 2 * amount\n",
            VIEWS,
        ),
        (
            "gateway/flow/controller.py",
            "flow: a charge ahead is taken for service",
            "        had = counter - self.in_flight.ahead.of(entry.tenant_id)\n",
            "        had = counter\n",
            VIEWS,
        ),
        (
            "gateway/flow/in_flight.py",
            "flow: serial numbers outlive their engine",
            "if known is not None and known[0] == life else None",
            "if known is not None else None",
            VIEWS,
        ),
        (
            "gateway/flow/in_flight.py",
            "flow: what other servers computed is never had",
            "        if not flight.is_reported and output_tokens:\n",
            "        if False:\n",
            VIEWS,
        ),
        (
            f"{LUA}/7_turns.lua",
            "flow: a charge ahead is taken for service in the pool",
            "ticket.place_counter - ahead_of(tenant)",
            "ticket.place_counter",
            SHARED,
        ),
        (
            f"{LUA}/8_acts.lua",
            "flow: a token is counted twice in the pool",
            "    part[AHEAD] = part[AHEAD] - amount\n",
            "    part[AHEAD] = part[AHEAD] - 2 * amount\n",
            SHARED,
        ),
        (
            f"{LUA}/6_placement.lua",
            "flow: no place is owed by parts in the pool",
            "  return not has_place and is_within_share(replica, ticket, rank)\n",
            "  return false\n",
            SHARED,
        ),
        (
            "engine/forecast/length/groups.py",
            "flow: a tenant's made-up users push out the others'",
            "own = self._held[newcomer] > self._max_groups // MOST_OF_ONE",
            "own = False",
            "tests/unit/engine/forecast/length/test_groups.py",
        ),
        (
            "gateway/explain/ideal_share.py",
            "flow: the ideal share knows no reservations",
            "        amount = self._divide_reserved(amount, seconds)\n",
            "",
            IDEAL,
        ),
        (
            "gateway/explain/ideal_share.py",
            "flow: what was due once is due again",
            "        line.left[rank] -= amount\n",
            "",
            IDEAL,
        ),
        (
            "gateway/flow/placement.py",
            "brakes: a braked tier is sent more than its share",
            "        if rank in self.brakes.shares:\n",
            "        if rank not in self.brakes.shares:\n",
            POOL,
        ),
        (
            "gateway/flow/shared/lua/6_placement.lua",
            "brakes: a shared queue knows no brake",
            "return share == 1 or sequences == 0\n",
            "return share <= 1 or sequences == 0\n",
            "tests/property/test_flow_shared.py",
        ),
        (
            "gateway/pools/chain_walk.py",
            "chains: a dearer model is taken whatever the alias allows",
            "            if self._ratio(pool) > self._chain.max_price:\n",
            "            if self._ratio(pool) < 0:\n",
            f"{WALK}::test_a_dearer_model_is_passed_over_unless_the_chain_allows_it",
        ),
        (
            "gateway/domain/fallback.py",
            "chains: a model is as dear as the cheapest of its prices",
            "    return max(ratios, default=1.0)\n",
            "    return min(ratios, default=1.0)\n",
            f"{DOMAIN}::test_a_model_is_as_dear_as_the_dearest_of_its_prices",
        ),
        (
            "gateway/flow/placement.py",
            "control: a reservation is shrunk by a knob",
            "                or (is_promised and self._promised.window.has_room(*asked))\n",
            "",
            KNOBS,
        ),
        (
            SCRIPT,
            "control: an earlier holder decides",
            "local is_holder = holder == own and term == in_force and term > 0\n",
            "local is_holder = term > 0\n",
            ELECTION,
        ),
        (
            "gateway/explain/own_work.py",
            "quotes: another tenant's work is its own",
            "other.tenant_id == request.tenant_id and ",
            "",
            OWN_WORK,
        ),
        (
            "gateway/domain/quote_redemption.py",
            "quotes: what does not bind is credited",
            "if missed and is_binding else 0",
            "if missed else 0",
            QUOTED,
        ),
        (
            "tenants/ledger/ledger.py",
            "quotes: a tenant's credits have no cap",
            "min(-credit.amounts.cost_nanousd, max(0, left))",
            "-credit.amounts.cost_nanousd",
            QUOTED,
        ),
    ]
)
