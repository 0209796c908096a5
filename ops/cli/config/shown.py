"""A plan as people read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

MOST_UNNAMED = 50
"""Lines; `--json` has all."""


def show_plan(plan: Mapping[str, Any]) -> None:
    """One line for each step, below it what changes, and at the end what the file does not name."""
    for step in plan["steps"]:
        click.echo(f"{step['act']:<20} {step['subject']}")
        for name, pair in step["changes"].items():
            click.echo(f"    {name}: {_value(pair['before'])} -> {_value(pair['after'])}")
    if not plan["steps"]:
        click.echo("no changes")
    unnamed = plan["unnamed"]
    for each in unnamed[:MOST_UNNAMED]:
        click.echo(f"not in the file: {each}")
    if len(unnamed) > MOST_UNNAMED:
        click.echo(f"not in the file: {len(unnamed) - MOST_UNNAMED} more")


def _value(value: Any) -> str:
    return "-" if value is None else json.dumps(value, ensure_ascii=False)
