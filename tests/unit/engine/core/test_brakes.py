"""Brakes at an engine: what a braked tier gets of places, memory and each step, on virtual time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest

from engine.core.core import EngineConfig
from engine.scheduling.brakes import Brakes
from engine.scheduling.options import PolicyOptions
from engine.virtual.replica import VirtualReplica
from tests.support import builders
from tests.support.builders import virtual_prompt

STANDARD, BATCH = 1, 2
PLACES, TOKENS, BLOCKS = 16, 64, 512
COMPOSITIONS = ("decode-first", "token-fair", "lanes", "slack")


class Steps:
    """An engine, and what each tier got of its steps."""

    def __init__(self, compose: str, *, places: int = PLACES, tokens: int = TOKENS) -> None:
        options = PolicyOptions(compose=compose, max_num_partial_prefills=4)
        config = EngineConfig("vtc", options, max_batched_tokens=tokens, max_sequences=places)
        self.engine = VirtualReplica(config, num_blocks=BLOCKS)
        self.number = 0

    def submit(
        self, tier: int, count: int = 1, *, prompt: int = 30, output: int = 40, tenant: str = ""
    ) -> None:
        for _ in range(count):
            self.number += 1
            name = f"{tenant or tier}-{self.number}"
            asked = builders.submit(
                name,
                tenant_id=tenant or f"tenant {tier}",
                prompt_token_ids=virtual_prompt(name, prompt),
                max_tokens=output,
                tier=tier,
                predicted_output_tokens=output,
            )
            assert self.engine.submit(asked) is None

    def brake(self, shares: Mapping[int, float]) -> None:
        self.engine.core.set_brakes(shares)

    def step(self) -> Counter[int]:
        """One step; the tokens of each tier."""
        table = self.engine.core.table
        before = [(each, each.computed_tokens) for each in table.sequences.values()]
        self.engine.step()
        table.check()
        tokens: Counter[int] = Counter()
        for sequence, computed in before:
            # What an admission found in the prefix cache is none of it: all prompts differ.
            tokens[sequence.tier] += sequence.computed_tokens - computed
        return tokens

    def running(self, tier: int) -> int:
        return self.engine.core.table.running_by_tier.get(tier, 0)


@pytest.mark.parametrize("compose", COMPOSITIONS)
@pytest.mark.parametrize("tier", [STANDARD, BATCH])
def test_a_braked_tier_stays_within_its_share_of_places_and_of_each_steps_tokens(
    compose: str, tier: int
) -> None:
    draw = random.Random(7)
    engine = Steps(compose)
    engine.brake({tier: 0.25})
    most: Counter[str] = Counter()
    other = STANDARD + BATCH - tier
    for _ in range(300):
        for each in (tier, other):
            if draw.random() < 0.2:
                engine.submit(each, 2, prompt=draw.randint(1, 90), output=draw.randint(1, 30))
        tokens = engine.step()
        assert tokens[tier] <= TOKENS // 4
        assert engine.running(tier) <= PLACES // 4
        most["tokens"] = max(most["tokens"], tokens[tier])
        most["places"] = max(most["places"], engine.running(tier))
        most["other's tokens"] = max(most["other's tokens"], tokens[other])
        most["other's places"] = max(most["other's places"], engine.running(other))
    assert most["tokens"] == TOKENS // 4, "the share was never used"
    assert most["places"] == PLACES // 4
    assert most["other's tokens"] > TOKENS // 2, "the other tier was held back, too"
    assert most["other's places"] > PLACES // 2


@pytest.mark.parametrize("compose", COMPOSITIONS)
def test_what_runs_above_its_share_runs_on_with_fewer_tokens_and_by_turns(compose: str) -> None:
    engine = Steps(compose)
    engine.submit(BATCH, 6, prompt=2, output=40, tenant="one")
    engine.submit(BATCH, 6, prompt=2, output=40, tenant="two")
    while engine.running(BATCH) < 12:
        engine.step()
    engine.brake({BATCH: 0.05})
    sequences = list(engine.engine.core.table.running)
    before = {each.sequence_id: each.emitted_tokens for each in sequences}
    for _ in range(40):
        assert engine.step()[BATCH] == 3, "of 64 tokens"
    gains = {each.sequence_id: each.emitted_tokens - before[each.sequence_id] for each in sequences}
    assert not any(each.preemptions for each in sequences)
    assert max(gains.values()) - min(gains.values()) <= 2, gains
    for _ in range(400):
        engine.step()
    assert not engine.engine.core.table.sequences, "all came to their end"


@pytest.mark.parametrize("compose", COMPOSITIONS)
def test_the_least_is_one_place_and_one_token_and_it_goes_on(compose: str) -> None:
    engine = Steps(compose, places=4, tokens=8)
    engine.brake({BATCH: 0.01})
    engine.submit(BATCH, 3, prompt=9, output=3)
    most = 0
    for _ in range(60):
        assert engine.step()[BATCH] <= 1
        most = max(most, engine.running(BATCH))
    assert most == 1
    assert not engine.engine.core.table.sequences


def test_its_memory_is_bounded_as_predicted_and_one_request_may_always_run() -> None:
    engine = Steps("decode-first")
    whole = BLOCKS * engine.engine.core.table.block_tokens
    engine.brake({STANDARD: 0.25})
    engine.submit(STANDARD, 6, prompt=100, output=whole // 12 - 100)
    for _ in range(30):
        engine.step()
    assert engine.running(STANDARD) == 3, "three twelfths"
    engine.submit(BATCH, 2, prompt=10, output=100)
    engine.step()
    assert engine.running(BATCH) == 2, "and lower tiers go past it"
    large = Steps("decode-first")
    large.brake({BATCH: 0.01})
    large.submit(BATCH, 2, prompt=100, output=100)
    large.step()
    assert large.running(BATCH) == 1


def test_lower_tiers_go_past_a_braked_one() -> None:
    engine = Steps("decode-first", places=4)
    engine.brake({STANDARD: 0.25})
    engine.submit(STANDARD, 5)
    engine.submit(BATCH, 3)
    for _ in range(4):
        engine.step()
    assert (engine.running(STANDARD), engine.running(BATCH)) == (1, 3)


def test_without_a_brake_all_is_as_before_and_a_share_that_makes_no_sense_is_refused() -> None:
    engine = Steps("decode-first")
    engine.brake({BATCH: 0.25})
    engine.submit(BATCH, 12, prompt=2)
    engine.step()
    assert engine.running(BATCH) == 4
    for share in (0.0, -0.5, 1.01, float("nan")):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            engine.brake({BATCH: share})
    assert engine.engine.core.table.brakes == Brakes({BATCH: 0.25}), "it stays as it was"
    engine.brake({})
    engine.step()
    assert engine.running(BATCH) == 12
