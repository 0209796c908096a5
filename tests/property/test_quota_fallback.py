"""Bound on exceeding a hard limit while gateways cannot reach Redis, and single counting after that.

Several gateways in front of one Redis, each with its own cut; a ledger of their rows; random histories of
requests, top-ups, settlements, cuts and returns. After every step: used and covered by rows in the ledger is
at most the amount and one slice for each gateway. After the last return Redis says what the ledger says.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.budget.counter_rebuild import CounterRebuilder
from tenants.errors import EpochEnded
from tenants.ledger.ledger import Ledger
from tenants.quota import rules
from tenants.quota.fallback import FallbackQuotaStore, slice_of
from tenants.quota.redis import RedisQuotaStore
from tenants.quota.store import Denied, Granted, Hold, QuotaStoreRecovering, QuotaStoreUnavailable
from tenants.types import Amounts, Limit, LimitMode, Meter
from tests.support import services
from tests.support.builders import site
from tests.support.quota import Clock, filled, limit, on_platform, on_user

AMOUNT = 300
PERCENT = 20
SLICE = 60
GATEWAYS = 3
LEASE_S = 60.0
BUDGET = limit(amount=AMOUNT)
ONE = on_platform(Meter.CONCURRENCY, amount=50)
LIMITS = (BUDGET, ONE)

Result = TypeVar("Result")


def tokens(count: int) -> Amounts:
    return Amounts(output_tokens=count)


class Cuttable:
    """Redis behind a line that can be cut: before a command gets through, or before its answer does."""

    def __init__(self, redis: RedisQuotaStore) -> None:
        self._redis = redis
        self.is_cut = False
        self.loses_answers = False
        self.before_settling: Callable[[], Awaitable[None]] | None = None

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._redis, name)
        if not callable(value) or name == "remember":
            return value

        async def over_the_line(*arguments: Any, **named: Any) -> Any:
            if self.is_cut and not self.loses_answers:
                raise QuotaStoreUnavailable("cut")
            if name == "settle" and self.before_settling is not None:
                meanwhile, self.before_settling = self.before_settling, None
                await meanwhile()
            answer = await value(*arguments, **named)
            if self.is_cut:
                raise QuotaStoreUnavailable("cut")
            return answer

        return over_the_line


@dataclass
class Row:
    """What the ledger knows of a request."""

    request_id: str
    charged_to: tuple[str, ...]
    held: Amounts
    worst: Amounts
    may_be_cut: bool
    used: Amounts = field(default_factory=lambda: tokens(0))
    settled: Amounts | None = None
    key_id: str = "ten_a"
    project_id: str = "ten_a"
    tenant_id: str = "ten_a"

    @property
    def reserve(self) -> Row:
        return self


@dataclass
class Standing:
    used: list[tuple[Limit, int]]
    open_requests: list[Row]


class Rows:
    """The ledger as far as a rebuild needs it: rows of an epoch that has ended are refused."""

    def __init__(self) -> None:
        self.epoch = 0
        self.rows: dict[str, Row] = {}

    def current(self, epoch: str) -> None:
        if epoch != f"e{self.epoch}":
            raise EpochEnded

    async def next_epoch(self) -> str:
        self.epoch += 1
        return f"e{self.epoch}"

    async def standing(self, limits: Iterable[Limit], now: datetime) -> Standing:
        open_requests = [row for row in self.rows.values() if row.settled is None]
        return Standing([(BUDGET, self.charged()), (ONE, 0)], open_requests)

    def charged(self) -> int:
        return sum(row.settled.output_tokens for row in self.rows.values() if row.settled is not None)

    def spoken_for(self) -> int:
        """Charged, and what open requests may emit."""
        open_rows = [row for row in self.rows.values() if row.settled is None]
        return self.charged() + sum(row.held.output_tokens for row in open_rows)


class Gateway:
    """Does what `gateway/budget/holds.py` does, in its order, without a database."""

    def __init__(self, name: str, url: str, rows: Rows, clock: Clock) -> None:
        self.name = name
        self.redis = RedisQuotaStore(url, timeout_s=30, virtual_clock=clock)
        self.line = Cuttable(self.redis)
        self.store = FallbackQuotaStore(cast("RedisQuotaStore", self.line), PERCENT, clock)
        self.rows = rows
        self.live: dict[str, Row] = {}
        self.mender = CounterRebuilder(
            site(None, clock, gateway_id=name, lease_ttl_s=LEASE_S),
            cast("Ledger", rows),
            self.store,
            lambda: list(LIMITS),
        )

    async def in_one_epoch(self, ask: Callable[[], Awaitable[Result]]) -> tuple[str, Result]:
        while True:
            epoch = self.store.epoch
            answer = await ask()
            if epoch == self.store.epoch:
                return epoch, answer

    async def reserve(self, request_id: str, hold: Hold) -> bool:
        epoch, answer = await self.in_one_epoch(lambda: self.store.reserve(request_id, LIMITS, hold, LEASE_S))
        if isinstance(answer, Denied):
            return False
        try:
            self.rows.current(epoch)
        except EpochEnded:
            await self.store.settle(request_id, tokens(0))
            raise
        row = Row(request_id, answer.charged_to, answer.covered, hold.most, hold.may_be_cut)
        self.rows.rows[request_id] = self.live[request_id] = row
        return True

    async def top_up(self, row: Row, count: int) -> bool:
        wanted = tokens(min(row.held.output_tokens + count, row.worst.output_tokens))
        used = row.held
        epoch, answer = await self.in_one_epoch(
            lambda: self.store.top_up(row.request_id, used, wanted, wanted)
        )
        if isinstance(answer, Denied):
            return False
        self.rows.current(epoch)
        assert answer.covered.output_tokens >= wanted.output_tokens
        row.held, row.used = rules.largest(row.held, answer.covered), used
        return True

    async def settle(self, row: Row, permille: int) -> None:
        if row.settled is None:
            row.settled = tokens(row.held.output_tokens * permille // 1000)
        await self.store.settle(row.request_id, row.settled)
        del self.live[row.request_id]

    async def heal(self) -> None:
        """Until the store serves with right counters; here nobody else is at it."""
        self.line.is_cut = False
        for _ in range(3):
            try:
                await self.mender.recover()
                break
            except QuotaStoreUnavailable:
                continue
        else:
            raise AssertionError("the store does not serve again")
        assert not self.store.is_local


OVER_IT: list[tuple[str, int, Any, Any]] = [
    *(("reserve", 0, 40, False) for _ in range(7)),
    *(("look", index, None, None) for index in range(GATEWAYS)),
    *(("cut", index, False, None) for index in range(GATEWAYS)),
    *(("reserve", index, 50, True) for index in range(GATEWAYS)),
    ("top_up", 0, 5, 4),
]
"""Every gateway gives out what all have seen."""
ENDED: list[tuple[str, int, Any, Any]] = [
    ("reserve", 0, 40, False),
    *(("look", index, None, None) for index in (0, 1)),
    *(("cut", index, False, None) for index in (0, 1)),
    *(("reserve", index, 10, True) for index in (0, 1)),
    ("heal", 1, None, None),
    ("top_up", 0, 5, 0),
    ("reserve", 0, 5, True),
]
"""One gateway is still without Redis when another is back and has begun the next epoch."""
SLICES: list[tuple[str, int, Any, Any]] = [
    *(("look", index, None, None) for index in range(GATEWAYS)),
    *(("cut", index, False, None) for index in range(GATEWAYS)),
    *(("reserve", index, 40, True) for index in range(GATEWAYS) for _ in range(5)),
]
"""Every gateway is asked for more than its slice."""
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(0, 2), st.integers(1, 80), st.booleans()),
        st.tuples(st.just("top_up"), st.integers(0, 2), st.integers(1, 40), st.integers(0, 99)),
        st.tuples(st.just("settle"), st.integers(0, 2), st.integers(500, 1000), st.integers(0, 99)),
        st.tuples(st.just("cut"), st.integers(0, 2), st.booleans(), st.none()),
        st.tuples(st.just("heal"), st.integers(0, 2), st.none(), st.none()),
        st.tuples(st.just("look"), st.integers(0, 2), st.none(), st.none()),
    ),
    min_size=10,
    max_size=60,
)


async def _step(gateway: Gateway, name: str, step: tuple[str, int, Any, Any], seen: Counter[str]) -> None:
    what, _, one, other = step
    was_local = gateway.store.is_local
    live = list(gateway.live.values())
    row = live[other % len(live)] if live and what in ("top_up", "settle") else None
    match what:
        case "reserve":
            hold = Hold(tokens(min(one, 10)), tokens(min(one, 40)), tokens(one), may_be_cut=other)
            seen["reserved here"] += await gateway.reserve(name, hold) and gateway.store.is_local
        case "top_up" if row is not None:
            granted = await gateway.top_up(row, one)
            seen["topped up here"] += granted and gateway.store.is_local
        case "settle" if row is not None:
            await gateway.settle(row, one)
            seen["settled here"] += gateway.store.is_local
        case "cut":
            gateway.line.is_cut, gateway.line.loses_answers = True, one
        case "heal":
            await gateway.heal()
            seen["came back"] += was_local
        case "look":
            await gateway.store.states(LIMITS)


async def _history(url: str, steps: list[tuple[str, int, Any, Any]], seen: Counter[str]) -> None:
    services.delete_keys(url)
    clock, rows = Clock(), Rows()
    gateways = [Gateway(f"g{number}", url, rows, clock) for number in range(GATEWAYS)]
    try:
        for gateway in gateways:
            await gateway.heal()
        for number, step in enumerate(steps):
            gateway = gateways[step[1]]
            try:
                await _step(gateway, f"r{number}", step, seen)
            except EpochEnded:
                seen["refused: its epoch had ended"] += 1
            except QuotaStoreUnavailable:
                seen["refused: no room without Redis"] += gateway.store.is_local
            assert rows.spoken_for() <= AMOUNT + GATEWAYS * SLICE
            seen["beyond the amount"] += rows.spoken_for() > AMOUNT
        for gateway in gateways:
            await gateway.heal()
        for gateway in gateways:
            for row in list(gateway.live.values()):
                await gateway.settle(row, 500)
        # What Redis held although its answer was lost ends as `Books` ends what nobody renews.
        clock.advance(LEASE_S + 1)
        for request_id in await gateways[0].store.overdue():
            assert request_id not in rows.rows
            await gateways[0].store.settle(request_id, tokens(0))
        budget, concurrency = await gateways[0].redis.states(LIMITS)
        assert (budget.used, budget.held, budget.worst_open) == (rows.charged(), 0, 0)
        assert concurrency.held == 0
    finally:
        for gateway in gateways:
            await gateway.redis.close()


def test_what_is_given_out_without_redis_stays_within_a_slice_each_and_is_counted_once(
    redis_url: str,
) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=150, deadline=None)
    @given(steps=STEPS)
    @example(steps=OVER_IT)
    @example(steps=ENDED)
    @example(steps=SLICES)
    def histories(steps: list[tuple[str, int, Any, Any]]) -> None:
        asyncio.run(_history(redis_url, steps, seen))

    histories()
    for case in (
        "reserved here",
        "topped up here",
        "settled here",
        "came back",
        "refused: its epoch had ended",
        "refused: no room without Redis",
        "beyond the amount",
    ):
        assert seen[case] > 0, f"no history met: {case} ({seen})"


# ---------------------------------------------------------------- single decisions


@pytest.fixture
async def gateways(redis_url: str) -> AsyncIterator[list[Gateway]]:
    """In front of one Redis and one ledger."""
    clock, rows = Clock(), Rows()
    made = [Gateway(f"g{number}", redis_url, rows, clock) for number in range(GATEWAYS)]
    for gateway in made:
        await gateway.heal()
    yield made
    for gateway in made:
        await gateway.redis.close()


def whole(count: int) -> Hold:
    return Hold.whole(tokens(count))


async def admitted(gateway: Gateway, prefix: str, size: int) -> int:
    """Tokens that can be reserved in pieces of `size` until it is refused."""
    count = 0
    try:
        while await gateway.reserve(f"{gateway.name}-{prefix}{count}", whole(size)):
            count += 1
    except QuotaStoreUnavailable:
        assert gateway.line.is_cut
    return count * size


async def test_each_gateway_gives_out_its_slice_and_no_more(gateways: list[Gateway]) -> None:
    for gateway in gateways:
        await gateway.store.states(LIMITS)
        gateway.line.is_cut = True
    assert [await admitted(gateway, "r", 7) for gateway in gateways] == [SLICE // 7 * 7] * GATEWAYS
    for gateway in gateways:
        await gateway.heal()
    [state, _] = await gateways[0].store.states(LIMITS)
    assert state.used + state.held == GATEWAYS * (SLICE // 7 * 7)


async def test_nothing_is_given_out_of_what_was_never_seen_or_was_full_when_last_seen(
    gateways: list[Gateway],
) -> None:
    one, other, _ = gateways
    assert await admitted(other, "full", AMOUNT) == AMOUNT
    [state, _] = await other.store.states(LIMITS)
    assert state.available == 0
    for gateway in (one, other):
        gateway.line.is_cut = True
        assert await admitted(gateway, "r", 1) == 0


async def test_each_end_user_has_a_slice_of_its_own_and_the_platform_one_for_all(
    gateways: list[Gateway],
) -> None:
    amy, bob, cid = (on_user(name, amount=100) for name in ("amy", "bob", "cid"))
    everyone = on_platform(amount=150)
    store = gateways[0].store
    await store.states([amy, bob, everyone])
    gateways[0].line.is_cut = True
    given = {user.subject_id: 0 for user in (amy, bob, cid)}
    for number, user in enumerate([amy, bob, cid] * 25):
        try:
            answer = await store.reserve(f"u{number}", [user, everyone], whole(1), LEASE_S)
        except QuotaStoreUnavailable:
            continue
        given[user.subject_id] += isinstance(answer, Granted)
    assert sum(given.values()) == 150 * PERCENT // 100
    assert 0 < max(given.values()) <= 100 * PERCENT // 100
    # Nothing was seen of cid.
    assert given[cid.subject_id] == 0


async def test_what_was_seen_before_an_outage_is_not_given_out_again_in_the_next(
    gateways: list[Gateway],
) -> None:
    gateway = gateways[0]
    await gateway.store.states(LIMITS)
    gateway.line.is_cut = True
    assert await admitted(gateway, "first", 10) == SLICE
    await gateway.heal()
    gateway.line.is_cut = True
    assert await admitted(gateway, "second", 10) == 0


async def test_promised_top_ups_need_no_slice_and_others_do(gateways: list[Gateway]) -> None:
    gateway = gateways[0]
    await gateway.reserve("promised", Hold(tokens(10), tokens(20), tokens(140)))
    await gateway.reserve("cut", Hold(tokens(10), tokens(20), tokens(140), may_be_cut=True))
    gateway.line.is_cut = True
    assert await gateway.top_up(gateway.live["promised"], 120)
    assert await gateway.top_up(gateway.live["cut"], SLICE)
    assert gateway.store.is_local
    with pytest.raises(QuotaStoreUnavailable):
        await gateway.top_up(gateway.live["cut"], 1)
    await gateway.heal()
    [state, one] = await gateway.store.states(LIMITS)
    assert (state.held, one.held) == (140 + 20 + SLICE, 2)


async def test_before_the_store_was_ready_nothing_is_given_out(redis_url: str) -> None:
    gateway = Gateway("new", redis_url, Rows(), Clock())
    gateway.line.is_cut = True
    for attempt in (gateway.store.ping(), gateway.reserve("r", whole(1))):
        with pytest.raises(QuotaStoreUnavailable):
            await attempt
    gateway.line.is_cut = False
    with pytest.raises(QuotaStoreRecovering):
        await gateway.reserve("r", whole(1))
    assert not gateway.store.is_local
    await gateway.redis.close()


async def test_what_is_given_out_after_the_ledger_was_read_again_is_refused(gateways: list[Gateway]) -> None:
    gateway, other, _ = gateways
    await gateway.store.states(LIMITS)
    await gateway.reserve("before", whole(5))
    gateway.line.is_cut = True
    assert await gateway.reserve("local", whole(5))
    await other.redis.lose(other.redis.epoch)
    await other.heal()
    await gateway.settle(gateway.live["before"], 1000)
    met = []

    async def late() -> None:
        assert gateway.store.is_local
        with pytest.raises(EpochEnded):
            await gateway.reserve("late", whole(5))
        met.append("late")

    gateway.line.before_settling = late
    await gateway.heal()
    assert met == ["late"]
    [state, one] = await other.store.states(LIMITS)
    # `local` had its row before the other one read the ledger.
    assert (state.used, state.held, one.held) == (5, 5, 1)


async def test_a_store_that_has_lost_its_counters_is_not_away(
    gateways: list[Gateway], redis_url: str
) -> None:
    gateway = gateways[0]
    await gateway.store.states(LIMITS)
    services.delete_keys(redis_url)
    with pytest.raises(QuotaStoreRecovering):
        await gateway.reserve("r", whole(1))
    assert not gateway.store.is_local


async def test_a_hold_that_was_filled_in_again_is_not_relied_on_before_the_store_has_named_it(
    gateways: list[Gateway],
) -> None:
    gateway = gateways[0]
    await gateway.reserve("r", Hold(tokens(10), tokens(10), tokens(200), may_be_cut=True))
    gateway.line.is_cut = True
    assert await gateway.top_up(gateway.live["r"], 10)
    await gateway.heal()
    await gateway.store.states(LIMITS)
    gateway.line.is_cut = True
    with pytest.raises(QuotaStoreUnavailable):
        await gateway.top_up(gateway.live["r"], 10)
    await gateway.heal()
    assert await gateway.top_up(gateway.live["r"], 10)
    gateway.line.is_cut = True
    assert await gateway.top_up(gateway.live["r"], 10)


@pytest.mark.parametrize(
    ("of", "available", "amount", "rate_per_s"),
    [
        (limit(amount=1_000), 1_000, 100, None),
        (limit(amount=1_000), 30, 30, None),
        (limit(amount=1_000), 0, 0, None),
        (limit(amount=9), 9, 0, None),
        (limit(Meter.CONCURRENCY, amount=16), 16, 1, None),
        (limit(amount=500, rate_per_s=100), 0, 50, 10.0),
        (limit(amount=1_000, mode=LimitMode.SOFT), 0, 1_000, None),
    ],
)
def test_the_slice_of_a_limit(of: Limit, available: int, amount: int, rate_per_s: float | None) -> None:
    part = slice_of(of, 10, available)
    assert part is not None
    assert (part.amount, part.rate_per_s) == (amount, rate_per_s)


def test_a_bucket_that_is_too_small_has_no_slice() -> None:
    assert slice_of(limit(amount=9, rate_per_s=100), 10, 9) is None
    assert slice_of(limit(amount=90, rate_per_s=0.001), 10, 90) is None


async def test_a_bucket_begins_with_what_was_seen_and_flows_at_its_part_of_the_rate(redis_url: str) -> None:
    clock = Clock()
    redis = RedisQuotaStore(redis_url, timeout_s=30, virtual_clock=clock)
    line = Cuttable(redis)
    store = FallbackQuotaStore(cast("RedisQuotaStore", line), 10, clock)
    await filled(store)
    bucket = limit(amount=500, rate_per_s=100)
    await store.reserve("r", [bucket], whole(480), LEASE_S)
    line.is_cut = True
    assert isinstance(await store.reserve("a", [bucket], whole(20), LEASE_S), Granted)
    denied = await store.reserve("b", [bucket], whole(30), LEASE_S)
    assert isinstance(denied, Denied)
    assert (denied.limit, denied.available) == (bucket, 0)
    await store.settle("a", tokens(20))
    clock.advance(2.9)
    assert isinstance(await store.reserve("b", [bucket], whole(30), LEASE_S), Denied)
    clock.advance(0.1)
    assert isinstance(await store.reserve("b", [bucket], whole(30), LEASE_S), Granted)
    await redis.close()
