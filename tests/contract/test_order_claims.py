"""Promises that orders claim: kept by those that claim them, broken by others.

A unit server: it takes who is next, charges what that one costs, and goes on. Parametrised over ORDERS; an
order that claims freedom from starvation has to state its bound here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from engine.entry import QueueEntry
from engine.scheduling.claims import FAIRNESS_BOUND, NO_STARVATION, WORK_CONSERVATION
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.order import buckets, drr, edf, hybrid, locality, mlfq, priority, sizes, sjf
from engine.scheduling.order.base import Order
from engine.scheduling.order.sjf import Sjf
from engine.scheduling.policy import ORDERS, make_order
from engine.scheduling.tiers import TieredQueue

CLAIMS = {name: make_order(name, ServiceCounters()).claims for name in ORDERS}
CLAIM_FAIRNESS = sorted(name for name in ORDERS if FAIRNESS_BOUND in CLAIMS[name])
CLAIM_NO_STARVATION = sorted(name for name in ORDERS if NO_STARVATION in CLAIMS[name])

make_plain = make_order


def make_tiered(name: str, counters: ServiceCounters) -> Order:
    return TieredQueue(name, counters)


MAKERS = pytest.mark.parametrize("make", [make_plain, make_tiered], ids=["alone", "in a tier"])

# ---------------------------------------------------------------- no starvation

CROWD = 12
"""Entries that stand against the victim at every moment: who is served is replaced at once."""
COST_PER_S = 1000

YIELDS_COST = 4000
VICTIM = QueueEntry("victim", "t0", 0.0, 3000, 800, predicted_high_tokens=1600, yields_cost=YIELDS_COST)
"""Large to those who know lanes."""

CROWDS: dict[str, Callable[[int, float], QueueEntry]] = {
    "short": lambda number, now_s: QueueEntry(f"c{number}", "t0", now_s, 8, 4),
    "short, of many tenants": lambda number, now_s: QueueEntry(f"c{number}", f"t{number % 4}", now_s, 8, 4),
    "cached": lambda number, now_s: QueueEntry(
        f"c{number}", "t0", now_s, 2000, 4, cached_tokens=1999, locality=1 + number % 2
    ),
    "urgent": lambda number, now_s: QueueEntry(f"c{number}", "t1", now_s, 40, 10, deadline_s=now_s),
    "overdue": lambda number, now_s: QueueEntry(f"c{number}", "t1", now_s, 40, 10, deadline_s=-1e6),
    "as long": lambda number, now_s: QueueEntry(f"c{number}", "t0", now_s, 3000, 800),
    "small, each of a new tenant": lambda number, now_s: QueueEntry(
        f"c{number}", f"new{number}", now_s, 40, 10
    ),
}


@dataclass(frozen=True)
class Case:
    """What a bound may depend on."""

    crowd_cost: int
    """Of one of the crowd."""
    crowd_prompt: int
    """Uncached."""
    tenants: int

    @property
    def line_cost(self) -> int:
        """What stands in line together, and one that is being served."""
        return (CROWD + 1) * self.crowd_cost


def hrrn_bound(case: Case) -> float:
    return 1.2 * case.line_cost * max(1.0, VICTIM.uncached_tokens / case.crowd_prompt) + case.line_cost


BOUNDS: dict[str, Callable[[Case], float]] = {
    "fcfs": lambda case: case.line_cost,
    "hrrn": hrrn_bound,
    "sjf": lambda case: sizes.remaining_tokens(VICTIM) / sjf.AGEING + case.line_cost,
    "srpt": lambda case: sizes.remaining_tokens(VICTIM) / sjf.AGEING + case.line_cost,
    "mlfq": lambda case: mlfq.STARVED_COST + case.line_cost,
    "priority": lambda case: (
        (
            priority.TIER_TOKENS * VICTIM.tier
            + priority.URGENCY_TOKENS_PER_S * priority.HORIZON_S
            + priority.HISTORY_WEIGHT * priority.HISTORY_CAP_COST
            + sizes.remaining_tokens(VICTIM)
        )
        / priority.AGEING
        + case.line_cost
    ),
    "edf": lambda case: edf.DEFAULT_S * COST_PER_S + case.line_cost,
    "drr": lambda case: case.tenants * (drr.QUANTUM_COST + 2 * case.line_cost),
    "dlpm": lambda case: case.tenants * (drr.QUANTUM_COST + 2 * case.line_cost * (locality.MAX_PASSES + 1)),
    "vtc": lambda case: case.tenants * case.line_cost,
    "hybrid": lambda case: hybrid.PATIENCE * YIELDS_COST + case.tenants * (hrrn_bound(case) + case.line_cost),
    "buckets": lambda case: case.line_cost * buckets.RUN_ENTRIES,
}
"""Cost tokens that others may get before the victim, as each order's docstring promises."""


def cost_until_served(order: Order, counters: ServiceCounters, crowd: str, at_most: float) -> int:
    """Cost tokens that the crowd got before the victim; more than `at_most` when it was given up."""
    number = 0
    total = 0
    joined: int | None = None
    for _ in range(CROWD):
        number += 1
        order.add(CROWDS[crowd](number, 0.0))
    while joined is None or total - joined <= at_most:
        now_s = total / COST_PER_S
        if number == 5 * CROWD:
            # The crowd has stood in line for a while.
            joined = total
            order.add(replace(VICTIM, arrived_s=now_s))
        entry = order.pop(now_s)
        if entry.entry_id == VICTIM.entry_id:
            break
        counters.charge(entry.tenant_id, entry.weight, entry.predicted_cost)
        total += entry.predicted_cost
        number += 1
        order.add(CROWDS[crowd](number, total / COST_PER_S))
    assert joined is not None
    return total - joined


def case_of(crowd: str) -> Case:
    some = [CROWDS[crowd](number, 0.0) for number in range(CROWD)]
    tenants = {VICTIM.tenant_id, *(each.tenant_id for each in some)}
    return Case(some[0].predicted_cost, some[0].uncached_tokens, len(tenants))


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_tiers_promise_inside_each_what_their_order_promises(name: str) -> None:
    queue = TieredQueue(name, ServiceCounters())
    assert queue.claims == CLAIMS[name]
    queue.set_order("las")
    assert queue.claims == CLAIMS["las"]


@MAKERS
@pytest.mark.parametrize("crowd", sorted(CROWDS))
@pytest.mark.parametrize("name", CLAIM_NO_STARVATION)
def test_the_victim_of_an_endless_stream_is_served_within_the_bound(
    name: str, crowd: str, make: Callable[[str, ServiceCounters], Order]
) -> None:
    bound = BOUNDS[name](case_of(crowd))
    counters = ServiceCounters()
    assert cost_until_served(make(name, counters), counters, crowd, bound) <= bound


@pytest.mark.parametrize("name", ["hrrn", "sjf", "srpt", "mlfq", "priority", "hybrid"])
def test_the_stream_does_pass_the_victim_at_first(name: str) -> None:
    """The case is met: without its ageing the order would serve the crowd for ever."""
    counters = ServiceCounters()
    assert cost_until_served(make_order(name, counters), counters, "short", 1e6) > 2 * CROWD * 16


@pytest.mark.parametrize("name", sorted(set(ORDERS) - set(CLAIM_NO_STARVATION)))
def test_an_order_that_does_not_promise_a_turn_starves_somebody(name: str) -> None:
    counters = ServiceCounters()
    order = make_order(name, counters)
    half_done = QueueEntry("half done", "t0", 0.0, 3000, 800, emitted_tokens=1, attained_tokens=3001)
    order.add(half_done, front=True)
    for number in range(5000):
        order.add(CROWDS["as long"](number, 0.0))
        assert order.pop(0.0) is not half_done
        counters.charge("t0", 1.0, 4600)


def test_shortest_first_starves_without_ageing() -> None:
    class Ageless(Sjf):
        ageing = 0.0

    counters = ServiceCounters()
    order = Ageless(counters)
    assert cost_until_served(order, counters, "short", 1e6) > 1e6


# ---------------------------------------------------------------- fair between tenants

WEIGHTS = {"light": 1.0, "short": 1.0, "heavy": 3.0}
MOST_COST = 400 + 2 * 150
"""Of one entry; U of the bound, as one at a time is served."""


def backlogged_entry(rng: random.Random, number: int, tenant_id: str) -> QueueEntry:
    # `short` sends many small ones; the others anything.
    prompt = rng.randint(1, 30) if tenant_id == "short" else rng.randint(1, 400)
    output = rng.randint(1, 20) if tenant_id == "short" else rng.randint(1, 150)
    return QueueEntry(f"e{number}", tenant_id, float(number), prompt, output, weight=WEIGHTS[tenant_id])


def largest_difference(order: Order, counters: ServiceCounters, seed: int, turns: int = 1500) -> float:
    """Of service per weight between two tenants that are backlogged throughout, over any interval."""
    rng = random.Random(seed)
    number = 0
    served = dict.fromkeys(WEIGHTS, 0.0)
    waiting = dict.fromkeys(WEIGHTS, 0)
    lowest = dict.fromkeys(PAIRS, 0.0)
    highest = dict.fromkeys(PAIRS, 0.0)
    for _ in range(turns):
        for tenant_id in WEIGHTS:
            # Ten times the connections earn nothing.
            while waiting[tenant_id] < (30 if tenant_id == "light" else 3):
                number += 1
                order.add(backlogged_entry(rng, number, tenant_id))
                waiting[tenant_id] += 1
        entry = order.pop(float(number))
        waiting[entry.tenant_id] -= 1
        # Charged as predicted, then corrected to what it really was.
        cost = entry.predicted_cost
        guess = rng.randint(0, 2 * cost)
        counters.charge(entry.tenant_id, entry.weight, guess)
        counters.charge(entry.tenant_id, entry.weight, cost - guess)
        served[entry.tenant_id] += cost / entry.weight
        for one, other in PAIRS:
            difference = served[one] - served[other]
            lowest[one, other] = min(lowest[one, other], difference)
            highest[one, other] = max(highest[one, other], difference)
    return max(highest[pair] - lowest[pair] for pair in PAIRS)


PAIRS = [("light", "short"), ("light", "heavy"), ("short", "heavy")]
TWO_U = 2 * MOST_COST / min(WEIGHTS.values())


@MAKERS
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CLAIM_FAIRNESS)
def test_backlogged_tenants_get_alike_per_weight_over_any_interval(
    name: str, seed: int, make: Callable[[str, ServiceCounters], Order]
) -> None:
    counters = ServiceCounters()
    assert largest_difference(make(name, counters), counters, seed) <= TWO_U


@pytest.mark.parametrize("name", sorted(set(ORDERS) - set(CLAIM_FAIRNESS)))
def test_an_order_that_does_not_promise_the_bound_breaks_it(name: str) -> None:
    counters = ServiceCounters()
    assert largest_difference(make_order(name, counters), counters, 1) > TWO_U


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["drr", "dlpm"])
def test_a_deficit_round_robin_stays_within_its_own_wider_bound(name: str, seed: int) -> None:
    counters = ServiceCounters()
    assert largest_difference(make_order(name, counters), counters, seed) <= TWO_U + drr.QUANTUM_COST


# ---------------------------------------------------------------- work conservation


@pytest.mark.parametrize("name", sorted(name for name in ORDERS if WORK_CONSERVATION in CLAIMS[name]))
def test_the_server_never_idles_while_somebody_waits(name: str) -> None:
    rng = random.Random(5)
    counters = ServiceCounters()
    order = make_order(name, counters)
    left = {number: rng.randint(0, 300) for number in range(400)}
    busy = 0
    for moment in range(800):
        for number in [number for number, at in left.items() if at == moment]:
            order.add(backlogged_entry(rng, number, rng.choice(sorted(WEIGHTS))))
        waiting = len(order)
        entry = order.peek(float(moment))
        assert (entry is not None) == (waiting > 0)
        if entry is not None:
            busy += 1
            order.pop(float(moment))
            counters.charge(entry.tenant_id, entry.weight, rng.choice((0, 10, 10**6)))
    assert busy == 400
    assert len(order) == 0
