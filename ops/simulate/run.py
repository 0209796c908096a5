"""Runs several policies on the very same requests."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import LEARNED_POLICIES, NeedsTable
from gateway.flow.control_rules import ControlMode
from gateway.flow.learned.table_file import LearnedTable
from ops.reporting import plain
from ops.simulate.budget import SimulatedBudget
from ops.simulate.control.steering import Steering
from ops.simulate.figures.fairness import Fairness
from ops.simulate.figures.figures import figures
from ops.simulate.figures.shortfall import Shortfall
from ops.simulate.machines.machines import Machine
from ops.simulate.pool import PoolObserver, SimulatedPool
from ops.simulate.predictions import PREDICTIONS
from ops.simulate.slo import SloLimits
from ops.simulate.traffic.requests import Source

MOST_REPLICAS = 256
OBJECTS_BETWEEN_COLLECTIONS = 100_000
Report = dict[str, Any]
Look = Callable[[SimulatedPool], None]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests and the replicas that serve them. Raises ValueError for numbers that make no sense."""

    source: Source
    machine: Machine
    replicas: int = 1
    slo: SloLimits = field(default_factory=SloLimits)
    predictions: str = "learned"
    options: PolicyOptions = field(default_factory=PolicyOptions)
    options_by_policy: Mapping[str, PolicyOptions] = field(default_factory=dict)
    """In place of `options`, for policies that have their own."""
    flow: Callable[[], Mapping[str, Any]] = dict
    """Makes further options of the queue (`FlowController`), for each run."""
    padded: bool = False
    claims: dict[str, str] = field(default_factory=dict)
    """Published results of such a scenario, by policy."""
    begins_s: float | None = None
    """Seconds since 1970 at the first arrival, for limits. None: requests have none."""
    shortfall: Shortfall | None = None
    """Added to simulated times; None: nothing."""
    control: ControlMode = ControlMode.OFF
    learned: LearnedTable | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MOST_REPLICAS:
            raise ValueError(f"replicas must be between 1 and {MOST_REPLICAS}, not {self.replicas}")
        if self.predictions not in PREDICTIONS:
            raise ValueError(f"no predictions {self.predictions!r}; there are {', '.join(PREDICTIONS)}")

    def options_of(self, policy: str) -> PolicyOptions:
        return self.options_by_policy.get(policy, self.options)

    def steering_of(self, policy: str) -> Steering | None:
        """The control loop or table under the policy; None: neither. Raises `NeedsTable`."""
        table = self.learned if policy in LEARNED_POLICIES else None
        if policy in LEARNED_POLICIES and table is None:
            raise NeedsTable(
                f"the policy {policy!r} looks up a learned table: make one with `fairgate policy learn` and"
                " name its file with --option learned_table=FILE"
            )
        if table is None and self.control is ControlMode.OFF:
            return None
        return Steering(self.control, self.slo, table)


def run_policy(
    scenario: Scenario, policy: str, *, runs: bool = True, on_rows: Callable[[int], None] = lambda rows: None
) -> tuple[SimulatedPool, Fairness]:
    """One policy, to the end of the last answer. Raises `UnknownPolicy`, `BadTrace`, ValueError."""
    fairness = Fairness()
    watch = PoolObserver(fairness.look, on_rows)
    steering = scenario.steering_of(policy)
    if steering is not None:
        watch = replace(steering.watch, on_decision=_both(steering.look, fairness.look), on_rows=on_rows)
    return served_pool(scenario, policy, watch, runs=runs), fairness


def served_pool(scenario: Scenario, policy: str, watch: PoolObserver, *, runs: bool = True) -> SimulatedPool:
    """The scenario's pool after the last answer's end. Raises as `run_policy` does."""
    pool = SimulatedPool(
        policy,
        replace(scenario.machine, padded=scenario.padded or scenario.machine.padded),
        replicas=scenario.replicas,
        options=scenario.options_of(policy),
        predictions=PREDICTIONS[scenario.predictions](),
        # Where nothing is shared, a cache changes nothing but the time that the simulation takes.
        prefix_caching=scenario.source.has_prefixes,
        runs=runs,
        watch=watch,
        flow=scenario.flow(),
        budget=None if scenario.begins_s is None else partial(SimulatedBudget, begins_s=scenario.begins_s),
    )
    with _few_collections():
        pool.run(scenario.source)
    if not len(pool.records):
        raise ValueError(f"{scenario.source.name}: there are no requests to simulate")
    return pool


def _both(first: Look, second: Look) -> Look:
    def look(pool: SimulatedPool) -> None:
        first(pool)
        second(pool)

    return look


def simulate(
    scenario: Scenario,
    policies: Sequence[str],
    *,
    on_policy: Callable[[str], None] = lambda name: None,
    on_rows: Callable[[int], None] = lambda rows: None,
    on_pool: Callable[[str, SimulatedPool], None] = lambda name, pool: None,
) -> Report:
    """For JSON. `on_pool` may look at a policy's requests before they are forgotten."""
    machine = scenario.machine
    results = []
    for policy in policies:
        on_policy(policy)
        pool, fairness = run_policy(scenario, policy, on_rows=on_rows)
        if scenario.shortfall is not None:
            scenario.shortfall.add_to(pool.records, policy)
        row = figures(pool, fairness, scenario.slo) | {"options": scenario.options_of(policy).changed()}
        if policy in scenario.claims:
            row["published"] = scenario.claims[policy]
        results.append(row)
        on_pool(policy, pool)
    shortfall = scenario.shortfall
    report: Report = plain(
        {
            "source": scenario.source.name,
            "machine": machine.name,
            "replicas": scenario.replicas,
            "kv_tokens": machine.kv_tokens,
            "max_sequences": machine.max_sequences,
            "max_batched_tokens": machine.max_batched_tokens,
            "slo": str(scenario.slo),
            "predictions": scenario.predictions,
            "control": scenario.control.value,
            "compared_requests": None if shortfall is None else len(shortfall.residuals),
            "policies": results,
        }
    )
    return report


@contextmanager
def _few_collections() -> Iterator[None]:
    """Makes collections of cyclic garbage rarer: there is little, and they take a tenth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
