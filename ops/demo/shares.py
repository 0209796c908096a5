"""Ideal weighted fair shares of the service that each tier was given.

The yardstick is the fluid model: at every instant the tier's service is split between the tenants that
have work, in proportion to their weights; what a tenant does not need goes to the others (weighted max-min,
"water filling": Demers, Keshav, Shenker, SIGCOMM 1989; Parekh and Gallager, 1993). It uses what was
asked and what the tier as a whole was served, never which tenant was served.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def water_fill(amount: float, demands: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    given = dict.fromkeys(demands, 0.0)
    left = amount
    hungry = {name for name, demand in demands.items() if demand > 0}
    while hungry and left > 1e-9:
        per_weight = left / sum(weights[name] for name in hungry)
        full = {name for name in hungry if demands[name] <= per_weight * weights[name]}
        if not full:
            for name in hungry:
                given[name] = per_weight * weights[name]
            break
        for name in full:
            given[name] = demands[name]
            left -= demands[name]
        hungry -= full
    return given


@dataclass(frozen=True, slots=True)
class TenantArrival:
    """Work that a tenant asked for at an instant, in cost tokens."""

    at_s: float
    tenant: str
    cost: float


@dataclass(frozen=True)
class FluidIdeal:
    service: dict[str, float]
    asked: dict[str, float]


def ideal_shares(
    arrivals: Sequence[TenantArrival], served: Sequence[tuple[float, float]], weights: Mapping[str, float]
) -> FluidIdeal:
    """The fluid model over the interval of `served`: (time, cumulative service of the whole tier). An arrival
    counts from the sample at or after it. `weights` names every tenant of the tier."""
    waiting: dict[str, float] = defaultdict(float)
    service, asked = dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0.0)
    surplus = 0.0
    pending = deque(sorted(arrivals, key=lambda arrival: arrival.at_s))
    for (_, before), (now_s, now) in itertools.pairwise(served):
        while pending and pending[0].at_s <= now_s:
            arrival = pending.popleft()
            waiting[arrival.tenant] += arrival.cost
            asked[arrival.tenant] += arrival.cost
        amount = now - before + surplus
        given = water_fill(amount, {name: left for name, left in waiting.items() if left > 1e-9}, weights)
        for name, part in given.items():
            waiting[name] -= part
            service[name] += part
        surplus = amount - sum(given.values())
    return FluidIdeal(service, asked)


def under_share(ideal: FluidIdeal, weights: Mapping[str, float], tier_service: float) -> set[str]:
    """Tenants that asked for less than their weight's part: a fair queue owes them no delay."""
    active = [name for name, amount in ideal.asked.items() if amount > 0]
    total = sum(weights[name] for name in active)
    return {name for name in active if ideal.asked[name] < tier_service * weights[name] / total}
