"""Mutants of the engine: counters, memory, turns, its messages, the plug-in in vLLM."""

from __future__ import annotations

from tests.mutants.mutations import mutations_of

HISTORIES = "tests/property/test_engine_histories.py::test_random_histories"
AHEAD_TESTS = "tests/property/test_one_step_ahead.py"
AHEAD = f"{AHEAD_TESTS}::test_each_sequence_has_the_answer_and_the_charge_of_the_plain_order"
GRAMMARS = "tests/property/test_grammar_histories.py"
SCHEDULER = "tests/unit/engine/core/test_scheduler.py"
COMPOSE = "engine/scheduling/compose"
COUNTERS = "engine/scheduling/step_counters.py"
COUNTERS_TEST = "tests/unit/engine/scheduling/test_step_counters.py"
CORE_TEST = "tests/unit/engine/core/test_core.py"
STEPS_TEST = "tests/unit/engine/core/test_token_fair_steps.py"
TURNS_TEST = "tests/unit/engine/scheduling/compose/test_token_fair.py"
ORDERS = "tests/unit/engine/scheduling/order/test_by_size.py"
STEPS = "engine/vllm_plugin/fair_steps.py"
PLUGIN_STEPS_TEST = "tests/unit/engine/vllm_plugin/test_fair_steps.py"
DESK = "tests/unit/engine/vllm_plugin/channel/test_desk.py"
ATTACKS = "tests/attack/test_engine_messages.py"
ROWS = "engine/model/rows.py"
ROWS_TEST = "tests/unit/engine/model/test_rows.py"
PADDED = f"{ROWS_TEST}::test_a_padded_step_is_the_plain_one_and_padding"
GRAPHS = "engine/model/graphs.py"
GRAPHS_TEST = "tests/integration/test_graphs.py"
STAND_IN = "tests/integration/test_stand_in_exactness.py::test_late_execution_gives_generates_tokens"
STATE = "tests/unit/gateway/upstream/vllm_plugin/test_channel_state.py"

ENGINE_MUTATIONS = mutations_of(
    [
        (
            "engine/scheduling/order/by_tenant.py",
            "skip the lift",
            "            self._comes(tenant_id, preempted=front)\n",
            "",
            "tests/unit/engine/scheduling/order/test_vtc.py",
        ),
        (
            "engine/core/sequence_table.py",
            "charge recomputation",
            "        sequence.match = None\n",
            "        sequence.match = None\n        sequence.charged_prompt_tokens = 0\n",
            f"{SCHEDULER}::test_recomputation_is_not_charged",
        ),
        (
            "engine/core/core.py",
            "grammars: masks are made before the token before is known",
            "        if is_launched and len(self._in_flight) == 1:\n            self._choose(result)\n",
            "        if is_launched:\n            self._choose(result)\n",
            GRAMMARS,
        ),
        (
            "engine/core/core.py",
            "grammars: forced tokens go beyond the lease",
            "sequence.constraint.follow(sequence.known_tokens, sequence.most_emitted, most)",
            "sequence.constraint.follow(sequence.known_tokens, most, most)",
            GRAMMARS,
        ),
        (
            "engine/grammar/constraint.py",
            "grammars: a state is not replayed",
            "        state.replay(emitted)\n",
            "",
            GRAMMARS,
        ),
        (
            "engine/grammar/constraint.py",
            "grammars: what must follow is sampled a token late",
            "        after = emitted + len(token_ids)\n",
            "        token_ids = token_ids[:-1]\n        after = emitted + len(token_ids)\n",
            GRAMMARS,
        ),
        (
            "engine/kv/prefix.py",
            "drop the tenant's salt",
            "return key + salt.encode() if depth == 0 else key",
            "return key",
            "tests/unit/engine/kv/test_cache.py",
        ),
        (
            "engine/model/staging.py",
            "device: a staging buffer is written while a step has yet to read it",
            "STAGING_BUFFERS = 3",
            "STAGING_BUFFERS = 1",
            STAND_IN,
        ),
        (
            "engine/model/runner.py",
            "device: results are read before they are there",
            (
                "                events[-1].synchronize()\n"
                "                pairs = zip(events[::2], events[1::2], strict=True)\n"
                "                device_s = sum(began.elapsed_time(ended) for began, ended in pairs) / 1e3\n"
            ),
            "                device_s = 0.0\n",
            STAND_IN,
        ),
        (
            ROWS,
            "device: a row keeps the counts of its former sequence",
            "            self._counts.index_fill_(0, counted, 0)\n",
            "",
            ROWS_TEST,
        ),
        (
            ROWS,
            "device: a row keeps the biases of its former sequence",
            "        self._bias_ids.index_fill_(0, rows, -1)\n",
            "",
            ROWS_TEST,
        ),
        (
            ROWS,
            "device: the masks of two rows are swapped",
            "kept.index_copy_(0, numbers, ",
            "kept.index_copy_(0, numbers.flip(0), ",
            f"{ROWS_TEST}::test_masks_are_those_of_the_last_choice",
        ),
        (
            ROWS,
            "graphs: the row of padding grows",
            "            contexts = contexts.masked_fill(rows == self.num_rows, 0)\n",
            "            pass\n",
            PADDED,
        ),
        (
            "kernels/batch.py",
            "graphs: padding is written to the cache",
            "slots=slots if is_padding is None else slots.masked_fill(is_padding, -1)",
            "slots=slots",
            PADDED,
        ),
        (
            ROWS,
            "graphs: changes that are padding change a table",
            '"entries": self.num_rows * self.width,',
            '"entries": 0,',
            PADDED,
        ),
        (
            ROWS,
            "graphs: changes beyond a graph's room are dropped",
            "                self.tables.index_copy_(0, *changes)\n",
            "                pass\n",
            PADDED,
        ),
        (
            ROWS,
            "device: counts that memory ran out for are half there",
            "            counts = torch.zeros(",
            "            self._counts = counts = torch.zeros(",
            f"{ROWS_TEST}::test_memory_that_runs_out_while_a_row_starts_leaves_nothing_to_the_next_step",
        ),
        (
            GRAPHS,
            "graphs: a device that was lost meanwhile is taken for a pass that cannot be captured",
            "            mark(self._queues).synchronize()  # of a device that is lost there is more to say\n",
            "",
            f"{GRAPHS_TEST}::test_a_device_that_is_lost_while_steps_are_captured_ends_the_load",
        ),
        (
            GRAPHS,
            "graphs: a choice is replayed that ignores what is asked for",
            "wants, size = covering(staged.wants),",
            "wants, size = GRAPH_WANTS[0],",
            f"{GRAPHS_TEST}::test_every_number_of_rows_up_to_a_size",
        ),
        (
            GRAPHS,
            "graphs: a choice is replayed that reads biases from where they were",
            " or (wants.bias and self._rows.biases_moved)",
            "",
            f"{GRAPHS_TEST}::test_more_changed_tables_and_biases_than_a_graph_has_room_for",
        ),
        (
            GRAPHS,
            "graphs: what a replay gives is not compared",
            "if not torch.equal(logits, expected):",
            "if False:",
            f"{GRAPHS_TEST}::test_a_forward_pass_that_cannot_be_captured_is_found",
        ),
        (
            GRAPHS,
            "graphs: the smallest are captured first",
            "key=lambda shape: shape.tokens, reverse=True",
            "key=lambda shape: shape.tokens",
            f"{GRAPHS_TEST}::test_what_takes_too_much_is_left_out",
        ),
        (
            GRAPHS,
            "graphs: a staging buffer is written again before it was read",
            "                mark(self._queues).synchronize()  # a staging buffer is written again\n",
            "",
            f"{GRAPHS_TEST}::test_what_takes_too_long_is_left_out",
        ),
        (
            "engine/sequence.py",
            "charge what was found in the cache",
            "        self.cached_tokens += max(0, min(tokens, self.prompt_tokens) - self.ever_computed_tokens)\n",
            "",
            HISTORIES,
        ),
        (
            "engine/kv/blocks.py",
            "hand out blocks behind the fence",
            "if self._in_flight:\n                    self._fenced",
            "if False:\n                    self._fenced",
            "tests/unit/engine/kv/test_blocks.py",
        ),
        (
            "engine/kv/blocks.py",
            "ahead: a fence is lifted early",
            "self._fenced[block] = self._in_flight[-1]",
            "self._fenced[block] = self._in_flight[0]",
            f"{AHEAD_TESTS}::test_a_block_is_given_away_only_when_the_step_that_writes_it_is_over",
        ),
        (
            "engine/sequence.py",
            "ahead: a lease ignores pending tokens",
            "        return self.emitted_tokens < most and not self.is_out_of_time and",
            "        return self.known_tokens < most and not self.is_out_of_time and",
            AHEAD,
        ),
        (
            "engine/core/sequence_table.py",
            "ahead: an unknown token is published",
            "            token_ids.append(UNKNOWN_TOKEN)\n",
            (
                "            token_ids.append(UNKNOWN_TOKEN)\n"
                "            slots = len(sequence.block_table) * self.block_tokens\n"
                "            known = min(slots, len(token_ids))\n"
                "            self.pool.publish(sequence.block_table, sequence.cursor, token_ids, known)\n"
            ),
            AHEAD,
        ),
        (
            "engine/core/sequence_table.py",
            "ahead: a wasted row is charged",
            "        self.charges.take_back(sequence, sequence.in_flight_first_time, pending, beyond)\n",
            "",
            AHEAD,
        ),
        (
            "engine/core/scheduler.py",
            "take memory from a higher tier",
            "            if runner.tier >= sequence.tier and runner.times_displaced",
            "            if runner.times_displaced",
            f"{SCHEDULER}::test_no_eviction_policy_can_take_from_a_higher_tier",
        ),
        (
            "engine/kv/cache.py",
            "take over one token too many of what another computed",
            "        gained = cursor.blocks * self.block_tokens - computed_tokens\n",
            "        gained = cursor.blocks * self.block_tokens - computed_tokens + 1\n",
            "tests/integration/test_exactness_paths.py",
        ),
        (
            "gateway/budget/lease.py",
            "lease a token more than is covered",
            "    room = covered - kept\n",
            "    room = covered - kept + 1\n",
            "tests/unit/gateway/budget/test_lease.py",
        ),
        (
            "tenants/ledger/ledger.py",
            "take for written what a request is charged to before it is",
            "        if is_new and not new_row.is_known and new_row.counter_set is not None:\n",
            "        if not new_row.is_known and new_row.counter_set is not None:\n",
            "tests/integration/test_ledger.py::test_a_set_is_not_taken_for_written_before_it_is",
        ),
        (
            "tenants/ledger/counter_sets.py",
            "let what a request is charged to be changed unseen",
            "        if set_id.__wrapped__(tuple(members.get((gateway_id, name), ()))) != name\n",
            "        if (gateway_id, name) not in members\n",
            "tests/integration/test_verify.py::test_what_requests_are_charged_to_is_not_changed_unseen",
        ),
        (
            "gateway/budget/top_up.py",
            "settle while a top-up is under way",
            "            await asyncio.wait([asking], timeout=self._accounts_wait_s)\n",
            "",
            "tests/integration/test_lifecycle.py::test_a_top_up_under_way_is_over_before_the_request_is_settled",
        ),
        (
            "engine/core/gpu_time.py",
            "charge device time of recomputation",
            "        if again > 0:\n",
            "        if again < 0:\n",
            "tests/unit/engine/core/test_gpu_time.py",
        ),
        (
            "engine/scheduling/counters.py",
            "ignore the weights",
            "    return round(cost * COUNTER_SCALE / weight)",
            "    return round(cost * COUNTER_SCALE)",
            "tests/unit/engine/scheduling/order/test_vtc.py",
        ),
        (
            f"{COMPOSE}/turns.py",
            "steps: turns do not look at weights",
            "    cost = sequence.token_charge or scaled(OUTPUT_TOKEN_COST, sequence.submit.weight)\n",
            "    cost = scaled(OUTPUT_TOKEN_COST, 1.0)\n",
            TURNS_TEST,
        ),
        (
            f"{COMPOSE}/prompt_shares.py",
            "steps: weights are ignored in prompts",
            "                    max(1, scaled(INPUT_TOKEN_COST, sequences[0].submit.weight)),\n",
            "                    scaled(INPUT_TOKEN_COST, 1.0),\n",
            f"{STEPS_TEST}::test_prompts_share_by_weight_within_a_chunk",
        ),
        (
            COUNTERS,
            "steps: a token counts twice",
            "        self._offsets[key] = had - heard\n",
            "        self._offsets[key] = had\n",
            COUNTERS_TEST,
        ),
        (
            "engine/core/tenant_charges.py",
            "steps: a charge ahead is taken for service",
            "submit.had, submit.heard)",
            "submit.counter, submit.heard)",
            f"{CORE_TEST}::test_a_gateway_has_charged_ahead_so_that_no_token_counts_twice",
        ),
        (
            "engine/core/tenant_charges.py",
            "steps: what a gateway charged ahead is charged again",
            "if tenant_id not in self._told]",
            "if tenant_id]",
            f"{CORE_TEST}::test_a_gateway_has_charged_ahead_so_that_no_token_counts_twice",
        ),
        (
            COUNTERS,
            "steps: a tenant served whole saves up in a contest",
            "        for tenant_id in whole:\n            self.lift(tier, tenant_id, lowest)\n",
            "",
            COUNTERS_TEST,
        ),
        (
            "engine/scheduling/order/edf.py",
            "targets: a client's word takes places from other tenants",
            "    def _terms(self, entry: QueueEntry) -> Terms:\n",
            (
                "    def _terms(self, entry: QueueEntry) -> Terms:\n"
                "        if entry.own_deadline_s is not None:\n"
                "            return (entry.own_deadline_s,)\n"
            ),
            ORDERS,
        ),
        (
            "engine/scheduling/order/priority.py",
            "targets: a client's word makes its tenant more urgent",
            "_slack_s(entry, entry.deadline_s)\n            +",
            "_slack_s(entry, entry.own_deadline_s or entry.deadline_s)\n            +",
            ORDERS,
        ),
        (
            STEPS,
            "plugin: tokens that were not planned are taken as they are",
            "            if tokens > planned and not (planned and self._aligns_chunks):\n",
            "            if tokens < 0:\n",
            f"{PLUGIN_STEPS_TEST}::test_a_difference_between_plan_and_step_is_never_silent",
        ),
        (
            "engine/vllm_plugin/planner.py",
            "plugin: one tenant keeps every place",
            "        is_owed = seats * sum(weights.values()) < table.most_decodes * head.weight\n",
            "        is_owed = False\n",
            f"{PLUGIN_STEPS_TEST}::test_a_tenant_below_its_share_gets_places_though_all_are_taken",
        ),
        (
            "engine/vllm_plugin/channel/claims_check.py",
            "channel: a signature is good more than once",
            "        if not self._seen.is_first(",
            "        if False and not self._seen.is_first(",
            f"{DESK}::test_a_signature_is_good_once",
        ),
        (
            "engine/vllm_plugin/channel/gateways.py",
            "channel: service is told once, heard or not",
            "        if heard >= self._told_at:\n            self._told = {}\n",
            "        self._told = {}\n",
            "tests/property/test_plugin_reports.py",
        ),
        (
            "engine/process/loop.py",
            "link: a gateway cancels what is another's",
            "            if self._owns(session, command.sequence_id):\n                self._core.cancel(",
            "            if session:\n                self._core.cancel(",
            f"{ATTACKS}::test_a_gateway_reaches_no_sequence_and_no_outcome_of_another",
        ),
        (
            "engine/process/server.py",
            "link: any key of a gateway is taken",
            "return domain == DOMAIN and public_key == self._public_key",
            "return domain == DOMAIN",
            f"{ATTACKS}::test_a_stranger_on_tcp_gets_no_word_from_an_engine_that_serves_its_gateway",
        ),
        (
            "engine/process/sessions.py",
            "link: a superseded gateway fights back",
            "if superseded is not None and identity in self._superseded:",
            "if False:",
            "tests/unit/engine/process/test_sessions.py::test_a_superseded_session_does_not_fight_back",
        ),
        (
            "gateway/upstream/vllm_plugin/channel_state.py",
            "link: outcomes of all choices count as the first one's",
            "            index=submit.index,\n",
            "",
            f"{STATE}::test_claims_are_those_of_the_sequence_and_each_attempt_has_an_id_of_its_own",
        ),
    ]
)
