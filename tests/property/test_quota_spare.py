"""While the share of spare capacity moves at random, buckets refill by exactly what was in force.

In both stores: never less than the rate that was set, never more than the ceiling; windows and buckets
without a ceiling are left alone. Gateways that hear of a change later stay between rate and ceiling, too.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Sequence
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenants.quota.memory import MemoryQuotaStore
from tenants.quota.redis import RedisQuotaStore
from tenants.quota.spare import WHOLE, SpareShares
from tenants.quota.store import Granted, Hold, QuotaStore
from tenants.types import Amounts, Limit, Meter, Tier, Window
from tests.support.quota import Clock, filled, limit, on_platform

BATCH: dict[str, Any] = {"tier": Tier.BATCH}
ON_ALL = limit(amount=900, rate_per_s=7.125, ceiling_per_s=80.5, **BATCH)
ON_ONE = limit(Meter.OUTPUT_TOKENS, amount=500, rate_per_s=10, ceiling_per_s=30, model="one", **BATCH)
OF_ALL = on_platform(Meter.OUTPUT_TOKENS, amount=700, rate_per_s=3, ceiling_per_s=300, **BATCH)
PLAIN = limit(Meter.OUTPUT_TOKENS, amount=600, rate_per_s=5, **BATCH)
WINDOW = limit(amount=5_000, window=Window.HOUR)
LIMITS = [ON_ALL, ON_ONE, OF_ALL, PLAIN, WINDOW]
BUCKETS = LIMITS[:4]
LOOK_S = 2.0
"""After which a gateway that follows has followed."""

steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("share"), st.sampled_from(("one", "two")), st.sampled_from((0.0, 0.25, 0.5, 0.75, 1.0))
        ),
        st.tuples(st.just("time"), st.sampled_from((0.001, 0.4, 2.0, 7.03, 60.0)), st.just(0.0)),
        st.tuples(
            st.just("spend"), st.sampled_from((1, 40, 150, 450)), st.sampled_from((0.0, 1.0, 3.0, 9.0))
        ),
    ),
    min_size=6,
    max_size=24,
)


class Bucket:
    """A bucket reckoned with by hand: it moves with every change, so it needs no history."""

    def __init__(self, of: Limit, rate_milli: int | None = None) -> None:
        self.of = of
        self.cap = of.amount * of.scale
        self.level = self.cap
        self.rate = rate_milli
        """Thousandths of a unit a second; None: what is in force."""

    def passes(self, milliseconds: int, share: int) -> None:
        assert self.of.rate_per_s is not None
        rate = round(self.of.rate_per_s * 1_000)
        ceiling = rate if self.of.ceiling_per_s is None else round(self.of.ceiling_per_s * 1_000)
        in_force = rate + (ceiling - rate) * share // WHOLE if self.rate is None else self.rate
        # Thousandths a second are millionths a millisecond.
        self.level = min(self.cap, self.level + in_force * milliseconds)

    def spend(self, amount: int) -> None:
        self.level = max(0, self.level - amount * self.of.scale)


class Shares:
    """What is in force, and what it was a look ago."""

    def __init__(self) -> None:
        self.of = {"one": 0, "two": 0}

    def on(self, limit: Limit) -> int:
        return self.of["one"] if limit.model == "one" else min(self.of.values())


async def holds(store: QuotaStore, name: str, tokens: int) -> bool:
    """Whether so many tokens could be held on all limits."""
    answer = await store.reserve(name, LIMITS, Hold.whole(Amounts(output_tokens=tokens)), 3_600)
    return isinstance(answer, Granted)


def history(
    loop: asyncio.AbstractEventLoop, stores: Sequence[QuotaStore], clock: Clock, wanted: Any, met: Tally[str]
) -> None:
    shares, exact = Shares(), [Bucket(each) for each in BUCKETS]
    for store in stores:
        store.spare.cover(("one", "two"))

    def passes(seconds: float) -> None:
        before_ms = round(clock.now_s * 1e6) // 1_000
        clock.now_s = round(clock.now_s + seconds, 6)
        milliseconds = round(clock.now_s * 1e6) // 1_000 - before_ms
        for bucket in exact:
            bucket.passes(milliseconds, shares.on(bucket.of))

    for number, (what, one, other) in enumerate(wanted):
        match what:
            case "share":
                shares.of[one] = round(other * WHOLE)
                for store in stores:
                    store.spare.set(one, other)
                met["raised"] += min(shares.of.values()) > 0
                met["given back"] += other == 0
            case "time":
                passes(one)
            case "spend":
                granted = [loop.run_until_complete(holds(store, f"r{number}", one)) for store in stores]
                assert granted == [granted[0]] * len(stores)
                met["denied"] += not granted[0]
                if not granted[0]:
                    continue
                passes(other)
                half = Amounts(output_tokens=one // 2)
                whole = Amounts(output_tokens=one)
                for store in stores:
                    topped = loop.run_until_complete(store.top_up(f"r{number}", half, whole, whole))
                    assert isinstance(topped, Granted)
                for bucket in exact:
                    bucket.spend(one // 2)
                passes(other)
                for store in stores:
                    loop.run_until_complete(store.settle(f"r{number}", whole))
                for bucket in exact:
                    bucket.spend(one - one // 2)
                met["charged while it moved"] += other > 0 and max(shares.of.values()) > 0
        states = [loop.run_until_complete(store.states(LIMITS)) for store in stores]
        assert states == [states[0]] * len(stores)
        for bucket, state in zip(exact, states[0], strict=False):
            assert state.available == bucket.level // bucket.of.scale
            assert state.refill_per_s is not None
            least = bucket.of.rate_per_s or 0.0
            assert least - 0.001 <= state.refill_per_s <= (bucket.of.ceiling_per_s or least)
            rate = round(state.refill_per_s * 1_000)
            assert round(state.reset_s * 1_000) == -(-(bucket.cap - bucket.level) // rate)
    # To the millionth of a token, without drift.
    memory = stores[0]
    assert isinstance(memory, MemoryQuotaStore)
    now_us = round(clock.now_s * 1e6)
    assert [memory._advance(each.of, now_us).level for each in exact] == [each.level for each in exact]  # type: ignore[union-attr]


def emptied(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()


@pytest.mark.parametrize("examples", [25, pytest.param(400, marks=pytest.mark.long)])
def test_both_stores_refill_by_exactly_what_was_in_force(examples: int, redis_url: str) -> None:
    loop, met = asyncio.new_event_loop(), Tally[str]()
    clock = Clock()
    shared = RedisQuotaStore(redis_url, timeout_s=30, virtual_clock=clock)

    @settings(
        max_examples=examples, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(steps)
    def histories(wanted: Any) -> None:
        emptied(redis_url)
        clock.now_s = Clock().now_s
        memory = MemoryQuotaStore(clock)
        shared.spare = SpareShares(clock)
        for store in (memory, shared):
            loop.run_until_complete(filled(store, f"e{met['histories']}"))
        met["histories"] += 1
        history(loop, (memory, shared), clock, wanted, met)

    histories()
    loop.run_until_complete(shared.close())
    loop.close()
    for case in ("raised", "given back", "denied", "charged while it moved"):
        assert met[case] > examples // 10, (case, met)


@pytest.mark.parametrize("examples", [12, pytest.param(200, marks=pytest.mark.long)])
def test_gateways_that_follow_late_stay_between_rate_and_ceiling(examples: int, redis_url: str) -> None:
    """The second gateway hears of each change one look later; each asks in turn."""
    loop, met, clock = asyncio.new_event_loop(), Tally[str](), Clock()
    gateways = [RedisQuotaStore(redis_url, timeout_s=30, virtual_clock=clock) for _ in range(2)]

    @settings(
        max_examples=examples, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(steps)
    def histories(wanted: Any) -> None:
        emptied(redis_url)
        clock.now_s = Clock().now_s
        loop.run_until_complete(filled(gateways[0], f"e{met['histories']}"))
        met["histories"] += 1
        for gateway in gateways:
            gateway.spare = SpareShares(clock)
            gateway.spare.cover(("one", "two"))
        least = [Bucket(each, round((each.rate_per_s or 0) * 1_000)) for each in BUCKETS]
        most = [Bucket(each, round((each.ceiling_per_s or each.rate_per_s or 0) * 1_000)) for each in BUCKETS]
        late: list[tuple[float, str, float]] = []

        def passes(seconds: float) -> None:
            clock.now_s = round(clock.now_s + seconds, 6)
            for bucket in (*least, *most):
                bucket.passes(round(seconds * 1_000), 0)
            while late and late[0][0] <= clock.now_s:
                _, model, share = late.pop(0)
                gateways[1].spare.set(model, share)

        for number, (what, one, other) in enumerate(wanted):
            gateway = gateways[number % 2]
            if what == "share":
                gateways[0].spare.set(one, other)
                late.append((clock.now_s + LOOK_S, one, other))
                met["told late"] += 1
            elif what == "time":
                passes(one)
            elif loop.run_until_complete(holds(gateway, f"r{number}", one)):
                loop.run_until_complete(gateway.settle(f"r{number}", Amounts(output_tokens=one)))
                for bucket in (*least, *most):
                    bucket.spend(one)
            states = loop.run_until_complete(gateway.states(BUCKETS))
            for low, state, high in zip(least, states, most, strict=True):
                assert low.level // low.of.scale <= state.available <= high.level // high.of.scale
                met["faster than its rate"] += state.available > low.level // low.of.scale

    histories()
    for gateway in gateways:
        loop.run_until_complete(gateway.close())
    loop.close()
    assert met["told late"] > examples // 4
    assert met["faster than its rate"] > examples // 4
