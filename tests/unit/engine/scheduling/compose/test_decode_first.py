"""Decode-first composition and the division of a step among prompts."""

from __future__ import annotations

import random

import pytest

from engine.messages import StepTime
from engine.scheduling.compose.decode_first import DecodeFirst
from engine.scheduling.compose.prompts import PromptLimits
from engine.step_time.model import PRIOR
from tests.support.scheduling_states import decoding, make_room, make_sequence, names, random_sequence, taken


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
