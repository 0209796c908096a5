"""Reasons of decisions in words."""

from __future__ import annotations

import pytest

from engine.entry import COUNTER_SCALE, QueueEntry
from engine.scheduling.claims import ALL
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.policy import LEARNED_POLICIES, ORDERS, POLICIES, TABLE_POLICIES, make_order
from engine.scheduling.reasons import CLAIM_WORDS, PURPOSES, WORDS, reason


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_every_number_of_an_orders_rank_has_a_word(name: str) -> None:
    entry = QueueEntry("e", "tenant", arrived_s=2.0, input_tokens=10, predicted_output_tokens=5)
    order = make_order(name, ServiceCounters())
    order.add(entry)
    rank = order.rank(entry, 3.0)
    assert len(rank) == len(WORDS[name])
    said = reason(f"order {name}, admit predicted-reserve", (1, *rank))
    assert said.startswith("tier standard; then ")
    assert said.count("; then ") == len(rank)


def test_a_counter_is_told_in_cost_tokens() -> None:
    said = reason("order hybrid, admit peak", (0, 123 * COUNTER_SCALE, -2.5))
    assert said == (
        "tier interactive; then least served tenant (counter 123 per weight);"
        " then highest response ratio (2.50)"
    )


def test_a_decision_without_a_rank_has_no_other_reason_than_its_rule() -> None:
    assert reason("place lost by tier", ()) == ""
    assert reason("order unheard-of, admit peak", (1, 2)) == ""


def test_every_policy_says_what_it_is_for_and_when_it_loses() -> None:
    assert PURPOSES.keys() == POLICIES.keys() | TABLE_POLICIES.keys() | LEARNED_POLICIES.keys()
    assert CLAIM_WORDS.keys() == ALL
