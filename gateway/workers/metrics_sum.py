"""The metrics of all workers of one port as one page. Pure.

Counters and histograms are summed, with what ended workers had last. What all workers see alike (an engine, a
shared queue, the audit) is the largest of them. Gauges are listed by rule: a new one belongs into the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.samples import Exemplar


def _named(words: str) -> frozenset[str]:
    return frozenset(f"fairgate_{word}" for word in words.split())


SUMMED = _named(
    """
    connections console_watchers password_hashes_open queued running settlements_pending traces_waiting
    """
)
"""Gauges of what each worker has of its own."""
MEAN = _named(
    """
    estimate_coverage length_coverage length_pinball_tokens wait_coverage
    """
)
"""Gauges of shares and means, each of a worker's own requests."""
LARGEST = _named(
    """
    alerts_firing audit_checkpoint_age_seconds audit_damaged audit_rows backup_age_seconds build_info
    control_holder control_knob control_mode engine_info engine_kv_blocks engine_preemptions engine_sequences
    engine_steps engine_traces_lost engine_up fair_share_lag_tokens holds_overdue ledger_drift_problems
    length_probe_error_tokens length_probe_judged length_probe_pinball_tokens length_probe_used
    length_used macro_state macro_state_outside macro_state_switches quota_store_local
    usage_fold_lag_seconds
    """
)
"""What all see alike, also counters of it."""


class Series(msgspec.Struct, array_like=True):
    name: str
    labels: dict[str, str]
    value: float
    exemplar: Any = None


class Family(msgspec.Struct, array_like=True):
    name: str
    documentation: str
    type: str
    unit: str
    series: list[Series]

    @property
    def is_added(self) -> bool:
        """A counter or histogram that goes on when its worker has ended."""
        return self.type != "gauge" and self.name not in LARGEST


def families_of(registry: CollectorRegistry) -> list[Family]:
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            metric.unit,
            [Series(each.name, each.labels, float(each.value), each.exemplar) for each in metric.samples],
        )
        for metric in registry.collect()
    ]


def merged(pages: Sequence[Iterable[Family]], ended: Sequence[Iterable[Family]] = ()) -> list[Family]:
    """`pages`: of living workers; `ended`: what others had last."""
    found: dict[str, Family] = {}
    series: dict[str, dict[tuple[str, ...], list[Series]]] = {}
    for is_ended, page in [(False, page) for page in pages] + [(True, page) for page in ended]:
        for family in page:
            if is_ended and not family.is_added:
                continue
            found.setdefault(family.name, family)
            lines = series.setdefault(family.name, {})
            for each in family.series:
                lines.setdefault((each.name, *map("=".join, each.labels.items())), []).append(each)
    return [
        msgspec.structs.replace(family, series=[_one(family, same) for same in series[family.name].values()])
        for family in found.values()
    ]


def _one(family: Family, same: Sequence[Series]) -> Series:
    values = [each.value for each in same]
    if family.is_added or family.name in SUMMED:
        value = sum(values)
    elif family.name in MEAN:
        value = sum(values) / len(values)
    else:
        value = max(values)
    exemplars = [each.exemplar for each in same if each.exemplar is not None]
    latest = max(exemplars, key=lambda exemplar: exemplar[2] or 0.0, default=None)
    return Series(same[0].name, same[0].labels, value, latest)


@dataclass(frozen=True, slots=True)
class MergedRegistry:
    """What an exposition is made of."""

    families: Iterable[Family]

    def collect(self) -> Iterable[Metric]:
        for family in self.families:
            metric = Metric(family.name, family.documentation, family.type, family.unit)
            for each in family.series:
                exemplar = None if each.exemplar is None else Exemplar(*each.exemplar)
                metric.add_sample(each.name, each.labels, each.value, None, exemplar)
            yield metric
