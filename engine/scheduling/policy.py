"""Which named choices of order, admit, compose and evict exist?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.scheduling.admit import Admit, PredictedReserve
from engine.scheduling.compose import Compose, DecodeFirst
from engine.scheduling.evict import Evict, FairVictim, LatestVictim
from engine.scheduling.fcfs import Fcfs
from engine.scheduling.order import Order, ServiceCountersLike
from engine.scheduling.vtc import Vtc

ORDERS: dict[str, Callable[[ServiceCountersLike], Order]] = {"fcfs": Fcfs, "vtc": Vtc}
"""Orders by name."""


class UnknownPolicy(ValueError):
    """No policy or order has this name; the message lists those that exist."""


@dataclass(frozen=True, slots=True)
class Policy:
    """One choice of each of the four decisions."""

    name: str
    order: str
    admit: Admit
    compose: Compose
    evict: Evict


POLICIES: dict[str, Policy] = {
    "fcfs": Policy("fcfs", "fcfs", PredictedReserve(), DecodeFirst(), LatestVictim()),
    "vtc": Policy("vtc", "vtc", PredictedReserve(), DecodeFirst(), FairVictim()),
}
"""Policies by name."""


def make_order(name: str, counters: ServiceCountersLike) -> Order:
    """A new, empty order. Raises `UnknownPolicy`."""
    if name not in ORDERS:
        raise UnknownPolicy(f"no order {name!r}; there are {', '.join(sorted(ORDERS))}")
    return ORDERS[name](counters)


def find_policy(name: str) -> Policy:
    """Raises `UnknownPolicy`."""
    if name not in POLICIES:
        raise UnknownPolicy(f"no policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
