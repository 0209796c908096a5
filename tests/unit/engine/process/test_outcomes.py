"""Unacknowledged outcomes: none is lost, none is returned twice, the number is bounded."""

from __future__ import annotations

import pytest

from engine.messages import SequenceOutcome
from engine.process.outcomes import HeldOutcome, OutcomeStore


def outcome(sequence_id: str, emitted_tokens: int = 3) -> SequenceOutcome:
    return SequenceOutcome(
        sequence_id, f"request of {sequence_id}", "acme", "stop", 5, 0, 5, emitted_tokens=emitted_tokens
    )


def holding_one(**options: int) -> OutcomeStore:
    store = OutcomeStore(**options)
    store.keep("gateway-a", outcome("one"))
    return store


def ids(outcomes: list[SequenceOutcome]) -> list[str]:
    return [each.sequence_id for each in outcomes]


def test_an_outcome_is_collected_again_and_again_until_it_is_acknowledged() -> None:
    store = holding_one()
    assert ids(store.collect("gateway-a")) == ["one"]
    assert ids(store.collect("gateway-a")) == ["one"]
    assert len(store.acknowledge("gateway-a", ["one"])) == 1
    assert store.collect("gateway-a") == []


def test_a_repeated_or_unknown_acknowledgement_changes_nothing() -> None:
    store = holding_one()
    assert len(store.acknowledge("gateway-a", ["other", "one", "one"])) == 1
    assert len(store.acknowledge("gateway-a", ["one"])) == 0
    assert len(store) == 0


def test_a_gateway_collects_and_acknowledges_its_own_outcomes_only() -> None:
    store = holding_one()
    store.keep("gateway-b", outcome("two"))
    assert len(store.acknowledge("gateway-b", ["one"])) == 0
    assert ids(store.collect("gateway-a")) == ["one"]


def test_a_sequence_has_one_outcome() -> None:
    store = holding_one()
    with pytest.raises(ValueError, match="one has an outcome already"):
        store.keep("gateway-a", outcome("one", emitted_tokens=4))


def test_adopting_takes_over_what_gateways_left_that_are_gone_and_nothing_else() -> None:
    store = OutcomeStore()
    for gateway_id, sequence_id in (("gone", "one"), ("alive", "two"), ("asker", "three")):
        store.keep(gateway_id, outcome(sequence_id))
    assert ids(store.collect("asker", adopt_from_all_but={"alive", "asker"})) == ["one", "three"]
    assert ids(store.collect("asker")) == ["one", "three"]
    assert store.collect("gone") == []
    assert ids(store.collect("alive")) == ["two"]


def test_a_sequence_may_start_only_if_its_outcome_will_find_room() -> None:
    store = holding_one(max_outcomes=3)
    assert store.has_room(live_sequences=1)
    assert not store.has_room(live_sequences=2)
    store.acknowledge("gateway-a", ["one"])
    assert store.has_room(live_sequences=2)


def test_what_an_earlier_engine_left_counts_down_to_nothing() -> None:
    store = OutcomeStore()
    left = [HeldOutcome("gateway-a", outcome("one")), HeldOutcome("gateway-b", outcome("two"))]
    settled: list[int] = []
    store.restore(left, lambda: settled.append(len(store)))
    store.keep("gateway-a", outcome("three"))
    store.acknowledge("gateway-a", ["one"])
    assert settled == []
    store.acknowledge("gateway-b", ["two"])
    store.acknowledge("gateway-a", ["three"])
    assert settled == [1], "once, when the last one of the earlier engine is settled"


def test_restoring_loses_nothing_even_beyond_the_bound() -> None:
    store = OutcomeStore(max_outcomes=1)
    store.restore([HeldOutcome("gateway-a", outcome(str(number))) for number in range(3)])
    assert len(store) == 3
    assert not store.has_room(live_sequences=0)


def test_a_store_without_room_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="max_outcomes"):
        OutcomeStore(max_outcomes=0)
