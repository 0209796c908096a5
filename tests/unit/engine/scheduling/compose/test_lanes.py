"""Two-lane composition."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

from engine.scheduling.compose.lanes import MOST_DECODE_STEPS, MOST_PREFILL_STEPS, Lanes
from engine.sequence import Sequence
from tests.support.scheduling_states import decoding, execute, make_room, make_sequence, names, taken


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
    compose = Lanes()
    running = [decoding("d"), *(make_sequence(f"p{number}", prompt=10_000) for number in range(4))]
    served = [
        any(sequence.sequence_id == "d" for sequence, _ in compose.shares(running, make_room(64)))
        for _ in range(40)
    ]
    gaps = "".join("d" if each else "." for each in served).split("d")
    assert max(len(gap) for gap in gaps) == MOST_PREFILL_STEPS
    assert sum(served) < 30


def test_a_single_prompt_waits_for_so_many_steps_of_answers_at_most() -> None:
    compose = Lanes()
    running = [*(decoding(f"d{number}") for number in range(40)), make_sequence("p", prompt=10_000)]
    served = [
        any(sequence.sequence_id == "p" for sequence, _ in compose.shares(running, make_room(64)))
        for _ in range(80)
    ]
    gaps = "".join("p" if each else "." for each in served).split("p")
    assert max(len(gap) for gap in gaps) == MOST_DECODE_STEPS


def test_with_too_few_tokens_answers_take_turns() -> None:
    compose = Lanes()
    running = [decoding(f"d{number}") for number in range(6)]
    served: Counter[str] = Counter()
    for _ in range(3):
        served.update(name for name, _ in names(compose.shares(running, make_room(4))))
    assert set(served.values()) == {2}
