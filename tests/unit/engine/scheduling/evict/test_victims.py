"""Choice of the victim, and swap against recompute."""

from __future__ import annotations

from engine.scheduling.counters import ServiceCounters
from engine.scheduling.evict.base import KvCosts
from engine.scheduling.evict.victims import AttainedVictim, FairVictim, LatestVictim
from engine.step_time.model import PRIOR
from tests.support.scheduling_states import (
    decoding,
    make_sequence,
)


def test_the_fair_victim_is_of_the_lowest_tier_even_if_it_had_little() -> None:
    counters = ServiceCounters()
    counters.set("rich", 1000)
    candidates = [make_sequence("a", tenant="rich", tier=0), make_sequence("b", tenant="poor", tier=2)]
    assert FairVictim().victim(candidates, counters).sequence_id == "b"


def test_the_fair_victim_is_of_the_tenant_that_had_most() -> None:
    counters = ServiceCounters()
    counters.set("rich", 1000)
    candidates = [make_sequence("a", tenant="rich", output=9), make_sequence("b", tenant="poor")]
    assert FairVictim().victim(candidates, counters).sequence_id == "a"


def test_of_one_tenants_sequences_the_one_that_emitted_least_gives_way() -> None:
    candidates = [make_sequence("a", output=3), make_sequence("b", output=1), make_sequence("c", output=2)]
    assert FairVictim().victim(candidates, ServiceCounters()).sequence_id == "b"


def test_of_equals_the_one_admitted_last_gives_way() -> None:
    candidates = [make_sequence("a"), make_sequence("b")]
    for evict in (FairVictim(), LatestVictim(), AttainedVictim()):
        assert evict.victim(candidates, ServiceCounters()).sequence_id == "b"


def test_first_come_first_served_takes_from_the_last_to_come() -> None:
    candidates = [make_sequence("late", submitted_s=5.0), make_sequence("early", submitted_s=1.0)]
    assert LatestVictim().victim(candidates, ServiceCounters()).sequence_id == "late"
    candidates.append(make_sequence("batch", submitted_s=0.0, tier=2))
    assert LatestVictim().victim(candidates, ServiceCounters()).sequence_id == "batch"


def test_least_attained_service_takes_from_the_one_that_had_most() -> None:
    candidates = [make_sequence("much", prompt=30, computed=30, output=1), decoding("more", output=40)]
    candidates.append(decoding("little", output=2))
    assert AttainedVictim().victim(candidates, ServiceCounters()).sequence_id == "more"


def test_kv_moves_where_that_is_sooner_than_computing_it_again() -> None:
    costs = KvCosts(PRIOR, block_tokens=16, swap_block_s=PRIOR.per_token_s * 16)
    short, long = make_sequence("short", computed=16), make_sequence("long", computed=3000)
    assert KvCosts(PRIOR, 16, 1.0).recompute_s(16) < 1.0
    for evict in (FairVictim(), AttainedVictim()):
        # Copying takes as long as computing the tokens; the context they attend to tips the scale.
        assert evict.swaps(long, costs)
        assert not evict.swaps(short, KvCosts(PRIOR, block_tokens=16, swap_block_s=1.0))
    assert not LatestVictim().swaps(long, costs)
