"""Table of the budget benchmark."""

from __future__ import annotations

from typing import Any

import click

from ops.bench.budgets.audit import KEYS
from ops.reporting import Report, cell

NOTED = (
    "tokens_per_s",
    "served",
    "refused",
    "cut",
    "left",
    "replays",
    "serving_again_s",
    "uncertain_tokens",
    "unseen_tokens",
    "pages",
)


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """By heading; a figure that was not taken is a dash."""
    return {
        "scenario": row["scenario"],
        **{key.split("_")[0]: row.get(key) for key in KEYS},
        "admitted": cell(row.get("admitted_of_admissible"), ".2f"),
        "at once": cell(row.get("admitted_at_once"), ".2f"),
        "charged": row.get("charged_tokens"),
        "s": f"{row['took_s']:.0f}",
        "": "ok" if row["ok"] else "BROKEN",
    }


def show(report: dict[str, Any]) -> None:
    """The table for people; below it broken requirements and further counts."""
    rows = report["scenarios"]
    cells = [_row(row) for row in rows]
    Report("Budgets through crashes", [(heading, heading) for heading in cells[0]], cells).show()
    for row in rows:
        if noted := [f"{name} {row[name]}" for name in NOTED if row.get(name)]:
            click.echo(f"  {row['scenario']}: {', '.join(noted)}")
    for row in rows:
        for problem in row["broken"]:
            click.echo(f"  BROKEN {row['scenario']}: {problem}")
    verdict = "the contract was kept" if report["ok"] else "THE CONTRACT WAS BROKEN"
    click.echo(f"{len(rows)} scenarios in {report['seconds']:.0f} s: {verdict}")
