"""What policies and their options do, in words; and what a what-if said of one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.scheduling.options import OPTIONS
from engine.scheduling.policy import COMPOSED_BY
from gateway.console import formats
from gateway.console.pages.policy.what_if_report import part_words
from gateway.domain.what_if import RunState, WhatIfRun

SAYS = {
    "static": "Runs requests in fixed batches: nobody joins a batch that has started.",
    "dynamic": "Collects requests for a moment, then runs them as one fixed batch.",
    "buckets": "Runs requests of similar length together.",
    "fcfs": "First come, first served. One tenant's flood delays everybody.",
    "hrrn": "Prefers requests that have waited long for their size, so short ones pass long ones.",
    "sjf": "The shortest predicted answer goes first; long waits count, too.",
    "srpt": "The shortest predicted rest goes first, and interrupts longer answers.",
    "las": "Whoever has got the least so far goes first: short answers pass long ones without a prediction.",
    "mlfq": "Like las, in levels, so that long answers do not starve.",
    "priority": "Scores tier, urgency, length and history; the best score goes first.",
    "edf": "The earliest deadline goes first.",
    "drr": "Tenants take turns of equal size, by weight.",
    "dlpm": "Like drr; within a tenant's turn, requests whose prompt is already cached go first.",
    "vtc": "The tenant with the least service for its weight goes first: a flood delays only itself.",
    "hybrid": "Tiers in order; in a tier the tenant with the least service for its weight; within a tenant"
    " short requests pass long ones.",
    "table": "Starts batches when a solved table says so.",
    "learned": "Like hybrid, with settings that a learned table chooses for the current load.",
}
_UNITS = {"_s": "seconds", "_permille": "thousandths", "_tokens": "tokens", "_ratio": "ratio"}
_OTHER_UNITS = {
    "max_num_partial_prefills": "prompts",
    "max_long_partial_prefills": "prompts",
    "long_prefill_token_threshold": "tokens",
    "batch_size": "requests",
    "slots": "tokens a step",
    "max_displacements": "times",
}
KNOB_UNITS = {
    "admission": "times the expected time; 0: off",
    "batch_cap": "share of an engine's requests",
    "token_budget": "share of a step's tokens",
    "lookahead": "requests",
    "ageing": "times the set times",
    "early_refusal": "times the expected wait",
    "batch_share": "share of an engine",
    "reserve_quantile": "quantile of the output",
    "prefix_weight": "weight",
    "quota": "share of the way to the ceiling",
    "slots": "share of an engine's requests",
    "partial_prefills": "prompts",
    "long_share": "share of an engine",
    "reserve_permille": "thousandths of the output",
}


def unit_of(option: str) -> str:
    """Empty: a word or a path."""
    found = (unit for suffix, unit in _UNITS.items() if option.endswith(suffix))
    return _OTHER_UNITS.get(option) or next(found, "")


def knobs() -> list[dict[str, Any]]:
    """Every option with its unit, its values and what it does."""
    return [
        {
            "name": one.name,
            "unit": unit_of(one.name) or "–",
            "default": "the policy's own" if one.default is None else one.default,
            "takes": one.accepts,
            "help": one.help.replace("`", ""),
            "only_with": ", ".join(COMPOSED_BY.get(one.name, ())),
        }
        for one in OPTIONS.values()
    ]


def words_of(policy: Mapping[str, Any]) -> str:
    """`vtc (slots=16 tokens a step)`."""
    options = ", ".join(
        " ".join(filter(None, (f"{name}={value}", unit_of(name))))
        for name, value in policy.get("options", {}).items()
    )
    return f"{policy['policy']} ({options})" if options else str(policy["policy"])


def what_if_said(runs: Iterable[WhatIfRun], name: str, options: Mapping[str, Any]) -> str:
    """How the newest what-if of this policy compares with its baseline; empty: there was none."""
    for run in runs:
        rows = run.report.get("policies", ()) if run.state is RunState.DONE else ()
        baseline = next((row for row in rows if row.get("is_baseline")), run.report.get("recorded"))
        for row in rows:
            if not row.get("is_baseline") and (row["policy"], dict(row["options"])) == (name, dict(options)):
                return _compared(run, row, baseline)
    return ""


def _compared(run: WhatIfRun, row: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> str:
    before = None if baseline is None else baseline["attainment"]
    after = row["attainment"]
    if after is None or before is None:
        return ""
    worse = " That is worse than what you have." if after < before else ""
    of = f"The what-if of {formats.at(run.started_us)}"
    return f"{of}: {part_words(after)} in time instead of {part_words(before)}.{worse}"
