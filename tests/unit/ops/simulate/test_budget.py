"""Limits hold simulated requests back, pause them, cut them and refuse them as they do served ones."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

from ops.simulate.budget import SimulatedBudget
from ops.simulate.pool import SimulatedPool
from ops.simulate.traffic.requests import RequestLimits, SimulatedRequest
from tenants.pricing.pricing import Price, PriceEntry, TokenWeights
from tenants.types import Limit, Meter, SubjectKind, Tier, Window
from tests.unit.ops.simulate.test_figures import machine

PRICE = PriceEntry(Price(100, 50, 300), 1_000)
NOON_S = 1_772_452_800.0


def bucket(meter: Meter, amount: int, rate_per_s: float) -> Limit:
    return Limit("lim", "t", SubjectKind.TENANT, "t", meter, amount, rate_per_s=rate_per_s)


def window(meter: Meter, amount: int, length: Window = Window.LIFETIME) -> Limit:
    return Limit("lim", "t", SubjectKind.TENANT, "t", meter, amount, window=length)


def request(
    at_s: float,
    *limits: Limit,
    output_tokens: int = 5,
    max_tokens: int = 0,
    may_be_cut: bool = False,
    price: PriceEntry = PRICE,
) -> SimulatedRequest:
    return SimulatedRequest(
        at_s,
        "t",
        10,
        output_tokens,
        limits=RequestLimits(limits, price, may_be_cut) if limits else None,
        max_tokens=max_tokens or output_tokens,
    )


def served(*requests: SimulatedRequest, runs: bool = True, places: int = 8) -> SimulatedPool:
    made: list[SimulatedBudget] = []

    def budget(pool: SimulatedPool) -> SimulatedBudget:
        made.append(SimulatedBudget(pool, begins_s=NOON_S))
        return made[0]

    pool = SimulatedPool("vtc", machine(places=places, kv_tokens=4000), runs=runs, budget=budget)
    pool.run(requests)
    [ours] = made
    ours._store.check()
    assert not ours._store._holds, "everything is settled"
    assert not len(ours._streams)
    return pool


def test_a_rate_holds_requests_back_until_it_has_refilled() -> None:
    requests = [request(0.0, bucket(Meter.REQUESTS, 1, 2.0)) for _ in range(4)]
    records = served(*requests).records
    again = [last_s + 0.5 for last_s in records.last_s[:3]]
    assert list(records.dispatched_s) == pytest.approx([0.0, *again], abs=2e-3), "held, it does not refill"


def test_one_at_a_time_goes_when_the_other_has_ended() -> None:
    limit = Limit("lim", "t", SubjectKind.TENANT, "t", Meter.CONCURRENCY, 1)
    records = served(*[request(0.0, limit) for _ in range(3)]).records
    assert list(records.dispatched_s[1:]) == list(records.last_s[:2])


def test_a_stream_goes_no_faster_than_its_rate_and_longer_streams_wait_their_turn() -> None:
    limit = bucket(Meter.OUTPUT_TOKENS, 20, 10.0)
    pool = served(*[request(0.0, limit, output_tokens=100, max_tokens=100) for _ in range(2)])
    records = pool.records
    assert 7.9 <= records.e2e_s(0) <= 10.1, "of 100 tokens at ten a second the burst has up to 20"
    assert records.dispatched_s[1] > records.last_s[0], "the rate feeds one stream"
    assert 18 <= records.last_s[1] <= 20.1
    free = served(request(0.0, output_tokens=100))
    assert free.records.e2e_s(0) < 1.2


@pytest.mark.parametrize("model", [None, "large"])
def test_a_stream_goes_faster_by_what_is_lent(model: str | None) -> None:
    limit = replace(bucket(Meter.OUTPUT_TOKENS, 20, 10.0), ceiling_per_s=50.0, tier=Tier.BATCH, model=model)
    asked = request(0.0, limit, output_tokens=100, max_tokens=100)
    took_s = []
    for share in (0.0, 0.5, 1.0):
        pool = SimulatedPool(
            "vtc", machine(places=8, kv_tokens=4000), budget=partial(SimulatedBudget, begins_s=NOON_S)
        )
        assert pool.budget is not None
        pool.budget.lend(share)
        pool.run([asked])
        took_s.append(pool.records.e2e_s(0))
    # Of 100 tokens the burst has up to 20.
    for seconds, rate in zip(took_s, (10, 30, 50), strict=True):
        assert 79 / rate <= seconds <= 101 / rate + 0.5


def test_a_budget_is_used_to_its_last_token_and_then_refused() -> None:
    limit = window(Meter.OUTPUT_TOKENS, 12)
    pool = served(*[request(float(at_s), limit, max_tokens=5, may_be_cut=True) for at_s in range(4)])
    assert list(pool.records.output_tokens) == [5, 5, 2, 5]
    assert list(pool.records.refused) == [0, 0, 0, 1]
    assert pool.records.e2e_s(2) < pool.records.e2e_s(1), "cut after two tokens"
    whole = served(*[request(float(at_s), limit, max_tokens=5) for at_s in range(4)])
    assert list(whole.records.refused) == [0, 0, 1, 1], "what may not be cut needs room for all of it"


def test_a_window_lets_requests_in_when_it_turns() -> None:
    limit = window(Meter.REQUESTS, 2, Window.MINUTE)
    records = served(*[request(1.0, limit) for _ in range(3)]).records
    assert list(records.dispatched_s) == pytest.approx([1.0, 1.0, 60.0])


def test_tokens_count_as_their_price_weights_them() -> None:
    heavy = PriceEntry(Price(100, 50, 300), 1_000, TokenWeights(output=3_000))
    limit = window(Meter.OUTPUT_TOKENS, 12)
    pool = served(*[request(0.0, limit, output_tokens=4, price=heavy) for _ in range(2)])
    assert list(pool.records.refused) == [0, 1]


def test_cached_input_is_held_in_full_and_charged_as_it_is_weighted() -> None:
    light = PriceEntry(Price(100, 50, 300), 1_000, TokenWeights(cached_input=0))
    limits = RequestLimits((window(Meter.INPUT_TOKENS, 45),), light, False, cached_tokens=30)
    asked = [SimulatedRequest(float(at_s), "t", 10, 5, limits=limits) for at_s in range(2)]
    assert list(served(*asked).records.refused) == [0, 1], "10 are charged, and 40 do not fit beside them"


def test_limits_of_device_time_are_left_out() -> None:
    requests = [request(0.0, window(Meter.GPU_MS, 1), output_tokens=100) for _ in range(2)]
    assert list(served(*requests).records.refused) == [0, 0]


def test_requests_without_limits_are_not_touched() -> None:
    requests = [request(0.1 * number, output_tokens=20) for number in range(20)]
    plain = SimulatedPool("vtc", machine(places=8, kv_tokens=4000))
    plain.run(requests)
    assert served(*requests).records.last_s == plain.records.last_s


@pytest.mark.parametrize("seed", range(8))
def test_runs_and_single_steps_are_the_same_under_limits(seed: int) -> None:
    rng = random.Random(seed)
    limits = [
        bucket(Meter.OUTPUT_TOKENS, rng.randint(20, 60), rng.uniform(20.0, 80.0)),
        bucket(Meter.TOTAL_TOKENS, rng.randint(200, 400), rng.uniform(50.0, 300.0)),
        window(Meter.OUTPUT_TOKENS, rng.randint(100, 1500)),
    ]
    requests = []
    for number in range(30):
        chosen = rng.sample(limits, rng.randint(0, 3))
        length = rng.randint(1, 80)
        requests.append(
            request(
                0.3 * number, *chosen, output_tokens=length, max_tokens=length + rng.choice((0, 40)),
                may_be_cut=rng.random() < 0.5,
            )
        )  # fmt: skip
    one, other = (served(*requests, runs=runs, places=4) for runs in (True, False))
    for column in ("first_s", "last_s", "refused", "output_tokens", "dispatched_s"):
        assert getattr(one.records, column) == getattr(other.records, column), column
    assert any(one.records.refused) or any(last_s >= 0 for last_s in one.records.last_s)
