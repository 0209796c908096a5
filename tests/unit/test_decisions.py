"""Do the single decisions (admit, compose, evict) decide what they say?"""

from __future__ import annotations

import pytest

from engine.messages import Submit
from engine.scheduling.admit import PredictedReserve, PromptOnly, blocks_promised, blocks_still_wanted
from engine.scheduling.compose import DecodeFirst
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.evict import FairVictim, LatestVictim
from engine.scheduling.policy import POLICIES, UnknownPolicy, find_policy
from engine.sequence import Sequence


def sequence(
    name: str,
    *,
    tenant: str = "t",
    prompt: int = 4,
    computed: int = 0,
    output: int = 0,
    tier: int = 1,
    predicted: int = 20,
    max_tokens: int = 40,
    submitted_s: float = 0.0,
) -> Sequence:
    submit = Submit(
        sequence_id=name,
        request_id=name,
        tenant_id=tenant,
        prompt_token_ids=[1] * prompt,
        max_tokens=max_tokens,
        lease_tokens=max_tokens,
        tier=tier,
        predicted_output_tokens=predicted,
    )
    made = Sequence.of(submit, "g", submitted_s)
    made.token_ids += [2] * output
    made.computed_tokens = computed
    return made


# ---------------------------------------------------------------- compose


def names(shares: list[tuple[Sequence, int]]) -> list[tuple[str, int]]:
    return [(each.sequence_id, tokens) for each, tokens in shares]


def test_decodes_go_before_prefills() -> None:
    prefill = sequence("prefill", prompt=30)
    decode = sequence("decode", prompt=4, computed=4, output=1)
    assert names(DecodeFirst().shares([prefill, decode], 10)) == [("decode", 1), ("prefill", 9)]


def test_prefills_share_what_is_left_by_tier_then_admission() -> None:
    batch = sequence("batch", prompt=8, tier=2)
    first = sequence("first", prompt=8)
    second = sequence("second", prompt=8)
    shares = DecodeFirst().shares([batch, first, second], 20)
    assert names(shares) == [("first", 8), ("second", 8), ("batch", 4)]


def test_a_chunk_limit_lets_prompts_advance_together() -> None:
    running = [sequence(f"p{number}", prompt=100) for number in range(3)]
    assert names(DecodeFirst(8).shares(running, 20)) == [("p0", 8), ("p1", 8), ("p2", 4)]
    assert DecodeFirst(8).first_chunk(100, 20) == 8
    assert DecodeFirst().first_chunk(100, 20) == 20
    assert DecodeFirst().first_chunk(3, 20) == 3


def test_nothing_is_handed_out_beyond_the_budget() -> None:
    running = [sequence(f"d{number}", computed=4, output=1) for number in range(5)]
    assert names(DecodeFirst().shares(running, 3)) == [("d0", 1), ("d1", 1), ("d2", 1)]


# ---------------------------------------------------------------- admit


def test_prompt_only_sets_nothing_aside() -> None:
    assert PromptOnly().reserve_tokens(sequence("s")) == 0
    assert blocks_still_wanted(PromptOnly(), sequence("s", prompt=9), 4) == 3


def test_the_reserve_is_a_part_of_the_predicted_remainder() -> None:
    admit = PredictedReserve(500)
    assert admit.reserve_tokens(sequence("s", predicted=20)) == 10
    assert admit.reserve_tokens(sequence("s", predicted=20, output=8)) == 6
    assert admit.reserve_tokens(sequence("s", predicted=20, output=30)) == 0


def test_no_more_is_wanted_than_the_sequence_can_ever_use() -> None:
    short = sequence("s", prompt=4, predicted=40, max_tokens=5)
    assert blocks_still_wanted(PredictedReserve(1000), short, 4) == 2  # 4 + 5 - 1 tokens


def test_blocks_that_are_held_are_not_wanted_again() -> None:
    running = sequence("s", prompt=8, computed=8, output=1, predicted=8)
    running.block_table.extend([0, 1, 2])
    assert blocks_still_wanted(PredictedReserve(1000), running, 4) == 1  # 9 + 7 tokens
    assert blocks_promised(PredictedReserve(1000), [running, running], 4) == 2


# ---------------------------------------------------------------- evict


def test_the_fair_victim_is_of_the_lowest_tier_even_if_it_had_little() -> None:
    counters = ServiceCounters()
    counters.set("rich", 1000)
    candidates = [sequence("a", tenant="rich", tier=0), sequence("b", tenant="poor", tier=2)]
    assert FairVictim().victim(candidates, counters).sequence_id == "b"


def test_the_fair_victim_is_of_the_tenant_that_had_most() -> None:
    counters = ServiceCounters()
    counters.set("rich", 1000)
    candidates = [sequence("a", tenant="rich", output=9), sequence("b", tenant="poor")]
    assert FairVictim().victim(candidates, counters).sequence_id == "a"


def test_of_one_tenants_sequences_the_one_that_emitted_least_gives_way() -> None:
    candidates = [sequence("a", output=3), sequence("b", output=1), sequence("c", output=2)]
    assert FairVictim().victim(candidates, ServiceCounters()).sequence_id == "b"


def test_of_equals_the_one_admitted_last_gives_way() -> None:
    candidates = [sequence("a"), sequence("b")]
    assert FairVictim().victim(candidates, ServiceCounters()).sequence_id == "b"
    assert LatestVictim().victim(candidates, ServiceCounters()).sequence_id == "b"


def test_first_come_first_served_takes_from_the_last_to_come() -> None:
    candidates = [sequence("late", submitted_s=5.0), sequence("early", submitted_s=1.0)]
    assert LatestVictim().victim(candidates, ServiceCounters()).sequence_id == "late"
    candidates.append(sequence("batch", submitted_s=0.0, tier=2))
    assert LatestVictim().victim(candidates, ServiceCounters()).sequence_id == "batch"


# ---------------------------------------------------------------- policies


def test_policies_go_by_their_name() -> None:
    for name, policy in POLICIES.items():
        assert find_policy(name) is policy
        assert policy.name == name
    with pytest.raises(UnknownPolicy, match="no policy 'best'; there are fcfs, vtc"):
        find_policy("best")
