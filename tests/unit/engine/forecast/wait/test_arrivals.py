"""What came lately is what may come next: tier by tier, in bursts as they came."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from random import Random
from statistics import mean, median

import pytest

from engine.entry import QueueEntry
from engine.forecast.wait.arrivals import MAX_RECENT, NEW_LOAD_S, NOTHING_CAME, ArrivalPattern, RecentArrivals


def arrive(
    recent: RecentArrivals, times_s: Iterable[float], tenant: str = "t", *, tier: int = 1, tokens: int = 10
) -> RecentArrivals:
    for number, at_s in enumerate(times_s):
        recent.observe(QueueEntry(f"{tenant}{tier}{number}", tenant, at_s, tokens, 10, tier))
    return recent


def every(gap_s: float, until_s: float) -> list[float]:
    return [number * gap_s for number in range(round(until_s / gap_s))]


def test_a_steady_stream_is_seen_as_often_as_it_comes() -> None:
    pattern = arrive(RecentArrivals(), every(0.25, 100.0)).pattern(100.0)
    assert pattern.requests_per_s == pytest.approx(4.0, rel=0.05)
    assert pattern.age_s == 100.0
    came = list(pattern.future(100.0).entries)
    assert len(came) == pytest.approx(4.0 * NEW_LOAD_S, abs=1), "the expected future: as many as came"
    assert {(each.tenant_id, each.tier, each.input_tokens) for each in came} == {("t", 1, 10)}
    assert pattern.future(100.0).cost_per_s == {1: pytest.approx(4.0 * 30, rel=0.05)}


def test_what_began_the_watch_is_no_rate() -> None:
    recent = arrive(RecentArrivals(), [5.0])
    assert recent.pattern(5.0).requests_per_s == recent.pattern(6.0).requests_per_s == 0.0
    burst = arrive(RecentArrivals(), every(0.001, 0.05))
    assert burst.pattern(0.05).requests_per_s == 0.0
    assert list(burst.pattern(0.05).future(0.05).entries) == []
    steady = arrive(RecentArrivals(), every(1.0, 10.0)).pattern(10.0)
    assert steady.requests_per_s == pytest.approx(1.0, rel=0.1)
    assert list(NOTHING_CAME.future(0.0, Random(1)).entries) == []


def test_bursts_come_as_they_came() -> None:
    recent = RecentArrivals()
    for second in range(60):
        arrive(recent, [second + 0.004 * number for number in range(1 + second % 3 * 4)], "t")
        arrive(recent, [second + 0.02], "other", tokens=500)
    pattern = recent.pattern(60.0)
    assert pattern.tiers[1].rate_per_s == pytest.approx(2.0, rel=0.05), "one of each tenant in a second"
    assert pattern.requests_per_s == pytest.approx(6.0, rel=0.1)
    sizes: dict[float, list[str]] = {}
    for each in pattern.future(60.0).entries:
        sizes.setdefault(each.arrived_s, []).append(each.tenant_id)
    assert {(len(burst), *set(burst)) for burst in sizes.values()} == {
        (1, "t"), (5, "t"), (9, "t"), (1, "other")
    }  # fmt: skip
    assert sum(map(len, sizes.values())) == pytest.approx(6.0 * NEW_LOAD_S, rel=0.25)


def test_a_tier_that_stopped_a_minute_ago_brings_nothing() -> None:
    recent = arrive(arrive(RecentArrivals(), every(0.1, 4.0)), every(0.1, 4.0), "u", tier=0)
    assert set(recent.pattern(4.0).tiers) == {0, 1}
    arrive(recent, [4.0 + at_s for at_s in every(0.2, 66.0)])
    assert set(recent.pattern(70.0).tiers) == {1}
    arrive(recent, [130.0, 131.0])
    assert recent.pattern(131.0).age_s == 1.0, "after a silence a load begins anew"


def test_what_is_remembered_is_bounded() -> None:
    recent = RecentArrivals()
    for number, at_s in enumerate(every(0.01, 20.0)):
        arrive(recent, [at_s], f"t{number}")
    assert len(recent.pattern(20.0).tiers[1].bursts) == MAX_RECENT
    assert recent.pattern(20.0).requests_per_s == pytest.approx(100.0, rel=0.02)


def test_sampled_futures_differ_by_their_seed_alone() -> None:
    recent = arrive(arrive(RecentArrivals(), every(0.5, 60.0)), every(0.3, 60.0), "u", tier=0)
    pattern = recent.pattern(60.0)

    def came(seed: int) -> list[QueueEntry]:
        return list(pattern.future(60.0, Random(seed)).entries)

    assert came(1) == came(1)
    assert came(1) != came(2)
    assert all(first.arrived_s <= second.arrived_s for first, second in pairwise(came(3)))
    assert len({each.entry_id for each in came(3)}) == len(came(3))
    futures = [pattern.future(60.0, Random(seed)) for seed in range(200)]
    assert mean(future.cost_per_s[0] for future in futures) == pytest.approx(30 / 0.3, rel=0.05)
    lasts_s = [
        median(ArrivalPattern({}, age_s).future(0.0, Random(seed)).lasts_s for seed in range(200))
        for age_s in (0.0, 100.0, 300.0)
    ]
    assert lasts_s[0] == pytest.approx(NEW_LOAD_S, rel=0.2)
    assert lasts_s[0] * 1.5 < lasts_s[1] < lasts_s[2] / 1.5, "what has gone on for long goes on for long"
