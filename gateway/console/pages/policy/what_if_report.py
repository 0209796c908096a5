"""A what-if's report as its page shows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.console import formats
from gateway.domain.what_if import RunState, WhatIfRun

MOST_TENANTS = 20
QUANTILES = ("p50", "p90", "p99")
_OF_TENANT = (("ttft_s", "p50"), ("ttft_s", "p99"), ("e2e_s", "p50"), ("e2e_s", "p99"))
_OF_ALL = tuple((name, quantile) for name in ("ttft_s", "e2e_s") for quantile in QUANTILES)


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One policy's simulation, or what happened."""

    name: str
    """`as it was`, `baseline: vtc`, `fcfs`."""
    policy: str
    """Empty for what happened."""
    number: int | None
    """Within the report; None for what happened."""
    requests: int
    refused: int
    times: Sequence[str]
    attainment: str
    preemptions: int | None


@dataclass(frozen=True, slots=True)
class ComparedTenant:
    """One tenant in one simulation, or in what happened."""

    tenant: str
    name: str
    requests: int
    refused: int
    times: Sequence[str]
    attainment: str


def time_words(value_s: float | None) -> str:
    """None means infinite."""
    return "never" if value_s is None else formats.seconds(value_s)


def part_words(part: float | None) -> str:
    return formats.NONE if part is None else f"{100 * part:.1f} %"


def name_of(row: Mapping[str, Any]) -> str:
    return f"baseline: {row['policy']}" if row.get("is_baseline") else str(row["policy"])


def rows_of(report: Mapping[str, Any]) -> list[ComparedRow]:
    recorded = [_row(report["recorded"], None)] if "recorded" in report else []
    return recorded + [_row(policy, number) for number, policy in enumerate(report["policies"])]


def tenants_of(report: Mapping[str, Any]) -> list[ComparedTenant]:
    """The tenants with the most requests."""
    rows = [report["recorded"], *report["policies"]] if "recorded" in report else report["policies"]
    names = list(dict.fromkeys(name for row in rows for name in row["tenants"]))[:MOST_TENANTS]
    return [
        ComparedTenant(
            tenant,
            name_of(row),
            its["requests"],
            its["refused"],
            [time_words(its[name][quantile]) for name, quantile in _OF_TENANT],
            part_words(its["attainment"]),
        )
        for tenant in names
        for row in rows
        if (its := row["tenants"].get(tenant)) is not None
    ]


def bars_of(report: Mapping[str, Any]) -> list[tuple[str, float, str, str]]:
    """TTFT p90 of each row: name, seconds, colour, words. Infinite ones have no bar."""
    rows = [report["recorded"], *report["policies"]] if "recorded" in report else report["policies"]
    return [
        (
            name_of(row),
            row["ttft_s"]["p90"] or 0.0,
            f"fill-{1 + number % 8}",
            time_words(row["ttft_s"]["p90"]),
        )
        for number, row in enumerate(rows)
    ]


def accuracy_of(report: Mapping[str, Any]) -> list[str]:
    """How far the baseline is off, figure by figure."""
    lines = []
    for row in report.get("baseline") or ():
        name = row["figure"].replace("_", " ").replace("ttft", "TTFT").replace("e2e", "E2E")
        off = "never came" if row["off"] is None else f"{100 * row['off']:+.1f} %"
        error = row["stated_error"]
        stated = "not known of so few requests" if error is None else f"{100 * error:.1f} %"
        lines.append(f"{name}: {off} (stated error: {stated})")
    return lines


def progress_words(run: WhatIfRun) -> str:
    if run.state is not RunState.RUNNING:
        return run.state.value
    if not run.number:
        return "reads what was recorded"
    what = "the baseline" if run.number == 1 else f"simulation {run.number - 1}"
    return f"{what}: {run.policy}, {100 * min(run.part, 1.0):.0f} %"


def otherwise_of(run: WhatIfRun) -> str:
    words = list(run.report.get("overrides") or ())
    words += [f"policy {name}" for name in run.asked.policies]
    return "; ".join(words) or "nothing: the baseline alone"


def _row(row: Mapping[str, Any], number: int | None) -> ComparedRow:
    can_apply = number is not None and not row.get("is_baseline")
    return ComparedRow(
        name_of(row),
        row["policy"] if can_apply else "",
        number,
        row["requests"],
        row["refused"],
        [time_words(row[name][quantile]) for name, quantile in _OF_ALL],
        part_words(row["attainment"]),
        row["preemptions"],
    )
