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
STREAM = "tests/unit/gateway/upstream/test_openai_response.py"
CLIENT = "tests/unit/gateway/http/test_client_address.py"
PARSE = "tests/unit/gateway/requests/test_parse.py"
LIFECYCLE = "tests/integration/test_lifecycle.py"
ASKED = "test_another_gateways_question_is_answered_about_the_askers_own_requests_only"

_BROKEN: list[Broken] = [
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
        "reversed(forwarded.split(",
        "iter(forwarded.split(",
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
        '        "The engine stopped while it generated this answer."\n'
        '        f" The {charged_tokens} tokens that arrived were charged, nothing else.",\n'
        "        type=SERVER_ERROR,\n        retry_after_s=RETRY_SOON_S,\n"
        "        should_retry=charged_tokens == 0,\n",
        '        "The engine stopped while it generated this answer."\n'
        '        f" The {charged_tokens} tokens that arrived were charged, nothing else.",\n'
        "        type=SERVER_ERROR,\n        retry_after_s=RETRY_SOON_S,\n"
        "        should_retry=True,\n",
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
        "    return errors.internal(request_id)\n",
        '    return errors.internal(f"{request_id} {exception}")\n',
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
        "tenants/admin/audit_query.py",
        "a cursor continues any list",
        "    if made_for != query:\n",
        "    if False:\n",
        "tests/unit/tenants/admin/test_audit_query.py",
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
        "if len(self._rest) > self._max_event_bytes:",
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
    (
        "gateway/upstream/health/breaker.py",
        "calls from before it opened close it",
        "        if epoch == self._epoch:\n            self._failures = self._openings = 0\n",
        "        if True:\n            self._failures = self._openings = 0\n",
        BREAKER,
    ),
    (
        "gateway/upstream/health/breaker.py",
        "a server that stays down is tried as often as before",
        "2.0 ** min(self._openings, 30)",
        "1.0 ** min(self._openings, 30)",
        BREAKER,
    ),
    (
        "gateway/upstream/health/breaker.py",
        "half open it lets everything through",
        "self.state(now_s) is BreakerState.HALF_OPEN and self._trials < self._rule.trials",
        "self.state(now_s) is BreakerState.HALF_OPEN",
        BREAKER,
    ),
    (
        "gateway/upstream/health/breaker.py",
        "a client that leaves keeps a trial",
        "            self._trials = max(0, self._trials - 1)\n",
        "            pass\n",
        BREAKER,
    ),
]

HTTP_MUTATIONS = mutations_of("http", _BROKEN)
