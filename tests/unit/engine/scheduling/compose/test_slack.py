"""Deadline-slack composition."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from engine.messages import StepTime
from engine.scheduling.compose.decode_first import DecodeFirst
from engine.scheduling.compose.prompts import PromptLimits
from engine.scheduling.compose.slack import DeadlineSlack
from tests.support.scheduling_states import (
    decoding,
    execute,
    make_room,
    make_sequence,
    names,
    random_sequence,
    taken,
)

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
        assert due_s is not None
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


@pytest.mark.parametrize("seed", range(40))
def test_without_targets_it_is_decode_first(seed: int) -> None:
    rng = random.Random(seed)
    running = [random_sequence(rng, f"s{number}") for number in range(rng.randint(1, 30))]
    for sequence in running:
        sequence.submit = replace(sequence.submit, ttft_target_s=0.0, tpot_target_s=0.0)
    limits = PromptLimits(max_num_partial_prefills=rng.choice((1, 4)), target_step_s=rng.choice((0.0, 0.05)))
    slack, decode_first = DeadlineSlack(limits=limits), DecodeFirst(limits)
    tokens = rng.choice((10, 200, 2000))
    one, other = make_room(tokens, now_s=9.0, step_time=FLAT), make_room(tokens, now_s=9.0, step_time=FLAT)
    assert slack.shares(running, one) == decode_first.shares(running, other)
    newcomer = make_sequence("new", prompt=300)
    assert slack.first_chunk(newcomer, one) == decode_first.first_chunk(newcomer, other)
    assert (slack.urgent_steps, slack.lent_tokens) == (0, 0)


def test_only_what_has_a_target_asks_lends_and_limits() -> None:
    paced = decoding("paced", output=40, tpot_target_s=0.1)
    paced.first_token_s = 0.0
    silent = decoding("silent", output=40)
    waiting = make_sequence("waiting", prompt=300)
    room = make_room(500, now_s=90.0, step_time=FLAT)
    compose = DeadlineSlack()
    assert compose.due_s(paced) == pytest.approx(0.0 + 40 * 0.1)
    assert compose.due_s(silent) is None
    assert compose.due_s(waiting) is None
    assert names(compose.shares([silent, waiting], room)) == [("silent", 1), ("waiting", 300)]
    # Late whatever is done, it limits the step to one token's pace; it lends nothing to one without a target.
    shares = names(compose.shares([paced, silent, waiting], make_room(500, now_s=90.0, step_time=FLAT)))
    assert shares == [("paced", 1), ("silent", 1), ("waiting", 88)]
    late = make_sequence("late", prompt=60, ttft_target_s=0.5)
    paced = decoding("paced", output=40, tpot_target_s=5.0)
    shares = names(compose.shares([paced, silent, late], make_room(50, now_s=90.0, step_time=FLAT)))
    assert shares == [("silent", 1), ("late", 49)], "what has a pace and is ahead of it lends"
    assert (compose.urgent_steps, compose.lent_tokens) == (1, 1)
