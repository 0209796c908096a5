"""Simulated runs of a piece under `hybrid` and under learned tables, counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.scheduling.options import PolicyOptions
from gateway.config import GatewayConfig
from gateway.flow.control_rules import ControlMode
from gateway.flow.learned.macro_state import NUM_STATES, Situation
from gateway.flow.learned.table_file import LearnedTable
from ops.simulate.control.steering import Steering
from ops.simulate.figures.figures import energy
from ops.simulate.learn.objective import LearningObjective, ServedSum, served_sum
from ops.simulate.learn.segments import Piece
from ops.simulate.machines.machines import Machine
from ops.simulate.pool import SimulatedPool, busy
from ops.simulate.run import Scenario, served_pool
from ops.simulate.slo import SloLimits

NO_LOOKS = (0,) * NUM_STATES
POLICY = "hybrid"
"""Whose choices a learned policy makes, and what it is compared with."""


@dataclass(frozen=True, slots=True)
class LearningSetup:
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
    def goal(self) -> str:
        return self.objective.words(self.slo, has_energy=self.machine.watts > 0)

    def scenario(self, piece: Piece) -> Scenario:
        return Scenario(
            piece, self.machine, self.replicas, self.slo, self.predictions, self.options, flow=self.flow
        )


def queue_as_served(machine: Machine) -> Mapping[str, Any]:
    """Options of the queue in front of such a machine: a gateway's defaults."""
    return {"lanes": GatewayConfig().queue_settings(machine.context_tokens).lanes}


@dataclass(frozen=True, slots=True)
class LearningTrial:
    piece: Piece
    seed: int


@dataclass(frozen=True, slots=True)
class TrialRun:
    served: ServedSum
    value: float
    looks: tuple[int, ...]
    """Looks in each macro-state of the table that ran; all 0 without a table."""
    waits: tuple[float, ...]
    """By macro-state: requests that waited for each place, summed over its looks."""


class Trials:
    """Runs trials and counts what they simulate; `hybrid` at most once for each trial."""

    def __init__(
        self, setup: LearningSetup, budget: int, progress: Callable[[int, int], None] = lambda done, of: None
    ) -> None:
        """`progress` gets the number of requests simulated, and `budget`."""
        self.setup = setup
        self.budget = budget
        self.simulated = 0
        self.runs = 0
        self._progress = progress
        self._hybrid: dict[tuple[str, int], ServedSum] = {}

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
        """Under `hybrid`; `on_situation` is called at every look, unless the trial has run before."""
        key = trial.piece.name, trial.seed
        if key not in self._hybrid:
            self._hybrid[key] = self._run(trial, None, on_situation)
        served = self._hybrid[key]
        return TrialRun(served, self.setup.objective.of(served, served), NO_LOOKS, NO_LOOKS)

    def learned(self, trial: LearningTrial, table: LearnedTable) -> TrialRun:
        hybrid = self.hybrid(trial)
        looks, waits = [0] * NUM_STATES, [0.0] * NUM_STATES

        def count(situation: Situation) -> None:
            state, _ = table.look_up(situation)
            looks[state] += 1
            waits[state] += situation.queued_per_place

        served = self._run(trial, table, count)
        value = self.setup.objective.of(served, hybrid.served)
        return TrialRun(served, value, tuple(looks), tuple(waits))

    def _run(
        self,
        trial: LearningTrial,
        table: LearnedTable | None,
        on_situation: Callable[[Situation], None] | None,
    ) -> ServedSum:
        slo, source = self.setup.slo, trial.piece.jittered(trial.seed)
        steering = Steering(ControlMode.OFF, slo, table, on_situation=on_situation)
        pool = served_pool(self.setup.scenario(source), POLICY, steering.watch)
        self.simulated += len(source)
        self.runs += 1
        self._progress(min(self.simulated, self.budget), self.budget)
        return served_sum(pool.records, slo, _joules_per_token(pool))


def _joules_per_token(pool: SimulatedPool) -> float | None:
    output_tokens = sum(pool.records.output_tokens[row] for row in pool.records.done())
    spent = energy(pool.machine, len(pool.members), busy(pool).busy_s, max(pool.now_s, 1e-9), output_tokens)
    return None if spent is None else spent["joules_per_output_token"]
