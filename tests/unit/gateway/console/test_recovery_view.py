"""Engine time as money: its parts add up, and the price that breaks even does."""

from __future__ import annotations

import pytest

from gateway.console.pages.money.amounts import SummedUsage
from gateway.console.pages.money.recovery import (
    HOUR_US,
    all_pools,
    by_pool,
    hour_nanousd,
    pool_of,
    pool_time,
    reservations,
    unused_us,
)
from tenants.admin.lists.engine_time import EngineTime, ServedTime
from tenants.counts.minute_store import EngineMinute
from tenants.errors import Invalid
from tenants.nouns.alias import Alias, Chain

USD = 1_000_000_000


def engine(pool: str, hours: float, away: float, idle: float, *tokens: int) -> EngineTime:
    computed, emitted, again = tokens or (300, 500, 200)
    counts = EngineMinute(
        seen_us=round(hours * HOUR_US), up_us=round((hours - away) * HOUR_US),
        idle_us=round(idle * HOUR_US), computed_tokens=computed, emitted_tokens=emitted,
        recomputed_tokens=again,
    )  # fmt: skip
    return EngineTime(pool, f"{pool}-0", counts)


def test_time_is_parted_exactly_and_so_is_money() -> None:
    [found] = by_pool(
        [engine("m", 10, 1, 4)], {"m": SummedUsage(0, 0, 600, 0, 400, 26 * USD, 1 * USD, 0)}, 2 * USD
    )
    time = found.time
    assert [each / HOUR_US for each in (time.away_us, time.idle_us, time.again_us, time.work_us)] == [
        1, 4, 1, 4,
    ]  # fmt: skip
    assert [found.away, found.idle, found.again, found.work, found.cost] == [
        each * USD for each in (2, 8, 2, 8, 20)
    ]
    assert (found.difference, found.share) == (5 * USD, 1.25)
    # A thousand tokens: at this price a million each, their charge would be the cost to the nano-dollar.
    assert found.break_even == 20 * USD * 1000
    assert found.tokens * found.break_even == found.cost * 1_000_000
    assert found.break_even_busy == 8 * USD * 1000
    assert found.charged_per_million == 25 * USD * 1000


@pytest.mark.parametrize("price", [1, 7, 333_333_333, 2_500_000_001])
def test_the_parts_add_up_to_the_cost_whatever_the_price(price: int) -> None:
    engines = [engine("a", 1 / 3, 0.01, 0.07), engine("b", 7 / 11, 0, 0.5, 1, 1, 1), engine("a", 0.123, 0, 0)]
    pools = by_pool(engines, {}, price)
    for each in (*pools, all_pools(pools, price, 10**15)):
        time = each.time
        assert time.away_us + time.idle_us + time.again_us + time.work_us == time.seen_us
        assert each.away + each.idle + each.again + each.work == each.cost
        assert each.work >= 0
        assert each.reserved <= each.idle
        assert (each.charged_per_million, each.break_even) == (None, None)
    assert [each.time.replicas for each in pools] == [2, 1]


def test_counts_that_overlap_never_give_less_than_nothing() -> None:
    counts = EngineMinute(seen_us=10, up_us=12, idle_us=15, recomputed_tokens=5)
    time = pool_time("m", [EngineTime("m", "m-0", counts)])
    assert (time.away_us, time.idle_us, time.again_us, time.work_us) == (0, 10, 0, 0)


def test_charges_without_engines_keep_a_row() -> None:
    found = by_pool([], {"alias": SummedUsage(cost_nanousd=5)}, USD)
    assert [(each.time.pool, each.cost, each.charged.net_nanousd, each.share) for each in found] == [
        ("alias", 0, 5, None)
    ]


def test_what_reservations_left_unused_is_told_by_the_hour_and_within_the_time_that_engines_waited() -> None:
    times = [pool_time("m", [engine("m", 10, 0, 6, 1, 1, 0)])]  # four hours of work
    # 36,000 tokens an hour are reserved. In one hour more was served, which makes up for no other hour.
    served = ServedTime(400_000, {"ten_a": (36_000, 90_000, 16_000)})
    unused = unused_us({"ten_a": 10.0}, served, 3, times)
    assert unused == 20_000 * 4 * HOUR_US // 400_000
    assert unused_us({"ten_a": 10.0}, served, 1_000, times) == 6 * HOUR_US
    assert unused_us({}, served, 3, times) == 0
    assert unused_us({"ten_a": 10.0}, ServedTime(0, {}), 3, times) == 6 * HOUR_US


def test_a_price_is_typed_or_set() -> None:
    assert hour_nanousd("", 0.1) == 100_000_000
    assert hour_nanousd("2.50", 1.0) == 2_500_000_000
    for wrong in ("-1", "NaN", "much", "1e9", "Infinity"):
        with pytest.raises(Invalid, match="price"):
            hour_nanousd(wrong, 1.0)


def test_a_name_that_means_one_model_counts_for_it() -> None:
    aliases: dict[str, Alias] = {"one": {"m": 3, "n": 0}, "both": {"m": 1, "n": 1}, "chain": Chain(("m",))}
    assert [pool_of(name, aliases) for name in ("m", "one", "both", "chain")] == ["m", "m", "both", "chain"]
    assert reservations([]) == {}
