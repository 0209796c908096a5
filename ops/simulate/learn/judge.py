"""Judgement of a table on pieces that its search never saw. Pure apart from the runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.flow.learned.table_file import LearnedTable
from ops.simulate.learn.segments import Piece
from ops.simulate.learn.trial import LearningTrial, TrialRun, Trials


@dataclass(frozen=True, slots=True)
class TableJudgement:
    """The sum under a table and under what it is compared with, means over seeds."""

    against: str
    table: float
    other: float
    spread: float
    """Standard deviation of the difference between seeds."""

    @property
    def gain(self) -> float:
        return self.other - self.table

    @property
    def wins(self) -> bool:
        return self.gain > self.spread and self.gain > 0

    def words(self) -> str:
        verdict = "does not win"
        if self.gain > 0:
            chance = "less than the seeds differ, which may be chance"
            verdict = f"wins by {'more than the seeds differ' if self.wins else chance}"
        return (
            f"{self.table:.4f} against {self.against}'s {self.other:.4f} (difference {-self.gain:+.4f},"
            f" spread {self.spread:.4f}): the table {verdict}"
        )


@dataclass(frozen=True, slots=True)
class HeldOutRuns:
    by_seed: Mapping[int, tuple[TrialRun, ...]]

    def means(self) -> list[float]:
        return [statistics.fmean(run.value for run in runs) for runs in self.by_seed.values()]

    def share(self, part: str) -> float:
        return statistics.fmean(getattr(run.served, part) for runs in self.by_seed.values() for run in runs)


def served_held_out(
    trials: Trials, pieces: Sequence[Piece], seeds: Sequence[int], table: LearnedTable | None
) -> HeldOutRuns:
    def run(piece: Piece, seed: int) -> TrialRun:
        trial = LearningTrial(piece, seed)
        return trials.hybrid(trial) if table is None else trials.learned(trial, table)

    return HeldOutRuns({seed: tuple(run(piece, seed) for piece in pieces) for seed in seeds})


def judged(against: str, table: HeldOutRuns, other: HeldOutRuns) -> TableJudgement:
    ours, theirs = table.means(), other.means()
    differences = [own - its for own, its in zip(ours, theirs, strict=True)]
    spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
    return TableJudgement(against, statistics.fmean(ours), statistics.fmean(theirs), spread)
