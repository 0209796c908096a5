"""Targets of a request, from every source."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain.estimate import Estimate
from gateway.domain.targets import LEAST_S, NO_TARGETS, RequestTargets, targets_of
from tests.support.builders import estimate

QUOTED = estimate(ttft_s=(0.3, 0.5), e2e_s=(2.0, 4.0))


def targets(
    slo: dict[str, float] | None = None, quoted: Estimate | None = None, **changes: Any
) -> RequestTargets:
    """Of a request let in at 100 s, with 11 predicted tokens."""
    facts = {"since_s": 100.0, "expires_s": None, "output_tokens": 11} | changes
    return targets_of(slo or {}, quoted, **facts)


def test_without_slo_quote_and_clients_word_nothing_is_set() -> None:
    assert targets() == NO_TARGETS
    assert NO_TARGETS.for_engine(5.0) == {
        "ttft_target_s": 0.0, "tpot_target_s": 0.0, "deadline_in_s": None, "own_deadline_in_s": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("slo", "expected"),
    [
        ({"ttft": 0.5, "tpot": 0.1, "e2e": 3.0}, RequestTargets(100.5, 0.1, 103.0)),
        ({"e2e": 3.0}, RequestTargets(deadline_s=103.0)),
        # Nothing says when the whole answer is due: at the pace that is named, or with the first token.
        ({"ttft": 0.5, "tpot": 0.1}, RequestTargets(100.5, 0.1, 101.5)),
        ({"ttft": 0.5}, RequestTargets(100.5, None, 100.5)),
        ({"tpot": 0.1}, RequestTargets(None, 0.1)),
    ],
)
def test_an_slo_sets_what_its_metrics_say(slo: dict[str, float], expected: RequestTargets) -> None:
    assert targets(slo) == expected


def test_a_quote_sets_what_it_promises() -> None:
    assert targets(quoted=QUOTED) == RequestTargets(100.5, None, 104.0)


def test_the_tightest_of_slo_and_quote_counts() -> None:
    assert targets({"ttft": 0.2, "e2e": 9.0}, QUOTED) == RequestTargets(100.2, None, 104.0)
    assert targets({"ttft": 0.9, "e2e": 1.0}, QUOTED) == RequestTargets(100.5, None, 101.0)


def test_a_clients_word_is_its_own_deadline_and_no_promise() -> None:
    assert targets(expires_s=101.0) == RequestTargets(own_deadline_s=101.0)
    assert targets({"e2e": 3.0}, expires_s=101.0) == RequestTargets(None, None, 103.0, 101.0)
    assert targets({"e2e": 3.0}, expires_s=120.0) == RequestTargets(deadline_s=103.0), "the tightest counts"


def test_an_engine_gets_the_seconds_that_are_left() -> None:
    whole = targets({"ttft": 0.5, "tpot": 0.1, "e2e": 3.0}, expires_s=102.0)
    assert whole.for_engine(100.25) == {
        "ttft_target_s": 0.25, "tpot_target_s": 0.1, "deadline_in_s": 2.75, "own_deadline_in_s": 1.75,
    }  # fmt: skip


def test_what_is_late_is_due_soon_and_never_untargeted() -> None:
    whole = targets({"ttft": 0.5, "tpot": 1e-9, "e2e": 3.0}, expires_s=102.0)
    assert set(whole.for_engine(1000.0).values()) == {LEAST_S}


def test_what_is_promised_counts_from_where_its_limits_let_it_in() -> None:
    assert targets({"e2e": 3.0}, since_s=107.0, expires_s=108.0) == RequestTargets(None, None, 110.0, 108.0)
