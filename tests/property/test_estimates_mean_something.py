"""The estimated wait is within a factor of two of the actual one, whatever the queue.

Acceptance 6 of the first release: with 0, 20 and 100 requests queued, for at least 80 % of requests; a
constant fails it. The real flow controller and engine core on virtual time; tenants with different weights
and lengths; lengths are drawn, the forecast knows only answers of the past; requests keep arriving while
others wait. Next to nothing is as good as right: within four steps of the engine counts as hit.
"""

from __future__ import annotations

import random
from functools import cache

import pytest

from engine.forecast.length.length import LengthForecast
from tests.support.virtual_gateway import MODEL_ID, Done, Job, VirtualGateway, share_within

PLACES = 16
STEP_S = 0.006
NEAR_ENOUGH_S = 4 * STEP_S
DEPTHS = (0, 20, 100)
ONE_TIER = (1,)
ALL_TIERS = (0, 1, 2)


@cache
def measured(depth: int, tiers: tuple[int, ...], *, sees_arrivals: bool = True) -> list[Done]:
    """Requests that arrived when about `depth` others were queued, each with its estimate."""
    return [
        done for seed in (1, 2) for done in closed_loop(depth, tiers, seed, 100, sees_arrivals=sees_arrivals)
    ]


def closed_loop(
    depth: int, tiers: tuple[int, ...], seed: int, count: int, *, sees_arrivals: bool
) -> list[Done]:
    rng = random.Random(seed)
    tenants = [f"t{number}" for number in range(8)]
    median = {tenant: rng.choice((15, 40, 80, 150)) for tenant in tenants}
    weight = {tenant: rng.choice((1.0, 2.0, 4.0)) for tenant in tenants}
    tier = {tenant: rng.choice(tiers) for tenant in tenants}
    # Everybody asks for about its share.
    demand = [weight[tenant] / (2 * median[tenant] + 100) for tenant in tenants]

    def job() -> Job:
        tenant = rng.choices(tenants, demand)[0]
        output = min(512, max(1, round(rng.lognormvariate(0, 0.7) * median[tenant])))
        return Job(tenant, rng.randint(10, 200), output, tier=tier[tenant], weight=weight[tenant])

    lengths = LengthForecast()
    for _ in range(600):
        past = job()
        lengths.observe(past.tenant_id, MODEL_ID, past.output_tokens)
    ended = 0
    estimated: list[Done] = []

    def on_end(done: Done) -> None:
        nonlocal ended
        ended += 1
        record = gateway.arrive(job(), estimate=40 < ended <= 40 + count)
        if record.estimate is not None:
            estimated.append(record)
            if depth:
                assert depth / 2 <= len(gateway.flow) - 1 <= depth * 2, "the case is not met"

    gateway = VirtualGateway(lengths=lengths, max_sequences=PLACES, on_end=on_end)
    gateway.sees_arrivals = sees_arrivals
    for number in range((PLACES - 4 if depth == 0 else PLACES + 2) + depth):
        gateway.at(number * 0.003, job())
    gateway.run(while_=lambda: len(estimated) < count or any(done.first_token_s < 0 for done in estimated))
    return estimated


def waits(done: list[Done]) -> list[tuple[float, float]]:
    return [(each.estimate.wait_s[0], each.wait_s) for each in done if each.estimate is not None]


@pytest.mark.parametrize("tiers", [ONE_TIER, ALL_TIERS], ids=["one tier", "three tiers"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_the_estimated_wait_is_within_twice_the_actual(depth: int, tiers: tuple[int, ...]) -> None:
    done = measured(depth, tiers)
    assert len(done) == 200
    assert share_within(waits(done), 2.0, NEAR_ENOUGH_S) >= 0.8


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_estimated_time_to_the_first_token_is_within_twice_the_actual(depth: int) -> None:
    pairs = [
        (each.estimate.ttft_s[0], each.first_token_s - each.arrived_s)
        for each in measured(depth, ONE_TIER)
        if each.estimate is not None
    ]
    assert share_within(pairs, 2.0, NEAR_ENOUGH_S) >= 0.8


def test_a_constant_fails() -> None:
    def worst(constant_s: float) -> float:
        return min(
            share_within(
                [(constant_s, actual) for _, actual in waits(measured(depth, ONE_TIER))], 2.0, NEAR_ENOUGH_S
            )
            for depth in DEPTHS
        )

    constants = [0.0, *(0.001 * 1.1**power for power in range(120))]
    assert max(worst(constant_s) for constant_s in constants) < 0.5

    actual = [actual for _, actual in waits(measured(20, ONE_TIER))]
    best = max(share_within([(c, each) for each in actual], 2.0, NEAR_ENOUGH_S) for c in constants)
    assert best < 0.6, "not even one constant for each queue length would do"


def test_without_the_requests_to_come_estimates_are_too_short() -> None:
    """Why the replay lets requests arrive: a fair order lets many of them pass."""
    blind = waits(measured(20, ONE_TIER, sees_arrivals=False))
    seeing = waits(measured(20, ONE_TIER))
    blind_ratio = sum(estimate for estimate, _ in blind) / sum(actual for _, actual in blind)
    ratio = sum(estimate for estimate, _ in seeing) / sum(actual for _, actual in seeing)
    assert blind_ratio < 0.6
    assert 0.7 < ratio < 1.25, "what is told is a median; waits have a long tail"


def test_the_upper_estimate_is_mostly_kept() -> None:
    """By the formula of what is ahead alone: these replays have no sampled futures."""
    done = [each for depth in DEPTHS for each in measured(depth, ONE_TIER)]
    kept = [each.wait_s <= each.estimate.wait_s[1] + STEP_S for each in done if each.estimate is not None]
    assert sum(kept) / len(kept) > 0.85
