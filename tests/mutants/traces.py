"""Mutants of traces: what is kept and what becomes of it; and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

DECISION = "tests/unit/gateway/tracing/test_decision.py"
BUILD = "tests/unit/gateway/tracing/test_build.py"
ENGINE = "tests/unit/engine/process/test_spans.py"
EXPORT = "tests/integration/test_span_export.py"
TRACES = "tests/e2e/test_traces.py"

_BROKEN: list[Broken] = [
    (
        "gateway/tracing/decision.py",
        "the ratio is ignored",
        "        return int(trace_id[16:], 16) < round(self.ratio * 2**64)\n",
        "        return True\n",
        DECISION,
    ),
    (
        "gateway/tracing/decision.py",
        "an error is no reason",
        "        if outcome in ERRORS:\n",
        "        if outcome in ERRORS and is_quote_kept is False:\n",
        DECISION,
    ),
    (
        "gateway/tracing/decision.py",
        "a broken quote is no reason",
        "        if is_quote_kept is False:\n",
        "        if is_quote_kept is True:\n",
        DECISION,
    ),
    (
        "gateway/tracing/decision.py",
        "a displaced request is no reason",
        "        each.others and each.kind in LOST_ITS_PLACE for each in outcome.decisions\n",
        "        False for each in outcome.decisions\n",
        DECISION,
    ),
    (
        "gateway/tracing/decision.py",
        "a missed target is no reason",
        "        if has_missed():\n",
        "        if False:\n",
        DECISION,
    ),
    (
        "gateway/tracing/decision.py",
        "a sampled parent is no reason",
        "        if trace.parent_id and trace.flags & SAMPLED:\n",
        "        if False:\n",
        DECISION,
    ),
    (
        "gateway/tracing/tracer.py",
        "spans are made of dropped requests",
        "        return cause\n",
        "        return cause or KeepCause.RATIO\n",
        f"{EXPORT}::test_of_2000_requests_all_bad_ones_and_a_hundredth_of_the_rest_are_kept_and_no_span_of_others_is_made",
    ),
    (
        "gateway/tracing/build.py",
        "a missed target is no event",
        "    for missed in kept.missed:\n",
        "    for missed in kept.missed[:0]:\n",
        BUILD,
    ),
    (
        "gateway/tracing/build.py",
        "another server is told of a span that is not made",
        "            client_span(call.index),\n",
        '            f"at.{call.index}",\n',
        BUILD,
    ),
    (
        "engine/process/spans.py",
        "the link is lost",
        "        links = [_link(known[each], each) for each in decision.others if each in known]\n",
        "        links: list[SpanLink] = []\n",
        ENGINE,
    ),
    (
        "engine/process/spans.py",
        "an engine remembers every trace",
        "            if len(self._known) > self._max_known:\n",
        "            if False:\n",
        ENGINE,
    ),
    (
        "gateway/requests/finish.py",
        "an engine is never told that a trace is kept",
        "is_traced=run.kept_for is not None",
        "is_traced=False",
        f"{TRACES}::test_a_streamed_displaced_request_that_its_budget_ends",
    ),
    (
        "engine/telemetry/sender.py",
        "the line has no end",
        "            if len(self._line) >= room or self._is_closing:\n",
        "            if self._is_closing:\n",
        f"{EXPORT}::test_without_a_collector_memory_is_bounded_and_offers_return_at_once",
    ),
    (
        "engine/telemetry/sender.py",
        "callers that sample all leave errors no room",
        "room = self._target.max_waiting * (SHARE_OF_SAMPLED if is_sampled else 1)",
        "room = self._target.max_waiting",
        f"{EXPORT}::test_no_more_spans_a_second_than_allowed_and_what_is_wrong_has_room_when_callers_sample_all",
    ),
    (
        "engine/telemetry/sender.py",
        "any number of spans a second",
        "len(spans) / self._target.spans_per_s",
        "0.0",
        f"{EXPORT}::test_no_more_spans_a_second_than_allowed_and_what_is_wrong_has_room_when_callers_sample_all",
    ),
    (
        "engine/telemetry/otlp.py",
        "a redirection counts as taken",
        "            raise CollectorRefused(self._said)\n",
        "            pass\n",
        f"{EXPORT}::test_a_collector_that_refuses_loses_spans_which_are_counted_and_named",
    ),
]

TRACE_MUTATIONS = mutations_of("traces", _BROKEN)
