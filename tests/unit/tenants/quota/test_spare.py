"""What share of spare capacity was in force when, and what buckets refill by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants.errors import Invalid
from tenants.quota import rules
from tenants.quota.fallback import slice_of
from tenants.quota.rules import BucketCounter
from tenants.quota.spare import MOST_CHANGES, NO_SPARE, WHOLE, SpareShares, by_ages, effective, smallest
from tenants.quota.wire import pack, unpack
from tenants.types import Limit, LimitMode, Meter, Override, Tier, Window
from tests.support.quota import Clock, limit

BUCKET = limit(amount=1_000, rate_per_s=10, ceiling_per_s=50, tier=Tier.BATCH)
OF_ONE = limit(amount=1_000, rate_per_s=10, ceiling_per_s=50, tier=Tier.BATCH, model="one")


def level(limit: Limit, counter: BucketCounter, clock: Clock, shares: SpareShares) -> int:
    after = rules.advance(limit, counter, round(clock.now_s * 1e6), shares.known)
    assert isinstance(after, BucketCounter)
    return after.level // limit.scale


def spare(now_s: float) -> tuple[Clock, SpareShares]:
    clock = Clock(now_s)
    return clock, SpareShares(clock)


def test_a_bucket_refills_by_what_was_in_force_also_when_it_is_asked_later() -> None:
    clock, shares = spare(1_000.0)
    empty = BucketCounter(0, 1_000_000, 0)
    clock.advance(2)
    shares.set("one", 1.0)
    clock.advance(3)
    shares.set("one", 0.25)
    clock.advance(5)
    shares.set("one", 0.0)
    clock.advance(7)
    assert level(OF_ONE, empty, clock, shares) == 2 * 10 + 3 * 50 + 5 * 20 + 7 * 10
    assert rules.rate_now(OF_ONE, shares.known) == rules.rate_per_ms(OF_ONE)


def test_what_a_bucket_has_stays_when_the_share_goes_back() -> None:
    clock, shares = spare(1_000.0)
    shares.set("one", 1.0)
    clock.advance(60)
    counter = rules.advance(OF_ONE, BucketCounter(0, 1_000_000, 400), round(clock.now_s * 1e6), shares.known)
    shares.set("one", 0.0)
    after = rules.advance(OF_ONE, counter, round(clock.now_s * 1e6), shares.known)
    assert after == counter == BucketCounter(1_000_000_000, 1_060_000, 400)


def test_a_limit_on_all_models_goes_by_the_smallest_share() -> None:
    shares = SpareShares(Clock())
    shares.cover(["one", "two"])
    shares.set("one", 1.0)
    assert (shares.rate_per_s(BUCKET), shares.rate_per_s(OF_ONE)) == (10, 50)
    shares.set("two", 0.5)
    assert (shares.rate_per_s(BUCKET), shares.rate_per_s(OF_ONE)) == (30, 50)
    shares.set("one", 0.25)
    assert (shares.rate_per_s(BUCKET), shares.rate_per_s(OF_ONE)) == (20, 20)
    other = limit(amount=1_000, rate_per_s=10, ceiling_per_s=50, tier=Tier.BATCH, model="gone")
    assert shares.rate_per_s(other) == 10, "a model that is not served has nothing to spare"
    assert shares.rate_per_s(limit(amount=10, rate_per_s=3, tier=Tier.BATCH)) == 3
    assert smallest({}, []) == smallest({"one": 900}, ["one", "two"]) == 0


def test_of_the_time_before_what_is_kept_the_rate_counts() -> None:
    clock, shares = spare(0.0)
    for number in range(2 * MOST_CHANGES):
        shares.set("one", 1.0 if number % 2 == 0 else 0.5)
        clock.advance(1)
    history = shares.known.of(OF_ONE)
    assert len(history) == MOST_CHANGES
    assert history[0][0] == MOST_CHANGES * 1_000
    kept = MOST_CHANGES // 2 * (50 + 30)
    bucket = limit(amount=90_000, rate_per_s=10, ceiling_per_s=50, tier=Tier.BATCH, model="one")
    assert level(bucket, BucketCounter(0, 0, 0), clock, shares) == MOST_CHANGES * 10 + kept


def test_the_same_share_again_is_no_change_and_two_at_once_are_the_last() -> None:
    clock, shares = spare(5.0)
    shares.set("one", 0.0)
    assert shares.known is NO_SPARE
    shares.set("one", 0.5)
    shares.set("one", 0.75)
    clock.advance(1)
    shares.set("one", 0.75)
    assert shares.known.of(OF_ONE) == ((5_000, 750),)
    shares.set("one", 7.0)
    assert shares.known.of(OF_ONE)[-1] == (6_000, WHOLE), "never beyond the ceiling"
    clock.advance(-3)
    shares.set("one", -1.0)
    assert shares.known.of(OF_ONE) == ((5_000, 750), (6_000, 0)), "of a clock that steps back the last counts"


def test_ages_are_the_same_on_another_clock() -> None:
    clock, shares = spare(100.0)
    shares.set("one", 0.5)
    clock.advance(2)
    shares.set("one", 0.0)
    clock.advance(1)
    assert by_ages(shares.ages(), 9_000).of(OF_ONE) == ((6_000, 500), (8_000, 0))
    assert by_ages({}, 9_000) is NO_SPARE


@given(st.integers(1, 10**9), st.integers(0, 10**9), st.integers(-10, WHOLE + 10))
def test_no_share_leads_below_the_rate_or_beyond_the_ceiling(rate: int, more: int, share: int) -> None:
    assert rate <= effective(rate, rate + more, share) <= rate + more
    assert effective(rate + more, rate, share) == rate + more, "a ceiling below the rate is none"


def test_times_are_told_by_what_is_in_force() -> None:
    _clock, shares = spare(1_000.0)
    shares.set("one", 0.5)
    counter = BucketCounter(400 * OF_ONE.scale, 1_000_000, 0)
    state = rules.view(OF_ONE, counter, 1_000_000_000, shares.known)
    assert (state.refill_per_s, state.reset_s) == (30, 20)
    assert rules.view(OF_ONE, counter, 1_000_000_000).reset_s == 60
    held = rules.Wish(700, 700, 0)
    rate = rules.rate_now(OF_ONE, shares.known)
    denied = rules.refuse([OF_ONE], [counter], [rules.LimitHold()], [held], 1_000_000_000, lambda _: rate)
    assert denied is not None
    assert denied.retry_after_s == 10


@pytest.mark.parametrize(
    "of",
    [
        limit(amount=100, window=Window.DAY, ceiling_per_s=5, tier=Tier.BATCH),
        limit(Meter.REQUESTS, amount=100, rate_per_s=1, ceiling_per_s=5, tier=Tier.BATCH),
        limit(Meter.COST_NANOUSD, amount=100, rate_per_s=1, ceiling_per_s=5, tier=Tier.BATCH),
        limit(amount=100, rate_per_s=1, ceiling_per_s=5, tier=Tier.BATCH, mode=LimitMode.SOFT),
        limit(amount=100, rate_per_s=1, ceiling_per_s=5, tier=Tier.BATCH, mode=LimitMode.SHADOW),
        limit(amount=100, rate_per_s=1, ceiling_per_s=5, tier=Tier.STANDARD),
        limit(amount=100, rate_per_s=1, ceiling_per_s=5),
    ],
)
def test_what_may_not_move_has_no_ceiling_in_a_store_either(of: Limit) -> None:
    with pytest.raises(Invalid, match=r"ceiling_per_s.*only hard rates of tokens in tier batch"):
        rules.check_limits([of])
    rules.check_limits([BUCKET])


def test_an_override_that_says_a_rate_means_that_rate() -> None:
    def under(rate_per_s: float | None) -> Limit:
        return replace(BUCKET, override=Override(77, rate_per_s, 10_000_000, "why"))

    assert (under(None).at(1.0).ceiling_per_s, under(None).at(11.0).ceiling_per_s) == (50, 50)
    assert (under(2.5).at(1.0).rate_per_s, under(2.5).at(1.0).ceiling_per_s) == (2.5, None)
    assert under(2.5).at(11.0).ceiling_per_s == 50


def test_a_local_slice_is_of_what_was_promised() -> None:
    part = slice_of(BUCKET, 10, 100)
    assert part is not None
    assert (part.rate_per_s, part.ceiling_per_s) == (1, None)


def test_a_hold_keeps_its_limits_ceiling_and_one_of_an_earlier_version_has_none() -> None:
    assert unpack(pack([OF_ONE, limit()]).encode()) == [OF_ONE, limit()]
    plain = limit(amount=9, rate_per_s=1)
    assert pack([plain]).count(",") == pack([OF_ONE]).count(",") - 1, "as it was where there is no ceiling"
