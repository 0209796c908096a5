"""Table and notes of the comparison, for people and for the README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from ops.bench.versus.figures import markdown
from ops.reporting import number


def notes(report: Mapping[str, Any]) -> list[str]:
    """What is needed to judge the table: times, refusals, fixed limits, words, how busy the gateways were."""
    found = [about(report)]
    for name, rows in report["stacks"].items():
        found.append(f"{name}: {_measured(rows)}")
        if "fixed_flood_ratio" in rows[0]:
            found.append(f"{name}, {_fixed(rows)}")
        if words := report["summary"][name]["why_words"]:
            found.append(f"{name} says why: {words}")
    return found + [f"INVALID {line}" for line in report["invalid"]]


def about(report: Mapping[str, Any]) -> str:
    """Date, machine, versions, rounds."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    machine = report["machine"]
    return (
        f"{report['date']}, {machine['cpu']}, {machine['cores']} cores; {versions};"
        f" {report['rounds']} rounds in {report['seconds'] / 60:.0f} minutes;"
        f" {report['slots']} sequences a step everywhere"
    )


def _measured(rows: Sequence[Mapping[str, Any]]) -> str:
    alone, beside = (
        [f"{number(1000 * row[which]['p50'])}/{number(1000 * row[which]['p99'])}" for row in rows]
        for which in ("alone_s", "beside_s")
    )
    used = [f"{burst['used_of_limit']:.0%}" for row in rows for burst in row["limit_bursts"].values()]
    return (
        f"first token p50/p99 alone {', '.join(alone)} ms, beside {', '.join(beside)} ms;"
        f" tokens/s with 64 streams {_listed(rows, 'weights_tokens_per_s')};"
        f" used of the limit {', '.join(used)}; cores of the gateway {_listed(rows, 'gateway_cores')}"
    )


def _fixed(rows: Sequence[Mapping[str, Any]]) -> str:
    refused = f"{_listed(rows, 'fixed_quiet_refused')} of its own and {_listed(rows, 'fixed_flood_refused')}"
    return (
        "with fixed limits a key (one request less at once than fit; tokens in the ratio 1:3, together the"
        f" speed that was measured): beside a flood {_listed(rows, 'fixed_flood_ratio', '.1f')} times its own"
        f" alone, requests refused: {refused} of the flood's;"
        f" weights 1:{_listed(rows, 'fixed_weights_ratio', '.2f')} at"
        f" {_listed(rows, 'fixed_weights_tokens_per_s')} tokens/s"
    )


def _listed(rows: Sequence[Mapping[str, Any]], key: str, spec: str = ",") -> str:
    return ", ".join(format(row[key], spec) for row in rows)


def show(report: Mapping[str, Any]) -> None:
    """Prints the table, as the README has it, and the notes."""
    click.echo(markdown(report["summary"]))
    for line in notes(report):
        click.echo(f"  {line}")
