"""Mutants of HTTP, and the test that has to notice each.

What answers and refusals tell a client, in whose words, and when its SDK tries again; what operators see and
shut; what is made of the answers of other servers, and when they are left alone.
"""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

REFUSALS = "tests/unit/gateway/test_error_mapping.py"
HEADERS = "tests/unit/gateway/test_response_headers.py"
ADMISSION = "tests/unit/gateway/dispatch/test_admission.py"
PROGRESS = "tests/unit/gateway/requests/test_queue_progress.py"
BREAKER = "tests/unit/gateway/upstream/test_breaker.py"
PARTS = "tests/unit/gateway/upstream/test_answer_parts.py"
STREAM = "tests/unit/gateway/upstream/test_openai_response.py"
UPSTREAM = "tests/integration/test_openai_upstream.py"
CLIENT = "tests/unit/gateway/http/test_client_address.py"
CONNECTION = "tests/unit/gateway/http/test_bounded_http.py"
TABLE = "tests/unit/gateway/http/test_connection_table.py"
RUN = "tests/unit/gateway/requests/test_run.py"
PARSE = "tests/unit/gateway/requests/test_parse.py"
RECORDED = "tests/e2e/test_recorded_servers.py"
THREADS = "tests/unit/gateway/test_fair_threads.py"
LIFECYCLE = "tests/integration/test_lifecycle.py"
ACTS = "tests/integration/test_acts_in_force.py"
ASKED = "test_another_gateways_question_is_answered_about_the_askers_own_requests_only"

_BROKEN: list[Broken] = [
    # ---- whose key it is
    (
        "gateway/http/authentication.py",
        "of two different keys the first one pays",
        "    if len(credentials) > 1:\n",
        "    if False:\n",
        "tests/e2e/test_bad_input.py::test_a_key_may_stand_in_the_header_of_azures_clients_and_never_beside_another",
    ),
    # ---- what another server says of a request
    (
        "gateway/upstream/openai/response.py",
        "a server's reason reaches a client with its keys",
        "    reason, field = without_secrets(said(error), *known), _field_of(error)\n",
        "    reason, field = said(error), _field_of(error)\n",
        STREAM,
    ),
    (
        "gateway/upstream/openai/sequence.py",
        "a server's words that repeat a prompt go into the log",
        'f"it refuses the request ({error.code})" if isinstance(error, SequenceRefused) else str(error)',
        "str(error)",
        UPSTREAM,
    ),
    # ---- what is written nowhere
    (
        "gateway/routes/context.py",
        "a prompt goes into the log",
        "        yield await read_json_body(request, most_bytes, config.body_timeout_s, reserved.grow)\n",
        "        body = await read_json_body(request, most_bytes, config.body_timeout_s, reserved.grow)\n"
        "        __import__('sys').stderr.write(repr(body))\n"
        "        yield body\n",
        "tests/attack/test_canaries.py",
    ),
    # ---- what only its server can count, and what is large
    (
        "gateway/upstream/openai/outcome.py",
        "a server's count of an estimated prompt has no bound",
        "            prompt_tokens = min(prompt_tokens, usage.prompt_tokens)\n",
        "            prompt_tokens = usage.prompt_tokens\n",
        "tests/unit/gateway/upstream/test_openai_outcome.py",
    ),
    (
        "gateway/requests/inputs/large_bodies.py",
        "one tenant takes the memory of all large bodies",
        "self._of_tenant[tenant_id] + num_bytes > self._most_bytes // SHARE_OF_ONE:",
        "self._of_tenant[tenant_id] + num_bytes > self._most_bytes:",
        "tests/unit/gateway/requests/inputs/test_large_bodies.py",
    ),
    (
        "gateway/upstream/openai/response_reader.py",
        "an echoed prompt counts as output",
        "        return [echoed], replace(chunk, text=text[length:], logprobs=())\n",
        "        return [], chunk\n",
        PARTS,
    ),
    (
        "gateway/requests/inputs/media.py",
        "any scheme is an image's address",
        '    if scheme not in ("http", "https") or not rest.startswith("//"):\n',
        "    if not colon:\n",
        "tests/unit/gateway/requests/inputs/test_media.py",
    ),
    (
        "gateway/requests/inputs/media.py",
        "a private name is an image's address",
        '    if config.image_addresses == "public" and not _has_public_name(url):\n',
        "    if False:\n",
        "tests/unit/gateway/requests/inputs/test_media.py",
    ),
    (
        "gateway/upstream/openai/vectors.py",
        "any list is the vectors of what was asked",
        "    if sorted(each.index for each in data) != list(range(inputs)):\n",
        "    if not data:\n",
        "tests/unit/gateway/upstream/test_openai_vectors.py",
    ),
    # ---- what an admin act does to requests that wait and run
    (
        "gateway/requests/lifecycle.py",
        "limits are not asked again at a request's turn",
        "while self._still_admitted(run) and await self._under_limits_in_force(run):",
        "while self._still_admitted(run) and False:",
        f"{ACTS}::test_where_it_has_no_room_at_its_turn_it_is_refused_and_refunded",
    ),
    (
        "gateway/requests/lifecycle.py",
        "a key is not asked again at a request's turn",
        "while self._still_admitted(run) and await self._under_limits_in_force(run):",
        "while await self._under_limits_in_force(run):",
        f"{ACTS}::test_what_waits_under_a_suspended_tenant_ends_refunded",
    ),
    (
        "gateway/requests/lifecycle.py",
        "a request is held on the limits of its look-up",
        "        run.call = replace(run.call, principal=principal)\n        return True\n",
        "        return True\n",
        f"{ACTS}::test_a_request_is_held_on_the_limits_of_the_moment_whenever_it_was_authenticated",
    ),
    (
        "gateway/budget/holds.py",
        "the ledger does not name the counters of later limits",
        "epoch, charged_to=answer.charged_to\n",
        "epoch\n",
        f"{ACTS}::test_a_limit_that_was_set_while_a_request_waited_counts_it_from_its_turn_on",
    ),
    (
        "tenants/quota/rules.py",
        "a rate that did not bind holds no more once it does",
        "    if not is_exact(limit):\n        return part\n    return replace(part",
        "    return part\n    return replace(part",
        f"{ACTS}::test_a_rate_that_only_watched_what_runs_holds_all_of_it_once_it_is_hard",
    ),
    (
        "gateway/budget/holds.py",
        "a limit that comes later counts only what was durable before",
        "async with live.changing:\n            may_be_cut",
        "if True:\n            may_be_cut",
        f"{ACTS}::test_a_limit_that_comes_while_a_top_up_is_written_holds_that_as_well",
    ),
    (
        "gateway/requests/lifecycle.py",
        "what ends waits for what goes on",
        "for run, task in list(self._tasks.items()) if self._still_admitted(run)]",
        "for run, task in list(self._tasks.items())]",
        f"{ACTS}::test_what_is_to_end_now_waits_for_no_other_request",
    ),
    (
        "tenants/directory/gateways.py",
        "an earlier revision confirms a later act",
        "each.served_revision is None or each.served_revision < revision",
        "each.served_revision is None",
        f"{ACTS}::test_an_act_waits_for_every_gateway_that_lives",
    ),
    # ---- what is bounded before any key is read
    (
        "gateway/http/bounded_http.py",
        "a head may be as large as memory",
        "        if self._head_bytes > self._max_head_bytes or ",
        "        if ",
        CONNECTION,
    ),
    (
        "gateway/http/bounded_http.py",
        "what the parser keeps for itself has no bound",
        "        if self._unreported_bytes > self._max_head_bytes:\n",
        "        if False:\n",
        CONNECTION,
    ),
    (
        "gateway/http/bounded_http.py",
        "a trailer is a header",
        "        if self._in_head:\n            name = name.lower()\n",
        "        if True:\n            name = name.lower()\n",
        CONNECTION,
    ),
    (
        "gateway/http/bounded_http.py",
        "each drop of a head gives it its time anew",
        "        elif self._in_head and not self._head_is_timed:\n",
        "        elif self._in_head:\n",
        CONNECTION,
    ),
    (
        "gateway/http/bounded_http.py",
        "a request that comes too early is run",
        "            self._stop_listening()\n            raise _Stop\n",
        "            pass\n",
        CONNECTION,
    ),
    (
        "gateway/http/bounded_http.py",
        "an answer that is not read keeps its connection open",
        "            if not cycle.response_complete:\n",
        "            if False:\n",
        CONNECTION,
    ),
    (
        "gateway/http/bounded_http.py",
        "behind a proxy an address has any number of requests",
        "            if self._is_proxy:\n",
        "            if False:\n",
        CONNECTION,
    ),
    (
        "gateway/http/connection_table.py",
        "connections with a key give way first",
        "for group in self._resting for each in group), None)",
        "for group in self._resting[::-1] for each in group), None)",
        TABLE,
    ),
    (
        "gateway/http/connection_table.py",
        "an address has all connections",
        "        if used >= self.limits.max_per_address:\n",
        "        if False:\n",
        TABLE,
    ),
    (
        "tenants/networks.py",
        "each address of a subscriber counts for itself",
        "    return IPv6Network((int(address) >> 64 << 64, 64))\n",
        "    return IPv6Network((int(address), 128))\n",
        CONNECTION,
    ),
    (
        "gateway/http/client_address.py",
        "of two headers that disagree one is believed",
        "    return found.pop() if len(found) == 1 else None\n",
        "    return found.pop()\n",
        CLIENT,
    ),
    (
        "gateway/requests/run.py",
        "what waits for a client that does not read is counted in pieces only",
        " and self._waiting_bytes < self.most_bytes",
        "",
        RUN,
    ),
    # ---- what a client is told, and may bound, before it waits
    (
        "gateway/dispatch/admission.py",
        "the longest wait that a client allows is not looked at",
        "        if expected_s > call.max_wait_s:\n",
        "        if False:\n",
        ADMISSION,
    ),
    (
        "gateway/dispatch/admission.py",
        "what a request could cost is its price without an answer",
        "most_nanousd = price(call.input_tokens, 0, call.max_output_tokens)",
        "most_nanousd = price(call.input_tokens, 0, 0)",
        ADMISSION,
    ),
    (
        "gateway/requests/queue_progress.py",
        "a stream whose wait was not foreseen hears of it with its first token",
        "    return max(0.0, tell_after_s - waited_s)\n",
        "    return None\n",
        PROGRESS,
    ),
    # ---- where a request comes from, what it is labelled with, how long it may wait
    (
        "gateway/http/client_address.py",
        "a client behind a trusted proxy names its own address",
        "    for hop in reversed(hops):\n",
        "    for hop in hops:\n",
        CLIENT,
    ),
    (
        "gateway/http/client_address.py",
        "any peer is taken for a proxy",
        "        if found is None or not is_within(found, trusted):\n            break\n",
        "",
        CLIENT,
    ),
    (
        "gateway/requests/parse.py",
        "a label takes any value",
        "        if value not in declared.get(key, (value,)):\n",
        "        if False:\n",
        PARSE,
    ),
    (
        "gateway/requests/lifecycle.py",
        "a client's timeout goes before every tier's",
        "call.tier is Tier.BATCH and call.names_timeout",
        "call.names_timeout",
        LIFECYCLE,
    ),
    # ---- what a refusal tells
    (
        "gateway/errors.py",
        "nobody hears when to come back, to the millisecond",
        '            headers["retry-after-ms"] = str(_milliseconds(self.retry_after_s))\n',
        "",
        REFUSALS,
    ),
    (
        "gateway/errors.py",
        "nobody hears whether it is worth another try",
        '            headers["x-should-retry"] = "true" if self.should_retry else "false"\n',
        "            pass\n",
        REFUSALS,
    ),
    (
        "gateway/response_headers.py",
        "headers tell of the loosest limit",
        "tightest = min(matching",
        "tightest = max(matching",
        HEADERS,
    ),
    (
        "gateway/response_headers.py",
        "headers tell of limits that refuse nothing",
        "hard = [state for state in states if state.limit.mode is LimitMode.HARD]",
        "hard = list(states)",
        REFUSALS,
    ),
    (
        "gateway/errors.py",
        "a spent budget is worth another try",
        'type="insufficient_quota", should_retry=False)',
        'type="insufficient_quota", should_retry=True)',
        HEADERS,
    ),
    (
        "gateway/errors.py",
        "a stream that was charged is tried again",
        '            should_retry = values["charged_tokens"] == 0\n',
        "            should_retry = True\n",
        REFUSALS,
    ),
    (
        "gateway/errors.py",
        "a broken stream does not say whether it is worth another try",
        '            "should_retry": self.should_retry,\n',
        "",
        REFUSALS,
    ),
    (
        "gateway/http/openai_responses.py",
        "a stream breaks off without a name for it",
        'return b"event: error\\n" + event(value)',
        "return event(value)",
        REFUSALS,
    ),
    (
        "gateway/error_mapping.py",
        "a client is told to sleep for hours",
        "if retry_after_s is not None and retry_after_s <= LONGEST_RETRY_S:",
        "if retry_after_s is not None:",
        HEADERS,
    ),
    (
        "gateway/error_mapping.py",
        "a refusal by a limit does not show the limits",
        "    error.headers.update(limit_headers(denied.states))\n",
        "",
        REFUSALS,
    ),
    (
        "gateway/error_mapping.py",
        "a tenant reads the numbers of the platform's limit",
        "    is_ours = is_platforms(denied.limit)\n",
        "    is_ours = False\n",
        REFUSALS,
    ),
    (
        "gateway/response_headers.py",
        "headers show the platform's limit",
        "    states = [state for state in states if not is_platforms(state.limit)]\n",
        "",
        REFUSALS,
    ),
    (
        "gateway/error_mapping.py",
        "a driver speaks to the client",
        "    return errors.internal(request_id=request_id)\n",
        '    return errors.internal(request_id=f"{request_id} {exception}")\n',
        HEADERS,
    ),
    (
        "gateway/response_headers.py",
        "a limit resets too early",
        "    whole = math.ceil(seconds)\n",
        "    whole = math.floor(seconds)\n",
        HEADERS,
    ),
    (
        "gateway/response_headers.py",
        "however many limits there are all are named",
        "for state in hard[:MAX_POLICIES]:",
        "for state in hard:",
        REFUSALS,
    ),
    (
        "gateway/response_headers.py",
        "a tenant's name writes headers",
        'character if " " <= character <= "~" else "?"',
        "character",
        HEADERS,
    ),
    (
        "gateway/http/asgi.py",
        "of a header that comes twice the last counts",
        'found.setdefault(name.decode("latin-1"), value.decode("latin-1"))',
        'found[name.decode("latin-1")] = value.decode("latin-1")',
        "tests/unit/gateway/http/test_asgi.py",
    ),
    # ---- operators
    (
        "gateway/pools/request_actions.py",
        "a tenant lists the requests of all",
        "tenant_id = ask.tenant_id if ask.tenant_id is not None else ask.of_tenant or None",
        "tenant_id = ask.of_tenant or None",
        f"tests/integration/test_tier_moves.py::{ASKED}",
    ),
    (
        "tenants/admin/cursor.py",
        "a cursor continues any list",
        "    if made_with != given(filters):\n",
        "    if False:\n",
        "tests/unit/tenants/admin/test_cursor.py",
    ),
    (
        "tenants/admin/transaction.py",
        "a change made for another state goes through",
        "    etag.check(if_match, done.before)\n",
        "",
        "tests/integration/test_entity_tags.py",
    ),
    (
        "tenants/admin/lists/requests.py",
        "a request with two misses is listed twice",
        "                along.append(_is_its_first_miss())\n",
        "",
        "tests/integration/test_pages.py",
    ),
    (
        "tenants/directory/directory.py",
        "the keys of a suspended project go on",
        '    elif project.status != "active":\n        refusal = "project_suspended"\n',
        "",
        "tests/integration/test_directory.py::test_each_reason_for_a_refusal",
    ),
    # ---- other servers
    (
        "gateway/upstream/openai/response.py",
        "a server that is full is broken",
        "    if status == 429:\n        return Meaning.BUSY\n",
        "",
        STREAM,
    ),
    (
        "gateway/upstream/openai/response.py",
        "what a server refuses of ours the client did wrong",
        "status in (400, 413, 422)",
        "status in (400, 401, 404, 413, 422)",
        STREAM,
    ),
    (
        "gateway/upstream/http/sse.py",
        "an event may be as large as memory",
        "if size > self._max_event_bytes:",
        "if False:",
        STREAM,
    ),
    (
        "gateway/upstream/http/sse.py",
        "of an event of several lines the last one counts",
        'return b"\\n".join(lines) if lines else None',
        "return lines[-1] if lines else None",
        STREAM,
    ),
    # ---- servers that lie, do not stop, or never end; what tenants learn of each other there
    (
        "gateway/upstream/openai/token_count.py",
        "text beyond what was asked for goes on",
        "                    self.fits = start + at + self._fitting(others + text.settled, before, part)\n",
        "                    self._fitting(others + text.settled, before, part)\n",
        STREAM,
    ),
    (
        "gateway/upstream/openai/token_count.py",
        "bytes without a tokenizer are not bounded",
        "        if beyond <= 0:\n",
        "        if True:\n",
        STREAM,
    ),
    (
        "gateway/upstream/openai/token_count.py",
        "words of tool calls count for nothing",
        "            texts.append(part.text if part.is_plain else text.call.words(part.text))\n",
        '            texts.append(part.text if part.is_plain else "")\n',
        f"{PARTS}::test_a_usage_below_the_words_of_a_tool_call_is_not_believed",
    ),
    (
        "gateway/upstream/part_text.py",
        "half a tool call is a whole one",
        '            return "tool_calls"\n',
        '            return ""\n',
        f"{PARTS}::test_a_tool_call_is_incomplete_until_its_arguments_have_ended",
    ),
    (
        "gateway/upstream/openai/upstream.py",
        "a server without usage goes on with tools",
        "            self._without_usage.add(kind)\n",
        "            pass\n",
        f"{UPSTREAM}::test_an_answer_without_usage_takes_away_what_only_the_server_counts",
    ),
    (
        "gateway/upstream/openai/token_count.py",
        "a usage below the text is believed",
        "        return said is not None and is_said and not self._is_above(said.completion_tokens)\n",
        "        return said is not None and is_said\n",
        f"{UPSTREAM}::test_a_usage_that_contradicts_the_text_or_the_request_is_marked",
    ),
    (
        "gateway/upstream/http/connection.py",
        "heads, chunk sizes and trailers may be as large as memory",
        "            if self._bare_bytes > MAX_HEADER_BYTES:\n",
        "            if False:\n",
        "tests/property/test_fuzz_sse.py::test_what_brings_no_content_is_bounded",
    ),
    (
        "gateway/upstream/openai/sequence.py",
        "comments keep an answer alive",
        "        if pieces or self.answer.has_begun != had_begun:\n",
        "        if True:\n",
        f"{UPSTREAM}::test_comments_and_empty_events_are_no_progress",
    ),
    (
        "gateway/upstream/openai/outcome.py",
        "hits in a cache that tenants share are told",
        "        if is_cache_told:\n",
        "        if True:\n",
        f"{UPSTREAM}::test_a_tenants_salt_goes_to_servers_that_take_it",
    ),
    (
        "gateway/upstream/openai/request.py",
        "all tenants have one cache salt",
        "hmac.new(secret, tenant_id.encode(), hashlib.sha256)",
        'hmac.new(secret, b"", hashlib.sha256)',
        f"{UPSTREAM}::test_a_tenants_salt_goes_to_servers_that_take_it",
    ),
    (
        "gateway/upstream/openai/response.py",
        "a refusal names whatever field the server names",
        "    if not steps or steps[0] not in REFUSABLE:\n",
        "    if not steps:\n",
        STREAM,
    ),
    (
        "gateway/upstream/health/breaker.py",
        "a request that failed opens it",
        "        self._is_suspected = True\n",
        "        self._is_suspected, self._open_until_s = True, math.inf\n",
        f"{BREAKER}::test_failed_requests_alone_never_open_it",
    ),
    (
        "gateway/upstream/health/breaker.py",
        "a server that stays down is tried as often as before",
        "2.0 ** min(self._openings, 30)",
        "1.0 ** min(self._openings, 30)",
        BREAKER,
    ),
    (
        "gateway/upstream/openai/monitor.py",
        "half open a client's request is let through",
        "        return self._answers and self._breaker.is_closed\n",
        "        return self._answers and self._breaker.state(now()) is not BreakerState.OPEN\n",
        f"{UPSTREAM}::test_a_server_that_gives_no_token_is_left_alone_until_it_gives_one",
    ),
    (
        "gateway/dispatch/failing_tenants.py",
        "another tenant waits for one whose requests keep failing",
        "        found = self._tenants.get(tenant_id)\n",
        "        found = next(iter(self._tenants.values()), None)\n",
        "tests/unit/gateway/dispatch/test_failing_tenants.py",
    ),
    # ---- large prompts
    (
        "gateway/fair_threads.py",
        "one tenant takes every thread",
        "return self._free > 0 and self._running[tenant_id] < self._most_of_one",
        "return self._free > 0",
        THREADS,
    ),
    (
        "gateway/fair_threads.py",
        "a tenant's next prompt goes before another's",
        "                    self._waiting.move_to_end(tenant_id)\n",
        "                    pass\n",
        THREADS,
    ),
    (
        "gateway/requests/token_bytes.py",
        "composed characters count as one byte",
        "                shrinks *= COMPOSED_BYTES\n",
        "                pass\n",
        "tests/unit/gateway/requests/test_token_bytes.py",
    ),
    (
        "gateway/requests/prompt.py",
        "ids are made before their number is judged",
        "            fits(sum(map(len, found)), True)\n",
        "            pass\n",
        "tests/unit/gateway/requests/test_prompt.py",
    ),
    # ---- what passes through
    (
        "gateway/requests/parse.py",
        "nothing is held for tools",
        "margin_ids(fields, PROMPT_FIELDS, renderer) if fields else []\n",
        "list[int]()\n",
        RECORDED,
    ),
    (
        "gateway/requests/parse.py",
        "a message that only calls tools gets a text",
        'return None if message.tool_calls else ""',
        'return ""',
        RECORDED,
    ),
    (
        "gateway/upstream/openai/request.py",
        "a request's own fields do not reach its server",
        "    found = taken_of(fields, server.offers)\n",
        "    found: dict[str, Any] = {}\n",
        RECORDED,
    ),
]

HTTP_MUTATIONS = mutations_of("http", _BROKEN)
