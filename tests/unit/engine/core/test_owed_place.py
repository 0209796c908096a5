"""Places for sequences that are owed service: given immediately within the tier, and taken a bounded number
of times.

The engine core on virtual time; what tenants had is said as a gateway would.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from engine.core.core import EngineConfig
from engine.core.places import SET_BACK_TOKENS
from engine.messages import SequenceOutcome, Submit
from engine.virtual.replica import VirtualReplica
from tests.support import builders

PLACES = 2


def replica() -> VirtualReplica:
    config = EngineConfig(policy="vtc", max_batched_tokens=64, max_sequences=PLACES)
    return VirtualReplica(config, num_blocks=64, block_tokens=4, audit=True)


def submit(name: str, tenant: str, counter: int, *, max_tokens: int = 6, **fields: Any) -> Submit:
    return builders.submit(
        name, tenant_id=tenant, counter=counter, had=counter, max_tokens=max_tokens, **fields
    )


def full(tier: int = 1) -> VirtualReplica:
    """All places decode sequences of a tenant that has had much."""
    engine = replica()
    for name in ("one", "two"):
        assert engine.submit(submit(name, "flood", 10**12, max_tokens=60, tier=tier)) is None
    for _ in range(3):
        engine.step()
    return engine


def names(engine: VirtualReplica) -> set[str]:
    return {each.sequence_id for each in engine.core.table.running}


def after(engine: VirtualReplica, name: str, tenant: str, counter: int, **fields: Any) -> set[str]:
    """Who runs in the step after this one came: owed a place, if nothing else is said."""
    engine.submit(submit(name, tenant, counter, **({"is_owed": True} | fields)))
    engine.step()
    return names(engine)


def step(engine: VirtualReplica) -> dict[str, SequenceOutcome]:
    """Who ended in it."""
    deltas = [each for of_gateway in engine.step().deltas.values() for each in of_gateway]
    engine.core.check()
    return {each.sequence_id: each.outcome for each in deltas if each.outcome is not None}


def to_the_end(engine: VirtualReplica) -> dict[str, SequenceOutcome]:
    outcomes: dict[str, SequenceOutcome] = {}
    while engine.core.has_work():
        outcomes |= step(engine)
    return outcomes


def test_it_starts_in_the_next_step_and_the_other_goes_on_with_its_kv() -> None:
    engine = full()
    running = after(engine, "light", "light", 10**9)
    assert "light" in running
    assert len(running) == PLACES
    outcomes = to_the_end(engine)
    emitted = {name: each.emitted_tokens for name, each in outcomes.items()}
    assert emitted == {"one": 60, "two": 60, "light": 6}
    assert engine.core.table.preemptions == 0, "no block was freed"
    (lost,) = [each for name in ("one", "two") for each in outcomes[name].decisions if each.kind == "pause"]
    assert (lost.rule, lost.others, lost.displaced_tokens) == ("place lost by share", ["light"], 6)
    (took,) = [each for each in outcomes["light"].decisions if each.kind == "admit"]
    assert took.displaced_tokens == 6


@pytest.mark.parametrize(
    ("tier", "tenant", "counter", "is_owed"),
    [(1, "light", 10**9, False), (1, "flood", 10**12, True), (0, "light", 10**9, True)],
    ids=["not owed", "its own tenant", "of a lower tier"],
)
def test_nobody_gives_way_to_who_is_not_owed_or_of_its_tenant_or_of_a_lower_tier(
    tier: int, tenant: str, counter: int, is_owed: bool
) -> None:
    assert after(full(tier), "late", tenant, counter, is_owed=is_owed) == {"one", "two"}


def test_nobody_gives_way_who_has_neither_had_more_nor_more_places() -> None:
    engine = replica()
    for name in ("one", "two"):
        engine.submit(submit(name, name, 10**12, max_tokens=60))
    engine.step()
    assert after(engine, "late", "late", 10**13) == {"one", "two"}


def test_who_has_more_places_gives_one_to_a_tenant_that_had_a_little_more() -> None:
    """It was idle for a moment and began where the other stands: by places it is owed one all the same."""
    engine = full()
    assert "light" in after(engine, "light", "light", 10**12 + 10**9)
    engine.submit(submit("second", "light", 10**12 + 2 * 10**9, is_owed=True))
    for _ in range(3):
        engine.step()
        assert "second" not in names(engine), "both have as many then"


def test_of_those_that_were_owed_their_place_the_tenant_that_had_more_gives_way() -> None:
    """A flood that came first was owed its places: they are no harder to take for it."""
    engine = replica()
    for name in ("one", "two"):
        engine.submit(submit(name, "flood", 10**12, is_owed=True, max_tokens=60))
    engine.step()
    assert "light" in after(engine, "light", "light", 10**9)
    # The flood's other one gives way, not the one that came.
    assert after(engine, "lighter", "lighter", 10**9) == {"light", "lighter"}


def pauses_by_share(outcomes: dict[str, SequenceOutcome], name: str) -> int:
    return sum(each.rule == "place lost by share" for each in outcomes[name].decisions)


def test_a_sequence_loses_its_place_that_way_only_so_often_without_its_tokens_between() -> None:
    engine = full()
    most = engine.core.table.policy.options.max_displacements
    outcomes: dict[str, SequenceOutcome] = {}
    for number in range(12):
        engine.submit(submit(f"light {number}", "light", 10**9 + number, is_owed=True, max_tokens=2))
        outcomes |= step(engine) | step(engine)
    outcomes |= to_the_end(engine)
    assert [pauses_by_share(outcomes, name) for name in ("one", "two")] == [most, most]
    assert len(outcomes) == 14


def test_a_long_flood_does_not_become_immune_against_newcomers() -> None:
    engine = VirtualReplica(
        EngineConfig(policy="vtc", max_batched_tokens=64, max_sequences=1), num_blocks=400, block_tokens=4
    )
    tokens = 8 * SET_BACK_TOKENS
    engine.submit(submit("flood", "flood", 10**12, max_tokens=tokens))
    outcomes: dict[str, SequenceOutcome] = {}
    waits: list[int] = []
    number = 0
    while "flood" not in outcomes:
        number += 1
        engine.submit(submit(f"light {number}", f"light {number}", 10**9, is_owed=True, max_tokens=1))
        steps = 0
        while f"light {number}" not in outcomes and "flood" not in outcomes:
            outcomes |= step(engine)
            steps += 1
        waits.append(steps)
        # One newcomer after another in every `SET_BACK_TOKENS` steps.
        for _ in range(SET_BACK_TOKENS):
            outcomes |= step(engine)
    assert len(waits) > engine.core.table.policy.options.max_displacements + 2
    assert set(waits[:-1]) == {1}


def test_an_owed_one_takes_the_place_of_an_equal_tenant_with_more_sequences() -> None:
    engine = replica()
    for name in ("one", "two"):
        engine.submit(submit(name, "equal", 10**9, max_tokens=60))
    engine.step()
    standings = engine.core.table.standings
    had = standings.value(1, "equal")
    assert "light" in after(engine, "light", "light", had)
    assert "further" not in after(engine, "further", "light", had), "each has one by then"


def test_the_victim_is_who_had_most_not_who_was_charged_most() -> None:
    engine = replica()
    engine.submit(replace(submit("charged", "charged", 10**8, max_tokens=60), counter=10**13))
    engine.submit(replace(submit("had", "had", 10**12, max_tokens=60), counter=10**12))
    engine.step()
    assert after(engine, "light", "light", 10) == {"charged", "light"}
