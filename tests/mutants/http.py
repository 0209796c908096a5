"""Mutants of HTTP: what answers and refusals tell, in whose words, and what bounds a hostile client."""

from __future__ import annotations

from tests.mutants.mutations import mutations_of

REFUSALS = "tests/unit/gateway/test_error_mapping.py"
HEADERS = "tests/unit/gateway/test_response_headers.py"
ADMISSION = "tests/unit/gateway/dispatch/test_admission.py"
BREAKER = "tests/unit/gateway/upstream/test_breaker.py"
PARTS = "tests/unit/gateway/upstream/test_answer_parts.py"
STREAM = "tests/unit/gateway/upstream/test_openai_response.py"
UPSTREAM = "tests/integration/test_openai_upstream.py"
CLIENT = "tests/unit/gateway/http/test_client_address.py"
TABLE = "tests/unit/gateway/http/test_connection_table.py"
THREADS = "tests/unit/gateway/test_fair_threads.py"
ACTS = "tests/integration/test_acts_in_force.py"
ASKED = "test_another_gateways_question_is_answered_about_the_askers_own_requests_only"
SPECIAL = "tests/unit/gateway/requests/test_special_tokens.py"

HTTP_MUTATIONS = mutations_of(
    [
        (
            "gateway/http/authentication.py",
            "http: of two different keys the first one pays",
            "    if len(credentials) > 1:\n",
            "    if False:\n",
            "tests/e2e/test_bad_input.py::test_a_key_may_stand_in_the_header_of_azures_clients_and_never_beside_another",
        ),
        (
            "gateway/upstream/openai/response.py",
            "http: a server's reason reaches a client with its keys",
            "    reason, field = without_secrets(said(error), *known), _field_of(error)\n",
            "    reason, field = said(error), _field_of(error)\n",
            STREAM,
        ),
        (
            "gateway/upstream/openai/sequence.py",
            "http: a server's words that repeat a prompt go into the log",
            'f"it refuses the request ({error.code})" if isinstance(error, SequenceRefused) else str(error)',
            "str(error)",
            UPSTREAM,
        ),
        (
            "gateway/routes/context.py",
            "http: a prompt goes into the log",
            "    return await read_json_body(request, most_bytes, config.body_timeout_s, reserved.grow)\n",
            (
                "    body = await read_json_body(request, most_bytes, config.body_timeout_s, reserved.grow)\n"
                "    __import__('sys').stderr.write(repr(body))\n"
                "    return body\n"
            ),
            "tests/attack/test_canaries.py",
        ),
        (
            "gateway/upstream/openai/outcome.py",
            "http: a server's count of an estimated prompt has no bound",
            "            prompt_tokens = min(prompt_tokens, usage.prompt_tokens)\n",
            "            prompt_tokens = usage.prompt_tokens\n",
            "tests/unit/gateway/upstream/test_openai_outcome.py",
        ),
        (
            "gateway/requests/inputs/large_bodies.py",
            "http: one tenant takes the memory of all large bodies",
            "is_of_tenant = of_tenant > self._most_bytes // SHARE_OF_ONE\n",
            "is_of_tenant = of_tenant > self._most_bytes\n",
            "tests/unit/gateway/requests/inputs/test_large_bodies.py",
        ),
        (
            "gateway/requests/inputs/media.py",
            "http: a private name is an image's address",
            '    if config.image_addresses == "public" and not _has_public_name(url):\n',
            "    if False:\n",
            "tests/unit/gateway/requests/inputs/test_media.py",
        ),
        (
            "gateway/requests/lifecycle.py",
            "http: limits are not asked again at a request's turn",
            "while self._still_admitted(run) and await self._under_limits_in_force(run):",
            "while self._still_admitted(run) and False:",
            f"{ACTS}::test_where_it_has_no_room_at_its_turn_it_is_refused_and_refunded",
        ),
        (
            "gateway/requests/lifecycle.py",
            "http: a key is not asked again at a request's turn",
            "while self._still_admitted(run) and await self._under_limits_in_force(run):",
            "while await self._under_limits_in_force(run):",
            f"{ACTS}::test_what_waits_under_a_suspended_tenant_ends_refunded",
        ),
        (
            "tenants/quota/rules.py",
            "http: a rate that did not bind holds no more once it does",
            "    if not is_exact(limit):\n        return part\n    return replace(part",
            "    return part\n    return replace(part",
            f"{ACTS}::test_a_rate_that_only_watched_what_runs_holds_all_of_it_once_it_is_hard",
        ),
        (
            "gateway/http/connection_table.py",
            "http: an address has all connections",
            "        if used + self._shared.add(address, 1) >= self.limits.max_per_address:\n",
            "        if False:\n",
            TABLE,
        ),
        (
            "gateway/http/client_address.py",
            "http: of two headers that disagree one is believed",
            "    return found.pop() if len(found) == 1 else None\n",
            "    return found.pop()\n",
            CLIENT,
        ),
        (
            "gateway/dispatch/admission.py",
            "http: what a request could cost is its price without an answer",
            "most_nanousd = price(call.input_tokens, 0, call.max_output_tokens)",
            "most_nanousd = price(call.input_tokens, 0, 0)",
            ADMISSION,
        ),
        (
            "gateway/http/client_address.py",
            "http: a client behind a trusted proxy names its own address",
            "    for hop in reversed(hops):\n",
            "    for hop in hops:\n",
            CLIENT,
        ),
        (
            "gateway/errors.py",
            "http: a stream that was charged is tried again",
            '            should_retry = values["charged_tokens"] == 0\n',
            "            should_retry = True\n",
            REFUSALS,
        ),
        (
            "gateway/error_mapping.py",
            "http: a tenant reads the numbers of the platform's limit",
            "    is_ours = is_platforms(denied.limit)\n",
            "    is_ours = False\n",
            REFUSALS,
        ),
        (
            "gateway/response_headers.py",
            "http: headers show the platform's limit",
            "    states = [state for state in states if not is_platforms(state.limit)]\n",
            "",
            REFUSALS,
        ),
        (
            "gateway/response_headers.py",
            "http: a tenant's name writes headers",
            'character if " " <= character <= "~" else "?"',
            "character",
            HEADERS,
        ),
        (
            "gateway/pools/request_actions.py",
            "http: a tenant lists the requests of all",
            "tenant_id = ask.tenant_id if ask.tenant_id is not None else ask.of_tenant or None",
            "tenant_id = ask.of_tenant or None",
            f"tests/integration/test_tier_moves.py::{ASKED}",
        ),
        (
            "tenants/admin/cursor.py",
            "http: a cursor continues any list",
            "    if made_with != given(filters):\n",
            "    if False:\n",
            "tests/unit/tenants/admin/test_cursor.py",
        ),
        (
            "tenants/admin/transaction.py",
            "http: a change made for another state goes through",
            "    require_match(if_match, done.before)\n",
            "",
            "tests/integration/test_entity_tags.py",
        ),
        (
            "tenants/directory/directory.py",
            "http: the keys of a suspended project go on",
            '    elif project.status != "active":\n        refusal = "project_suspended"\n',
            "",
            "tests/integration/test_directory.py::test_each_reason_for_a_refusal",
        ),
        (
            "gateway/upstream/openai/token_count.py",
            "http: text beyond what was asked for goes on",
            "                    self.fits = start + at + self._fitting(others + text.settled, before, part)\n",
            "                    self._fitting(others + text.settled, before, part)\n",
            STREAM,
        ),
        (
            "gateway/upstream/openai/token_count.py",
            "http: words of tool calls count for nothing",
            "            texts.append(part.text if part.is_plain else text.call.words(part.text))\n",
            '            texts.append(part.text if part.is_plain else "")\n',
            f"{PARTS}::test_a_usage_below_the_words_of_a_tool_call_is_not_believed",
        ),
        (
            "gateway/upstream/openai/token_count.py",
            "http: a usage below the text is believed",
            "        return said is not None and is_said and not self._is_above(said.completion_tokens)\n",
            "        return said is not None and is_said\n",
            f"{UPSTREAM}::test_a_usage_that_contradicts_the_text_or_the_request_is_marked",
        ),
        (
            "gateway/upstream/openai/outcome.py",
            "http: hits in a cache that tenants share are told",
            "        if is_cache_told:\n",
            "        if True:\n",
            f"{UPSTREAM}::test_a_tenants_salt_goes_to_servers_that_take_it",
        ),
        (
            "gateway/upstream/openai/request.py",
            "http: all tenants have one cache salt",
            "hmac.new(secret, tenant_id.encode(), hashlib.sha256)",
            'hmac.new(secret, b"", hashlib.sha256)',
            f"{UPSTREAM}::test_a_tenants_salt_goes_to_servers_that_take_it",
        ),
        (
            "gateway/upstream/health/breaker.py",
            "http: a request that failed opens it",
            "        self._is_suspected = True\n",
            "        self._is_suspected, self._open_until_s = True, math.inf\n",
            f"{BREAKER}::test_failed_requests_alone_never_open_it",
        ),
        (
            "gateway/dispatch/failing_tenants.py",
            "http: another tenant waits for one whose requests keep failing",
            "        found = self._tenants.get(tenant_id)\n",
            "        found = next(iter(self._tenants.values()), None)\n",
            "tests/unit/gateway/dispatch/test_failing_tenants.py",
        ),
        (
            "gateway/fair_threads.py",
            "http: one tenant takes every thread",
            "return self._free > 0 and self._running[tenant_id] < self._most_of_one",
            "return self._free > 0",
            THREADS,
        ),
        (
            "gateway/requests/prompt.py",
            "text: a special token in a text counts as one",
            "            ids += self._plain_ids(text, spot.field)\n",
            "            ids += self._encode([rendered[spot.begin : spot.end]])\n",
            SPECIAL,
        ),
        (
            "gateway/upstream/openai/request.py",
            "text: a client's field goes before what the gateway decides",
            '    found: dict[str, Any] = {**wording.fields, **wording.sampling, "model": model}\n',
            '    found: dict[str, Any] = {"model": model, **wording.fields, **wording.sampling}\n',
            "tests/unit/gateway/upstream/test_capability_trial.py",
        ),
    ]
)

EVENTS, EVENTS_TEST = (
    "gateway/requests/dialects/response_events.py",
    "tests/unit/gateway/requests/dialects/test_response_events.py",
)
BLOCKS, BLOCKS_TEST = (
    "gateway/requests/dialects/message_events.py",
    "tests/unit/gateway/requests/dialects/test_message_events.py",
)
ITEMS_TEST = "tests/unit/gateway/requests/dialects/test_responses.py"
DIALECT_MUTATIONS = mutations_of(
    [
        (EVENTS, "responses: items are never closed", "return self._close_all()", 'return b""', EVENTS_TEST),
        (EVENTS, "responses: a budget's end is called complete", '== "length" else None', '== "" else None', EVENTS_TEST),
        (BLOCKS, "messages: calls side by side are mixed", "return bool(self._held) or (self._open == CALL and ", "return False and (", BLOCKS_TEST),
        (BLOCKS, "messages: cached tokens are counted twice", '"input_tokens": input_tokens - cached_tokens,', '"input_tokens": input_tokens,', BLOCKS_TEST),
        ("gateway/requests/fields/tools.py", "dialects: two tools of one name are passed on", "if (name := _name_of(tool)) in known:", "if (name := _name_of(tool)) in ():", ITEMS_TEST),
        ("gateway/requests/dialects/translation.py", "dialects: refusals name a chat's fields", "return self.names[prefix] + field[len(prefix) :]", "return field", ITEMS_TEST),
        ("tenants/admin/lists/sessions.py", "sessions: another tenant's calls are shown", "select(names, at_us).where(timelines.c.tenant_id == tenant_id,", "select(names, at_us).where(timelines.c.tenant_id != '',", "tests/integration/test_sessions.py"),
        ("tenants/csv_table.py", "csv: a text runs as a formula", "isinstance(value, str) and value.startswith(FORMULA_STARTS)", "False", "tests/unit/tenants/usage/test_export.py"),
    ]
)  # fmt: skip
