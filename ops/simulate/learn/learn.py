"""Learns a table from a trace: borders, search, and judgement on what was held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from gateway.flow.lanes import LaneRule
from gateway.flow.learned.actions import HYBRID
from gateway.flow.learned.macro_state import NUM_STATES, Situation, state_of
from gateway.flow.learned.table_file import FORMAT, VERSION, Judged, LearnedTable, TableEntry
from gateway.flow.window import NUM_RANKS
from ops.simulate.learn.grid import GRID, actions_that_act, borders_of, range_of
from ops.simulate.learn.judge import HeldOutRuns, TableJudgement, judged, served_held_out
from ops.simulate.learn.search import TableChange, TableSearch
from ops.simulate.learn.segments import Piece, some_of, split
from ops.simulate.learn.trial import LearningSetup, LearningTrial, Trials
from ops.simulate.traffic.requests import SimulatedRequest

DEFAULT_BUDGET = 120_000
JUDGE_SHARE, SURVEY_SHARE = 0.3, 0.15
SEEDS_A_SEARCH, SEEDS_A_JUDGEMENT = 2, 3
RUNS_A_UNIT = 16
"""Runs of the search on each of its pieces and seeds: the fewer pieces, the more candidates."""
LEAST_RUNS = 4
MOST_SEED = 1_000_000


@dataclass(frozen=True, slots=True)
class LearningOutcome:
    table: LearnedTable
    against_hybrid: TableJudgement
    against_old: TableJudgement | None
    """None: there was none that could be compared."""
    runs: HeldOutRuns
    hybrid: HeldOutRuns
    changes: Sequence[TableChange]
    candidates: int
    searched: Sequence[str]
    learnt_from: Sequence[Piece]
    searched_on: Sequence[Piece]
    held_out: Sequence[Piece]
    is_spent: bool

    @property
    def wins(self) -> bool:
        return self.against_hybrid.wins and (self.against_old is None or self.against_old.wins)


def learn(
    name: str,
    requests: Sequence[SimulatedRequest],
    setup: LearningSetup,
    *,
    has_prefixes: bool = False,
    seed: int = 0,
    budget: int = DEFAULT_BUDGET,
    old: LearnedTable | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> LearningOutcome:
    """Deterministic. `old`: a table to beat. Raises `ValueError`: too short a trace, too small a budget."""
    if not 0 <= seed <= MOST_SEED:
        raise ValueError(f"the seed must be between 0 and {MOST_SEED:,}, not {seed}")
    parts = split(name, requests, has_prefixes=has_prefixes)
    tables = 2 if old is None else 3
    judge_seeds = [10 * seed + 5 + number for number in range(SEEDS_A_JUDGEMENT)]
    search_seeds = [10 * seed + number for number in range(SEEDS_A_SEARCH)]
    held_out = some_of(parts.held_out, int(budget * JUDGE_SHARE) // (SEEDS_A_JUDGEMENT * tables))
    keep = sum(map(len, held_out)) * SEEDS_A_JUDGEMENT * tables
    surveyed = some_of(parts.learnt_from, int(budget * SURVEY_SHARE))
    least = keep + sum(map(len, surveyed)) + LEAST_RUNS * SEEDS_A_SEARCH * max(map(len, surveyed))
    if budget < least:
        raise ValueError(
            f"{name}: a budget of {budget:,} simulated requests is too small for pieces of"
            f" {parts.piece_s:g} s: at least {least:,} are needed (--budget)"
        )
    trials = Trials(setup, budget, progress)
    seen: list[Situation] = []
    values = {
        piece: trials.hybrid(LearningTrial(piece, search_seeds[0]), seen.append).value for piece in surveyed
    }
    units = [
        LearningTrial(piece, search_seed)
        for piece in _unlike(values, trials.left(keep) // (RUNS_A_UNIT * SEEDS_A_SEARCH))
        for search_seed in search_seeds
    ]
    start = _start(name, setup, seed, seen)
    rules = setup.flow()
    ageing_s = rules.get("ageing_s") or (float("inf"),) * NUM_RANKS
    searched = actions_that_act(requests, (rules.get("lanes") or LaneRule()).long_tokens, ageing_s)
    search = TableSearch(trials, units, start, searched, keep=keep)
    table = _with_shares(search.run(), seen, search.looks)
    runs = served_held_out(trials, held_out, judge_seeds, table)
    hybrid = served_held_out(trials, held_out, judge_seeds, None)
    against_hybrid = judged("hybrid", runs, hybrid)
    against_old = None
    if old is not None:
        against_old = judged("the table before", runs, served_held_out(trials, held_out, judge_seeds, old))
    sums = (against_hybrid.table, against_hybrid.other, against_hybrid.spread)
    table = msgspec.structs.replace(
        table, simulated_requests=trials.simulated, judged=Judged(*map(_rounded, sums))
    )
    return LearningOutcome(
        table,
        against_hybrid,
        against_old,
        runs,
        hybrid,
        search.changes,
        search.candidates,
        [action for action in GRID if action in searched],
        parts.learnt_from,
        list(dict.fromkeys(unit.piece for unit in units)),
        held_out,
        search.is_spent,
    )


def _unlike(values: dict[Piece, float], most_requests: int) -> list[Piece]:
    """Pieces on which hybrid's sum is unlike: evenly spaced from the largest on."""
    ranked = sorted(values, key=lambda piece: (-values[piece], piece.number))
    return list(some_of(ranked, most_requests))


def _start(name: str, setup: LearningSetup, seed: int, seen: Sequence[Situation]) -> LearnedTable:
    return LearnedTable(
        format=FORMAT,
        version=VERSION,
        model=setup.model,
        machine=setup.machine.name,
        trace=name,
        seed=seed,
        simulated_requests=0,
        borders=borders_of(seen),
        fitted=range_of(seen),
        entries=[TableEntry(state, HYBRID, 1 / NUM_STATES) for state in range(NUM_STATES)],
    )


def _with_shares(table: LearnedTable, seen: Sequence[Situation], looks: Sequence[int]) -> LearnedTable:
    counts = list(looks)
    for situation in seen:
        counts[state_of(situation, table.borders)] += 1
    total = sum(counts)
    entries = [
        TableEntry(entry.state, entry.actions, _rounded(counts[entry.state] / total))
        for entry in table.entries
        if counts[entry.state]
    ]
    return msgspec.structs.replace(table, entries=entries)


def _rounded(value: float) -> float:
    """Six digits: as exact as a judgement is, and the same text everywhere."""
    return float(f"{value:.6g}")
