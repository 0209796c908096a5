"""Contract of `engine.scheduling.compose.base.Compose`, for every composition.

Parametrised over COMPOSES: a new composition is held to it by being named there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from engine.scheduling.claims import NO_STARVATION, SAFE, WORK_CONSERVATION
from engine.scheduling.compose.base import Compose
from engine.scheduling.compose.turns import note_turns
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import COMPOSES
from engine.scheduling.room import Room
from engine.sequence import Sequence
from tests.support.scheduling_states import (
    decoding,
    execute,
    is_through,
    make_room,
    make_sequence,
    random_sequence,
)

Make = Callable[[], Compose]

VARIANTS = {
    "plain": PolicyOptions(),
    "several prompts": PolicyOptions(max_num_partial_prefills=3, max_long_partial_prefills=2),
    "long ones capped": PolicyOptions(
        max_num_partial_prefills=2, max_long_partial_prefills=1, long_prefill_token_threshold=64
    ),
    "step time": PolicyOptions(max_num_partial_prefills=2, target_step_s=0.006),
    "few slots": PolicyOptions(slots=3, cap_tokens=32, ttft_target_s=0.05, tpot_target_s=0.002),
}


@pytest.fixture(
    params=[(name, variant) for name in sorted(COMPOSES) for variant in VARIANTS],
    ids=lambda param: " with ".join(param),
)
def make(request: pytest.FixtureRequest) -> Make:
    name, variant = request.param
    return lambda: COMPOSES[name](VARIANTS[variant])


def contents(room: Room) -> tuple[object, ...]:
    return (
        room.tokens,
        room.used_tokens,
        room.used_context,
        room.used_sequences,
        room.prefills,
        dict(room.given),
        dict(room.unfinished),
    )


def left(sequence: Sequence) -> int:
    return sequence.total_tokens - sequence.computed_tokens


def compose_step(compose: Compose, running: list[Sequence], room: Room) -> list[tuple[Sequence, int]]:
    """Shares that keep the contract, noted in `room`."""
    before = contents(room)
    shares = compose.shares(running, room)
    assert contents(room) == before, "composing changed the room"
    assert sum(tokens for _, tokens in shares) <= room.tokens
    assert all(count == 1 for count in Counter(sequence for sequence, _ in shares).values())
    for sequence, tokens in shares:
        assert sequence in running
        assert 1 <= tokens <= left(sequence)
        room.take(sequence, tokens)
    note_turns(room)
    return shares


@pytest.mark.parametrize("seed", range(8))
def test_shares_fit_the_room_the_sequences_and_each_other(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    compose = make()
    running: list[Sequence] = []
    met: Counter[str] = Counter()
    for step in range(60):
        room = make_room(
            rng.choice((1, 2, 7, 40, 300)), now_s=step * 0.01, step=step, num_waiting=rng.randint(0, 3)
        )
        shares = compose_step(compose, running, room)
        assert bool(shares) == bool(running), "something runs and nothing is shared"
        met["contested"] += len(running) > len(shares) > 0
        for number in range(rng.randint(0, 4)):
            newcomer = random_sequence(rng, f"{step}.{number}", now_s=room.now_s)
            before = contents(room)
            tokens = compose.first_chunk(newcomer, room)
            assert contents(room) == before
            assert 0 <= tokens <= min(room.tokens, left(newcomer))
            met["put off"] += tokens == 0
            if tokens:
                room.take(newcomer, tokens)
                running.append(newcomer)
                met["let in"] += 1
        for sequence, tokens in room.given.items():
            execute(sequence, tokens)
        running = [sequence for sequence in running if not is_through(sequence)]
    assert min(met["contested"], met["put off"], met["let in"]) > 5, met


def test_an_empty_engine_composes_an_empty_step(make: Make) -> None:
    assert make().shares([], make_room(10)) == []


def test_a_newcomer_starts_in_an_empty_step(make: Make) -> None:
    for prompt in (1, 2, 40, 3000):
        assert make().first_chunk(make_sequence("s", prompt=prompt), make_room(100)) > 0


def test_what_it_claims_is_known(make: Make) -> None:
    assert make().claims >= SAFE


def test_one_that_serves_all_gives_every_decoding_sequence_its_token(make: Make) -> None:
    compose = make()
    running = [decoding(f"d{number}", tenant="ab"[number % 2]) for number in range(6)]
    running.insert(2, make_sequence("prompt", prompt=500, submitted_s=-10.0))
    served = {sequence for sequence, _ in compose.shares(running, make_room(8, now_s=1.0))}
    if compose.serves_all:
        assert served >= {sequence for sequence in running if left(sequence) == 1}


@pytest.mark.parametrize("seed", range(4))
def test_whatever_runs_comes_to_its_end(make: Make, seed: int) -> None:
    """Work conservation and progress: each step advances a sequence, and so all end."""
    rng = random.Random(seed)
    compose = make()
    assert WORK_CONSERVATION in compose.claims
    running = [random_sequence(rng, f"s{number}", longest=300) for number in range(12)]
    to_do = sum(left(sequence) + sequence.submit.max_tokens - sequence.emitted_tokens for sequence in running)
    steps = 0
    while running:
        room = make_room(5, now_s=steps * 0.01, step=steps)
        assert compose_step(compose, running, room)
        for sequence, tokens in room.given.items():
            execute(sequence, tokens)
        running = [sequence for sequence in running if not is_through(sequence)]
        steps += 1
        assert steps <= to_do


def test_nobody_that_runs_starves_behind_newcomers(make: Make) -> None:
    compose = make()
    assert NO_STARVATION in compose.claims
    old = make_sequence("old", prompt=600, max_tokens=5)
    running = [old]
    came = steps = 0
    while old in running:
        steps += 1
        assert steps < 3000, f"{left(old)} tokens of the old one are left"
        room = make_room(24, now_s=steps * 0.01, step=steps, num_waiting=2)
        compose_step(compose, running, room)
        for number in range(2):
            newcomer = make_sequence(f"{steps}.{number}", prompt=10, max_tokens=3, submitted_s=room.now_s)
            tokens = compose.first_chunk(newcomer, room) if len(running) < 8 and room.tokens else 0
            if tokens:
                room.take(newcomer, tokens)
                running.append(newcomer)
                came += 1
        for sequence, tokens in room.given.items():
            execute(sequence, tokens)
        running = [sequence for sequence in running if not is_through(sequence)]
    # Either there were newcomers to starve behind, or none got in before the old one was through.
    assert came > 20 or steps <= 600 // 24 + 10
