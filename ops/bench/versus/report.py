"""Tables, notes and charts of a report, for people, for the README and for the documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from ops.bench.versus.figures import LINES, markdown
from ops.pages.charts import Bar, BarChart
from ops.reporting import Report, number

PART_COLUMNS: dict[str, Sequence[tuple[str, ...]]] = {
    "leases": (("case", "leases"), ("measured", "measured"), ("must_be", "must be"), ("ok", "ok")),
    "shares": (
        ("case", "through the gateway"), ("ratio", "ratio", ".3f"), ("fluid_ratio", "fluid share", ".3f"),
        ("furthest_off", "furthest off, any 1,000 steps", ".2%"),
        ("longest_first_token_s", "longest first token, s", ".2f"), ("tokens_per_s", "tokens/s"),
        ("ok", "ok"),
    ),
    "limits": (
        ("case", "50 at once"), ("limit", "limit"), ("delivered_tokens", "delivered"),
        ("charged_tokens", "charged"), ("overshoot_tokens", "overshoot"),
        ("not_charged_tokens", "not charged"), ("ok", "ok"),
    ),
    "caches": (("prompt_tokens", "prompt"), ("cached_tokens", "found in the cache"), ("ok", "ok")),
    "texts": (("case", "as stock vLLM's"), ("equal", "equal"), ("of", "of"), ("ok", "ok")),
    "speed": (
        ("case", "tokens/s without a gateway"), ("stock_tokens_per_s", "stock", ",.0f"),
        ("plugin_tokens_per_s", "plug-in", ",.0f"), ("ratios", "ratio of each round"),
    ),
}  # fmt: skip


def notes(report: Mapping[str, Any]) -> list[str]:
    """Notes for judging the table: times, refusals, fixed limits, explanations, the gateways' load."""
    lines = [about(report)]
    for name, rows in report["stacks"].items():
        lines.append(f"{name}: {_measured(rows)}")
        if "fixed_flood_ratio" in rows[0]:
            lines.append(f"{name}, {_fixed(rows)}")
        if words := report["summary"][name]["why_words"]:
            lines.append(f"{name} says why: {words}")
    return lines + [f"INVALID {line}" for line in report["invalid"]]


def about(report: Mapping[str, Any]) -> str:
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
    if report["stacks"]:
        click.echo(markdown(report["summary"]))
    for part, columns in PART_COLUMNS.items():
        if rows := report.get(part):
            Report(part, columns, rows).show()
    for line in notes(report):
        click.echo(f"  {line}")


def versus_charts(report: Mapping[str, Any]) -> list[BarChart]:
    def bar(name: str, number: int, figure: Mapping[str, float], spec: str) -> Bar:
        median = figure["median"]
        return Bar(name, median, format(median, spec), number, figure["least"], figure["most"])

    stacks = list(enumerate(report["summary"].items()))
    return [
        BarChart(
            line.title,
            [bar(name, place, stack[line.key], line.spec) for place, (name, stack) in stacks],
            float(line.wanted),
        )
        for line in LINES
        if stacks
    ]
