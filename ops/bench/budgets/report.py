"""Table of the budget benchmark."""

from __future__ import annotations

from typing import Any

import click

from ops.bench.budgets.audit import KEYS
from ops.reporting import table

HEADS = (
    "scenario",
    "overshoot",
    "drift",
    "double",
    "leaked",
    "cancel",
    "admitted",
    "at once",
    "charged",
    "s",
    "",
)
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
)


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table; a figure that was not taken is a dash."""
    figures = [str(row.get(key, "-")) for key in KEYS]
    admitted, at_once = row.get("admitted_of_admissible"), row.get("admitted_at_once")
    return [
        row["scenario"],
        *figures,
        "-" if admitted is None else f"{admitted:.2f}",
        "-" if at_once is None else f"{at_once:.2f}",
        str(row.get("charged_tokens", "-")),
        f"{row['took_s']:.0f}",
        "ok" if row["ok"] else "BROKEN" if "peer" not in row else "exceeded",
    ]


def show(report: dict[str, Any]) -> None:
    """The table for people; below it broken requirements and further counts."""
    rows = report["scenarios"]
    table("Budgets through crashes", HEADS, [cells(row) for row in rows])
    for row in rows:
        if noted := [f"{name} {row[name]}" for name in NOTED if row.get(name)]:
            click.echo(f"  {row['scenario']}: {', '.join(noted)}")
    for row in rows:
        for problem in row["broken"]:
            click.echo(f"  BROKEN {row['scenario']}: {problem}")
    verdict = "the contract was kept" if report["ok"] else "THE CONTRACT WAS BROKEN"
    click.echo(f"{len(rows)} scenarios in {report['seconds']:.0f} s: {verdict}")
