"""Capacity of a machine for a mix of requests, and the load that a stream puts on it.

Load 1 is the rate at which `fcfs` works off the same requests when all of them wait from the first instant,
until none waits any more: a property of machine and mix, so that "load 0.8" means the same for every policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.scheduling.policy import Policy
from ops.bench.policies.figures import LatencyTargets, attainment
from ops.simulate.engine_run import run_load
from ops.simulate.machines.machines import Machine
from ops.simulate.traffic.arrivals import Predictions, all_at_once, exact, slowed
from ops.simulate.traffic.requests import SimulatedRequest

BISECTIONS = 5


def requests_per_s(arrivals: Sequence[SimulatedRequest], machine: Machine) -> float:
    """Requests of the mix that the machine works off a second while some wait."""
    run = run_load("fcfs", all_at_once(arrivals), machine, while_waiting=True)
    # The last output token is never fed back.
    tokens = sum(each.input_tokens + each.output_tokens - 1 for each in arrivals)
    return run.computed_tokens / run.ended_s * len(arrivals) / tokens


def load_of(arrivals: Sequence[SimulatedRequest], machine: Machine) -> float:
    """Arrivals a second over what the machine works off a second."""
    return len(arrivals) / arrivals[-1].arrival_s / requests_per_s(arrivals, machine)


def at_load(arrivals: Sequence[SimulatedRequest], load: float, machine: Machine) -> list[SimulatedRequest]:
    """The same requests with all gaps stretched or shrunk alike, so that they are that load."""
    return slowed(arrivals, load_of(arrivals, machine) / load)


def sustained_per_s(
    policy: str | Callable[[], Policy],
    arrivals: Sequence[SimulatedRequest],
    machine: Machine,
    slo: LatencyTargets,
    *,
    wanted: float,
    predictions: Predictions = exact,
) -> float:
    """The most requests a second of the mix at which `wanted` of all submitted ones meet the SLO.

    Found by bisection between an eighth of and twice what the machine works off, to 9 %.
    """
    per_s = len(arrivals) / arrivals[-1].arrival_s
    most = 2 * requests_per_s(arrivals, machine)
    least = most / 16

    def holds(rate: float) -> bool:
        run = run_load(policy, slowed(arrivals, per_s / rate), machine, predictions=predictions)
        return attainment(run.served, slo) >= wanted

    if not holds(least):
        return 0.0
    for _ in range(BISECTIONS):
        middle = (least * most) ** 0.5
        if holds(middle):
            least = middle
        else:
            most = middle
    return least
