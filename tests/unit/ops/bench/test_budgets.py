"""The budget benchmark's audit: every kind of breach is found, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ops.bench.budgets.audit import (
    KEYS,
    AuditedRow,
    AuditFacts,
    Findings,
    StoredCounters,
    judge,
    read_counters,
)
from ops.bench.budgets.run import BudgetBenchOptions, chosen
from ops.bench.budgets.scenarios import ScenarioEvidence, judged_burst
from ops.bench.budgets.testbed import BudgetTenant
from ops.bench.common.attempts import ClientAttempt, take_line, tokens_per_s

ACME = BudgetTenant("acme", "ten_1", "fg_live_x", "total_tokens", 100, True)


def facts() -> AuditFacts:
    """Two requests of 20 + 30 tokens: the whole budget, and not one more."""
    rows = [
        row
        for name in ("one", "two")
        for row in (AuditedRow(name, "ten_1", "reserve", 20, 60), AuditedRow(name, "ten_1", "settle", 20, 30))
    ]
    answers = [
        ClientAttempt(
            "ten_1", 200, name, delivered_tokens=30, is_whole=True, prompt_tokens=20, usage_tokens=30
        )
        for name in ("one", "two")
    ]
    return AuditFacts(
        [ACME], rows, {"ten_1": StoredCounters({"total_tokens": 100}, {}, 0)}, {"ten_1": 60}, 0, answers
    )


def figures(found: Findings) -> dict[str, int]:
    """The figures that are not 0."""
    return {key: getattr(found, key) for key in KEYS if getattr(found, key)}


def with_answer(**changes: Any) -> AuditFacts:
    """The first answer, changed."""
    first, second = facts().answers
    return replace(facts(), answers=[replace(first, **changes), second])


def test_books_that_agree_have_no_finding() -> None:
    found = judge(facts())
    assert figures(found) == {}
    assert found.examples == []
    assert found.charged_tokens == 100


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tenants": [replace(ACME, amount=99)]}, {"overshoot_tokens": 1}),
        # The engine emitted more than was charged: beyond the limit, and off the books.
        ({"emitted": {"ten_1": 63}}, {"overshoot_tokens": 3, "drift_tokens": 3}),
        ({"stored": {"ten_1": StoredCounters({"total_tokens": 93}, {}, 0)}}, {"drift_tokens": 7}),
        ({"stored": {"ten_1": StoredCounters({"total_tokens": 100}, {"x": 5}, 0)}}, {"leaked_holds": 1}),
        ({"stored": {"ten_1": StoredCounters({"total_tokens": 100}, {"x": 5}, 2)}}, {"leaked_holds": 2}),
        ({"left_in_engine": 3}, {"leaked_holds": 3}),
        ({"usage": ["usage by key: the API says 1, the ledger 2"]}, {"drift_tokens": 1}),
        ({"rows": [*facts().rows, AuditedRow("three", "ten_1", "reserve", 20, 60)]}, {"leaked_holds": 1}),
    ],
)
def test_every_disagreement_is_found(changes: dict[str, Any], expected: dict[str, int]) -> None:
    found = judge(replace(facts(), **changes))
    assert figures(found) == expected
    assert found.examples


def test_a_second_settlement_is_a_double_charge() -> None:
    rows = [*facts().rows, AuditedRow("two", "ten_1", "settle", 20, 30)]
    assert figures(judge(replace(facts(), rows=rows))) == {"double_charges": 1}


def test_two_charged_runs_under_one_key_are_a_double_charge() -> None:
    answers = [replace(answer, idempotency_key="k") for answer in facts().answers]
    assert figures(judge(replace(facts(), answers=answers))) == {"double_charges": 1}
    answers = [replace(answer, idempotency_key=answer.request_id) for answer in answers]
    assert figures(judge(replace(facts(), answers=answers))) == {}


def test_a_replay_is_neither_a_run_nor_a_delivery() -> None:
    replay = replace(facts().answers[0], request_id="replayed", is_replay=True, idempotency_key="k")
    assert figures(judge(replace(facts(), answers=[*facts().answers, replay]))) == {}


def test_what_a_whole_answer_had_is_what_is_charged_exactly() -> None:
    assert figures(judge(with_answer(delivered_tokens=29))) == {}, "stated 30: one brought no log probability"
    assert figures(judge(with_answer(delivered_tokens=29, usage_tokens=29))) == {"drift_tokens": 1}
    assert figures(judge(with_answer(delivered_tokens=0, usage_tokens=31, code="engine_lost"))) == {
        "drift_tokens": 1
    }


def test_a_broken_answer_had_at_most_what_is_charged() -> None:
    assert figures(judge(with_answer(delivered_tokens=7, usage_tokens=None, is_whole=False))) == {}
    found = judge(with_answer(delivered_tokens=32, usage_tokens=None, is_whole=False))
    assert figures(found) == {"overshoot_tokens": 2, "drift_tokens": 2}


def test_where_a_client_left_the_difference_is_a_cancel_error() -> None:
    left = with_answer(delivered_tokens=5, usage_tokens=None, is_whole=False, has_left=True)
    assert figures(judge(left)) == {}
    assert figures(judge(replace(left, emitted={"ten_1": 58}))) == {"cancel_error_tokens": 2}


def test_the_last_report_may_be_off_by_what_it_says_and_no_more() -> None:
    rows = [replace(facts().rows[1], basis="last_report", uncertain_tokens=4), *facts().rows[2:]]
    rows = [facts().rows[0], *rows]
    roomy = replace(facts(), rows=rows, tenants=[replace(ACME, amount=1000)], emitted=None)
    for delivered, drift in ((34, {}), (35, {"drift_tokens": 1})):
        first = replace(facts().answers[0], delivered_tokens=delivered, usage_tokens=None, is_whole=False)
        found = judge(replace(roomy, answers=[first, facts().answers[1]]))
        assert figures(found) == drift
        assert (found.uncertain_tokens, found.unseen_tokens) == (4, delivered - 30)


def test_counters_are_read_as_redis_has_them() -> None:
    counters = {
        "#epoch": "3",
        "tenant:ten_1:total_tokens:lifetime/UTC:*": "0 0 40 0 0",
        "tenant:ten_1:output_tokens:lifetime/UTC:*": "0 0 25 3 4",
        "tenant:ten_1:requests:bucket:*": "5000 17 1",
        "tenant:ten_1:concurrency:concurrency:*": "0",
    }
    stored = read_counters(counters, 1)
    assert stored.used == {"total_tokens": 40, "output_tokens": 25}
    assert stored.held == {
        "tenant:ten_1:output_tokens:lifetime/UTC:*": 7,
        "tenant:ten_1:requests:bucket:*": 1,
    }
    assert stored.holds == 1


def test_a_stream_is_counted_from_its_log_probabilities() -> None:
    answer = ClientAttempt("ten_1", 200)

    def chunk(**fields: Any) -> str:
        return "data: " + json.dumps(fields)

    piece = {"delta": {"content": "ab"}, "finish_reason": None, "logprobs": {"content": [{}, {}]}}
    assert take_line(answer, chunk(choices=[piece]), 1.0)
    assert not take_line(answer, chunk(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 3}), 2.0)
    assert not take_line(answer, ": waiting", 2.0)
    assert (answer.delivered_tokens, answer.usage_tokens, answer.prompt_tokens) == (2, 3, 9)
    assert (answer.text, answer.token_times_s, answer.is_whole) == ("ab", [1.0, 1.0], False)
    lost = {"code": "engine_lost", "message": "The engine stopped. The 2 tokens that arrived were charged."}
    take_line(answer, chunk(error=lost), 3.0)
    assert (answer.code, answer.usage_tokens, answer.is_whole) == ("engine_lost", 2, True)


def test_too_little_admitted_is_a_breach_where_it_is_required() -> None:
    def burst(delivered: int, *, must: bool) -> ScenarioEvidence:
        answers = [
            ClientAttempt("ten_1", 200, "one", delivered_tokens=delivered, prompt_tokens=20),
            ClientAttempt("ten_1", 429),
        ]
        return judged_burst(ScenarioEvidence([ACME], answers), 100, 500, 1.0, must=must)

    assert burst(75, must=True).broken == []
    assert burst(74, must=True).broken == ["admitted/admissible 0.94 < 0.95"]
    assert burst(74, must=False).broken == []
    assert burst(74, must=False).figures["admitted_of_admissible"] == 0.94


def test_an_answer_that_a_burst_must_not_have_is_a_breach() -> None:
    evidence = judged_burst(
        ScenarioEvidence([ACME], [ClientAttempt("ten_1", 500, code="x")]), 100, 500, 1.0, must=False
    )
    assert evidence.broken == ["1 unexpected answers, such as 500 x"]


def test_the_slope_is_that_of_the_tokens_after_the_burst() -> None:
    times = [0.0] * 10 + [0.01 * number for number in range(1, 300)]
    assert tokens_per_s(times, 50) == pytest.approx(100.0)
    assert tokens_per_s([0.02 * number for number in range(100)], 50) == pytest.approx(50.0)
    with pytest.raises(ValueError, match="no slope"):
        tokens_per_s(times, 308)
    with pytest.raises(ValueError, match="at once"):
        tokens_per_s([1.0, 1.0, 1.0], 0)


def test_scenarios_are_chosen_by_pattern_and_unknown_ones_are_refused() -> None:
    names = [scenario.name for scenario in chosen(BudgetBenchOptions(gateways=(1, 2), concurrency=(50,)))]
    assert len(names) == len(set(names)) == 8 + 1 + 7 + 1
    killed = chosen(BudgetBenchOptions(names=["kill-*"], gateways=(1,)))
    assert [scenario.name for scenario in killed] == [
        "kill-gateway", "kill-engine", "kill-redis", "kill-postgres", "kill-both",
    ]  # fmt: skip
    assert {scenario.gateways for scenario in killed} == {2}, "one lives on"
    with pytest.raises(
        ValueError, match=r"no scenario 'kill-all'; there are: rate, .*kill-both, .*suspension-under-load"
    ):
        chosen(BudgetBenchOptions(names=["kill-all"]))
