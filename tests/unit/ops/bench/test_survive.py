"""The comparison of disturbed streams: every difference is found, and a move alone is none."""

from __future__ import annotations

from typing import Any

import pytest

from ops.bench.budgets.audit import AuditedRow, AuditFacts, StoredCounters
from ops.bench.budgets.testbed import BudgetTenant
from ops.bench.common.attempts import ClientAttempt
from ops.bench.survive.run import chosen, judged
from ops.bench.survive.streams import SEEDLESS, ReceivedStream

TENANT = BudgetTenant("acme", "ten_1", "fg_live_x", "output_tokens", 12, True)


def stream(*texts: str, kind: str = "logprobs", moves: int = 0, logprob: float = -1.0) -> ReceivedStream:
    """A whole stream of one token a text."""
    received = ReceivedStream(kind)
    for text in texts:
        token = {"token": text, "logprob": logprob}
        choice = {"index": 0, "delta": {"content": text}, "logprobs": {"content": [token]}}
        received.take({"choices": [choice]})
    account = {"replica_moves": [{}] * moves}
    received.take({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "fairgate": account})
    received.attempt = ClientAttempt(
        "ten_1", 200, "one", is_whole=True, prompt_tokens=3, usage_tokens=len(texts)
    )
    return received


def row_of(disturbed: ReceivedStream, *settles: int, is_compared: bool = True) -> dict[str, Any]:
    """Figures of one stream, whose undisturbed text is "ab", with these charges."""
    rows = [AuditedRow("one", "ten_1", "settle", 3, tokens) for tokens in settles]
    counters = {"ten_1": StoredCounters({}, {}, 0)}
    facts = AuditFacts([TENANT], rows, counters, None, 0, [disturbed.attempt])
    return judged([disturbed], [stream("a", "b", kind=disturbed.kind)], facts, is_compared=is_compared)


def test_a_stream_that_moved_and_is_as_undisturbed_is_well() -> None:
    row = row_of(stream("a", "b", moves=1), 2)
    assert (row["ok"], row["moves"], row["broken_streams"], row["other_streams"]) == (True, 1, 0, 0)
    assert not row_of(stream("a", "b"), 2)["ok"], "where nothing moved, nothing is shown"


@pytest.mark.parametrize(
    "disturbed",
    [stream("a", "c", moves=1), stream("a", "b", "b", moves=1), stream("a", "b", moves=1, logprob=-1.1)],
)
def test_another_token_text_or_probability_is_found(disturbed: ReceivedStream) -> None:
    assert row_of(disturbed, disturbed.attempt.usage_tokens or 0)["other_streams"] == 1


def test_draws_of_its_own_are_no_difference_and_an_end_without_one_is() -> None:
    assert row_of(stream("x", "y", kind=SEEDLESS, moves=1), 2)["ok"]
    cut = stream("x", kind=SEEDLESS, moves=1)
    cut.attempt.is_whole = False
    assert row_of(cut, 1)["broken_streams"] == 1
    assert row_of(cut, 1, is_compared=False)["ok"], "its gateway was killed"


def test_the_books_are_judged() -> None:
    moved = stream("a", "b", moves=1)
    assert row_of(moved, 2, 2)["double_charges"] == 1
    assert row_of(moved, 3)["drift_tokens"] == 1
    assert row_of(moved, 13)["overshoot_tokens"] == 1
    assert [scenario.name for scenario in chosen(["survive-k*"])] == ["survive-kill"]
