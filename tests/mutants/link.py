"""Mutants of the link between gateways and engines, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

ATTACKS = "tests/attack/test_engine_messages.py"
LOOP = "tests/integration/test_engine_loop.py"
PLUGGED = "tests/integration/test_plugged_vllm.py"
PARSE = "tests/unit/gateway/requests/test_parse.py"
SERVERS = "tests/unit/gateway/requests/fields/test_servers.py"
STATE = "tests/unit/gateway/upstream/vllm_plugin/test_channel_state.py"

_BROKEN: list[Broken] = [
    (
        "engine/process/loop.py",
        "a gateway cancels what is another's",
        "            if self._owns(session, command.sequence_id):\n                self._core.cancel(",
        "            if session:\n                self._core.cancel(",
        f"{ATTACKS}::test_a_gateway_reaches_no_sequence_and_no_outcome_of_another",
    ),
    (
        "engine/process/outcomes.py",
        "a gateway acknowledges what is another's",
        "if held is not None and held.gateway_id == gateway_id:",
        "if held is not None:",
        "tests/unit/engine/process/test_outcomes.py",
    ),
    (
        "engine/process/server.py",
        "any key of a gateway is taken",
        "return domain == DOMAIN and public_key == self._public_key",
        "return domain == DOMAIN",
        f"{ATTACKS}::test_a_stranger_on_tcp_gets_no_word_from_an_engine_that_serves_its_gateway",
    ),
    (
        "engine/client/client.py",
        "no thread speaks for a busy loop",
        "            self._liveness.session = ready.session\n",
        '            self._liveness.session = ""\n',
        f"{LOOP}::test_a_gateway_whose_loop_stands_still_keeps_its_streams",
    ),
    (
        "engine/client/liveness.py",
        "the thread speaks for a loop that stands still for ever",
        "if self.session and self._clock() - self._turned_s < self._patience_s:",
        "if self.session:",
        "tests/unit/engine/client/test_liveness.py",
    ),
    (
        "engine/client/client.py",
        "one inventory without it loses a sequence",
        "if stream.missed >= MOST_MISSED:",
        "if stream.missed >= 1:",
        f"{LOOP}::test_a_stream_that_the_engine_does_not_have_is_lost_after_two_inventories",
    ),
    (
        "engine/process/sessions.py",
        "a superseded gateway fights back",
        "if superseded is not None and identity in self._superseded:",
        "if False:",
        "tests/unit/engine/process/test_sessions.py::test_a_superseded_session_does_not_fight_back",
    ),
    (
        "engine/messages.py",
        "bytes that are no UTF-8 end the engine",
        "        command: Command = _decode_command(payload)\n        return command\n"
        "    except (UnicodeDecodeError, RecursionError) as error:",
        "        command: Command = _decode_command(payload)\n        return command\n"
        "    except RecursionError as error:",
        "tests/property/test_fuzz_engine_messages.py",
    ),
    (
        "gateway/upstream/vllm_plugin/channel_state.py",
        "a lease is said once to a plug-in",
        "max(begun.submit.lease_tokens, known.lease_tokens)",
        "max(begun.submit.lease_tokens, begun.lease_tokens * bool(self.report and self.report.step > 1))",
        f"{STATE}::test_a_lease_is_said_until_a_report_shows_it",
    ),
    (
        "gateway/upstream/vllm_plugin/channel_state.py",
        "outcomes of all choices count as the first one's",
        "            index=submit.index,\n",
        "",
        f"{STATE}::test_claims_are_those_of_the_sequence_and_each_attempt_has_an_id_of_its_own",
    ),
    (
        "gateway/upstream/openai/server_kinds.py",
        "tools that may not be called are read as text by our own engine",
        "        idle.update(TOOL_FIELDS)\n",
        "        pass\n",
        f"{PARSE}::test_tools_that_may_not_be_called_add_nothing_to_our_own_engines_prompt",
    ),
    (
        "gateway/upstream/openai/server_kinds.py",
        "a server without a count is asked to hide what it generates",
        '    "include_reasoning", "separate_reasoning", "stream_reasoning", "echo", *MEDIA_NEEDS\n',
        '    "echo", *MEDIA_NEEDS\n',
        f"{SERVERS}::test_fields_that_hide_output_or_change_the_prompt_need_the_servers_own_count",
    ),
    (
        "gateway/upstream/openai/server_kinds.py",
        "a server without a count writes prompts that are not counted here",
        "COUNTED_FIELDS = PROMPT_FIELDS | {\n",
        "COUNTED_FIELDS = set[str]() | {\n",
        f"{SERVERS}::test_fields_that_hide_output_or_change_the_prompt_need_the_servers_own_count",
    ),
    (
        "gateway/upstream/vllm_plugin/channel_state.py",
        "what a vLLM's stream holds back when its lease ends is waited for",
        'if each.state == "parked"}',
        'if each.state == "held"}',
        f"{PLUGGED}::test_what_the_stream_of_a_resting_sequence_lacks_counts_when_its_reader_has_read",
    ),
    (
        "gateway/upstream/openai/sequence.py",
        "a reader that does not read gets longer leases of a vLLM",
        "if not self._is_over and not self._deltas:\n            self._lease.emitted(",
        "if not self._is_over:\n            self._lease.emitted(",
        f"{PLUGGED}::test_what_the_stream_of_a_resting_sequence_lacks_counts_when_its_reader_has_read",
    ),
    (
        "gateway/upstream/openai/upstream.py",
        "a server whose plug-in does not answer is used",
        "return self._monitor.is_up and (self._link is None or self._link.is_up)",
        "return self._monitor.is_up",
        f"{PLUGGED}::test_a_server_without_the_plugin_is_not_used_and_says_what_to_do",
    ),
    (
        "gateway/upstream/openai/sequence.py",
        "an answer that a plug-in ended for want of contact is complete",
        "            if not self._stop_cause:\n                self._ended_early()\n",
        "            if self._stop_cause == finish:\n                self._ended_early()\n",
        f"{PLUGGED}::test_a_server_that_lost_contact_ends_what_rests_and_the_answer_fails",
    ),
]

LINK_MUTATIONS = mutations_of("link", _BROKEN)
