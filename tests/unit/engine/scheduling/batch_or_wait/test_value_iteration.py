"""The solver finds the best policy where it is known, can be tried out, or can be simulated."""

from __future__ import annotations

from math import exp

import pytest

from engine.scheduling.batch_or_wait.batch_model import BatchModel, RequestLengths
from engine.scheduling.batch_or_wait.kv_pool import KvMemory
from engine.scheduling.batch_or_wait.objective import Objective, late_starts
from engine.scheduling.batch_or_wait.states import SHORT_ONES, SIZES, WAIT, Grid
from engine.scheduling.batch_or_wait.table import solve_table
from engine.scheduling.batch_or_wait.value_iteration import Solution, solve
from tests.support.batch_line import RandomPressure, by_table, tokens
from tests.support.batch_queue import Arrivals
from tests.support.builders import step_time

pytestmark = pytest.mark.long

STEP_TIME = step_time(12e-3, 300e-6, per_context_token_s=150e-9, per_sequence_s=400e-6)
SHORT, LONG = RequestLengths(96, 16), RequestLengths(512, 128)
MIXED = BatchModel(STEP_TIME, SHORT, LONG, long_share=0.2)
ALIKE = BatchModel(STEP_TIME, SHORT, LONG, long_share=0.0, launch_joules=40.0)


def run_from(solution: Solution, longs: int = 0) -> int:
    """The least number waiting of which a batch runs at once."""
    return next(count for count, row in enumerate(solution.actions[0][longs], 1) if row[0] != WAIT)


def cost_of_control_limit(
    model: BatchModel, rate: float, objective: Objective, limit: int, max_batch: int, most: int = 80
) -> float:
    """Exact average cost of running once `limit` wait, all short: by the chain of numbers left behind."""
    chain, costs, times = [], [], []
    for left in range(most):
        count = max(left, limit)
        batch = min(count, max_batch)
        service_s = model.service_s(batch, 0)
        waited = sum(waiting / rate for waiting in range(left, limit))
        costs.append(
            objective.alpha / rate * (waited + count * service_s + rate * service_s**2 / 2)
            + objective.beta * model.energy_j(batch, 0)
        )
        times.append(max(0, limit - left) / rate + service_s)
        row = [0.0] * most
        probability = exp(-rate * service_s)
        for arrivals in range(most):
            row[min(most - 1, count - batch + arrivals)] += probability
            probability *= rate * service_s / (arrivals + 1)
        chain.append(row)
    share = [1 / most] * most
    for _ in range(300):
        share = [sum(share[origin] * chain[origin][goal] for origin in range(most)) for goal in range(most)]
    return sum(map(float.__mul__, share, costs)) / sum(map(float.__mul__, share, times))


def test_one_at_a_time_costs_what_pollaczek_and_khinchine_say() -> None:
    service_s = ALIKE.service_s(1, 0)
    rate = 0.6 / service_s
    objective = Objective(alpha=1.0, beta=0.0, gamma=0.0, slo_s=1.0)

    solution = solve(ALIKE, rate, objective, Grid(1, 2.0, 2, queue_cap=40))

    assert solution.cost == pytest.approx(service_s + rate * service_s**2 / (2 * (1 - 0.6)), rel=5e-3)
    assert run_from(solution) == 1


@pytest.mark.parametrize(("rate", "beta"), [(1.0, 0.02), (3.0, 0.02), (6.0, 0.05)])
def test_the_best_control_limit_is_found_where_all_can_be_tried(rate: float, beta: float) -> None:
    objective = Objective(alpha=1.0, beta=beta, gamma=0.0, slo_s=20.0)
    tried = {
        limit: cost_of_control_limit(ALIKE, rate, objective, limit, max_batch=8) for limit in range(1, 9)
    }
    best = min(tried, key=lambda limit: tried[limit])

    # No request waits so long here that the limit on waiting matters.
    solution = solve(ALIKE, rate, objective, Grid(8, 60.0, 2, queue_cap=40))

    assert solution.cost == pytest.approx(tried[best], rel=5e-3)
    assert tried[run_from(solution)] == pytest.approx(tried[best], rel=2e-3)
    assert best > 1, "a case in which waiting pays"


def test_more_arrivals_never_lower_the_control_limit() -> None:
    objective = Objective(alpha=1.0, beta=0.05, gamma=0.0, slo_s=20.0)
    limits = [run_from(solve(ALIKE, rate, objective, Grid(8, 60.0, 2))) for rate in (0.5, 1.0, 2.0, 4.0, 8.0)]

    assert limits == sorted(limits)
    assert limits[0] < limits[-1]


@pytest.mark.parametrize("short_first", [True, False])
@pytest.mark.parametrize(("load", "gamma", "within"), [(0.3, 0.0, 0.03), (0.6, 0.0, 0.03), (0.6, 2.0, 0.07)])
def test_the_cost_it_foresees_is_the_cost_that_a_long_run_has(
    load: float, gamma: float, within: float, short_first: bool
) -> None:
    """How late those left behind start is foreseen less exactly: it takes them for evenly spread."""
    rate = load * MIXED.capacity_per_s(4)
    objective = Objective(alpha=1.0, beta=0.005, gamma=gamma, slo_s=1.5)
    grid = Grid(4, 3.0, 8, queue_cap=24, short_first=short_first)
    table = solve_table(MIXED, [rate], objective, grid, tolerance=5e-3)
    foreseen = float(str(table.summary()[0]["cost"]))

    outcome = by_table(MIXED, Arrivals.poisson(rate, MIXED.long_share, 40_000, seed=5), table)

    assert outcome.cost(objective) == pytest.approx(foreseen, rel=within)


@pytest.mark.parametrize("short_first", [True, False])
def test_the_cost_it_foresees_where_memory_comes_and_goes(short_first: bool) -> None:
    """Room for one long one at the high pressure, for any batch at the low one."""
    pool = KvMemory(tokens=2600, pressures=(0.0, 0.75), pressure_hold_s=20.0)
    objective = Objective(alpha=1.0, beta=0.005, gamma=0.0, slo_s=1.5)
    grid = Grid(3, 3.0, 4, queue_cap=20, short_first=short_first)
    rate = 0.65 * MIXED.capacity_per_s(3)

    table = solve_table(MIXED, [rate], objective, grid, pool, tolerance=1e-2)
    foreseen = float(str(table.summary()[0]["cost"]))
    pressure = RandomPressure(pool.pressures, pool.pressure_hold_s, seed=6)

    arrivals = Arrivals.poisson(rate, MIXED.long_share, 20_000, seed=5)
    outcome = by_table(MIXED, arrivals, table, pressure=pressure, pool_tokens=pool.tokens)

    assert pressure.changes > 300
    found = outcome.cost(objective)
    assert found == pytest.approx(foreseen, rel=0.05)
    # Solved as if there were always memory enough, it foresees too little.
    assert solve(MIXED, rate, objective, grid, tolerance=1e-2).cost < 0.95 * found


def test_a_batch_that_would_be_small_for_want_of_memory_may_wait_for_it() -> None:
    """Starting is dear, and the pressure passes quickly."""
    costly = BatchModel(STEP_TIME, SHORT, LONG, long_share=0.0, launch_joules=400.0)
    objective = Objective(alpha=1.0, beta=0.02, gamma=0.0, slo_s=20.0)
    pool = KvMemory(tokens=1000, pressures=(0.0, 0.8), pressure_hold_s=2.0)

    actions = solve(costly, 2.0, objective, Grid(8, 10.0, 5), pool).actions

    def waits(pressure: int) -> list[int]:
        return [count for count, row in enumerate(actions[pressure][0], 1) if row[0] == WAIT]

    assert waits(0) == [*range(1, max(waits(0)) + 1)]
    assert max(waits(0)) < max(waits(1))


def test_a_pressure_that_hardly_ever_changes_costs_the_mean_of_its_levels() -> None:
    """Also with an empty queue: else the time would be spent at the level that is idle less often."""
    rate = 0.8 / ALIKE.service_s(1, 0)
    objective = Objective(alpha=1.0, beta=0.0, gamma=0.0, slo_s=1.0)

    def cost(*pressures: float) -> float:
        pool = KvMemory(500, pressures, pressure_hold_s=100.0)
        return solve(ALIKE, rate, objective, Grid(4, 2.0, 2, queue_cap=30), pool, tolerance=1e-2).cost

    free, full = cost(0.0), cost(0.75)

    assert full > 1.5 * free
    assert cost(0.0, 0.75) == pytest.approx((free + full) / 2, rel=0.025)


def test_odds_of_the_pressure_are_those_of_its_chain() -> None:
    two, three = KvMemory(1, (0.0, 0.5), 10.0), KvMemory(1, (0.0, 0.5, 0.75), 10.0)

    # Two levels that swap: the well-known exponential approach to one half.
    assert two.odds(0, 5.0) == pytest.approx([0.5 + 0.5 * exp(-1.0), 0.5 - 0.5 * exp(-1.0)])
    assert three.odds(1, 0.0) == [0, 1, 0]
    assert three.odds(2, 1e9) == pytest.approx([0.25, 0.5, 0.25])
    # Chapman and Kolmogorov.
    twice = [
        sum(first * three.odds(by, 7.0)[goal] for by, first in enumerate(three.odds(0, 7.0)))
        for goal in range(3)
    ]
    assert three.odds(0, 14.0) == pytest.approx(twice)
    assert KvMemory(0).odds(0, 5.0) == [1.0]


@pytest.mark.parametrize("short_first", [True, False])
def test_a_batch_holds_what_fits(short_first: bool) -> None:
    pool = KvMemory(tokens=2000, pressures=(0.0, 0.5))
    for level, free in enumerate((2000, 1000)):
        for count in range(1, 20):
            for longs in range(count + 1):
                fits = pool.fits(MIXED, count, longs, level, short_first=short_first)
                assert 1 <= fits <= count
                if short_first:
                    inside = [
                        (min(size, count - longs), max(0, size - count + longs)) for size in (fits, fits + 1)
                    ]
                    assert fits == 1 or tokens(MIXED, inside[0]) <= free
                    assert fits == count or tokens(MIXED, inside[1]) > free
                else:
                    mean = tokens(MIXED, (count - longs, longs)) / count
                    assert fits == 1 or fits * mean <= free
                    assert fits == count or (fits + 1) * mean > free


def test_bounds_enclose_the_cost_and_meet() -> None:
    solution = solve(MIXED, 1.0, Objective(), Grid(3, 2.0, 2), tolerance=1e-4)

    assert solution.least_cost <= solution.cost <= solution.most_cost
    assert solution.most_cost - solution.least_cost <= 1e-4 * solution.cost
    assert not solution.saturated


def test_short_ones_run_without_the_long_ones_only_where_they_stand_first() -> None:
    rate = 0.6 * MIXED.capacity_per_s(4)
    by_length, by_arrival = (
        solve(MIXED, rate, Objective(), Grid(4, 2.0, 2, short_first=first), tolerance=5e-3)
        for first in (True, False)
    )

    def letters(solution: Solution) -> set[str]:
        return {letter for level in solution.actions[0] for row in level for letter in row}

    assert SHORT_ONES in letters(by_length)
    assert SHORT_ONES not in letters(by_arrival)
    assert by_length.cost < by_arrival.cost


def test_a_prompt_that_costs_by_the_token_is_not_held_up_for_a_batch() -> None:
    by_token = step_time(1e-6, 1e-3)
    model = BatchModel(by_token, RequestLengths(50, 1), RequestLengths(500, 1), long_share=0.0)

    solution = solve(model, 10.0, Objective(1.0, 0.0, 0.0, 1.0), Grid(4, 1.0, 2))

    # A batch gives back nothing, so each runs alone.
    assert {solution.actions[0][0][count - 1][0] for count in (2, 3)} == {"1"}
    assert SIZES["1"] == 1


def test_nobody_waits_with_a_full_batch_or_after_the_longest_wait() -> None:
    expensive = Objective(alpha=1.0, beta=1.0, gamma=0.0, slo_s=1.0)
    solution = solve(MIXED, 1.0, expensive, Grid(4, 2.0, 4))

    rows = [(count, row) for level in solution.actions[0] for count, row in enumerate(level, 1)]
    assert any(WAIT in row for _, row in rows), "a case in which waiting pays"
    assert all(row[-1] != WAIT for _, row in rows)
    assert all(WAIT not in row for count, row in rows if count >= 4)


def test_the_target_makes_it_run_before_the_target_passes() -> None:
    def first_run(gamma: float) -> int:
        objective = Objective(alpha=0.2, beta=0.05, gamma=gamma, slo_s=2.0)
        row = solve(ALIKE, 0.8, objective, Grid(8, 4.0, 8)).actions[0][0][1]
        return next(point for point, letter in enumerate(row) if letter != WAIT)

    # Two wait. Grid points are half a second apart; the target is the fourth.
    assert first_run(0.0) > 4
    assert 0 < first_run(50.0) <= 4


def test_a_rate_that_no_batch_can_serve_is_called_saturated() -> None:
    rate = 1.5 * MIXED.capacity_per_s(4)

    assert solve(MIXED, rate, Objective(), Grid(4, 2.0, 2), tolerance=1e-2).saturated


def test_late_starts_are_spread_evenly_behind_the_first() -> None:
    assert late_starts(5, 5, oldest_wait_s=1.0, slo_s=1.0) == 0
    assert late_starts(1, 1, oldest_wait_s=1.1, slo_s=1.0) == 1
    assert late_starts(5, 5, oldest_wait_s=2.0, slo_s=1.0) == 3
    assert late_starts(5, 2, oldest_wait_s=2.0, slo_s=1.0) == 2


def test_a_batch_takes_as_long_as_its_steps() -> None:
    steps_s = [12e-3 + 300e-6 * 192 + 150e-9 * 2 * (96 * 97 // 2) + 800e-6]
    steps_s += [12e-3 + 300e-6 * 2 + 150e-9 * 2 * (96 + emitted) + 800e-6 for emitted in range(1, 16)]

    assert ALIKE.service_s(2, 0) == pytest.approx(sum(steps_s))
    assert ALIKE.energy_j(2, 0) == pytest.approx(40 + 200 * sum(steps_s))
    # The short ones leave the steps when they are done, padded ones do not.
    padded = BatchModel(STEP_TIME, SHORT, LONG, 0.2, padded=True)
    assert MIXED.service_s(0, 1) < MIXED.service_s(3, 1) < padded.service_s(3, 1) == MIXED.service_s(0, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: solve(MIXED, 0.0, Objective(), Grid()), "rate_per_s"),
        (lambda: Objective(alpha=-1.0), "alpha"),
        (lambda: Objective(alpha=0.0, gamma=0.0), "alpha or gamma"),
        (lambda: Objective(slo_s=float("nan")), "slo_s"),
        (lambda: Grid(max_batch=0), "max_batch"),
        (lambda: Grid(longest_wait_s=0.0), "longest_wait_s"),
        (lambda: Grid(wait_buckets=0), "wait_buckets"),
        (lambda: Grid(max_batch=8, queue_cap=8), "queue_cap"),
        (lambda: Grid(max_batch=500, wait_buckets=100), "states"),
        (lambda: BatchModel(STEP_TIME, LONG, SHORT, 0.1), "more tokens"),
        (lambda: BatchModel(STEP_TIME, SHORT, LONG, 1.5), "long_share"),
        (lambda: BatchModel(STEP_TIME, SHORT, LONG, 0.5, busy_watts=float("nan")), "busy_watts"),
        (lambda: RequestLengths(0, 1), "at least 1"),
        (lambda: solve(MIXED, 1.0, Objective(), Grid(), KvMemory(tokens=639)), "no long request of 640"),
        (lambda: solve(MIXED, 1.0, Objective(), Grid(40, 2.0, 50), KvMemory(9999)), "fewer KV pressures"),
        (lambda: KvMemory(tokens=-1), "pool tokens -1"),
        (lambda: KvMemory(pressures=()), "1 to 6"),
        (lambda: KvMemory(pressures=(0.0, 1.0)), "parts of the pool"),
        (lambda: KvMemory(pressures=(0.5, 0.0)), "must rise"),
        (lambda: KvMemory(pressure_hold_s=0.0), "pressure_hold_s"),
    ],
)
def test_bad_input_is_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
