"""Do the single decisions (admit, compose, evict) decide what they say, in cases worked out by hand?"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace
from itertools import pairwise

import pytest

from engine.messages import StepTime
from engine.scheduling.admit.base import Batch, Defer
from engine.scheduling.admit.batch_gate import RUNS
from engine.scheduling.admit.buckets import LengthBuckets
from engine.scheduling.admit.peak import DECAY_STEPS, PeakAdmit, Peaks, plain_peak
from engine.scheduling.admit.reserve import PredictedReserve, prompt_only
from engine.scheduling.admit.static import StaticBatch
from engine.scheduling.admit.table import BatchOrWait, TableAction
from engine.scheduling.admit.window import DynamicWindow
from engine.scheduling.batch_or_wait.padding import batch_waste
from engine.scheduling.claims import ALL, FAIRNESS_BOUND, NO_STARVATION, WORK_CONSERVATION
from engine.scheduling.compose.decode_first import DecodeFirst
from engine.scheduling.compose.lanes import Lanes
from engine.scheduling.compose.prompts import PromptLimits
from engine.scheduling.compose.slack import DeadlineSlack
from engine.scheduling.compose.token_fair import TokenFair
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.evict.base import KvCosts
from engine.scheduling.evict.victims import AttainedVictim, FairVictim, LatestVictim
from engine.scheduling.options import PolicyOptions
from engine.scheduling.order.buckets import bucket_size
from engine.scheduling.policy import POLICIES, UnknownPolicy, make_policy
from engine.scheduling.room import Room
from engine.sequence import Sequence
from engine.step_time.model import PRIOR
from tests.support.scheduling_states import (
    decoding,
    execute,
    make_batch,
    make_room,
    make_sequence,
    random_sequence,
    start,
)


def names(shares: list[tuple[Sequence, int]]) -> list[tuple[str, int]]:
    return [(each.sequence_id, tokens) for each, tokens in shares]


def taken(room: Room, shares: list[tuple[Sequence, int]]) -> Room:
    for sequence, tokens in shares:
        room.take(sequence, tokens)
    return room


# ---------------------------------------------------------------- decode first


def test_decodes_go_before_prompts() -> None:
    running = [make_sequence("prompt", prompt=30), decoding("decode")]
    assert names(DecodeFirst().shares(running, make_room(10))) == [("decode", 1), ("prompt", 9)]


def test_prompts_share_what_is_left_by_tier_then_admission() -> None:
    batch = make_sequence("batch", prompt=8, tier=2)
    running = [batch, make_sequence("first", prompt=8), make_sequence("second", prompt=8)]
    assert names(DecodeFirst().shares(running, make_room(20))) == [("first", 8), ("second", 8), ("batch", 4)]


def test_nothing_is_handed_out_beyond_the_budget() -> None:
    running = [decoding(f"d{number}") for number in range(5)]
    assert names(DecodeFirst().shares(running, make_room(3))) == [("d0", 1), ("d1", 1), ("d2", 1)]


def test_one_prompt_at_a_time_stays_unfinished() -> None:
    running = [make_sequence("a", prompt=6), make_sequence("b", prompt=100), make_sequence("c", prompt=100)]
    room = make_room(20)
    assert names(DecodeFirst().shares(running, room)) == [("a", 6), ("b", 14)]
    capped = DecodeFirst(PromptLimits(long_prefill_token_threshold=8))
    # b's chunk is capped, and c may not be left unfinished beside it.
    assert names(capped.shares(running, room)) == [("a", 6), ("b", 8)]


def test_what_a_step_can_complete_needs_no_place_among_the_unfinished() -> None:
    running = [make_sequence("long", prompt=100), make_sequence("short", prompt=5)]
    capped = DecodeFirst(PromptLimits(long_prefill_token_threshold=8))
    room = make_room(20)
    assert names(capped.shares(running, room)) == [("long", 8), ("short", 5)]
    taken(room, capped.shares(running, room))
    assert capped.first_chunk(make_sequence("new", prompt=7), room) == 7
    assert capped.first_chunk(make_sequence("newer", prompt=8), room) == 0


def test_several_prompts_advance_together_in_equal_parts() -> None:
    running = [make_sequence(f"p{number}", prompt=100) for number in range(3)]
    compose = DecodeFirst(PromptLimits(max_num_partial_prefills=2, max_long_partial_prefills=2))
    assert names(compose.shares(running, make_room(20))) == [("p0", 10), ("p1", 10)]


def test_what_a_short_prompt_does_not_need_goes_to_the_others() -> None:
    running = [make_sequence("a", prompt=100), make_sequence("b", prompt=3), make_sequence("c", prompt=100)]
    compose = DecodeFirst(PromptLimits(max_num_partial_prefills=3, max_long_partial_prefills=3))
    assert sorted(names(compose.shares(running, make_room(21)))) == [("a", 9), ("b", 3), ("c", 9)]


def test_while_others_may_come_their_parts_are_left_for_them() -> None:
    running = [make_sequence("a", prompt=100)]
    compose = DecodeFirst(PromptLimits(max_num_partial_prefills=2, max_long_partial_prefills=2))
    assert names(compose.shares(running, make_room(20))) == [("a", 20)]
    assert names(compose.shares(running, make_room(20, num_waiting=9))) == [("a", 10)]
    of_four = DecodeFirst(PromptLimits(max_num_partial_prefills=4, max_long_partial_prefills=4))
    assert names(of_four.shares(running, make_room(20, num_waiting=9))) == [("a", 5)]
    room = make_room(20, num_waiting=1)
    assert names(compose.shares(running, room)) == [("a", 10)]
    taken(room, compose.shares(running, room))
    assert compose.first_chunk(make_sequence("new", prompt=100), room) == 10


def test_no_part_is_left_for_others_when_all_places_are_taken() -> None:
    compose = DecodeFirst(PromptLimits(max_num_partial_prefills=2, max_long_partial_prefills=2))
    room = make_room(40, num_waiting=5)
    taken(room, [(make_sequence("a", prompt=100), 20)])
    # A second call in the same step: a's place and this one's are all there are.
    assert names(compose.shares([make_sequence("b", prompt=100, tier=2)], room)) == [("b", 20)]


def test_short_prompts_pass_the_long_one_that_advances() -> None:
    limits = PromptLimits(
        max_num_partial_prefills=2, max_long_partial_prefills=1, long_prefill_token_threshold=50
    )
    compose = DecodeFirst(limits)
    running = [make_sequence("long", prompt=400), make_sequence("longer", prompt=500)]
    running.append(make_sequence("short", prompt=40))
    room = make_room(60)
    # One long one at a time: the second waits, the short one does not.
    assert sorted(names(compose.shares(running, room))) == [("long", 30), ("short", 30)]
    taken(room, [(running[0], 30)])
    # A long newcomer must not hold up the short one behind it: it starts with a token and then waits.
    third = make_sequence("third", prompt=300)
    assert compose.first_chunk(third, room) == 1
    taken(room, [(third, 1)])
    assert compose.first_chunk(make_sequence("small", prompt=45), room) == 29
    # What is left of a long prompt counts, not what it was.
    nearly = make_sequence("nearly", prompt=400, computed=360)
    assert compose.first_chunk(nearly, room) == 29


def test_with_several_prompts_one_is_long_above_four_percent_of_the_model() -> None:
    compose = DecodeFirst(PromptLimits(max_num_partial_prefills=2))
    assert compose.first_chunk(make_sequence("s", prompt=900), make_room(1000, context_tokens=5000)) == 200
    assert DecodeFirst().first_chunk(make_sequence("s", prompt=900), make_room(1000)) == 900


def test_prompts_fill_a_step_up_to_its_predicted_time() -> None:
    compose = DecodeFirst(PromptLimits(target_step_s=0.010, least_chunk_tokens=4))
    running = [*(decoding(f"d{number}", output=9) for number in range(20)), make_sequence("p", prompt=5000)]
    room = make_room(4000)
    shares = compose.shares(running, room)
    assert len(shares) == 21
    taken(room, shares)
    assert 0.0099 < room.predicted_s() <= 0.010
    assert compose.first_chunk(make_sequence("new", prompt=500), room) == 0


def test_prompts_advance_even_when_answers_alone_take_too_long() -> None:
    compose = DecodeFirst(PromptLimits(target_step_s=0.003, least_chunk_tokens=4))
    running = [*(decoding(f"d{number}") for number in range(50)), make_sequence("p", prompt=500)]
    room = make_room(4000)
    assert room.predicted_s() + 50 * (PRIOR.per_token_s + PRIOR.per_sequence_s) > 0.003
    shares = compose.shares(running, room)
    assert names(shares)[-1] == ("p", 4)
    assert compose.first_chunk(make_sequence("new", prompt=500), taken(room, shares)) == 0
    running.pop()
    room = taken(make_room(4000), compose.shares(running, make_room(4000)))
    assert compose.first_chunk(make_sequence("new", prompt=500), room) == 4


def test_only_one_prompt_of_a_step_may_exceed_its_time() -> None:
    limits = PromptLimits(
        max_num_partial_prefills=3, max_long_partial_prefills=3, target_step_s=0.003, least_chunk_tokens=4
    )
    running = [decoding(f"d{number}") for number in range(50)]
    running += [make_sequence(f"p{number}", prompt=100) for number in range(2)]
    room = make_room(4000)
    shares = DecodeFirst(limits).shares(running, room)
    assert names(shares)[50:] == [("p0", 4)]
    assert DecodeFirst(limits).first_chunk(make_sequence("new", prompt=50), taken(room, shares)) == 0


def test_a_long_prompt_without_a_place_waits_even_if_the_step_could_complete_it() -> None:
    compose = DecodeFirst(PromptLimits(long_prefill_token_threshold=8))
    running = [make_sequence("long", prompt=100), make_sequence("not so long", prompt=10)]
    room = make_room(50)
    assert names(compose.shares(running, room)) == [("long", 8)]
    assert compose.first_chunk(running[1], taken(room, [(running[0], 8)])) == 1


def test_a_step_takes_a_part_of_the_threshold_of_a_long_prompt() -> None:
    compose = DecodeFirst(PromptLimits(long_prefill_token_threshold=50, long_chunk_permille=400))
    slow = StepTime(0.03, 40e-6, 20e-9, 100e-6, samples=0, relative_error=0.0)
    assert compose.first_chunk(make_sequence("long", prompt=51), make_room(100, step_time=slow)) == 20
    assert compose.first_chunk(make_sequence("short", prompt=50), make_room(100, step_time=slow)) == 50


def test_on_a_fast_engine_a_long_prompts_part_is_what_nobody_feels() -> None:
    limits = PromptLimits(long_prefill_token_threshold=50, long_chunk_permille=400)
    # A step of 2 ms, 0.1 ms for the sequence and 0.2 ms a token: 25 ms have room for 114 tokens.
    fast = StepTime(2e-3, 2e-4, 0.0, 100e-6, samples=0, relative_error=0.0)
    room = make_room(1000, step_time=fast)
    assert DecodeFirst(limits).first_chunk(make_sequence("long", prompt=900), room) == 114
    running = [make_sequence("long", prompt=900)]
    assert names(DecodeFirst(limits).shares(running, make_room(1000, step_time=fast))) == [("long", 114)]
    whole = PromptLimits(long_prefill_token_threshold=50)
    assert DecodeFirst(whole).first_chunk(make_sequence("long", prompt=900), room) == 50, "not cut in parts"


def test_a_room_knows_who_stays_unfinished() -> None:
    room = make_room(50)
    part, whole, decoder = make_sequence("part", prompt=30), make_sequence("whole", prompt=9), decoding("d")
    taken(room, [(part, 10), (whole, 9), (decoder, 1), (make_sequence("starts", prompt=30), 1)])
    assert room.unfinished == {part: 30}
    assert (room.tokens, room.prefills, room.used_sequences) == (29, 3, 4)
    draft = room.draft()
    draft.take(make_sequence("other", prompt=30), 5)
    assert (draft.tokens, len(draft.unfinished), room.tokens, len(room.unfinished)) == (24, 2, 29, 1)
    room.give_back(part)
    assert room.unfinished == {}
    assert (room.tokens, room.prefills, room.used_sequences) == (39, 2, 3)


@pytest.mark.parametrize("seed", range(20))
def test_without_a_limit_no_token_is_left_over_while_somebody_wants_it(seed: int) -> None:
    rng = random.Random(seed)
    running = [random_sequence(rng, f"s{number}", longest=60) for number in range(rng.randint(1, 10))]
    room = make_room(rng.randint(1, 400), num_waiting=rng.randint(0, 2))
    wanted = sum(each.total_tokens - each.computed_tokens for each in running)
    taken(room, DecodeFirst().shares(running, room))
    assert room.used_tokens == min(wanted, room.used_tokens + room.tokens)
    newcomer = make_sequence("new", prompt=30)
    unfinished = any(each.total_tokens - each.computed_tokens > room.given.get(each, 0) for each in running)
    assert DecodeFirst().first_chunk(newcomer, room) == (0 if unfinished else min(30, room.tokens))


# ---------------------------------------------------------------- token fair


def decode_steps(compose: TokenFair, running: list[Sequence], tokens: int, steps: int) -> list[Counter[str]]:
    """Tokens by tenant, step by step."""
    each_step = []
    for _ in range(steps):
        shares = compose.shares(running, make_room(tokens))
        assert all(count == 1 for _, count in shares)
        each_step.append(Counter(sequence.tenant_id for sequence, _ in shares))
        for sequence, count in shares:
            execute(sequence, count)
    return each_step


def windows(each_step: list[Counter[str]], tenant: str, width: int) -> list[int]:
    sums, window = [], deque(maxlen=width)
    for served in each_step:
        window.append(served[tenant])
        if len(window) == width:
            sums.append(sum(window))
    return sums


def test_when_slots_are_short_tokens_follow_the_weights() -> None:
    running = [decoding(f"a{number}", tenant="a", weight=1.0) for number in range(30)]
    running += [decoding(f"b{number}", tenant="b", weight=3.0) for number in range(30)]
    steps = decode_steps(TokenFair(slots=20), running, 100, 300)
    assert all(served.total() == 20 for served in steps)
    assert all(abs(tokens - 64 * 5) <= 20 for tokens in windows(steps, "a", 64))
    assert all(abs(tokens - 64 * 15) <= 20 for tokens in windows(steps, "b", 64))


def test_one_sequence_against_fifty_gets_its_token_every_step() -> None:
    running = [decoding("a", tenant="a"), *(decoding(f"b{number}", tenant="b") for number in range(50))]
    compose = TokenFair(slots=25)
    steps = decode_steps(compose, running, 100, 200)
    assert [served["a"] for served in steps] == [1] * 200
    assert [served["b"] for served in steps] == [24] * 200
    emitted = [sequence.emitted_tokens for sequence in running[1:]]
    assert max(emitted) - min(emitted) <= 1
    assert compose.credit_tokens > 0
    assert compose.floor_tokens == 0


def test_who_missed_a_step_is_first_in_the_next() -> None:
    running = [decoding(f"s{number}") for number in range(5)]
    compose = TokenFair(slots=3)
    served = [{each.sequence_id for each, _ in compose.shares(running, make_room(10))} for _ in range(3)]
    assert served[0] == {"s0", "s1", "s2"}
    assert served[1] >= {"s3", "s4"}
    assert served[2] >= {"s1", "s2"}
    assert compose.credit_tokens == 4


def test_a_tenant_that_was_away_has_nothing_saved_up() -> None:
    ones = [decoding(f"a{number}", tenant="a") for number in range(10)]
    others = [decoding(f"b{number}", tenant="b") for number in range(10)]
    compose = TokenFair(slots=4)
    decode_steps(compose, ones, 50, 100)
    steps = decode_steps(compose, ones + others, 50, 20)
    assert all(abs(tokens - 16) <= 4 for tokens in windows(steps, "b", 8))


def test_a_tenant_with_few_sequences_saves_nothing_up_either() -> None:
    few = [decoding("a", tenant="a")]
    others = [decoding(f"b{number}", tenant="b") for number in range(50)]
    compose = TokenFair(slots=20)
    decode_steps(compose, few + others, 100, 100)
    few += [decoding(f"a{number}", tenant="a") for number in range(30)]
    steps = decode_steps(compose, few + others, 100, 20)
    assert all(abs(served["a"] - 10) <= 1 for served in steps)


def test_slots_are_those_of_the_whole_step() -> None:
    compose = TokenFair(slots=3)
    early, late = [decoding(f"e{number}") for number in range(2)], [decoding(f"l{n}") for n in range(2)]
    room = make_room(20)
    taken(room, compose.shares(early, room))
    assert len(compose.shares(late, room)) == 1


def test_every_one_has_its_floor_while_there_are_slots_and_a_prompt_its_cap() -> None:
    running = [decoding(f"s{number}") for number in range(5)]
    running.append(make_sequence("prompt", prompt=500))
    compose = TokenFair(cap_tokens=32)
    shares = dict(names(compose.shares(running, make_room(100))))
    assert shares == {**{f"s{number}": 1 for number in range(5)}, "prompt": 32}
    assert (compose.floor_tokens, compose.credit_tokens, compose.capped_chunks) == (5, 0, 1)
    assert compose.first_chunk(make_sequence("new", prompt=33), make_room(100)) == 32
    assert compose.first_chunk(make_sequence("new", prompt=32), make_room(100)) == 32
    assert compose.capped_chunks == 2


def test_decoding_sequences_leave_prompts_a_part_of_the_step() -> None:
    running = [decoding(f"s{number}") for number in range(40)]
    running.append(make_sequence("prompt", prompt=500))
    shares = dict(names(TokenFair().shares(running, make_room(20))))
    assert shares["prompt"] >= 5
    assert sum(shares.values()) == 20


def test_higher_tiers_have_their_slots_first() -> None:
    running = [decoding(f"low{number}", tier=2) for number in range(4)]
    running += [decoding(f"high{number}", tier=0) for number in range(4)]
    shares = names(TokenFair(slots=6).shares(running, make_room(10)))
    assert sum(name.startswith("high") for name, _ in shares) == 4
    assert len(shares) == 6


# ---------------------------------------------------------------- slack

FLAT = StepTime(0.010, 0.001, 0.0, 0.0, samples=0, relative_error=0.0)
"""10 ms a step and 1 ms a token."""


def test_a_prompt_takes_what_the_least_slack_leaves() -> None:
    # Due at 0 + 1.0 + 4 * 0.1 = 1.4 and at 1.5; now it is 1.2995.
    tight, loose = decoding("tight", output=4), decoding("loose", output=5)
    prompt = make_sequence("prompt", prompt=500, submitted_s=1.29)
    room = make_room(500, now_s=1.2995, step_time=FLAT)
    compose = DeadlineSlack(1.0, 0.1)
    shares = compose.shares([tight, loose, prompt], room)
    # 10 ms + 2 tokens of answers + 88 of the prompt take the 100.5 ms that are left.
    assert names(shares) == [("tight", 1), ("loose", 1), ("prompt", 88)]
    assert (compose.urgent_steps, compose.lent_tokens) == (0, 0)


def test_sequences_that_are_ahead_lend_their_tokens_to_a_prompt_that_is_late() -> None:
    tight, ahead = decoding("tight", output=1), decoding("ahead", output=40)
    prompt = make_sequence("prompt", prompt=60, submitted_s=0.1)
    room = make_room(50, now_s=1.05, step_time=FLAT)
    compose = DeadlineSlack(1.0, 0.1)
    shares = names(compose.shares([tight, ahead, prompt], room))
    assert shares == [("tight", 1), ("prompt", 39)], "the step must end by 1.1, when tight is due"
    assert (compose.urgent_steps, compose.lent_tokens) == (1, 1)


def test_the_prompt_that_is_due_first_goes_first() -> None:
    running = [make_sequence(f"p{number}", prompt=30, submitted_s=-number / 10) for number in range(3)]
    running.append(make_sequence("patient", prompt=30, submitted_s=-1.0, ttft_target_s=5.0))
    shares = names(DeadlineSlack(1.0, 0.1).shares(running, make_room(70)))
    assert shares == [("p2", 30), ("p1", 30), ("p0", 10)]


def test_nobody_lends_who_could_not_miss_two_such_steps() -> None:
    decoder = decoding("decoder", output=2)
    prompt = make_sequence("prompt", prompt=600, submitted_s=0.0)
    room = make_room(500, now_s=1.0, step_time=FLAT)
    assert [name for name, _ in names(DeadlineSlack(1.0, 0.1).shares([decoder, prompt], room))] == [
        "decoder",
        "prompt",
    ]


def test_one_that_is_late_whatever_is_done_does_not_hold_up_prompts() -> None:
    late = decoding("late", output=1)
    prompt = make_sequence("prompt", prompt=500, submitted_s=9.9)
    room = make_room(500, now_s=10.0, step_time=FLAT)
    # 10 ms and its own token, and prompt tokens for the rest of one token's pace (100 ms).
    shares = names(DeadlineSlack(1.0, 0.1).shares([late, prompt], room))
    assert shares == [("late", 1), ("prompt", 89)]


def test_nobody_lends_to_a_lower_tier() -> None:
    ahead = decoding("ahead", output=40, tier=0)
    prompt = make_sequence("prompt", prompt=60, tier=2)
    room = make_room(50, now_s=1.05, step_time=FLAT)
    assert names(DeadlineSlack(1.0, 0.1).shares([ahead, prompt], room))[0] == ("ahead", 1)


def test_a_sequences_own_targets_count() -> None:
    compose = DeadlineSlack(1.0, 0.1)
    own = decoding("own", output=3, submitted_s=2.0, ttft_target_s=0.5, tpot_target_s=0.2)
    assert compose.due_s(own) == pytest.approx(2.0 + 0.5 + 3 * 0.2)
    assert compose.due_s(decoding("default", output=3, submitted_s=2.0)) == pytest.approx(2.0 + 1.0 + 0.3)
    assert compose.due_s(make_sequence("patient", ttft_target_s=1e9)) == 60.0


def test_lending_makes_nobody_late() -> None:
    """One answer with slack and a stream of prompts, all of them late: its tokens still come when due."""
    compose = DeadlineSlack(0.5, 0.1)
    answer = decoding("answer", output=30, max_tokens=200, submitted_s=0.0)
    now_s, running, late = 1.0, [answer], 0
    for number in range(60):
        running.append(make_sequence(f"p{number}", prompt=40, max_tokens=1, submitted_s=now_s - 1))
        room = make_room(60, now_s=now_s, step_time=FLAT)
        due_s = compose.due_s(answer)
        taken(room, compose.shares(running, room))
        now_s += room.predicted_s()
        late += answer in room.given and now_s > due_s + 1e-9
        assert answer in room.given or now_s < due_s
        for sequence, tokens in room.given.items():
            execute(sequence, tokens)
        running = [each for each in running if each is answer or each.emitted_tokens == 0]
    assert compose.lent_tokens > 5
    assert answer.emitted_tokens > 31
    assert late == 0


# ---------------------------------------------------------------- lanes


def test_a_step_advances_prompts_or_answers() -> None:
    rng = random.Random(4)
    compose = Lanes()
    running: list[Sequence] = []
    kinds = []
    for step in range(400):
        room = make_room(64, now_s=step * 0.01, num_waiting=1)
        shares = compose.shares(running, room)
        in_prompts = {sequence.total_tokens - sequence.computed_tokens > 1 for sequence, _ in shares}
        assert len(in_prompts) <= 1, "a step of both lanes"
        if shares:
            kinds.append(in_prompts.pop())
        taken(room, shares)
        if rng.random() < 0.3 and room.tokens:
            newcomer = make_sequence(f"s{step}", prompt=rng.randint(30, 200), max_tokens=rng.randint(2, 40))
            tokens = compose.first_chunk(newcomer, room)
            if tokens:
                room.take(newcomer, tokens)
                running.append(newcomer)
                assert tokens > 1 or (shares and not kinds[-1])
        for sequence, tokens in room.given.items():
            execute(sequence, tokens)
        running = [each for each in running if each.emitted_tokens < each.submit.max_tokens]
    assert compose.switches > 10
    changes = sum(before != after for before, after in pairwise(kinds))
    assert changes < len(kinds) / 3, "the lanes are switched nearly every step"


def test_answers_wait_for_so_many_steps_of_prompts_at_most() -> None:
    compose = Lanes(most_prefill_steps=3, least_decode_steps=2)
    running = [decoding("d"), *(make_sequence(f"p{number}", prompt=10_000) for number in range(4))]
    served = [
        any(sequence.sequence_id == "d" for sequence, _ in compose.shares(running, make_room(64)))
        for _ in range(40)
    ]
    gaps = "".join("d" if each else "." for each in served).split("d")
    assert max(len(gap) for gap in gaps) == 3
    assert sum(served) < 30


def test_a_single_prompt_waits_for_so_many_steps_of_answers_at_most() -> None:
    compose = Lanes(most_decode_steps=7)
    running = [*(decoding(f"d{number}") for number in range(40)), make_sequence("p", prompt=10_000)]
    served = [
        any(sequence.sequence_id == "p" for sequence, _ in compose.shares(running, make_room(64)))
        for _ in range(40)
    ]
    gaps = "".join("p" if each else "." for each in served).split("p")
    assert max(len(gap) for gap in gaps) == 7


def test_with_too_few_tokens_answers_take_turns() -> None:
    compose = Lanes()
    running = [decoding(f"d{number}") for number in range(6)]
    served: Counter[str] = Counter()
    for _ in range(3):
        served.update(name for name, _ in names(compose.shares(running, make_room(4))))
    assert set(served.values()) == {2}


# ---------------------------------------------------------------- admit: memory


def test_prompt_only_sets_nothing_aside() -> None:
    batch = make_batch([start(make_sequence("r"), 4)], block_tokens=4)
    assert prompt_only().blocks_wanted(make_sequence("s", prompt=9), batch) == 3


def test_the_reserve_is_a_part_of_the_predicted_remainder() -> None:
    admit = PredictedReserve(500)
    batch = make_batch([], block_tokens=1)
    assert admit.blocks_wanted(make_sequence("s", predicted=20), batch) == 4 + 10
    assert admit.blocks_wanted(make_sequence("s", predicted=20, output=8), batch) == 4 + 8 + 6
    assert admit.blocks_wanted(make_sequence("s", predicted=20, output=30), batch) == 4 + 30


def test_no_more_is_wanted_than_the_sequence_can_ever_use() -> None:
    short = make_sequence("s", prompt=4, predicted=40, max_tokens=5)
    assert (
        PredictedReserve(1000).blocks_wanted(short, make_batch([], block_tokens=4)) == 2
    )  # 4 + 5 - 1 tokens


def test_blocks_that_are_held_are_not_wanted_again() -> None:
    running = start(make_sequence("r", prompt=8, computed=8, output=1, predicted=8), 4)
    batch = make_batch([running, running], block_tokens=4)
    assert len(running.block_table) == 3
    # Two running ones miss a block each (9 + 7 tokens), and the candidate wants two.
    candidate = make_sequence("s", prompt=4, predicted=4)
    assert PredictedReserve(1000).blocks_wanted(candidate, batch) == 2 + 2


# ---------------------------------------------------------------- admit: peak


def most_at_once(needs: list[tuple[int, int]]) -> int:
    """Everybody grows by a token a step; who has no more to come is gone after that step."""
    alive = list(needs)
    most = sum(used for _, used in alive)
    while alive:
        most = max(most, sum(used for _, used in alive))
        alive = [(remaining - 1, used + 1) for remaining, used in alive if remaining > 0]
    return most


@pytest.mark.parametrize("seed", range(30))
def test_the_peak_is_what_a_step_by_step_account_finds(seed: int) -> None:
    rng = random.Random(seed)
    needs = [(rng.randint(0, 30), rng.randint(1, 50)) for _ in range(rng.randint(0, 12))]
    assert plain_peak(needs) == most_at_once(needs)


@pytest.mark.parametrize("seed", range(30))
def test_the_peak_kept_up_to_date_is_the_plain_one(seed: int) -> None:
    rng = random.Random(seed)
    needs = [(rng.randint(0, 9), rng.randint(1, 50)) for _ in range(rng.randint(0, 12))]
    peaks = Peaks(needs)
    for _ in range(20):
        one_more = (rng.randint(0, 9), rng.randint(1, 50))
        assert peaks.with_one_more(*one_more) == plain_peak([*needs, one_more])
        if rng.random() < 0.5:
            needs.append(one_more)
            peaks.insert(*one_more)


def test_the_peak_is_smaller_than_all_that_will_ever_be_used() -> None:
    # The short one is gone (after 2 tokens) long before the long one has grown by 30.
    running = [start(make_sequence("short", prompt=10, predicted=2), 1)]
    batch = make_batch(running, block_tokens=1)
    admit = PeakAdmit(quantile_permille=500)
    long = make_sequence("long", prompt=10, predicted=30)
    assert admit.blocks_wanted(long, batch) == 10 + 30 - 10  # of 10 held, which are free by then
    short = make_sequence("short too", prompt=10, predicted=2)
    assert admit.blocks_wanted(short, batch) == 12 + 12 - 10


def test_in_blocks_the_peak_covers_every_last_one_that_is_nearly_empty() -> None:
    running = [start(make_sequence(f"r{number}", prompt=5, predicted=4), 4) for number in range(3)]
    batch = make_batch(running, block_tokens=4)
    admit = PeakAdmit(quantile_permille=500)
    candidate = make_sequence("s", prompt=5, predicted=4)
    assert admit.blocks_wanted(candidate, batch) == 4 * 3 - 3 * 2  # 9 tokens each


def test_the_quantile_lies_between_median_high_and_maximum() -> None:
    sequence = make_sequence("s", prompt=1, predicted=100, high=180, max_tokens=1001)
    at = {level: PeakAdmit(quantile_permille=level) for level in (500, 700, 900, 950, 1000)}
    remaining = {level: admit.needs([sequence], 1)[0][0] for level, admit in at.items()}
    assert remaining == {500: 100, 700: 140, 900: 180, 950: 590, 1000: 1000}
    sequence.token_ids += [2] * 150
    assert at[500].needs([sequence], 1)[0][0] == 1, "one that outlived its forecast has a token to come"


def test_the_quantile_jumps_once_a_step_and_sinks_back() -> None:
    admit = PeakAdmit(quantile_permille=600, jump_permille=200)
    admit.preempted()
    admit.preempted()
    assert (admit.level_permille, admit.jumps) == (800, 1)
    for _ in range(DECAY_STEPS // 2):
        admit.stepped()
    assert admit.level_permille == 700
    for _ in range(DECAY_STEPS // 2):
        admit.stepped()
    assert admit.level_permille == 600
    for _ in range(10):
        admit.preempted()
        admit.stepped()
    assert 990 <= admit.level_permille <= 1000


def test_headroom_is_kept_beside_others_only() -> None:
    admit = PeakAdmit(headroom_permille=100)
    candidate = make_sequence("s", prompt=16, predicted=1)
    empty = make_batch([], num_blocks=100)
    beside = make_batch([start(make_sequence("r", prompt=16, predicted=1))], num_blocks=100)
    plain = PeakAdmit()
    assert admit.blocks_wanted(candidate, empty) == plain.blocks_wanted(candidate, empty)
    beside.memo.clear()
    assert admit.blocks_wanted(candidate, beside) == 10 + plain.blocks_wanted(
        candidate, make_batch(beside.running, num_blocks=100)
    )


# ---------------------------------------------------------------- admit: batches


def let_in(admit: StaticBatch | DynamicWindow | BatchOrWait, running: list[Sequence], name: str) -> Sequence:
    sequence = start(make_sequence(name))
    running.append(sequence)
    admit.admitted(sequence, make_batch(running))
    return sequence


def test_a_static_batch_is_filled_once_and_closed_until_all_have_finished() -> None:
    admit = StaticBatch(size=3)
    running: list[Sequence] = []
    candidate = make_sequence("candidate")
    for number in range(3):
        assert admit.joins(candidate, make_batch(running, num_waiting=5 - number)) is None
        let_in(admit, running, f"s{number}")
    assert admit.joins(candidate, make_batch(running, num_waiting=2)) == RUNS
    running.pop()
    assert admit.joins(candidate, make_batch(running, num_waiting=2)) == RUNS
    running.clear()
    assert admit.joins(candidate, make_batch(running, num_waiting=2)) is None


def test_a_static_batch_takes_those_who_waited_when_it_was_opened() -> None:
    admit = StaticBatch(size=10)
    running: list[Sequence] = []
    assert admit.joins(make_sequence("s0"), make_batch(running, num_waiting=2)) is None
    let_in(admit, running, "s0")
    # The next one's prompt did not fit into the first step.
    admit.stepped()
    assert admit.joins(make_sequence("s1"), make_batch(running, num_waiting=5)) is None
    let_in(admit, running, "s1")
    assert admit.joins(make_sequence("s2"), make_batch(running, num_waiting=4)) == RUNS


def test_a_static_batch_waits_for_prompts_but_not_for_memory() -> None:
    admit = StaticBatch(size=10)
    running: list[Sequence] = []
    candidate = make_sequence("s1")
    assert admit.joins(make_sequence("s0"), make_batch(running, num_waiting=2)) is None
    first = let_in(admit, running, "s0")
    admit.stepped()
    admit.stepped()
    assert admit.joins(candidate, make_batch(running)) is None, "the first one's prompt is not through"
    execute(first, 4)
    assert admit.joins(candidate, make_batch(running)) == RUNS


def test_a_member_that_lost_its_memory_comes_back() -> None:
    admit = StaticBatch(size=2)
    running: list[Sequence] = []
    admit.joins(make_sequence("s0"), make_batch(running, num_waiting=2))
    let_in(admit, running, "s0")
    lost = let_in(admit, running, "s1")
    running.remove(lost)
    lost.preemptions = 1
    stranger = make_sequence("stranger")
    stranger.preemptions = 1
    assert admit.joins(lost, make_batch(running)) is None
    assert admit.joins(stranger, make_batch(running)) == RUNS


def test_padding_is_counted_to_the_longest_prompt_and_the_longest_answer() -> None:
    waste = batch_waste([(10, 5), (4, 20), (7, 7)])
    assert (waste.useful_tokens, waste.prompt_padding_tokens, waste.output_padding_tokens) == (53, 9, 28)
    assert waste.share == pytest.approx(37 / 90)
    assert batch_waste([]).share == 0.0
    assert (waste + waste).batches == 2


def test_a_static_batch_counts_the_padding_of_its_batches() -> None:
    admit = StaticBatch(size=2)
    running: list[Sequence] = []
    for batch in range(2):
        for number in range(2):
            admit.joins(make_sequence("candidate"), make_batch(running, num_waiting=2 - number))
            let_in(admit, running, f"{batch}.{number}").token_ids.extend([2] * (3 + 4 * number))
        running.clear()
    assert (admit.waste.batches, admit.waste.output_padding_tokens) == (2, 8)
    assert admit.waste.useful_tokens == 2 * (4 + 3 + 4 + 7)


def test_a_window_is_open_for_its_time_or_until_it_is_full() -> None:
    admit = DynamicWindow(size=4, window_s=0.5)
    first = make_sequence("first", submitted_s=10.0)
    assert admit.joins(first, make_batch([], now_s=10.0, num_waiting=1)) == Defer("the window is open", 10.5)
    assert admit.joins(first, make_batch([], now_s=10.2, num_waiting=3)) == Defer("the window is open", 10.5)
    assert admit.joins(first, make_batch([], now_s=10.2, num_waiting=4)) is None
    assert admit.joins(first, make_batch([], now_s=10.5, num_waiting=2)) is None


def test_who_waited_while_a_batch_ran_waits_for_no_window() -> None:
    admit = DynamicWindow(size=4, window_s=0.5)
    running: list[Sequence] = []
    admit.joins(make_sequence("s", submitted_s=0.0), make_batch([], now_s=1.0))
    let_in(admit, running, "s")
    early, late = make_sequence("early", submitted_s=2.0), make_sequence("late", submitted_s=5.0)
    assert admit.joins(early, make_batch(running, now_s=2.0)) == RUNS
    # Another one stands at the head by then: the first one's wait counts all the same.
    assert admit.joins(late, make_batch([], now_s=5.0, num_waiting=2)) is None


def test_each_batch_has_a_window_of_its_own() -> None:
    admit = DynamicWindow(size=4, window_s=0.5)
    running: list[Sequence] = []
    admit.joins(make_sequence("s", submitted_s=0.0), make_batch([], now_s=1.0))
    let_in(admit, running, "s")
    next_one = make_sequence("next", submitted_s=9.0)
    assert admit.joins(next_one, make_batch([], now_s=9.1)) == Defer("the window is open", 9.5)


class Recorded:
    """A table that says what it was told to, and keeps what it was asked."""

    long_tokens = 30
    longest_wait_s = 0.5

    def __init__(self, *decisions: TableAction) -> None:
        self.decisions = list(decisions)
        self.asked: list[dict[str, float]] = []

    def decide(self, **situation: float) -> TableAction:
        self.asked.append(situation)
        return self.decisions.pop(0)


def test_the_table_is_asked_about_all_that_wait_and_says_how_long() -> None:
    table = Recorded(
        TableAction(0.2, 0), TableAction(0.2, 0), TableAction(0.2, 0), TableAction(0.2, 0), TableAction(0, 2)
    )
    admit = BatchOrWait(table, size=4)
    short = make_sequence("s", submitted_s=1.0, prompt=4, predicted=20)
    long = make_sequence("l", submitted_s=0.75, prompt=16, predicted=20)
    for number in range(5):
        admit.arrived(0.5 * number)

    def batch(now_s: float, waiting: int) -> Batch:
        made = make_batch([], now_s=now_s, num_waiting=waiting, num_blocks=8)
        made.waiting, made.free_blocks = (lambda: [short.entry(), long.entry()]), 6
        return made

    # The head is not the one that has waited longest, and not the long one.
    assert admit.joins(short, batch(1.0, 2)) == Defer("the table says wait", 1.2)
    assert table.asked == [
        {
            "rate_per_s": 2.0,
            "num_waiting": 2,
            "oldest_wait_s": 0.25,
            "has_long": True,
            "remaining_tokens": 60,
            "kv_pressure": 0.25,
        }
    ]
    assert admit.joins(short, batch(1.2, 2)) == Defer("the table says wait", 1.25), "it has a longest wait"
    assert admit.joins(short, batch(1.25, 2)) is None
    assert admit.joins(short, batch(1.0, 4)) is None, "a full batch"
    assert admit.joins(short, batch(1.0, 3)) is None, "the table says run"


def test_a_batch_takes_no_more_than_the_table_says() -> None:
    admit = BatchOrWait(Recorded(TableAction(0.0, 2)), size=4)
    running: list[Sequence] = []
    assert admit.joins(make_sequence("s0"), make_batch(running, num_waiting=4)) is None
    let_in(admit, running, "s0")
    assert admit.joins(make_sequence("s1"), make_batch(running, num_waiting=3)) is None
    let_in(admit, running, "s1")
    assert admit.joins(make_sequence("s2"), make_batch(running, num_waiting=2)) == RUNS


def test_a_wait_too_short_to_move_the_clock_is_none() -> None:
    admit = BatchOrWait(Recorded(TableAction(1e-30, 0)))
    assert admit.joins(make_sequence("s", submitted_s=1.0), make_batch([], now_s=1.0)) is None


# ---------------------------------------------------------------- admit: the lane of small ones


def test_large_ones_leave_a_lane_and_small_ones_may_take_of_what_those_are_promised() -> None:
    """Ten blocks of a hundred; a running large one still wants 15, of small ones 4 hold a block each."""
    admit, plain = PredictedReserve(500, small_permille=100), PredictedReserve(500)
    large = start(make_sequence("large", prompt=40, predicted=120, max_tokens=200), 4)
    large.yields_cost = 1
    small = [start(make_sequence(f"small{number}", prompt=3, predicted=1), 4) for number in range(4)]
    newcomer, next_large = (
        make_sequence("s", prompt=3, predicted=1),
        make_sequence("l", prompt=40, predicted=8),
    )
    next_large.yields_cost = 1

    def wanted(which: PredictedReserve, candidate: Sequence, running: list[Sequence]) -> int:
        return which.blocks_wanted(candidate, make_batch(running, block_tokens=4, num_blocks=100))

    assert wanted(plain, newcomer, [large]) == 15 + 1
    assert wanted(admit, newcomer, [large]) == 15 + 1 - 10
    assert wanted(admit, next_large, [large]) == wanted(plain, next_large, [large]), "no small one runs"
    assert wanted(admit, next_large, [large, *small]) == wanted(plain, next_large, [large]) + 4
    many = [start(make_sequence(f"m{number}", prompt=3, predicted=1), 4) for number in range(30)]
    assert wanted(admit, next_large, [large, *many]) == wanted(plain, next_large, [large]) + 10
    # What small ones are promised themselves is not to be had.
    growing = start(make_sequence("g", prompt=4, predicted=80, max_tokens=90), 4)
    assert wanted(admit, newcomer, [growing]) == wanted(plain, newcomer, [growing]) == 10 + 1


def test_while_a_prompt_decodes_any_length_may_start() -> None:
    admit = LengthBuckets()
    running = [start(of_length("r", 200))]
    running[0].computed_tokens = running[0].total_tokens - 1
    assert admit.joins(of_length("shorter", 20), make_batch(running)) is None


def test_order_and_admission_sort_by_the_same_length() -> None:
    sequence = of_length("s", 200)
    sequence.found_tokens = 150
    admit, same = LengthBuckets(), of_length("same", 50)
    assert bucket_size(sequence.entry()) == 50
    assert admit.bucket(sequence) == admit.bucket(same)


# ---------------------------------------------------------------- admit: buckets


def of_length(name: str, total: int, **changes: object) -> Sequence:
    return make_sequence(name, prompt=total, predicted=20, **changes)  # type: ignore[arg-type]


def test_a_batch_takes_in_its_like() -> None:
    admit = LengthBuckets()
    running = [start(of_length("r", 200))]
    assert admit.joins(of_length("like", 255), make_batch(running)) is None
    assert admit.joins(of_length("longer", 256), make_batch(running)) == Defer("bucket 7 runs")
    assert admit.joins(of_length("shorter", 127), make_batch(running)) == Defer("bucket 7 runs")
    assert admit.joins(of_length("any", 9000), make_batch([])) is None


def test_in_a_bucket_lengths_lie_within_the_ratio() -> None:
    for ratio in (1.5, 2.0, 4.0):
        admit = LengthBuckets(ratio=ratio)
        by_bucket: dict[int, list[int]] = {}
        for total in range(21, 5000):
            by_bucket.setdefault(admit.bucket(of_length("s", total)), []).append(total)
        assert len(by_bucket) > 3
        assert all(max(lengths) <= ratio * min(lengths) for lengths in by_bucket.values())


def long_ones(count: int) -> list[Sequence]:
    return [
        start(make_sequence(f"long{number}", prompt=900, output=5, predicted=400, max_tokens=500))
        for number in range(count)
    ]


def test_long_ones_are_suspended_for_a_short_one_that_has_waited() -> None:
    admit = LengthBuckets(suspend_after_s=0.5)
    running = long_ones(3)
    short = of_length("short", 30, submitted_s=1.0)
    assert admit.suspends(short, make_batch(running, now_s=1.4)) == []
    assert admit.suspends(short, make_batch(running, now_s=1.5)) == running
    assert admit.suspensions == 3


@pytest.mark.parametrize("why", ["near", "tier", "starts", "ends soon", "memory", "mixed"])
def test_long_ones_are_left_alone(why: str) -> None:
    admit = LengthBuckets()
    running = long_ones(2)
    short = of_length("short", 600 if why == "near" else 30)
    changes: dict[str, int] = {}
    if why == "tier":
        short = of_length("short", 30, tier=0)
    elif why == "starts":
        running[1].token_ids = running[1].token_ids[:900]
    elif why == "ends soon":
        running[1].computed_tokens = running[1].total_tokens - 10
    elif why == "memory":
        changes["num_blocks"] = sum(len(each.block_table) for each in running)
    elif why == "mixed":
        running.append(start(of_length("between", 50)))
    assert admit.suspends(short, make_batch(running, now_s=100.0, **changes)) == []
    assert admit.suspensions == 0


def test_suspensions_are_far_apart_and_few() -> None:
    admit = LengthBuckets(rest_steps=10, most_suspensions=2)
    running = long_ones(1)
    short = of_length("short", 30)
    times = []
    for step in range(100):
        admit.stepped()
        if admit.suspends(short, make_batch(running, now_s=100.0)):
            times.append(step)
    assert times == [0, 10]


def test_suspended_ones_return_with_their_like_or_when_nothing_runs() -> None:
    admit = LengthBuckets(longest_pause_s=5.0)
    [long] = running = long_ones(1)
    short = of_length("short", 30)
    assert admit.suspends(short, make_batch(running, now_s=100.0)) == [long]
    long.is_suspended, long.paused_since_s = True, 100.0
    shorts = [start(of_length("runs", 30))]
    assert admit.joins(short, make_batch(shorts, now_s=104.9)) is None
    assert admit.joins(long, make_batch(shorts, now_s=104.9)) == Defer("bucket 4 runs")
    # After so long the short ones let the batch run dry.
    assert admit.joins(short, make_batch(shorts, now_s=105.0)) == Defer("suspended ones go first")
    assert admit.joins(long, make_batch([], now_s=105.0)) is None
    long.is_suspended = False
    assert admit.joins(short, make_batch(shorts, now_s=105.1)) is None


# ---------------------------------------------------------------- evict


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


# ---------------------------------------------------------------- policies

PRESETS = [
    *("static", "static-padded", "dynamic", "buckets", "fcfs", "hrrn", "sjf", "srpt", "las", "mlfq"),
    *("priority", "edf", "drr", "dlpm", "vtc", "hybrid"),
]


def test_every_preset_exists_and_goes_by_its_name() -> None:
    assert sorted(POLICIES) == sorted(PRESETS)
    for name in POLICIES:
        policy = make_policy(name)
        assert policy.name == name
        assert policy.admit is not make_policy(name).admit or policy.admit == make_policy(name).admit
    with pytest.raises(UnknownPolicy, match="no policy 'best'; there are buckets, dlpm, drr, dynamic, edf"):
        make_policy("best")


def test_policies_do_not_share_state() -> None:
    for name in ("static", "dynamic", "buckets", "hybrid"):
        assert make_policy(name).admit is not make_policy(name).admit


def test_a_policy_promises_what_all_four_choices_promise() -> None:
    assert make_policy("hybrid").claims == ALL
    assert make_policy("vtc").claims == ALL
    assert make_policy("vtc", PolicyOptions(compose="slack")).claims == ALL - {FAIRNESS_BOUND}
    assert NO_STARVATION not in make_policy("las").claims
    assert WORK_CONSERVATION not in make_policy("static").claims
    assert FAIRNESS_BOUND not in make_policy("fcfs").claims


def test_a_policy_describes_itself() -> None:
    options = PolicyOptions(compose="token-fair", slots=32)
    described = make_policy("fcfs", options).describe()
    assert described["policy"] == "fcfs"
    assert described["order"] == "fcfs"
    assert described["admit"] == "predicted-reserve"
    assert described["compose"] == "token-fair"
    assert described["evict"] == "latest-victim"
    assert described["options"] == {"compose": "token-fair", "slots": 32}
    assert described["claims"] == sorted(make_policy("fcfs", options).claims)
    own = {
        "max_num_partial_prefills": 4,
        "long_chunk_permille": 400,
        "target_step_s": 0.2,
        "small_lane_permille": 75,
    }
    assert make_policy("hybrid").describe()["options"] == own
    changed = make_policy("hybrid", PolicyOptions(max_num_partial_prefills=1)).describe()["options"]
    assert changed == {**own, "max_num_partial_prefills": 1}


def test_options_reach_the_choices() -> None:
    options = PolicyOptions(
        max_num_partial_prefills=4,
        max_long_partial_prefills=2,
        long_prefill_token_threshold=77,
        long_chunk_permille=900,
        target_step_s=0.0,
        least_chunk_tokens=9,
        peak_quantile_permille=800,
        peak_jump_permille=50,
        peak_headroom_permille=20,
    )
    policy = make_policy("hybrid", replace(options, admit="peak"))
    assert policy.compose == DecodeFirst(PromptLimits(4, 2, 77, 0.0, 9, 900))
    assert policy.admit == PeakAdmit(quantile_permille=800, jump_permille=50, headroom_permille=20)
    window = make_policy("dynamic", PolicyOptions(batch_size=6, window_s=0.3, reserve_permille=100)).admit
    assert isinstance(window, DynamicWindow)
    assert (window.size, window.window_s, window.memory.permille) == (6, 0.3, 100)
    static = make_policy("static-padded", PolicyOptions(batch_size=6)).admit
    assert isinstance(static, StaticBatch)
    assert (static.padded, static.size) == (True, 6)
    buckets = make_policy(
        "buckets", PolicyOptions(bucket_ratio=4, suspend_after_s=2, longest_pause_s=3)
    ).admit
    assert isinstance(buckets, LengthBuckets)
    assert (buckets.ratio, buckets.suspend_after_s, buckets.longest_pause_s) == (4, 2, 3)
    fair = make_policy("vtc", PolicyOptions(compose="token-fair", slots=5, cap_tokens=7)).compose
    assert isinstance(fair, TokenFair)
    assert (fair.slots, fair.cap_tokens) == (5, 7)
    slack = make_policy("vtc", PolicyOptions(compose="slack", ttft_target_s=2, tpot_target_s=0.3)).compose
    assert isinstance(slack, DeadlineSlack)
    assert (slack.ttft_target_s, slack.tpot_target_s) == (2, 0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills must be between 1 and 4096, not 0"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be between 0 and"),
        ({"target_step_s": float("nan")}, "target_step_s must be between 0 and 3600, not nan"),
        ({"peak_quantile_permille": 1001}, "peak_quantile_permille must be between 500 and 1000, not 1001"),
        ({"window_s": -0.1}, "window_s must be between 0 and 3600, not -0.1"),
        ({"bucket_ratio": 1.0}, "bucket_ratio must be between 1.1 and 16, not 1.0"),
        (
            {"max_long_partial_prefills": 3, "max_num_partial_prefills": 2},
            r"max_long_partial_prefills \(3\) must not exceed max_num_partial_prefills \(2\)",
        ),
    ],
)
def test_a_number_out_of_range_is_named_with_its_bounds(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyOptions(**options)  # type: ignore[arg-type]


def test_choices_that_do_not_exist_are_named_with_those_that_do() -> None:
    with pytest.raises(UnknownPolicy, match="no compose 'best'; there are decode-first, lanes, slack"):
        make_policy("vtc", PolicyOptions(compose="best"))
    with pytest.raises(UnknownPolicy, match="no admit 'best'; there are buckets, dynamic"):
        make_policy("vtc", PolicyOptions(admit="best"))
    with pytest.raises(UnknownPolicy, match="no evict 'best'; there are attained-victim"):
        make_policy("vtc", PolicyOptions(evict="best"))


def test_the_table_must_be_handed_in() -> None:
    with pytest.raises(ValueError, match="a batch-or-wait table, and none is set"):
        make_policy("fcfs", PolicyOptions(admit="table"))
