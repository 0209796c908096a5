"""One replay with probes says what a replay of its own would say to each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replace_load
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from engine.entry import QueueEntry
from engine.forecast.wait.arrivals import RecentArrivals
from engine.forecast.wait.forecast import Forecast
from engine.forecast.wait.picture import FUTURE_EVENTS, FUTURES, Picture, replay_probes
from engine.forecast.wait.probing import KNOTS, MAX_EVENTS, MAX_LINES
from engine.forecast.wait.replayed_engine import EngineLoad, Flight
from engine.forecast.wait.since import NOTHING_SINCE, Since
from engine.forecast.wait.surface import NEWCOMER, Line, Surface
from engine.messages import StepTime
from engine.scheduling.bands import Lag, no_lag
from engine.scheduling.brakes import NO_BRAKES, Brakes
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.tiers import TieredQueue
from tests.support.pictures import forecast_of, picture

STEPS = StepTime(0.01, 1e-4, 0.0, 1e-4, samples=50, relative_error=0.0)
TIERS = (0, 1, 2)


def entry(name: str, tenant: str, *, tier: int = 1, input_tokens: int = 100, output: int = 50) -> QueueEntry:
    return QueueEntry(name, tenant, 0.0, input_tokens, output, tier)


def engine(*flights: Flight, places: int = 4, brakes: Brakes = NO_BRAKES) -> EngineLoad:
    return EngineLoad("e", STEPS, places, 256, places + 1, 100_000, flights, brakes)


def flights(count: int, tenant: str = "busy", tier: int = 1) -> list[Flight]:
    return [Flight(entry(f"running {number}", tenant, tier=tier), 0, 110, 10, 150) for number in range(count)]


def seen(
    waiting: Sequence[QueueEntry],
    *engines: EngineLoad,
    order: str = "vtc",
    lag: Lag = no_lag,
    served: Sequence[str] = (),
    **fields: Any,
) -> Picture:
    counters = ServiceCounters()
    for tenant in served:
        counters.charge(tenant, 1.0, 1_000)
    queue = TieredQueue(order, counters, lag=lag)
    for each in waiting:
        queue.add(each)
    return picture(queue, counters, engines, 5.0, **fields)


def surface(waiting: Sequence[QueueEntry], *engines: EngineLoad, **fields: Any) -> Surface:
    return seen(waiting, *engines, **fields).surface()


def alone(candidate: QueueEntry, waiting: list[QueueEntry], *engines: EngineLoad) -> Forecast:
    return forecast_of(candidate, seen(waiting, *engines))


def read(found: Surface, tenant: str, tier: int = 1, since: Since = NOTHING_SINCE) -> Forecast:
    return found.read(tenant, tier, 100, 1, (50, 50), since=since)


def more(count: int, input_tokens: int = 0) -> Since:
    """So many more of the same size (negative: they left), all ahead."""
    return Since(count, count, input_tokens=input_tokens, mean_input_tokens=100, mean_output_tokens=(50, 50))


WAITING = [
    *(entry(f"a{number}", "a") for number in range(12)),
    *(entry(f"b{number}", "b") for number in range(4)),
    *(entry(f"low{number}", "c", tier=2) for number in range(3)),
    *(entry(f"high{number}", "d", tier=0) for number in range(2)),
]


@pytest.mark.parametrize("tenant", ["a", "b", "c", "newcomer"])
@pytest.mark.parametrize("tier", TIERS)
def test_a_line_is_told_about_what_a_replay_for_one_request_tells(tenant: str, tier: int) -> None:
    busy = engine(*flights(4))
    found = surface(WAITING, busy, lines=tuple(Line(each, tier) for each in ("a", "b", "c")))
    told, expected = (read(found, tenant, tier), alone(entry("me", tenant, tier=tier), WAITING, busy))
    assert (expected.wait_s[0] > 0) == (tier > 0), "an interactive request takes a place"
    assert told.wait_s[0] == pytest.approx(expected.wait_s[0], rel=0.15)
    assert told.ttft_s[0] == pytest.approx(expected.ttft_s[0], rel=0.2)
    assert told.e2e_s[0] == pytest.approx(expected.e2e_s[0], rel=0.25)
    for cause, tokens in expected.tokens_ahead.items():
        assert told.tokens_ahead[cause] == pytest.approx(tokens, rel=0.15, abs=400), cause


@pytest.mark.parametrize("tier", TIERS)
def test_a_line_is_told_what_a_brake_costs_its_tier(tier: int) -> None:
    waiting = [entry(f"a{number}", "a") for number in range(6)]
    braked = engine(brakes=Brakes({1: 0.25}))
    found = surface(waiting, braked, lines=(Line("a", tier), Line("b", tier)))
    told, expected = read(found, "b", tier), alone(entry("me", "b", tier=tier), waiting, braked)
    assert (expected.wait_s[0] > 0) == (tier == 1), "others have free places"
    assert told.wait_s[0] == pytest.approx(expected.wait_s[0], rel=0.15)


def test_on_an_idle_engine_nobody_waits() -> None:
    told = read(surface([], engine()), "anybody")
    assert told.wait_s == (0.0, 0.0)
    assert told.tokens_ahead == {"own": 0, "others": 0, "higher_tier": 0}
    assert not told.saturated
    expected = alone(entry("me", "anybody"), [], engine())
    assert told.ttft_s[0] == pytest.approx(expected.ttft_s[0])
    assert told.e2e_s[0] == pytest.approx(expected.e2e_s[0], rel=0.05)


def test_probes_take_nothing_from_one_another() -> None:
    busy = engine(*flights(4))
    one = surface(WAITING, busy, lines=(Line("a", 1),))
    many = surface(WAITING, busy, lines=(*(Line(f"t{number}", 1) for number in range(40)), Line("a", 1)))
    assert read(one, "a").wait_s == read(many, "a").wait_s


def test_outstanding_quotes_stand_in_line() -> None:
    busy = engine(*flights(4))
    quotes = tuple(entry(f"quote {number}", "q") for number in range(20))
    without, with_quotes = (
        read(surface([], busy), NEWCOMER),
        read(surface([], busy, promised=quotes), NEWCOMER),
    )
    mine = read(surface([], busy, lines=(Line("q", 1),), promised=quotes), "q")
    assert mine.wait_s[0] > without.wait_s[0]
    assert mine.tokens_ahead["own"] >= 20 * 200
    assert with_quotes.wait_s[0] < mine.wait_s[0], "a fair order lets who asked for less go before them"


def test_a_larger_request_waits_longer_where_the_order_looks_at_sizes() -> None:
    waiting = [entry(f"w{number}", "a", output=40 + 10 * number) for number in range(30)]
    found = surface(waiting, engine(*flights(4)), lines=(Line("a", 1),), order="sjf")
    waits = [found.read("a", 1, 20, 1, (output, output)).wait_s[0] for output in (4, 200, 2000)]
    assert waits[0] < waits[1] < waits[2]


def test_a_small_prompt_waits_less_where_the_order_looks_at_prompts_whatever_its_answer() -> None:
    waiting = [entry(f"w{number}", "a", input_tokens=100 * number) for number in range(1, 31)]
    found = surface(waiting, engine(*flights(4)), lines=(Line("a", 1),), order="hybrid", knots=(100, 3_000))
    asked = [(100, 1_000), (400, 800), (900, 400), (1_800, 100), (3_000, 1)]
    waits = [found.read("a", 1, prompt, 1, (output, output)).wait_s[0] for prompt, output in asked]
    assert all(smaller < larger for smaller, larger in pairwise(waits))


def test_what_happened_since_the_replay_counts() -> None:
    busy = surface(WAITING, engine(*flights(4)), lines=(Line("a", 1),))
    assert read(busy, "a", since=more(5)).wait_s[0] > read(busy, "a").wait_s[0]
    assert read(busy, "a", since=more(-5)).wait_s[0] < read(busy, "a").wait_s[0]
    assert read(busy, "a", since=more(-1000)).wait_s[0] == 0.0
    idle = surface([], engine(*flights(2)))
    assert read(idle, "x", since=more(2)).wait_s[0] == 0.0, "three places are free"
    assert read(idle, "x", since=more(3)).wait_s[0] > 0.0
    assert read(idle, "x", since=more(1, 500)).ttft_s[0] > read(idle, "x").ttft_s[0]


@pytest.mark.parametrize("running", [0, 2, 4])
def test_what_comes_at_once_is_told_what_a_replay_of_all_of_them_tells(running: int) -> None:
    load = engine(*flights(running))
    found = surface([], load)
    burst = [entry(f"burst {number}", "b") for number in range(16)]
    for number in range(len(burst)):
        told = read(found, "b", since=more(number, 100 * number))
        expected = alone(burst[number], burst[:number], load)
        assert told.wait_s[0] == pytest.approx(expected.wait_s[0], rel=0.25, abs=0.05), number
        assert told.ttft_s[0] == pytest.approx(expected.ttft_s[0], rel=0.25, abs=0.1), number


def test_a_newcomer_in_a_burst_is_told_of_its_turn_and_not_of_the_burst_s_end() -> None:
    found = surface([], engine())
    last = read(found, "flood", since=more(30))
    newcomer = read(found, "other", since=replace(more(30), ahead=1.0))
    assert newcomer.wait_s[0] < last.wait_s[0] / 4


def test_what_waited_first_is_no_part_of_the_gap_between_turns() -> None:
    """The first turn comes when the first of the running ones ends, each further one a gap later."""
    waiting = [entry(f"w{number}", "a") for number in range(8)]
    found = surface(waiting, engine(*flights(4)), lines=(Line("a", 1),))
    twice = surface(
        [*waiting, *(entry(f"v{n}", "a") for n in range(8))], engine(*flights(4)), lines=(Line("a", 1),)
    )
    assert read(found, "a", since=more(8)).wait_s[0] == pytest.approx(read(twice, "a").wait_s[0], rel=0.2)


def test_a_gap_is_between_two_turns_of_its_tier_and_of_those_above() -> None:
    waiting = [entry(f"{tier} {number}", "abc"[tier], tier=tier) for tier in (1, 2) for number in range(12)]
    recent = RecentArrivals()
    for number in range(60):
        recent.observe(replace(entry(f"d{number}", "d", tier=0), arrived_s=number / 6 - 5.0))
    found = surface(
        waiting, engine(*flights(4)), lines=(Line("b", 1), Line("c", 2)), arrivals=recent.pattern(5.0)
    )
    for tier, first in ((1, 12), (2, 24)):
        wait_s = read(found, "abc"[tier], tier).wait_s[0]
        assert wait_s / found.dispatch_gap_s[tier] == pytest.approx(first + 6.0 * wait_s, rel=0.15)


def test_the_p90_is_the_longest_wait_of_the_futures_and_lasts_until_the_next_are_known() -> None:
    waiting = [entry(f"w{number}", "a") for number in range(12)]
    recent = RecentArrivals()
    for second in range(4):
        for number in range(8):
            recent.observe(replace(entry(f"d{number}", "d", tier=0), arrived_s=second + 0.01 * number))
    now = seen(waiting, engine(*flights(4)), lines=(Line("a", 1),), arrivals=recent.pattern(5.0))
    told = read(now.surface(futures=FUTURES, seed=3), "a")
    seeds = range(3 * FUTURES, 4 * FUTURES)
    waits = [read(replay_probes(now, FUTURE_EVENTS, Random(seed)), "a").wait_s[0] for seed in seeds]
    assert told.wait_s[1] == pytest.approx(max(waits))
    assert told.wait_s[0] == read(now.surface(), "a").wait_s[0]
    assert told.wait_s[1] > read(now.surface(), "a").wait_s[1]
    fewer = replace_load(now, queue=seen(waiting[:8]).queue)
    later = fewer.surface()
    later.spread_as(now.surface(futures=FUTURES, seed=3))
    then = read(later, "a").wait_s
    assert then[0] == read(fewer.surface(), "a").wait_s[0] < told.wait_s[0]
    assert then[1] - then[0] == pytest.approx(told.wait_s[1] - told.wait_s[0])


@pytest.mark.parametrize("pauses", [True, False])
def test_who_is_owed_a_place_is_told_that_it_goes_at_once(pauses: bool) -> None:
    waiting = [entry(f"w{number}", "busy") for number in range(20)]
    load = replace_load(engine(*flights(5), places=4), pauses=pauses)
    # It begins before a tenant with something in flight.
    found = surface(waiting, load, lines=(Line("busy", 1),), lag=lambda tenant, other: 1, served=["busy"])
    told = read(found, "newcomer")
    assert (told.wait_s[0] == 0.0) == pauses
    crowd = [entry(f"c{number}", f"t{number}") for number in range(6)]
    found = surface(crowd, load, lag=lambda tenant, other: 1, served=[each.tenant_id for each in crowd])
    assert read(found, "newcomer").wait_s[0] > 0.0, "of four places none is a whole part of seven"


def test_a_long_queue_is_extrapolated_and_the_rest_is_said_to_be_unknown() -> None:
    long = [entry(f"w{number}", "a", output=20) for number in range(MAX_EVENTS * 3)]
    found = surface(long, engine(*flights(4)), lines=(Line("a", 1), Line("z", 2)))
    mine, low = read(found, "a"), read(found, "z", 2)
    assert found.is_extrapolated
    assert "extrapolated" in mine.basis
    assert mine.tokens_ahead["own"] == pytest.approx(len(long) * 140, rel=0.05)
    assert low.wait_s[0] >= mine.wait_s[0]
    assert not mine.saturated
    assert read(surface(long[:20]), "a").saturated, "without an engine it is unknown"


def test_it_is_bounded() -> None:
    lines = tuple(Line(f"t{number}", 1) for number in range(MAX_LINES + 50))
    found = surface(WAITING, engine(*flights(4)), lines=lines)
    assert len(found.points) == MAX_LINES + len(TIERS)
    assert read(found, "t90") == read(found, NEWCOMER), "a line without probes is answered as a newcomer's"


@pytest.mark.parametrize("waiting", [[], WAITING[:2], WAITING])
@pytest.mark.parametrize("tenant", ["a", "b", "newcomer"])
@pytest.mark.parametrize("order", ["vtc", "sjf"])
def test_where_all_sizes_see_the_same_a_search_finds_nothing_else(
    waiting: list[QueueEntry], tenant: str, order: str
) -> None:
    lines = (Line("a", 1), Line("b", 1))
    quick = surface(waiting, engine(*flights(2)), lines=lines, order=order)
    searched = surface(waiting, engine(*flights(2)), lines=lines, order=order)
    searched._flat.update(dict.fromkeys([(tenant, tier) for tier in TIERS]))
    flat = 0
    for tier in TIERS:
        for size in (1, 60, 700, 5_000):
            asked = (tenant, tier, size, 2, (size, 2 * size))
            assert quick.read(*asked) == searched.read(*asked)
        flat += quick._flat[tenant, tier] is not None
    if not waiting:
        assert flat == len(TIERS)


@pytest.mark.parametrize("running", range(7))
@pytest.mark.parametrize("kv_tokens", [100_000, 1_900, 1_100])
@pytest.mark.parametrize("replicas", [1, 2])
def test_one_probe_stands_for_all_sizes_only_where_each_would_see_the_same(
    running: int, kv_tokens: int, replicas: int
) -> None:
    """A surface of one size is the plain twin: its probe is that size's own."""
    loads = [
        EngineLoad(f"e{index}", STEPS, 4, 256, 5, kv_tokens, flights(max(0, running - index)))
        for index in range(replicas)
    ]
    lines = (Line("busy", 1), Line("b", 0))
    found = surface([], *loads, lines=lines)
    is_one = [len(points) == 1 for points in found.points.values()]
    assert any(is_one) == all(is_one)
    if kv_tokens == 100_000:
        assert all(is_one) == (running < 5)
    if not all(is_one):
        return
    for cost in KNOTS:
        single = surface([], *loads, lines=lines, knots=[cost])
        for tenant, tier in found.points:
            asked = (tenant, tier, cost // 2, 1, (cost // 4, cost // 2))
            assert found.read(*asked) == single.read(*asked)


@pytest.mark.parametrize("lengths", [(50, 50), (1, 512), (40, 90)])
def test_places_come_free_one_after_the_other(lengths: tuple[int, int]) -> None:
    places = surface([], engine(*flights(2))).places[1]
    ends = [places.free_after_s(count, 4 + count, 100, lengths) for count in range(40)]
    assert ends[0] == 0.0
    assert ends == sorted(ends)
    assert ends[-1] < 40 * max(lengths) * 0.02, "no tail without an end"
