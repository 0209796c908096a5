"""Reports of what was learned: for JSON, and for people."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from msgspec import structs

from gateway.flow.learned.actions import HYBRID, Actions
from gateway.flow.learned.macro_state import NUM_STATES, words
from ops.reporting import plain, table
from ops.simulate.learn.grid import GRID
from ops.simulate.learn.judge import TableJudgement
from ops.simulate.learn.learn import LearningOutcome
from ops.simulate.learn.search import TableChange
from ops.simulate.learn.trial import LearningSetup


def report(
    outcome: LearningOutcome, setup: LearningSetup, budget: int, written: Path | None, notes: list[str]
) -> dict[str, Any]:
    """For JSON. `written`: the file that has the table now."""
    learned, runs, hybrid = outcome.table, outcome.runs, outcome.hybrid
    return plain(  # type: ignore[no-any-return]
        {
            **{name: getattr(learned, name) for name in ("trace", "model", "machine", "seed")},
            "budget": budget,
            "simulated_requests": learned.simulated_requests,
            "objective": setup.goal,
            "pieces": {
                "learnt_from": len(outcome.learnt_from),
                "searched_on": [piece.name for piece in outcome.searched_on],
                "held_out": [piece.name for piece in outcome.held_out],
            },
            "searched": list(outcome.searched),
            "left_as_hybrid": [name for name in GRID if name not in outcome.searched],
            "candidates": outcome.candidates,
            "is_budget_spent": outcome.is_spent,
            "changes": [asdict(change) for change in outcome.changes],
            "entries": [
                {
                    "state": entry.state,
                    "words": words(entry.state),
                    "share": entry.share,
                    "actions": structs.asdict(entry.actions),
                }
                for entry in learned.entries
            ],
            "borders": structs.asdict(learned.borders),
            "fitted": structs.asdict(learned.fitted),
            "judged": _judged(outcome.against_hybrid, "hybrid")
            | {
                part: {"learned": runs.share(part), "hybrid": hybrid.share(part)}
                for part in ("missed", "refused")
            },
            "judged_against_old": outcome.against_old and _judged(outcome.against_old, "old"),
            "is_better": outcome.wins,
            "written": None if written is None else str(written),
            "notes": notes,
        }
    )


def _judged(judgement: TableJudgement, other: str) -> dict[str, Any]:
    return {
        "learned": judgement.table,
        other: judgement.other,
        "spread": judgement.spread,
        "wins": judgement.wins,
    }


def show(outcome: LearningOutcome, setup: LearningSetup, written: Path | None, notes: list[str]) -> None:
    learned = outcome.table
    click.echo(f"minimised: {setup.goal}")
    table(
        f"changes of hybrid's actions that won, {learned.machine}, {learned.trace}",
        ("states", "action", "value", "the sum fell by", "spread between seeds"),
        [
            (
                _states(change),
                change.action,
                f"{change.value:g}",
                f"{change.gain:.4f}",
                f"{change.spread:.4f}",
            )
            for change in outcome.changes
        ],
    )
    table(
        "the table",
        ("state", "share of looks", "actions that differ from hybrid's"),
        [
            (words(entry.state), f"{100 * entry.share:.1f} %", differences(entry.actions))
            for entry in learned.entries
        ],
    )
    left = [name for name in GRID if name not in outcome.searched]
    click.echo(
        f"{learned.simulated_requests:,} simulated requests, {outcome.candidates} candidates"
        + (" (the budget ended the search)" if outcome.is_spent else " (nothing won any more)")
        + (f"; without effect on this traffic, and left alone: {', '.join(left)}" if left else "")
    )
    count = len(outcome.held_out)
    click.echo(f"on {count} held-out piece{'s' if count > 1 else ''}: {outcome.against_hybrid.words()}")
    missed, refused = (
        f"{100 * outcome.runs.share(part):.1f} % (hybrid: {100 * outcome.hybrid.share(part):.1f} %)"
        for part in ("missed", "refused")
    )
    click.echo(f"  missed {missed}, of them refused {refused}")
    if outcome.against_old is not None:
        click.echo(f"  {outcome.against_old.words()}")
    for note in notes:
        click.echo(note)
    if written is not None:
        click.echo(f"{written}: written; `fairgate policy set learned --option learned_table={written}`")


def differences(actions: Actions) -> str:
    usual = structs.asdict(HYBRID)
    changed = [
        f"{name} {value:g} (hybrid: {usual[name]:g})"
        for name, value in structs.asdict(actions).items()
        if value != usual[name]
    ]
    return ", ".join(changed) or "none"


def _states(change: TableChange) -> str:
    return "all" if len(change.states) == NUM_STATES else "; ".join(map(words, change.states))
