"""Simulated runs of a piece under `hybrid` and under learned tables, counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.scheduling.options import PolicyOptions
from gateway.flow.control_rules import ControlMode
from gateway.flow.lanes import LaneRule, long_tokens_of
from gateway.flow.learned.macro_state import NUM_STATES, Situation
from gateway.flow.learned.table_file import LearnedTable
from ops.simulate.control.steering import Steering
from ops.simulate.figures.figures import energy
from ops.simulate.learn.objective import LearningObjective, ServedSum, served_sum
from ops.simulate.learn.segments import Piece
from ops.simulate.machines.machines import Machine
from ops.simulate.pool import SimulatedPool, busy
from ops.simulate.predictions import PREDICTIONS
from ops.simulate.run import few_collections
from ops.simulate.slo import SloLimits

NO_LOOKS = (0,) * NUM_STATES
LONG_SHARE = 0.5
"""Of a replica, for the long lane: as gateways have it unless they are told otherwise."""
POLICY = "hybrid"
"""Whose choices a learned policy makes, and what it is compared with."""


@dataclass(frozen=True, slots=True)
class LearningSetup:
    """What serves the requests, and by what it is judged."""

    model: str
    machine: Machine
    replicas: int = 1
    slo: SloLimits = field(default_factory=SloLimits)
    objective: LearningObjective = field(default_factory=LearningObjective)
    predictions: str = "learned"
    options: PolicyOptions = field(default_factory=PolicyOptions)
    flow: Callable[[], Mapping[str, Any]] = dict
    """Makes further options of the queue (`FlowController`), for each run."""

    @property
    def has_energy(self) -> bool:
        """Whether the power of the machine is known."""
        return self.machine.watts > 0


def queue_as_served(machine: Machine) -> Mapping[str, Any]:
    """Options of the queue in front of such a machine, where nothing else is known: a gateway's defaults."""
    lanes = LaneRule(long_tokens_of(machine.context_tokens), LONG_SHARE, LONG_SHARE)
    return {"lanes": lanes}


@dataclass(frozen=True, slots=True)
class LearningTrial:
    """A piece with the arrivals of one seed."""

    piece: Piece
    seed: int


@dataclass(frozen=True, slots=True)
class TrialRun:
    """One run of a trial."""

    served: ServedSum
    value: float
    """Of the objective."""
    looks: tuple[int, ...]
    """In each macro-state of the table that ran; all 0 where none did."""
    waits: tuple[float, ...]
    """Of the looks in each macro-state, the requests that waited for each place, summed up."""


class Trials:
    """Runs trials, each at most once under the same table, and counts what they simulate."""

    def __init__(
        self, setup: LearningSetup, budget: int, progress: Callable[[int, int], None] = lambda done, of: None
    ) -> None:
        """`progress` is told how many of the requests of `budget` are simulated."""
        self.setup = setup
        self.budget = budget
        self.simulated = 0
        self.runs = 0
        self._progress = progress
        self._hybrid: dict[tuple[str, int], ServedSum] = {}
        """By piece and seed."""

    def left(self, keep: int = 0) -> int:
        """Requests that may still be simulated, apart from `keep`."""
        return self.budget - self.simulated - keep

    def cost_of(self, trial: LearningTrial) -> int:
        """Requests that a run of a table simulates, that of `hybrid` before it included."""
        has_run = (trial.piece.name, trial.seed) in self._hybrid
        return len(trial.piece) * (1 if has_run else 2)

    def hybrid(
        self, trial: LearningTrial, on_situation: Callable[[Situation], None] | None = None
    ) -> TrialRun:
        """Under `hybrid`; `on_situation` is told of every look's load, if it has not run before."""
        key = trial.piece.name, trial.seed
        if key not in self._hybrid:
            self._hybrid[key] = self._run(
                trial, Steering(ControlMode.OFF, self.setup.slo, on_situation=on_situation)
            )
        served = self._hybrid[key]
        return TrialRun(served, self.setup.objective.of(served, served), NO_LOOKS, NO_LOOKS)

    def learned(
        self, trial: LearningTrial, table: LearnedTable, control: ControlMode = ControlMode.OFF
    ) -> TrialRun:
        """Under `table`, with the control loop in this mode."""
        hybrid = self.hybrid(trial)
        looks, waits = [0] * NUM_STATES, [0.0] * NUM_STATES

        def count(situation: Situation) -> None:
            state, _ = table.look_up(situation)
            looks[state] += 1
            waits[state] += situation.queued_per_place

        served = self._run(trial, Steering(control, self.setup.slo, table, on_situation=count))
        value = self.setup.objective.of(served, hybrid.served)
        return TrialRun(served, value, tuple(looks), tuple(waits))

    def other(self, trial: LearningTrial, policy: str, control: ControlMode = ControlMode.OFF) -> TrialRun:
        """Under another policy, or with the control loop."""
        hybrid = self.hybrid(trial)
        served = self._run(trial, Steering(control, self.setup.slo), policy)
        return TrialRun(served, self.setup.objective.of(served, hybrid.served), NO_LOOKS, NO_LOOKS)

    def _run(self, trial: LearningTrial, steering: Steering, policy: str = POLICY) -> ServedSum:
        setup = self.setup
        source = trial.piece.jittered(trial.seed)
        pool = SimulatedPool(
            policy,
            setup.machine,
            replicas=setup.replicas,
            options=setup.options,
            predictions=PREDICTIONS[setup.predictions](),
            prefix_caching=source.has_prefixes,
            watch=steering.watch,
            flow=setup.flow(),
        )
        with few_collections():
            pool.run(source)
        self.simulated += len(source)
        self.runs += 1
        self._progress(min(self.simulated, self.budget), self.budget)
        return served_sum(pool.records, setup.slo, _joules_per_token(pool))


def _joules_per_token(pool: SimulatedPool) -> float | None:
    spent, records = busy(pool), pool.records
    output_tokens = sum(records.output_tokens[row] for row in records.done())
    found = energy(pool.machine, len(pool.members), spent.busy_s, max(pool.now_s, 1e-9), output_tokens)
    return None if found is None else found["joules_per_output_token"]
