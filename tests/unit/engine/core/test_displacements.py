"""Displaced tokens are counted once for each side, step by step."""

from __future__ import annotations

from engine.core.core import EngineConfig
from engine.messages import Delta, SequenceOutcome, Submit
from engine.virtual.replica import VirtualReplica
from tests.support import builders

INTERACTIVE, BATCH = 0, 2


def replica(places: int = 1) -> VirtualReplica:
    config = EngineConfig(max_batched_tokens=64, max_sequences=places)
    return VirtualReplica(config, num_blocks=64, block_tokens=4, audit=True)


def submit(name: str, tier: int, max_tokens: int) -> Submit:
    return builders.submit(
        name, request_id=f"request of {name}", tenant_id=f"tenant of {name}", max_tokens=max_tokens, tier=tier
    )


def steps(of: VirtualReplica, count: int) -> list[Delta]:
    deltas: list[Delta] = []
    for _ in range(count):
        deltas += [delta for each in of.step().deltas.values() for delta in each]
        of.core.check()
    return deltas


def jumped(slow: int, quick: int, places: int = 1) -> VirtualReplica:
    """One of tier batch has had three steps when an interactive one comes; each of so many tokens."""
    engine = replica(places)
    assert engine.submit(submit("slow", BATCH, slow)) is None
    steps(engine, 3)
    assert engine.submit(submit("quick", INTERACTIVE, quick)) is None
    return engine


def to_the_end(of: VirtualReplica) -> dict[str, SequenceOutcome]:
    outcomes: dict[str, SequenceOutcome] = {}
    while of.core.has_work():
        for delta in steps(of, 1):
            if delta.outcome is not None:
                outcomes[delta.sequence_id] = delta.outcome
    return outcomes


def displaced(outcome: SequenceOutcome) -> list[tuple[str, list[str], int]]:
    return [
        (each.kind, each.others, each.displaced_tokens) for each in outcome.decisions if each.displaced_tokens
    ]


def test_who_takes_a_place_and_who_gives_it_up_record_the_same_tokens() -> None:
    engine = jumped(12, 5)
    first = steps(engine, 1)
    assert [delta.sequence_id for delta in first if delta.token_ids] == ["quick"], (
        "the step after its arrival"
    )
    outcomes = to_the_end(engine)
    # Five steps for five tokens: the prompt's step emits the first.
    assert displaced(outcomes["quick"]) == [("admit", ["slow"], 5)]
    assert displaced(outcomes["slow"]) == [("pause", ["quick"], 5)]
    assert outcomes["slow"].preemptions == 0
    assert outcomes["slow"].recomputed_tokens == 0
    assert outcomes["slow"].emitted_tokens == 12


def test_the_next_jumper_takes_the_place_that_was_just_given_back() -> None:
    engine = jumped(12, 5)
    steps(engine, 1)
    assert engine.submit(submit("next", INTERACTIVE, 4)) is None
    outcomes = to_the_end(engine)
    assert displaced(outcomes["quick"]) == [("admit", ["slow"], 5)]
    assert displaced(outcomes["next"]) == [("admit", ["slow"], 4)]
    assert displaced(outcomes["slow"]) == [("pause", ["quick"], 5), ("pause", ["next"], 4)]


def test_who_is_cancelled_while_it_stands_back_leaves_the_count_so_far() -> None:
    engine = jumped(12, 9)
    steps(engine, 4)
    engine.core.cancel("slow", "cancelled")
    outcomes = to_the_end(engine)
    assert displaced(outcomes["slow"]) == [("pause", ["quick"], 4)]
    assert displaced(outcomes["quick"]) == [("admit", ["slow"], 4)]
    assert not engine.core.table.decisions._displaced


def test_several_jumps_over_one_are_counted_each() -> None:
    engine = replica()
    assert engine.submit(submit("slow", BATCH, 20)) is None
    for _ in range(2):
        steps(engine, 3)
        name = f"quick {engine.core.table.decisions.step}"
        assert engine.submit(submit(name, INTERACTIVE, 2)) is None
        steps(engine, 3)
    outcomes = to_the_end(engine)
    assert [tokens for _, _, tokens in displaced(outcomes["slow"])] == [2, 2]


def test_with_a_free_place_nothing_is_displaced() -> None:
    engine = jumped(12, 5, places=2)
    assert all(not displaced(outcome) for outcome in to_the_end(engine).values())
