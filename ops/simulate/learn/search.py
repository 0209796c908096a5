"""Search of a table: one change of one action at a time, kept where it wins by more than the seeds differ.

First changes of all macro-states together, since what one does shows in the others; then state by state.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from gateway.flow.learned.actions import Actions
from gateway.flow.learned.macro_state import NUM_STATES
from gateway.flow.learned.table_file import LearnedTable
from ops.simulate.learn.grid import GRID
from ops.simulate.learn.trial import LearningTrial, TrialRun, Trials

LEAST_GAIN = 0.002
"""A change that wins less is not worth a line in a table."""
MOST_PASSES = 3


@dataclass(frozen=True, slots=True)
class TableChange:
    states: tuple[int, ...]
    action: str
    value: float
    gain: float
    """Decrease of the sum, mean of all trials."""
    spread: float
    """Standard deviation of the gain between seeds."""


class BudgetSpent(Exception):
    pass


class TableSearch:
    """One search. `table`: where it begins, and the best so far."""

    def __init__(
        self, trials: Trials, units: Sequence[LearningTrial], table: LearnedTable, actions: Sequence[str], *,
        keep: int = 0,
    ) -> None:  # fmt: skip
        """`units`: what candidates run on; `keep`: requests of the budget that are left for others."""
        self.table = table
        self.changes: list[TableChange] = []
        self.candidates = 0
        self.is_spent = False
        self._trials = trials
        self._units = list(units)
        self._actions = list(actions)
        self._keep = keep
        self._best: dict[LearningTrial, TrialRun] = {}

    @property
    def looks(self) -> list[int]:
        return [sum(run.looks[state] for run in self._best.values()) for state in range(NUM_STATES)]

    def run(self) -> LearnedTable:
        try:
            for unit in self._units:
                self._best[unit] = self._serve(unit, self.table)
            self._improve([tuple(range(NUM_STATES))])
            for _ in range(MOST_PASSES):
                if not self._improve([(state,) for state in self.states_by_weight()]):
                    break
        except BudgetSpent:
            self.is_spent = True
        return self.table

    def states_by_weight(self) -> list[int]:
        """The states seen, by their share of looks times the waiting in them, the heaviest first."""
        looks = self.looks
        # The sum over the looks is their number times the mean wait in them.
        waits = [sum(run.waits[state] for run in self._best.values()) for state in range(NUM_STATES)]
        seen = [state for state in range(NUM_STATES) if looks[state]]
        return sorted(seen, key=lambda state: (-waits[state], -looks[state], state))

    def _improve(self, groups: Sequence[tuple[int, ...]]) -> int:
        """Tries every value of every action in each group of states; returns how many changes were kept."""
        kept = len(self.changes)
        for states in groups:
            for action in self._actions:
                for value in GRID[action]:
                    self._try(states, action, value)
        return len(self.changes) - kept

    def _try(self, states: tuple[int, ...], action: str, value: float) -> None:
        candidate = changed(self.table, states, action, value)
        if candidate == self.table:
            return
        looks = {unit: sum(run.looks[state] for state in states) for unit, run in self._best.items()}
        # A change has no effect where its states are not seen.
        seen = sorted((unit for unit in self._units if looks[unit]), key=lambda unit: -looks[unit])
        if not seen:
            return
        runs: dict[LearningTrial, TrialRun] = {}
        for unit in seen:
            runs[unit] = self._serve(unit, candidate)
            self.candidates += len(runs) == 1
            if len(runs) == 1 and runs[unit].value >= self._best[unit].value:
                return
        gain, spread = gain_of(self._units, self._best, runs)
        if is_kept(gain, spread):
            self.table = candidate
            self._best |= runs
            self.changes.append(TableChange(states, action, value, gain, spread))

    def _serve(self, unit: LearningTrial, table: LearnedTable) -> TrialRun:
        # The same requests under hybrid come first, where they have not run yet.
        if self._trials.left(self._keep) < self._trials.cost_of(unit):
            raise BudgetSpent
        return self._trials.learned(unit, table)


def gain_of(
    units: Sequence[LearningTrial], best: dict[LearningTrial, TrialRun], runs: dict[LearningTrial, TrialRun]
) -> tuple[float, float]:
    """Mean decrease of the sum over all units, and its standard deviation between seeds."""
    by_seed: dict[int, list[float]] = {}
    for unit in units:
        gain = best[unit].value - runs[unit].value if unit in runs else 0.0
        by_seed.setdefault(unit.seed, []).append(gain)
    means = [statistics.fmean(gains) for gains in by_seed.values()]
    return statistics.fmean(means), statistics.stdev(means) if len(means) > 1 else 0.0


def is_kept(gain: float, spread: float) -> bool:
    return gain > max(LEAST_GAIN, spread)


def changed(table: LearnedTable, states: Sequence[int], action: str, value: float) -> LearnedTable:
    changes = {action: type(getattr(Actions(), action))(value)}
    entries = [
        replace(entry, actions=replace(entry.actions, **changes)) if entry.state in states else entry
        for entry in table.entries
    ]
    return replace(table, entries=entries)
