"""Do the store in this process and the one in Redis do the same, and do both keep the invariants?

Random histories over shared limits of every shape, on one virtual clock that also steps back a little. After
every operation both stores must have given the same answer, and the books kept here must balance: reserved =
charged + refunded + outstanding, nothing negative, no hard limit exceeded in any window or any interval.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from typing import ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tenants.quota import rules
from tenants.quota.memory import MemoryQuotaStore
from tenants.quota.redis import RedisQuotaStore
from tenants.quota.store import Denied, Granted, Overrun
from tenants.types import Amounts, Limit, Meter, Mode, SubjectKind, Tier, Window
from tests.quota import Clock, limit

T = TypeVar("T")

LIMITS = [
    limit(amount=400, window=Window.MINUTE),
    limit(amount=2_000, window=Window.HOUR, time_zone="Asia/Kolkata"),
    limit(Meter.OUTPUT_TOKENS, amount=3_000),
    limit(Meter.COST_NANOUSD, amount=4_000_000, window=Window.DAY, time_zone="Europe/Berlin"),
    limit(Meter.REQUESTS, amount=12, rate_per_s=0.25),
    limit(amount=300, rate_per_s=7.125),
    limit(Meter.COST_NANOUSD, amount=900_000, rate_per_s=1_001),
    limit(Meter.CONCURRENCY, amount=5),
    limit(Meter.INPUT_TOKENS, amount=150, window=Window.MINUTE, mode=Mode.SOFT),
    limit(Meter.OUTPUT_TOKENS, amount=90, rate_per_s=3, mode=Mode.SHADOW),
    limit(amount=200, rate_per_s=20, kind=SubjectKind.KEY, subject_id="key_a", tier=Tier.BATCH),
]

amounts = st.builds(
    Amounts,
    input_tokens=st.integers(0, 120),
    output_tokens=st.integers(0, 120),
    cost_nanousd=st.integers(0, 400_000),
    requests=st.integers(0, 2),
)
#: What of a hold is used: per thousand.
shares = st.tuples(*(st.sampled_from((0, 1, 333, 999, 1000)) for _ in range(4)))


CASES = ("granted", "settled", "topped up", "top-up denied", "overrun", "expired", "exceeded", "outlived")
CASES += ("denied bucket", "denied window")


class Twins(RuleBasedStateMachine):
    """`loop`, `redis_url` and `met` are set by the test."""

    loop: ClassVar[asyncio.AbstractEventLoop]
    redis_url: ClassVar[str]
    met: ClassVar[Tally[str]]

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.memory = MemoryQuotaStore(self.clock)
        self.redis = RedisQuotaStore(
            self.redis_url, prefix=f"fairgate-{uuid.uuid4().hex}", timeout_s=30, virtual_clock=self.clock
        )
        self.limits = list(LIMITS)
        self.live: dict[str, tuple[list[Limit], Amounts, tuple[str, ...]]] = {}
        self.names = itertools.count()
        # The books: by counter name, what was ever reserved, charged and refunded.
        self.reserved: Tally[str] = Tally()
        self.charged: Tally[str] = Tally()
        self.refunded: Tally[str] = Tally()
        # By bucket identity: (time, tokens) of every charge.
        self.flows: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        self.latest_s = self.clock.now_s

    def both(self, first: Awaitable[T], second: Awaitable[T]) -> T:
        """Runs the same on both; asserts that the answers are equal."""

        async def run() -> tuple[object, object]:
            found: list[object] = []
            for awaitable in (first, second):
                try:
                    found.append(await awaitable)
                except (KeyError, Overrun) as error:
                    found.append((type(error).__name__, str(error)))
            return found[0], found[1]

        left, right = self.loop.run_until_complete(run())
        assert left == right
        return left  # type: ignore[return-value]

    def end(self, request_id: str, used: Amounts) -> None:
        limits, held, names = self.live.pop(request_id)
        for each, name in zip(limits, names, strict=True):
            actual = 0 if each.meter is Meter.CONCURRENCY else used.of(each.meter)
            self.charged[name] += actual
            self.refunded[name] += held.of(each.meter) - actual
            if each.is_bucket:
                self.flows[name].append((self.latest_s, actual))

    @rule(
        chosen=st.one_of(
            st.sets(st.sampled_from(range(len(LIMITS))), min_size=1, max_size=6),
            st.sampled_from(({0}, {0, 2}, {0, 3, 7})),
        ),
        wanted=amounts,
        lease_s=st.sampled_from((5, 60, 4_000)),
    )
    def reserve(self, chosen: set[int], wanted: Amounts, lease_s: float) -> None:
        request_id, limits = f"r{next(self.names)}", [self.limits[index] for index in sorted(chosen)]
        answer = self.both(
            self.memory.reserve(request_id, limits, wanted, lease_s),
            self.redis.reserve(request_id, limits, wanted, lease_s),
        )
        if isinstance(answer, Granted):
            self.met["granted"] += 1
            self.met["exceeded"] += len(answer.exceeded)
            self.live[request_id] = (limits, wanted, answer.charged_to)
            for each, name in zip(limits, answer.charged_to, strict=True):
                self.reserved[name] += wanted.of(each.meter)
        else:
            assert isinstance(answer, Denied)
            shape = "bucket" if answer.limit.is_bucket else "window" if answer.limit.window else "concurrency"
            self.met[f"denied {shape}"] += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), share=shares)
    def settle(self, data: st.DataObject, share: tuple[int, int, int, int]) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        _, held, _ = self.live[request_id]
        used = Amounts(
            held.input_tokens * share[0] // 1000,
            held.output_tokens * share[1] // 1000,
            held.cost_nanousd * share[2] // 1000,
            held.requests * share[3] // 1000,
        )
        answer = self.both(self.memory.settle(request_id, used), self.redis.settle(request_id, used))
        assert answer is True
        self.end(request_id, used)
        again = self.both(self.memory.settle(request_id, used), self.redis.settle(request_id, used))
        assert again is False
        self.met["settled"] += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def overrun(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        limits, held, _ = self.live[request_id]
        if not any(each.mode is Mode.HARD and each.meter is not Meter.CONCURRENCY for each in limits):
            return
        used = Amounts(
            held.input_tokens + 1, held.output_tokens + 1, held.cost_nanousd + 1, held.requests + 1
        )
        answer = self.both(self.memory.settle(request_id, used), self.redis.settle(request_id, used))
        assert isinstance(answer, tuple)
        self.met["overrun"] += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=amounts)
    def top_up(self, data: st.DataObject, more: Amounts) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        more = replace(more, requests=0)
        answer = self.both(self.memory.top_up(request_id, more), self.redis.top_up(request_id, more))
        limits, held, names = self.live[request_id]
        if isinstance(answer, Granted):
            total = Amounts(
                held.input_tokens + more.input_tokens,
                held.output_tokens + more.output_tokens,
                held.cost_nanousd + more.cost_nanousd,
                held.requests,
            )
            self.live[request_id] = (limits, total, names)
            for each, name in zip(limits, names, strict=True):
                if each.meter is not Meter.CONCURRENCY:
                    self.reserved[name] += more.of(each.meter)
            self.met["topped up"] += 1
        else:
            self.met["top-up denied"] += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), output_tokens=st.integers(0, 300))
    def a_request_outlives_its_minute(self, data: st.DataObject, output_tokens: int) -> None:
        """The next window is open when it asks for more, or ends."""
        self.time_passes(61)
        self.reserve({0}, Amounts(requests=1), 4_000)
        self.top_up(data, Amounts(output_tokens=output_tokens))
        self.settle(data, (1000, 999, 1, 1000))
        self.met["outlived"] += 1

    @rule(seconds=st.sampled_from((0.001, 0.5, 3.25, 20, 61, 3_700, 90_000)))
    def time_passes(self, seconds: float) -> None:
        """(Leases that run out stay held until somebody expires them.)"""
        self.clock.now_s = round(self.clock.now_s + seconds, 6)
        self.latest_s = max(self.latest_s, self.clock.now_s)

    @rule(seconds=st.sampled_from((0.002, 1, 45)))
    def the_clock_steps_back(self, seconds: float) -> None:
        self.clock.now_s = round(self.clock.now_s - seconds, 6)

    @rule(seconds=st.sampled_from((0, 5, 61, 4_001)))
    def leases_run_out(self, seconds: float) -> None:
        self.time_passes(seconds)

        async def sorted_ids(store: MemoryQuotaStore | RedisQuotaStore) -> list[str]:
            return sorted(await store.expire())

        for request_id in self.both(sorted_ids(self.memory), sorted_ids(self.redis)):
            self.end(request_id, Amounts(requests=0))
            self.met["expired"] += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), lease_s=st.sampled_from((1, 500)))
    def renew(self, data: st.DataObject, lease_s: float) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.live)), unique=True))
        self.both(self.memory.renew(ids, lease_s), self.redis.renew(ids, lease_s))

    @rule(index=st.sampled_from(range(len(LIMITS))), per_cent=st.sampled_from((50, 100, 150)))
    def an_amount_is_changed(self, index: int, per_cent: int) -> None:
        original = LIMITS[index]
        self.limits[index] = replace(original, amount=original.amount * per_cent // 100)

    @invariant()
    def the_stores_agree_and_the_books_balance(self) -> None:
        states = self.both(self.memory.states(self.limits), self.redis.states(self.limits))
        self.memory.check()
        outstanding: Tally[str] = Tally()
        for limits, held, names in self.live.values():
            for each, name in zip(limits, names, strict=True):
                outstanding[name] += held.of(each.meter)
        for state in states:
            name, each = state.counter, state.limit
            assert min(state.used, state.held, state.available) >= 0
            assert state.held == outstanding[name]
            if each.window is not None:
                assert state.used == self.charged[name]
        for name, reserved in self.reserved.items():
            assert rules.conserved(reserved, self.charged[name], self.refunded[name], outstanding[name])
        largest = {rules.identity(each): each.amount * 3 // 2 for each in LIMITS if each.mode is Mode.HARD}
        for name in self.reserved:
            identity = name.partition("@")[0]
            if identity in largest and ":bucket:" not in identity:
                # In any window (the name says which), with the largest amount the limit ever had.
                spent = self.charged[name] + outstanding[name]
                if ":concurrency:" in identity:
                    spent = outstanding[name]
                assert spent <= largest[identity]

    @invariant()
    def no_interval_of_a_bucket_gives_more_than_burst_and_rate(self) -> None:
        for each in LIMITS:
            if not each.is_bucket or each.mode is not Mode.HARD:
                continue
            assert each.rate_per_s is not None
            burst, flows = each.amount * 3 // 2, self.flows[rules.identity(each)]
            for start in range(len(flows)):
                total = 0
                for at_s, amount in flows[start:]:
                    total += amount
                    # A millisecond: times are counted in whole ones.
                    allowed = burst + each.rate_per_s * (at_s - flows[start][0] + 0.001)
                    assert total <= allowed + 1e-6

    def teardown(self) -> None:
        self.loop.run_until_complete(self.redis.close())


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def test_memory_and_redis_are_twins(loop: asyncio.AbstractEventLoop, redis_url: str) -> None:
    Twins.loop, Twins.redis_url, Twins.met = loop, redis_url, Tally()
    run_state_machine_as_test(
        Twins,
        settings=settings(
            max_examples=120,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        ),
    )
    # A property that never met its cases proves nothing.
    for case in CASES:
        assert Twins.met[case] > 2, Twins.met
