"""Mutants of the queue, and the test that has to notice each.

Who goes next and with how many, on one gateway and on several; who gives way at the engine for it.
"""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

LAG = "tests/unit/gateway/flow/test_lag.py"
OWED = "tests/unit/engine/core/test_owed_place.py"
PROMISES = "tests/property/test_flow_promises.py"
SHARED = "tests/property/test_flow_shared.py"
SESSION = "tests/unit/gateway/flow/test_shared_protocol.py"
VIEWS = "tests/unit/gateway/flow/test_two_views.py"
LUA = "gateway/flow/shared/lua"

_BROKEN: list[Broken] = [
    # ---- who stays below its share
    (
        "gateway/flow/in_flight.py",
        "an idle tenant is owed service",
        "if ended is None or self._counters.served_cost - ended >= most:",
        "if ended is None:",
        LAG,
    ),
    (
        "gateway/flow/in_flight.py",
        "a newcomer is owed service",
        "if ended is None or self._counters.served_cost - ended >= most:",
        "if ended is not None and self._counters.served_cost - ended >= most:",
        LAG,
    ),
    (
        "gateway/flow/in_flight.py",
        "whoever has nothing under way was idle",
        "if ended is None or self._counters.served_cost - ended >= most:",
        "if ended is None or ended >= 0:",
        LAG,
    ),
    (
        "gateway/flow/in_flight.py",
        "lag has no bound",
        "return scaled(most, weight)",
        "return scaled(10**9, weight)",
        LAG,
    ),
    (
        "gateway/flow/in_flight.py",
        "lag does not look at weights",
        "return scaled(most, weight)",
        "return scaled(most, 1.0)",
        LAG,
    ),
    (
        "engine/scheduling/bands.py",
        "who comes back is lifted whole",
        "self.raise_to(tenant_id, to - self._lag(tenant_id, other_id))",
        "self.raise_to(tenant_id, to)",
        LAG,
    ),
    (
        "gateway/flow/window.py",
        "who is owed service goes without bound",
        "places += replica.max_sequences // OWED_PART",
        "places += replica.max_sequences * 10",
        LAG,
    ),
    (
        "gateway/flow/queue.py",
        "everybody is owed service",
        "scaled(entry.predicted_cost, entry.weight) <= began",
        "scaled(entry.predicted_cost, entry.weight) <= began + 10**12",
        LAG,
    ),
    (
        "gateway/flow/controller.py",
        "who catches up ends what it is owed",
        "        if reason is Reason.ORDER:\n",
        "        if reason is not Reason.RESERVATION:\n",
        LAG,
    ),
    (
        "engine/core/places.py",
        "places are lost to who is owed them without bound",
        "        and (runner.times_set_back < table.max_displacements or _has_recovered(runner))\n",
        "",
        OWED,
    ),
    (
        "engine/core/places.py",
        "who has had less gives way, too",
        "        and stands_above(runner)\n",
        "",
        OWED,
    ),
    (
        "engine/core/places.py",
        "a place that a tenant's part of them gives is refused by the engine",
        "        return (count + 1) * its_weight <= (its - 1) * weight\n",
        "        return False\n",
        OWED,
    ),
    # ---- ageing
    (
        "gateway/flow/ageing.py",
        "requests age a step early",
        "(tier - effective + 1) * ageing_s[tier]",
        "(tier - effective) * ageing_s[tier]",
        "tests/unit/gateway/flow/test_ageing.py",
    ),
    (
        "engine/scheduling/bands.py",
        "what comes up one by one takes every turn",
        "        to = max(to, self._finishes.get(tenant_id, to))\n",
        "",
        f"{PROMISES}::test_aged_work_that_comes_one_by_one_does_not_take_every_turn",
    ),
    # ---- lanes
    (
        "gateway/flow/lanes.py",
        "batch waits in the ordinary lane",
        "return LONG if is_long or entry.tier >= LOWEST_RANK else ORDINARY",
        "return LONG if is_long else ORDINARY",
        "tests/unit/gateway/flow/test_lanes.py",
    ),
    (
        "gateway/flow/dispatch_rules.py",
        "a full long lane holds up the ordinary one",
        "                elif found is Blocked.WINDOW and lane != LONG:\n",
        "                elif True:\n",
        f"{PROMISES}::test_a_full_long_lane_never_blocks_the_ordinary_one",
    ),
    (
        "gateway/flow/dispatch_rules.py",
        "no room is kept for a long request",
        "                        self._placement.keep_room(ticket, tier, lane, replicas, kept)\n",
        "                        pass\n",
        f"{PROMISES}::test_a_long_request_gets_its_turn_under_an_endless_flood_of_short_ones",
    ),
    # ---- reservations
    (
        "gateway/flow/mclock.py",
        "who was held back is owed all of it",
        "max(reserved.tag_s, now_s - self._burst_s)",
        "reserved.tag_s",
        f"{PROMISES}::test_a_tenant_that_was_held_back_is_owed_no_more_than_the_burst",
    ),
    (
        "gateway/flow/mclock.py",
        "idle time earns reserved service",
        "            reserved.tag_s = max(reserved.tag_s, now_s)\n",
        "            pass\n",
        "tests/unit/gateway/flow/test_mclock.py",
    ),
    (
        "gateway/flow/mclock.py",
        "reserved service is counted as predicted",
        "            reserved.tag_s += cost / reserved.rate\n",
        "            pass\n",
        "tests/unit/gateway/flow/test_mclock.py",
    ),
    # ---- early refusal, routing, displaced tokens
    (
        "gateway/flow/deadline_check.py",
        "a request is refused by the p90",
        "ahead.wait_s[0] if",
        "ahead.wait_s[1] if",
        "tests/unit/gateway/flow/test_deadline_check.py",
    ),
    (
        "gateway/flow/deadline_check.py",
        "an instant that has passed refuses nothing",
        "if allowed_s <= 0 or expected_s > allowed_s:",
        "if expected_s > max(0.0, allowed_s):",
        "tests/unit/gateway/flow/test_deadline_check.py",
    ),
    (
        "gateway/flow/deadline_check.py",
        "a target refuses by the median",
        "for metric, what, (_, expected_s) in (",
        "for metric, what, (expected_s, _) in (",
        "tests/unit/gateway/flow/test_deadline_check.py",
    ),
    (
        "gateway/dispatch/admission.py",
        "nobody is tried",
        "return late if self._out_of_reach % TRIED_ONE_IN else None",
        "return late",
        "tests/unit/gateway/dispatch/test_admission.py",
    ),
    (
        "gateway/dispatch/admission.py",
        "a quote is refused for a target",
        "if call.binding is not None or estimate is None",
        "if estimate is None",
        "tests/unit/gateway/dispatch/test_admission.py",
    ),
    (
        "gateway/flow/routing.py",
        "a hit counts on however full a replica",
        "            if share[0] <= emptiest + MAX_IMBALANCE\n",
        "            if True\n",
        "tests/unit/gateway/flow/test_routing.py",
    ),
    (
        "gateway/flow/routing.py",
        "prompts under way do not count",
        "sum(each.prefill_tokens for each in under if each.rank <= rank)",
        "0",
        "tests/unit/gateway/flow/test_routing.py",
    ),
    (
        "engine/core/decision_log.py",
        "who stands back does not count what it sat out",
        "        _add(of, DISPLACED, None, steps)\n",
        "",
        "tests/unit/engine/core/test_displacements.py",
    ),
    # ---- several gateways, one queue
    (
        "gateway/flow/shared/protocol.py",
        "turns of an earlier life count",
        "            if turn.life != self._life:\n                continue\n",
        "",
        SESSION,
    ),
    (
        f"{LUA}/9_exchange.lua",
        "a gateway joins by a copy that comes late",
        "joins = lived ~= life and joins",
        "joins = joins",
        SHARED,
    ),
    (
        f"{LUA}/9_exchange.lua",
        "what was said twice counts twice",
        "if number > me.number then",
        "if true then",
        SHARED,
    ),
    (
        f"{LUA}/4_lines.lua",
        "an idle tenant is owed service in the pool",
        "tenant.under_way > 0 or tenant.ended and number_of('served') - tenant.ended < most",
        "tenant.under_way > 0 or tenant.ended",
        SHARED,
    ),
    (
        f"{LUA}/4_lines.lua",
        "whoever has nothing under way was idle in the pool",
        "tenant.under_way > 0 or tenant.ended and number_of('served') - tenant.ended < most",
        "tenant.under_way > 0",
        SHARED,
    ),
    (
        f"{LUA}/7_turns.lua",
        "who catches up ends what it is owed in the pool",
        "if not is_reserved and not owed and lane_of",
        "if not is_reserved and lane_of",
        SHARED,
    ),
    (
        f"{LUA}/7_turns.lua",
        "reserved service stands behind those who wait",
        "      ticket.place_counter = math.min(ticket.place_counter, lowest)\n",
        "",
        SHARED,
    ),
    (
        f"{LUA}/8_acts.lua",
        "what ended is still under way",
        "  tenant.under_way = math.max(0, tenant.under_way - 1)\n",
        "",
        SHARED,
    ),
    (
        f"{LUA}/5_ageing.lua",
        "nobody ages in the pool",
        "for order, id in ipairs(due) do",
        "for order, id in ipairs({}) do",
        SHARED,
    ),
    (
        "gateway/flow/shared/mirror.py",
        "a gateway's own requests are forecast twice",
        "each.count - own[each.tenant_id, each.tier, each.lane]",
        "each.count",
        "tests/integration/test_pool_forecast.py",
    ),
    (
        "gateway/pools/request_actions.py",
        "another gateway's tenants are answered about anybody's requests",
        "if run is None or ask.tenant_id not in (None, run.call.principal.tenant_id):",
        "if run is None:",
        "tests/integration/test_tier_moves.py",
    ),
    (
        "gateway/pools/peer_requests.py",
        "who did not answer is not missed",
        "max(0, waiting.expected - len(waiting.answers))",
        "0",
        "tests/integration/test_peer_requests.py",
    ),
    (
        "gateway/flow/window.py",
        "engines that pause nobody are sent what is owed, too",
        "        if is_owed and replica.pauses:\n",
        "        if is_owed:\n",
        LAG,
    ),
    # ---- two views of one counter, and places by parts
    (
        "gateway/flow/in_flight.py",
        "a token is counted twice in what a tenant had",
        "            part.ahead -= amount\n",
        "            part.ahead -= 2 * amount\n",
        VIEWS,
    ),
    (
        "gateway/flow/controller.py",
        "a charge ahead is taken for service",
        "        had = counter - self.dispatched.ahead.of(entry.tenant_id)\n",
        "        had = counter\n",
        VIEWS,
    ),
    (
        "gateway/flow/controller.py",
        "the engine's count is a second counter",
        "            self._serials.note(replica_id, life, tenant_id, share.serials)\n",
        "",
        VIEWS,
    ),
    (
        "gateway/flow/in_flight.py",
        "serial numbers outlive their engine",
        "if known is not None and known[0] == life else None",
        "if known is not None else None",
        VIEWS,
    ),
    (
        "gateway/flow/in_flight.py",
        "charges ahead outlive their requests",
        "        part.ahead = max(-part.charged, min(part.ahead, part.charged))\n",
        "",
        VIEWS,
    ),
    (
        "gateway/flow/in_flight.py",
        "what other servers computed is never had",
        "        if not flight.is_reported and output_tokens:\n",
        "        if False:\n",
        VIEWS,
    ),
    (
        "engine/scheduling/tiers.py",
        "an engine's lift goes above who waits",
        "to if first is None else min(to, first[0])",
        "to",
        VIEWS,
    ),
    (
        "gateway/flow/controller.py",
        "newcomers pay for what others have not had",
        "        return max(lag, self.dispatched.below(other_id))\n",
        "        return lag\n",
        LAG,
    ),
    (
        "gateway/flow/window.py",
        "every place is owed to who asks",
        "            if live * weights > most:\n                return False\n",
        "",
        LAG,
    ),
    (
        "gateway/flow/window.py",
        "parts of the places ignore weights",
        "most = replica.max_sequences * weight_of(tenant_id)",
        "most = replica.max_sequences",
        LAG,
    ),
    (
        "gateway/flow/dispatch_rules.py",
        "no place is owed by parts",
        "        return self._placement.load(replica.replica_id).is_within_share(\n",
        "        return False and self._placement.load(replica.replica_id).is_within_share(\n",
        LAG,
    ),
    (
        f"{LUA}/7_turns.lua",
        "a charge ahead is taken for service in the pool",
        "ticket.place_counter - ahead_of(tenant)",
        "ticket.place_counter",
        SHARED,
    ),
    (
        f"{LUA}/8_acts.lua",
        "a token is counted twice in the pool",
        "    part[AHEAD] = part[AHEAD] - amount\n",
        "    part[AHEAD] = part[AHEAD] - 2 * amount\n",
        SHARED,
    ),
    (
        f"{LUA}/8_acts.lua",
        "charges ahead stay when a gateway leaves",
        "  end_ahead(tenant, ticket.gateway, scaled(cost or ticket.charged, ticket.weight))\n",
        "",
        SHARED,
    ),
    (
        f"{LUA}/6_placement.lua",
        "no place is owed by parts in the pool",
        "  return not has_place and is_within_share(replica, ticket, rank)\n",
        "  return false\n",
        SHARED,
    ),
    (
        f"{LUA}/4_lines.lua",
        "newcomers pay for what others have not had in the pool",
        "ahead_of(other), other.under_way > 0 and 1 or 0)",
        "0)",
        SHARED,
    ),
    (
        f"{LUA}/4_lines.lua",
        "a tenant's own go by arrival under hybrid in the pool",
        "  if meta.order ~= 'hybrid' then\n    return first_of",
        "  if true then\n    return first_of",
        f"{SHARED}::test_hybrid_in_the_pool_is_hybrid_in_one_controller",
    ),
]

FLOW_MUTATIONS = mutations_of("flow", _BROKEN)
