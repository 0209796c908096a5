"""Queue and steps together share service by weight on random histories.

A queue that charges the predicted cost when it dispatches, in front of an engine core on virtual time whose
steps have fewer slots than sequences. Slots change, some sequences have TPOT targets, answers are longer or
shorter than predicted. All tenants are backlogged all the time.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.core.core import EngineConfig
from engine.entry import COUNTER_SCALE
from engine.messages import Submit
from engine.scheduling.compose.token_fair import TokenFair
from engine.scheduling.counters import scaled
from engine.scheduling.options import PolicyOptions
from engine.virtual.replica import VirtualReplica, virtual_prompt

PLACES = 12
LONGEST_PROMPT, LONGEST_OUTPUT = 120, 60
STEPS = 400


class QueueAndEngine:
    """One writer of the counters, as a gateway is, with the two views of them."""

    def __init__(self, seed: int, *, compose: str = "") -> None:
        self.rng = random.Random(seed)
        self.weights = {"a": 1.0, "b": self.rng.choice((1.0, 3.0)), "c": 2.0}
        options = PolicyOptions(compose=compose, slots=0 if compose else 4, cap_tokens=32)
        config = EngineConfig(
            policy="vtc", policy_options=options, max_batched_tokens=48, max_sequences=PLACES
        )
        self.engine = VirtualReplica(config, num_blocks=4096)
        self.charged = dict.fromkeys(self.weights, 0)
        self.ahead = dict.fromkeys(self.weights, 0)
        self.heard = dict.fromkeys(self.weights, 0)
        self.had: Counter[str] = Counter()
        """Cost tokens computed for each."""
        self.sizes: dict[str, tuple[str, int, int]] = {}
        """Of those in flight: tenant, prompt tokens, predicted output tokens."""
        self.number = 0
        self.spread = 0.0

    def dispatch(self) -> None:
        """The lowest counter goes next, while there are places."""
        while len(self.sizes) < PLACES + 1:
            tenant = min(self.weights, key=lambda each: (self.charged[each], each))
            prompt, predicted = self.rng.randint(1, LONGEST_PROMPT), self.rng.randint(5, LONGEST_OUTPUT)
            self.number += 1
            name, weight = f"s{self.number}", self.weights[tenant]
            self.change(tenant, prompt + 2 * predicted)
            self.sizes[name] = (tenant, prompt, predicted)
            output = self.rng.randint(1, LONGEST_OUTPUT)
            submit = Submit(
                sequence_id=name,
                request_id=name,
                tenant_id=tenant,
                prompt_token_ids=virtual_prompt(name, prompt),
                max_tokens=output,
                lease_tokens=output,
                weight=weight,
                counter=self.charged[tenant],
                had=self.charged[tenant] - self.ahead[tenant],
                heard=self.heard[tenant],
                predicted_output_tokens=predicted,
                tpot_target_s=self.rng.choice((0.0, 0.0, 0.004)) if tenant == "a" else 0.0,
            )
            assert self.engine.submit(submit) is None

    def change(self, tenant: str, cost: int) -> None:
        self.charged[tenant] += scaled(cost, self.weights[tenant])
        self.ahead[tenant] += scaled(cost, self.weights[tenant])

    def step(self) -> None:
        compose = self.engine.core.table.policy.compose
        if isinstance(compose, TokenFair) and self.rng.random() < 0.1:
            compose.slots = self.rng.choice((1, 3, 5, 8, 0))
        result = self.engine.step()
        for tenant, share in result.shares.items():
            # Its requests wait: a lift is not taken over.
            self.heard[tenant] = share.serials.get(1, self.heard[tenant])
            cost = share.total.computed_tokens + 2 * share.total.emitted_tokens
            self.ahead[tenant] -= scaled(cost, self.weights[tenant])
            self.had[tenant] += cost
        for delta in result.deltas.get("virtual", []):
            if delta.outcome is not None:
                tenant, _, predicted = self.sizes.pop(delta.sequence_id)
                self.change(tenant, 2 * (delta.outcome.emitted_tokens - predicted))
        per_weight = [self.had[tenant] / weight for tenant, weight in self.weights.items()]
        self.spread = max(self.spread, max(per_weight) - min(per_weight))

    def run(self) -> None:
        for _ in range(STEPS):
            self.dispatch()
            self.step()
            standings = self.engine.core.table.standings
            for tenant, heard in self.heard.items():
                assert standings.serial(1, tenant) >= heard


@pytest.mark.parametrize("seed", range(6))
def test_backlogged_tenants_stay_within_the_bound_whatever_slots_and_targets_do(seed: int) -> None:
    history = QueueAndEngine(seed)
    history.run()
    assert min(history.had.values()) > 1000
    # Twice a request's cost; the cost of all that runs, which bounds the queue alone, is six times as much.
    assert history.spread <= 2 * (LONGEST_PROMPT + 2 * LONGEST_OUTPUT) / min(history.weights.values())


@pytest.mark.parametrize("seed", range(6))
def test_the_views_meet_when_all_has_ended(seed: int) -> None:
    history = QueueAndEngine(seed)
    history.run()
    while history.engine.core.has_work():
        history.step()
    assert not history.sizes
    # But for rounding, at most one unit of a millionth token a message.
    assert all(abs(ahead) < 10_000 for ahead in history.ahead.values())
    for tenant, weight in history.weights.items():
        assert abs(history.charged[tenant] - history.had[tenant] * COUNTER_SCALE / weight) < COUNTER_SCALE
