"""A what-if's report as its page shows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.console import formats
from gateway.domain.what_if import RunState, WhatIfRun

MOST_TENANTS = 20
QUANTILES = ("p50", "p90", "p99")
_OF_TENANT = (("ttft_s", "p50"), ("ttft_s", "p99"), ("e2e_s", "p50"), ("e2e_s", "p99"))
_OF_ALL = tuple((name, quantile) for name in ("ttft_s", "e2e_s") for quantile in QUANTILES)


Row = dict[str, Any]


def time_words(value_s: float | None) -> str:
    """None means infinite."""
    return "never" if value_s is None else formats.seconds(value_s)


def part_words(part: float | None) -> str:
    return formats.NONE if part is None else f"{100 * part:.1f} %"


def name_of(row: Mapping[str, Any]) -> str:
    return f"baseline: {row['policy']}" if row.get("is_baseline") else str(row["policy"])


def rows_of(report: Mapping[str, Any]) -> list[Row]:
    """Each simulation and what happened, with `name` (`as it was`, `baseline: vtc`, `fcfs`), `policy` (empty:
    it cannot be applied) and `number` (within the report; None for what happened)."""
    recorded = [_row(report["recorded"], None)] if "recorded" in report else []
    return recorded + [_row(policy, number) for number, policy in enumerate(report["policies"])]


def tenants_of(report: Mapping[str, Any]) -> list[Row]:
    """The tenants with the most requests."""
    rows = [report["recorded"], *report["policies"]] if "recorded" in report else report["policies"]
    names = list(dict.fromkeys(name for row in rows for name in row["tenants"]))[:MOST_TENANTS]
    return [
        its
        | {
            "tenant": tenant,
            "name": name_of(row),
            "times": [time_words(its[name][quantile]) for name, quantile in _OF_TENANT],
            "attainment": part_words(its["attainment"]),
        }
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


def verdict_of(report: Mapping[str, Any]) -> str:
    """The best of what was tried against the baseline, in a sentence; empty: there is nothing to compare."""
    rows = report["policies"]
    baseline = next((row for row in rows if row.get("is_baseline")), report.get("recorded"))
    tried = [row for row in rows if not row.get("is_baseline") and row["attainment"] is not None]
    if baseline is None or baseline["attainment"] is None or not tried:
        return ""
    before, best = baseline["attainment"], max(tried, key=lambda row: row["attainment"])
    after, name = best["attainment"], best["policy"]
    figures = f"{name} would have answered {part_words(after)} in time instead of {part_words(before)}"
    if part_words(after) == part_words(before):
        return f"Nothing here beats what you have: {figures}."
    return f"Nothing here beats what you have: at best {figures}." if after < before else f"{figures}."


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
        return "reading the recorded traffic"
    what = "the baseline" if run.number == 1 else f"simulation {run.number - 1}"
    return f"{what}: {run.policy}, {100 * min(run.part, 1.0):.0f} %"


def otherwise_of(run: WhatIfRun) -> str:
    words = list(run.report.get("overrides") or ())
    words += [f"policy {name}" for name in run.asked.policies]
    return "; ".join(words) or "nothing: only the baseline"


def _row(row: Mapping[str, Any], number: int | None) -> Row:
    can_apply = number is not None and not row.get("is_baseline")
    return {
        **row,
        "name": name_of(row),
        "policy": row["policy"] if can_apply else "",
        "number": number,
        "times": [time_words(row[name][quantile]) for name, quantile in _OF_ALL],
        "attainment": part_words(row["attainment"]),
    }
