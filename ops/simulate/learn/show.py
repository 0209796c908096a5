"""Reports of what was learned: for JSON, and for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from msgspec import structs

from gateway.flow.learned.actions import HYBRID, Actions
from gateway.flow.learned.macro_state import NUM_STATES, words
from ops.reporting import plain, table
from ops.simulate.learn.grid import GRID
from ops.simulate.learn.learn import LearningOutcome
from ops.simulate.learn.search import TableChange
from ops.simulate.learn.trial import LearningSetup


def report(
    outcome: LearningOutcome, setup: LearningSetup, budget: int, written: Path | None, notes: list[str]
) -> dict[str, Any]:
    """For JSON. `written`: the file that has the table now; `notes`: what else is to be said."""
    found = outcome.table
    return plain(  # type: ignore[no-any-return]
        {
            "trace": found.trace,
            "model": found.model,
            "machine": found.machine,
            "seed": found.seed,
            "budget": budget,
            "simulated_requests": found.simulated_requests,
            "objective": setup.objective.words(setup.slo, has_energy=setup.has_energy),
            "pieces": {
                "learnt_from": len(outcome.learnt_from),
                "searched_on": [each.name for each in outcome.searched_on],
                "held_out": [each.name for each in outcome.held_out],
            },
            "searched": list(outcome.searched),
            "left_as_hybrid": [name for name in GRID if name not in outcome.searched],
            "candidates": outcome.candidates,
            "is_budget_spent": outcome.is_spent,
            "changes": [
                {
                    "states": list(each.states),
                    "action": each.action,
                    "value": each.value,
                    "gain": each.gain,
                    "spread": each.spread,
                }
                for each in outcome.changes
            ],
            "entries": [
                {
                    "state": entry.state,
                    "words": words(entry.state),
                    "share": entry.share,
                    "actions": structs.asdict(entry.actions),
                }
                for entry in found.entries
            ],
            "borders": structs.asdict(found.borders),
            "fitted": structs.asdict(found.fitted),
            "judged": {
                "learned": outcome.against_hybrid.table,
                "hybrid": outcome.against_hybrid.other,
                "spread": outcome.against_hybrid.spread,
                "wins": outcome.against_hybrid.wins,
                "missed": {"learned": outcome.runs.share("missed"), "hybrid": outcome.hybrid.share("missed")},
                "refused": {
                    "learned": outcome.runs.share("refused"),
                    "hybrid": outcome.hybrid.share("refused"),
                },
            },
            "judged_against_old": None
            if outcome.against_old is None
            else {
                "learned": outcome.against_old.table,
                "old": outcome.against_old.other,
                "spread": outcome.against_old.spread,
                "wins": outcome.against_old.wins,
            },
            "is_better": outcome.wins,
            "written": None if written is None else str(written),
            "notes": notes,
        }
    )


def show(outcome: LearningOutcome, setup: LearningSetup, written: Path | None, notes: list[str]) -> None:
    """For people."""
    found = outcome.table
    click.echo(f"minimised: {setup.objective.words(setup.slo, has_energy=setup.has_energy)}")
    table(
        f"changes of hybrid's actions that won, {found.machine}, {found.trace}",
        ("states", "action", "value", "the sum fell by", "spread between seeds"),
        [
            (_states(each), each.action, f"{each.value:g}", f"{each.gain:.4f}", f"{each.spread:.4f}")
            for each in outcome.changes
        ],
    )
    table(
        "the table",
        ("state", "share of looks", "actions that differ from hybrid's"),
        [
            (words(entry.state), f"{100 * entry.share:.1f} %", differences(entry.actions))
            for entry in found.entries
        ],
    )
    left = [name for name in GRID if name not in outcome.searched]
    click.echo(
        f"{found.simulated_requests:,} simulated requests, {outcome.candidates} candidates"
        + (" (the budget ended the search)" if outcome.is_spent else " (nothing won any more)")
        + (f"; without effect on this traffic, and left alone: {', '.join(left)}" if left else "")
    )
    count = len(outcome.held_out)
    click.echo(f"on {count} held-out piece{'s' if count > 1 else ''}: {outcome.against_hybrid.words()}")
    runs, hybrid = outcome.runs, outcome.hybrid
    click.echo(
        f"  missed {100 * runs.share('missed'):.1f} % (hybrid: {100 * hybrid.share('missed'):.1f} %), of them"
        f" refused {100 * runs.share('refused'):.1f} % (hybrid: {100 * hybrid.share('refused'):.1f} %)"
    )
    if outcome.against_old is not None:
        click.echo(f"  {outcome.against_old.words()}")
    for note in notes:
        click.echo(note)
    if written is not None:
        click.echo(f"{written}: written; `fairgate policy set learned --option learned_table={written}`")


def differences(actions: Actions) -> str:
    """What an entry does otherwise than `hybrid`."""
    ours, usual = structs.asdict(actions), structs.asdict(HYBRID)
    changed = [
        f"{name} {value:g} (hybrid: {usual[name]:g})" for name, value in ours.items() if value != usual[name]
    ]
    return ", ".join(changed) or "none"


def _states(change: TableChange) -> str:
    if len(change.states) == NUM_STATES:
        return "all"
    return "; ".join(words(state) for state in change.states)
