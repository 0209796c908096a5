"""Contract of `engine.scheduling.evict.base.Evict`, for every choice of a victim.

Parametrised over EVICTS: a new choice is held to it by being named there.
"""

from __future__ import annotations

import random

import pytest

from engine.scheduling.claims import SAFE
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.evict.base import Evict
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import EVICTS
from tests.support.scheduling_states import random_sequence


@pytest.fixture(params=sorted(EVICTS))
def evict(request: pytest.FixtureRequest) -> Evict:
    return EVICTS[request.param](PolicyOptions())


@pytest.mark.parametrize("seed", range(20))
def test_the_victim_is_a_candidate_of_the_lowest_tier_there_is(evict: Evict, seed: int) -> None:
    rng = random.Random(seed)
    counters = ServiceCounters()
    for tenant in "abcd":
        counters.charge(tenant, 1.0, rng.randint(0, 1000))
    candidates = [random_sequence(rng, f"s{number}") for number in range(rng.randint(1, 30))]
    victim = evict.victim(candidates, counters)
    assert any(victim is candidate for candidate in candidates)
    assert victim.tier == max(candidate.tier for candidate in candidates)


def test_a_single_candidate_is_the_victim(evict: Evict) -> None:
    only = random_sequence(random.Random(1), "only")
    assert evict.victim([only], ServiceCounters()) is only


def test_choosing_changes_nothing(evict: Evict) -> None:
    rng = random.Random(3)
    counters = ServiceCounters()
    candidates = [random_sequence(rng, f"s{number}") for number in range(10)]
    before = [(each.state, each.computed_tokens, each.times_displaced) for each in candidates]
    first = evict.victim(candidates, counters)
    assert evict.victim(candidates, counters) is first
    assert [(each.state, each.computed_tokens, each.times_displaced) for each in candidates] == before
    assert counters.values() == {}


def test_what_it_claims_is_known(evict: Evict) -> None:
    assert evict.claims >= SAFE
