"""Arithmetic of limits, by hand-computed examples and over all instants."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenants.instants import from_us, to_us
from tenants.quota import rules, wire
from tenants.quota.rules import BucketCounter, LimitHold, WindowCounter, Wish
from tenants.quota.store import Hold
from tenants.types import Amounts, Limit, LimitMode, Meter, SubjectKind, Tier, Window, scale_of
from tests.support.quota import limit

ZONES = (
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "America/Sao_Paulo",
    "America/Havana",  # its clocks change at midnight
    "America/St_Johns",  # put its clocks back at 00:01, across midnight
    "Asia/Kolkata",
    "Asia/Tehran",
    "Asia/Kathmandu",
    "Pacific/Apia",  # skipped 2011-12-30
    "Pacific/Chatham",
    "Africa/Monrovia",
)


def us(text: str) -> int:
    return to_us(datetime.fromisoformat(text).astimezone(UTC))


@pytest.mark.parametrize(
    ("window", "zone", "now", "start", "end"),
    [
        (Window.MINUTE, "UTC", "2025-03-30T00:59:59.999999Z", "2025-03-30T00:59:00Z", "2025-03-30T01:00:00Z"),
        (Window.HOUR, "UTC", "2025-03-30T01:00:00Z", "2025-03-30T01:00:00Z", "2025-03-30T02:00:00Z"),
        (Window.HOUR, "Asia/Kolkata", "2025-06-01T00:10:00Z", "2025-05-31T23:30:00Z", "2025-06-01T00:30:00Z"),
        (Window.DAY, "UTC", "2025-06-01T12:00:00Z", "2025-06-01T00:00:00Z", "2025-06-02T00:00:00Z"),
        # 23 hours: the clock goes forward; 25 hours: it goes back.
        (Window.DAY, "Europe/Berlin", "2025-03-30T10:00:00Z", "2025-03-29T23:00:00Z", "2025-03-30T22:00:00Z"),
        (Window.DAY, "Europe/Berlin", "2025-10-26T10:00:00Z", "2025-10-25T22:00:00Z", "2025-10-26T23:00:00Z"),
        # Havana has no midnight on 2025-03-09: the day begins at one.
        (Window.DAY, "America/Havana", "2025-03-09T12:00Z", "2025-03-09T05:00Z", "2025-03-10T04:00Z"),
        # 23:15 for the second time: the day that began at the first midnight goes on.
        (Window.DAY, "America/St_Johns", "2010-11-07T02:45Z", "2010-11-07T02:30Z", "2010-11-08T03:30Z"),
        (Window.MONTH, "UTC", "2024-02-29T23:59:59Z", "2024-02-01T00:00:00Z", "2024-03-01T00:00:00Z"),
        (Window.MONTH, "UTC", "2025-12-31T23:59:59Z", "2025-12-01T00:00:00Z", "2026-01-01T00:00:00Z"),
        (Window.MONTH, "Asia/Tokyo", "2025-01-31T15:00:00Z", "2025-01-31T15:00:00Z", "2025-02-28T15:00:00Z"),
    ],
)
def test_windows_begin_and_end_with_the_local_calendar(
    window: Window, zone: str, now: str, start: str, end: str
) -> None:
    assert rules.window_bounds_us(window, zone, us(now)) == (us(start), us(end))


def test_a_lifetime_has_no_end() -> None:
    assert rules.window_bounds_us(Window.LIFETIME, "UTC", us("2025-06-01T00:00:00Z")) == (0, 0)


@settings(max_examples=400, deadline=None)
@given(
    window=st.sampled_from((Window.MINUTE, Window.HOUR, Window.DAY, Window.MONTH)),
    zone=st.sampled_from(ZONES),
    now_us=st.integers(us("1990-01-01T00:00:00Z"), us("2037-01-01T00:00:00Z")),
)
def test_days_and_months_are_a_partition_of_time(window: Window, zone: str, now_us: int) -> None:
    start, end = rules.window_bounds_us(window, zone, now_us)
    assert start <= now_us < end
    if window in (Window.DAY, Window.MONTH):
        assert rules.window_bounds_us(window, zone, start) == (start, end)
        assert rules.window_bounds_us(window, zone, end - 1) == (start, end)
        assert rules.window_bounds_us(window, zone, end)[0] == end


@given(st.integers(0, 4_000_000_000_000_000))
def test_instants_survive_the_way_to_the_database_and_back(at_us: int) -> None:
    assert to_us(from_us(at_us)) == at_us


@settings(max_examples=300, deadline=None)
@given(
    rate_milli=st.integers(1, 9_000_000_000),
    amount=st.integers(1, 9_000_000_000),
    level=st.integers(0, 10**6),
    steps=st.lists(st.integers(0, 10**9), min_size=1, max_size=12),
)
def test_refilling_in_steps_is_refilling_at_once(
    rate_milli: int, amount: int, level: int, steps: list[int]
) -> None:
    bucket = limit(amount=amount, rate_per_s=rate_milli / 1000)
    start = BucketCounter(min(level, amount * 1_000_000), 0, 0)
    stepwise: rules.Counter = start
    now_us = 0
    for step in steps:
        now_us += step
        stepwise = rules.advance(bucket, stepwise, now_us)
    assert stepwise == rules.advance(bucket, start, now_us)
    assert isinstance(stepwise, BucketCounter)
    # The definition, in exact arithmetic.
    exact = min(amount * 1_000_000, start.level + rate_milli * (now_us // 1000))
    assert stepwise.level == exact


def test_money_buckets_refill_whole_nanodollars() -> None:
    bucket = limit(Meter.COST_NANOUSD, amount=9_000_000_000_000, rate_per_s=1)
    counter = rules.advance(bucket, BucketCounter(0, 0, 0), 1_000_000_000)
    assert rules.view(bucket, counter, 1_000_000_000).available == 1_000


def test_no_number_of_any_counter_leaves_the_range_that_doubles_hold_exactly() -> None:
    for meter in Meter:
        assert (rules.MAX_COUNT // scale_of(meter)) * scale_of(meter) < 2**53


def test_the_charge_name_says_which_window() -> None:
    minute = limit(window=Window.MINUTE, time_zone="Asia/Tokyo")
    counter = WindowCounter(1_700_136_000_000_000, 1_700_136_060_000_000, 0, 0, 0)
    assert rules.charge_name(minute, counter) == "tenant:ten_a:total_tokens:minute/Asia/Tokyo:*@1700136000"


def test_a_clock_that_steps_back_neither_refills_nor_empties() -> None:
    bucket, minute = limit(amount=10, rate_per_s=1), limit(window=Window.MINUTE)
    counter = BucketCounter(3_000_000, 1_000_000, 0)
    assert rules.advance(bucket, counter, 500_000_000) == counter
    window = rules.advance(minute, None, us("2025-06-01T12:00:30Z"))
    assert rules.advance(minute, window, us("2025-06-01T11:59:59Z")) == window


@settings(max_examples=500, deadline=None)
@given(
    amount=st.integers(0, 50),
    used=st.integers(0, 50),
    others_held=st.integers(0, 50),
    others_open=st.integers(0, 50),
    asked=st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30)).map(sorted),
    may_be_cut=st.booleans(),
    claims=st.lists(st.integers(0, 40), max_size=4),
)
def test_an_admitted_promise_can_be_claimed_and_takes_nothing_from_others(
    amount: int,
    used: int,
    others_held: int,
    others_open: int,
    asked: list[int],
    may_be_cut: bool,
    claims: list[int],
) -> None:
    budget, counter = limit(amount=amount), WindowCounter(0, 0, used, others_held, others_open)
    first, ahead, most = (Amounts(output_tokens=count) for count in asked)
    wish, nothing = rules.wish(budget, Hold(first, ahead, most, may_be_cut)), LimitHold()
    fits = used + others_held + others_open + (asked[0] if may_be_cut else asked[2]) <= amount
    assert rules.is_short(budget, counter, nothing, wish) == (
        not fits and (asked[0] if may_be_cut else asked[2]) > 0
    )
    if not fits:
        return
    part = rules.reach(budget, counter, nothing, wish)
    after = rules.changed(counter, nothing, part)
    for claim in (0, *claims):
        more = Wish(claim, claim, 0)
        assert isinstance(after, WindowCounter)
        assert asked[0] <= part.covered
        assert after.used + after.held + after.worst_open <= amount
        # The other's is untouched.
        assert after.held - part.held == others_held
        assert after.worst_open - part.open == others_open
        is_promised = not may_be_cut and claim <= asked[2]
        is_short = rules.is_short(budget, after, part, more)
        assert not (is_promised and is_short)
        if not is_short:
            raised = rules.reach(budget, after, part, more)
            assert raised.covered >= max(claim, part.covered)
            after, part = rules.changed(after, part, raised), raised


def test_a_limit_survives_the_way_to_redis_and_back() -> None:
    limits = [
        Limit(
            "lim_1", "ten_a", SubjectKind.KEY, "key_a", Meter.COST_NANOUSD, 5,
            window=Window.DAY, time_zone="Asia/Tokyo", mode=LimitMode.SOFT, tier=Tier.BATCH,
            thresholds=(50, 80),
        ),
        limit(Meter.GPU_MS, 7, rate_per_s=0.5, mode=LimitMode.SHADOW),
        limit(Meter.CONCURRENCY, 3),
    ]  # fmt: skip
    assert wire.unpack(wire.pack(limits).encode()) == limits


@given(
    st.sampled_from([LimitMode.HARD, LimitMode.HARD, LimitMode.SOFT, LimitMode.SHADOW]),
    st.sampled_from(["window", "bucket", "concurrency"]),
    st.lists(st.integers(0, 60), min_size=3, max_size=3),
    st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.booleans()),
)
@settings(max_examples=600)
def test_what_a_first_hold_takes_at_once_is_what_it_takes_step_by_step(
    mode: LimitMode, shape: str, counts: list[int], asked: tuple[int, int, int, bool]
) -> None:
    used, held, worst_open = counts
    first, more, still_more, promises = asked
    wish = Wish(first, first + more, first + more + still_more if promises else 0)
    meter = Meter.CONCURRENCY if shape == "concurrency" else Meter.TOTAL_TOKENS
    window, rate_per_s = Window.DAY if shape == "window" else None, 10.0 if shape == "bucket" else None
    subject = limit(meter, 100, window=window, rate_per_s=rate_per_s, mode=mode)
    counter: rules.Counter = {
        "window": WindowCounter(0, 10**9, used, held, worst_open),
        "bucket": BucketCounter(used * scale_of(meter), 0, held),
        "concurrency": rules.ConcurrencyCounter(held),
    }[shape]
    at_once = rules.taken(subject, counter, wish)
    if mode is not LimitMode.HARD or rules.is_short(subject, counter, LimitHold(), wish):
        assert at_once is None
        return
    part = rules.reach(subject, counter, LimitHold(), wish)
    assert at_once == (rules.changed(counter, LimitHold(), part), part)
