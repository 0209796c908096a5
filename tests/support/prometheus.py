"""Checks of metrics pages by Prometheus's own tool, and what such a page contains."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator
from typing import Any

import promql_parser
import pytest
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as prometheus_text
from prometheus_client.registry import Collector, CollectorRegistry

OPEN_METRICS = "application/openmetrics-text"
TEXT = "text/plain"
Series = tuple[str, frozenset[tuple[str, str]]]
"""Name and labels."""
WITHOUT_PROMTOOL = "promtool is not installed: apt-get install --no-install-recommends prometheus"


def promtool(*arguments: str, stdin: str = "", silent: bool = True) -> str:
    """What `promtool` says; with `silent` nothing where all is well. Skips the test where there is none."""
    if shutil.which("promtool") is None:
        pytest.skip(WITHOUT_PROMTOOL)
    done = subprocess.run(["promtool", *arguments], input=stdin, capture_output=True, text=True, timeout=60)
    return "" if silent and done.returncode == 0 and not done.stderr else done.stdout + done.stderr


OF_PROMETHEUS = {"job", "instance", "le"}
"""Labels that it adds to what it scrapes, and that of buckets."""


class _Page(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def lint(page: str, *, is_open_metrics: bool) -> str:
    """What `promtool check metrics` finds. It reads Prometheus's text format only: OpenMetrics is read by the
    strict parser of its reference implementation, and what that has understood is checked."""
    if is_open_metrics:
        registry = CollectorRegistry()
        registry.register(_Page(open_metrics(page)))
        page = generate_latest(registry).decode()
    return promtool("check", "metrics", stdin=page)


def series(page: str, *, is_open_metrics: bool = False) -> set[Series]:
    """All series of a page."""
    families = open_metrics(page) if is_open_metrics else prometheus_text(page)
    return {
        (sample.name, frozenset(sample.labels.items())) for family in families for sample in family.samples
    }


def value(page: str, name: str, **labels: str) -> float | None:
    """The sum of the samples of a name with these labels, among others; None: there is none."""
    found = [
        sample.value
        for family in prometheus_text(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return sum(found) if found else None


def selected(query: str) -> list[tuple[str, set[str], dict[str, str]]]:
    """What a query asks for: of each selector the metric, the labels that it or an aggregation around it
    names, and of these the values that it wants. Raises `ValueError` for what is no query."""
    return list(_selected(promql_parser.parse(query), frozenset()))


def _selected(node: Any, labels: frozenset[str]) -> Iterator[tuple[str, set[str], dict[str, str]]]:
    if isinstance(node, promql_parser.VectorSelector):
        matchers = node.matchers.matchers
        equal = {each.name: each.value for each in matchers if each.op == promql_parser.MatchOp.Equal}
        yield node.name, {*labels, *(each.name for each in matchers)}, equal
        return
    if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
        assert str(node.modifier).startswith("by"), "others have no labels to be looked for"
        labels |= set(node.modifier.labels)
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        if (inner := getattr(node, name, None)) is not None:
            yield from _selected(inner, labels)
    for inner in getattr(node, "args", ()):
        yield from _selected(inner, labels)


def missing_on(page: str, query: str) -> list[str]:
    """What a query asks for and the page does not have: metrics, labels, and values of labels."""
    found: dict[str, list[dict[str, str]]] = {}
    for name, labels in series(page):
        found.setdefault(name, []).append(dict(labels))
    lacking = []
    for metric, labels, wanted in selected(query):
        those = found.get(metric, [])
        own = labels - OF_PROMETHEUS
        if not those:
            lacking.append(metric)
        elif not any(own <= each.keys() and wanted.items() <= each.items() for each in those):
            lacking.append(f"{metric} with {sorted(own)} and {wanted}")
    return lacking
