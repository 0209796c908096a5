"""Choice of the victim, and swap against recompute."""

from __future__ import annotations

from math import inf

from engine.scheduling.counters import ServiceCounters
from engine.scheduling.evict.base import KvCosts, memory_free_in_s
from engine.scheduling.evict.victims import AttainedVictim, FairVictim, LatestVictim
from engine.sequence import Sequence
from engine.step_time.model import PRIOR, predict_step_s
from tests.support.scheduling_states import decoding, make_sequence


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
    assert KvCosts(PRIOR, 16, 1.0).recompute_s(16) < 1.0
    # Copying takes as long as computing the tokens; the context they attend to tips the scale.
    assert costs.swaps(3000)
    assert not KvCosts(PRIOR, block_tokens=16, swap_block_s=1.0).swaps(16)


def test_kv_stays_where_memory_comes_free_sooner_than_it_could_be_brought_back() -> None:
    costs = KvCosts(PRIOR, block_tokens=16, swap_block_s=PRIOR.per_token_s)
    again_s, copied_s = costs.recompute_s(320), costs.swap_s(320)
    assert copied_s < again_s
    assert costs.pauses(320, copied_s, has_host_room=True)
    assert not costs.pauses(320, (copied_s + again_s) / 2, has_host_room=True)
    # Without room in host memory it would be computed again.
    assert costs.pauses(320, (copied_s + again_s) / 2, has_host_room=False)
    assert not costs.pauses(320, again_s * 1.01, has_host_room=False)
    assert not costs.pauses(320, inf, has_host_room=False)


def runner(name: str, *, output: int, predicted: int, blocks: int) -> Sequence:
    """Of 10 prompt tokens."""
    sequence = decoding(name, prompt=10, output=output)
    sequence.predicted_output_tokens = predicted
    sequence.block_table = [0] * blocks
    return sequence


def test_memory_comes_free_with_the_first_end_that_needs_no_other_block() -> None:
    costs = KvCosts(PRIOR, block_tokens=16, swap_block_s=0.0)
    soon = runner("soon", output=4, predicted=7, blocks=1)
    later = runner("later", output=1, predicted=7, blocks=1)
    assert memory_free_in_s([later], costs) > memory_free_in_s([later, soon], costs) > 0
    context_tokens = soon.total_tokens + later.total_tokens
    assert memory_free_in_s([later, soon], costs) == 3 * predict_step_s(PRIOR, 2, context_tokens, 2)


def test_no_memory_comes_free_by_itself_where_each_asks_for_more_or_has_no_predicted_end() -> None:
    costs = KvCosts(PRIOR, block_tokens=16, swap_block_s=0.0)
    asks = runner("asks", output=4, predicted=8, blocks=1)
    beyond = runner("beyond", output=4, predicted=4, blocks=9)
    prompt = make_sequence("prompt", prompt=30, computed=10)
    assert memory_free_in_s([asks, beyond, prompt], costs) == inf
    assert memory_free_in_s([], costs) == inf
