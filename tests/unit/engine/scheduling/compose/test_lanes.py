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


def waits_of(name: str, running: list[Sequence], steps: int) -> list[int]:
    """After how many steps without it the sequence has its turn, each time."""
    compose = Lanes()
    served = [
        any(sequence.sequence_id == name for sequence, _ in compose.shares(running, make_room(64)))
        for _ in range(steps)
    ]
    return [len(gap) for gap in "".join("x" if each else "." for each in served).split("x")]


def test_answers_wait_for_so_many_steps_of_prompts_at_most() -> None:
    running = [decoding("d"), *(make_sequence(f"p{number}", prompt=10_000) for number in range(4))]
    waits = waits_of("d", running, 40)
    assert max(waits) == MOST_PREFILL_STEPS
    assert len(waits) - 1 < 30


def test_a_single_prompt_waits_for_so_many_steps_of_answers_at_most() -> None:
    running = [*(decoding(f"d{number}") for number in range(40)), make_sequence("p", prompt=10_000)]
    assert max(waits_of("p", running, 80)) == MOST_DECODE_STEPS


def test_with_too_few_tokens_answers_take_turns() -> None:
    compose = Lanes()
    running = [decoding(f"d{number}") for number in range(6)]
    served: Counter[str] = Counter()
    for _ in range(3):
        served.update(name for name, _ in names(compose.shares(running, make_room(4))))
    assert set(served.values()) == {2}
