"""A learned table and the control loop beside every preset, on traffic that the table has not seen.

The table was made by

    fairgate policy learn --trace azure --speed 1.3 --gpu l40s --max-sequences 64 --max-batched-tokens 512

and is judged by the sum that it was made to minimise (`ops/simulate/learn/objective.py`), on pieces of that
trace that were held out, and on two traces of other services. The same machine serves all, and all are sped
up so that they ask for 0.5 to 1.5 times what it serves. Where the table's entries differ, one more row says
what a single vector of actions is worth, the one that it has most often: what is better than that is worth
the macro-states.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from gateway.flow.control_rules import ControlMode
from gateway.flow.learned.macro_state import NUM_STATES
from gateway.flow.learned.table_file import LearnedTable, TableEntry
from ops.bench.policies.figures import SEEDS, spread
from ops.reporting import Check, Report
from ops.simulate.learn.judge import HeldOutRuns, judged
from ops.simulate.learn.segments import Piece, some_of, split
from ops.simulate.learn.trial import LearningSetup, LearningTrial, TrialRun, Trials, queue_as_served
from ops.simulate.machines.machines import roofline_machine
from ops.simulate.slo import SloLimits
from ops.simulate.traffic.generate import TRACES
from ops.simulate.traffic.requests import Sped
from ops.simulate.traffic.trace import open_trace

TABLE_FILE = Path(__file__).parents[1] / "data" / "learned_azure_l40s.json"
MACHINE = roofline_machine("l40s", "8b", max_sequences=64, max_batched_tokens=512)
SETUP = LearningSetup(
    "8b", MACHINE, slo=SloLimits(ttft_s=2.0, tpot_s=0.1), flow=partial(queue_as_served, MACHINE)
)
REQUESTS = 900
"""Of each trace, at most: evenly spaced pieces of it."""
LEARNED, ONE_VECTOR = "learned", "learned, one vector"
CONTROL, BOTH = "hybrid, control acting", "learned, control acting"
NO_BUDGET = 1 << 62

COLUMNS = (
    ("trace", "trace"),
    ("policy", "policy"),
    ("sum", "the sum"),
    ("gain", "hybrid's less it", "+.3f"),
    ("deviation", "spread of that", ".3f"),
    ("missed", "missed", ".1%"),
    ("refused", "refused", ".1%"),
    ("waits", "waits, in targets", ".2f"),
    ("energy", "energy a token, to hybrid's", ".2f"),
)


@dataclass(frozen=True, slots=True)
class JudgedTrace:
    """Traffic that the table has not seen."""

    name: str
    trace: str
    speed: float
    is_own: bool = False
    """The table was learned from other pieces of it: only what was held out counts."""
    is_foreign: bool = False
    """Most of its load is outside of what the table was fitted on: it need not win, and must not lose."""
    is_short: bool = False
    """Served as one piece, from its beginning."""

    def pieces(self) -> tuple[Piece, ...]:
        """Those that are served."""
        source = Sped(open_trace(TRACES[self.trace]), self.speed)
        requests = list(source)
        if self.is_short:
            return (Piece(0, source.name, tuple(requests[:REQUESTS])),)
        parts = split(source.name, requests)
        unseen = parts.held_out if self.is_own else (*parts.learnt_from, *parts.held_out)
        return some_of(sorted(unseen, key=lambda piece: piece.number), REQUESTS)


JUDGED_TRACES = (
    JudgedTrace("azure x1.3, held out", "azure", 1.3, is_own=True),
    JudgedTrace("servegen x2", "servegen", 2.0, is_foreign=True),
    JudgedTrace("arena x4", "arena", 4.0, is_short=True),
)


@cache
def table() -> LearnedTable:
    """The one that is judged."""
    return LearnedTable.load(TABLE_FILE)


def is_one_vector() -> bool:
    """Whether it says the same in every macro-state."""
    return len({entry.actions for entry in table().entries}) == 1


def one_vector() -> LearnedTable:
    """Its most frequent actions, in every state and under any load."""
    found = table()
    often = max(found.entries, key=lambda entry: (entry.share, -entry.state))
    return msgspec.structs.replace(
        found,
        entries=[TableEntry(state, often.actions, 1 / NUM_STATES) for state in range(NUM_STATES)],
        fitted=msgspec.structs.replace(found.fitted, queued_per_place=1e9, kv_share=1.0, trend=1e9),
    )


def learned(policies: Collection[str]) -> Report:
    """Every trace, under `policies`, with the control loop, and with the table."""
    report = Report("a learned table and the control loop beside the presets", COLUMNS)
    trials = Trials(SETUP, NO_BUDGET)
    runs: dict[str, Callable[[LearningTrial], TrialRun]] = {
        **{policy: partial(trials.other, policy=policy) for policy in policies if policy != "hybrid"},
        "hybrid": trials.hybrid,
        CONTROL: partial(trials.other, policy="hybrid", control=ControlMode.ACTING),
        BOTH: partial(trials.learned, table=table(), control=ControlMode.ACTING),
        LEARNED: partial(trials.learned, table=table()),
    }
    if not is_one_vector():
        runs[ONE_VECTOR] = partial(trials.learned, table=one_vector())
    for traffic in JUDGED_TRACES:
        pieces = traffic.pieces()
        found = {
            name: HeldOutRuns(
                {seed: tuple(run(LearningTrial(each, seed)) for each in pieces) for seed in SEEDS}
            )
            for name, run in runs.items()
        }
        report.rows += [_row(traffic, name, found) for name in found]
        against = judged("hybrid", found[LEARNED], found["hybrid"])
        report.checks.append(
            Check(
                f"{traffic.name}: the table's gain over hybrid, and the spread of that",
                against.gain + against.spread if traffic.is_foreign else against.gain - against.spread,
                0.0,
                at_most=False,
            )
        )
    report.notes.append(
        f"{MACHINE.name}, at most {MACHINE.max_sequences} sequences; the sum:"
        f" {SETUP.objective.words(SETUP.slo, has_energy=SETUP.has_energy)}"
    )
    if is_one_vector():
        report.notes.append("the table says the same in every macro-state: it is worth what that vector is")
    return report


def _row(traffic: JudgedTrace, name: str, found: dict[str, HeldOutRuns]) -> dict[str, Any]:
    runs, hybrid = found[name], found["hybrid"]
    against = judged("hybrid", runs, hybrid)
    return {
        "trace": traffic.name,
        "policy": name,
        "sum": spread(runs.means()),
        "gain": against.gain,
        "deviation": against.spread,
        "missed": runs.share("missed"),
        "refused": runs.share("refused"),
        "waits": runs.share("waits"),
        "energy": runs.share("joules_per_token") / hybrid.share("joules_per_token"),
    }
