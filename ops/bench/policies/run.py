"""The benchmarks of scheduling policies, by name.

All on virtual time and seeded: the same code gives the same figures on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from engine.scheduling.policy import POLICIES, UnknownPolicy
from ops.bench.policies import batches, compose, fairness, learned, mixed, templates, win_and_lose
from ops.reporting import Report


@dataclass(frozen=True, slots=True)
class PolicyBenchmark:
    """One benchmark."""

    name: str
    run: Callable[[Collection[str]], Report]
    policies: Sequence[str]
    """Compared unless others are asked for."""


_CASES = (
    PolicyBenchmark("mixed", mixed.mixed, mixed.MIXED_POLICIES),
    PolicyBenchmark("predictions", mixed.with_predictions, mixed.PREDICTED),
    PolicyBenchmark("contests", win_and_lose.contests, sorted(POLICIES)),
    PolicyBenchmark("composition", compose.composition, ()),
    PolicyBenchmark("batching", batches.batching, ("static", "dynamic", "fcfs")),
    PolicyBenchmark("buckets", batches.buckets, ("fcfs", "buckets")),
    PolicyBenchmark("templates", templates.templates, ()),
    PolicyBenchmark("learned", learned.learned, sorted(POLICIES)),
    PolicyBenchmark("published", fairness.published, fairness.FAIRNESS_POLICIES),
)
CASES = {case.name: case for case in _CASES}
"""By name."""


def run_cases(names: Sequence[str], policies: Sequence[str]) -> dict[str, Report]:
    """Runs the named cases (none: all), for the named policies (none: each case's own).

    Raises ValueError for a case that does not exist, `UnknownPolicy` for a policy.
    """
    for name in names:
        if name not in CASES:
            raise ValueError(f"no case {name!r}; there are {', '.join(CASES)}")
    for policy in policies:
        if policy not in POLICIES:
            raise UnknownPolicy(f"no policy {policy!r}; there are {', '.join(sorted(POLICIES))}")
    return {
        case.name: case.run(policies or case.policies) for case in _CASES if not names or case.name in names
    }


def as_json(reports: dict[str, Report]) -> dict[str, Any]:
    """All reports."""
    return {
        "cases": {name: report.as_json() for name, report in reports.items()},
        "ok": all(report.ok for report in reports.values()),
    }


def show(reports: dict[str, Report]) -> None:
    """The tables for people."""
    for report in reports.values():
        report.show()
        print()
