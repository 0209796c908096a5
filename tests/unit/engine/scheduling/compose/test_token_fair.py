"""Token-fair composition: floor, turns by weight, cap."""

from __future__ import annotations

from collections import Counter, deque

from engine.scheduling.compose.token_fair import TokenFair
from engine.sequence import Sequence
from tests.support.scheduling_states import (
    decoding,
    execute,
    make_room,
    make_sequence,
    names,
    taken,
)


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
