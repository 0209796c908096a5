"""Do our plain numbers say what the library's own counters and histograms would?"""

from __future__ import annotations

import random
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.domain.estimate import Times
from gateway.metrics.registry import Metrics
from gateway.metrics.requests import BUCKETS_S, EndedRequests

Sample = tuple[str, tuple[tuple[str, str], ...]]
TIERS = ("interactive", "standard", "batch")
OUTCOMES = ("completed", "cancelled", "refused")


def samples(registry: CollectorRegistry) -> dict[Sample, float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


class Plain:
    """The library's, each with its lock."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("fairgate_requests", "-", ["outcome", "tier"], registry=registry)
        self.tokens = Counter("fairgate_tokens", "-", ["kind", "tier"], registry=registry)
        self.cost = Counter("fairgate_cost_nanousd", "-", ["tier"], registry=registry)
        self.wait, self.ttft, self.e2e = (
            Histogram(f"fairgate_{name}_seconds", "-", ["tier"], buckets=BUCKETS_S, registry=registry)
            for name in ("wait", "ttft", "e2e")
        )

    def add(self, outcome: str, tier: str, times: Times, tokens: tuple[int, int], cost: int) -> None:
        self.requests.labels(outcome, tier).inc()
        self.tokens.labels("input", tier).inc(tokens[0])
        self.tokens.labels("output", tier).inc(tokens[1])
        self.cost.labels(tier).inc(cost)
        wait, ttft, e2e = (each.labels(tier) for each in (self.wait, self.ttft, self.e2e))
        if times.wait_s is not None:
            wait.observe(times.wait_s)
        if times.ttft_s is not None:
            ttft.observe(times.ttft_s)
        if times.e2e_s is not None and outcome == "completed":
            e2e.observe(times.e2e_s)


def times_of(wait_s: float | None, ttft_s: float | None, e2e_s: float | None) -> Times:
    return Times(0.0, dispatched_s=wait_s, first_token_s=ttft_s, ended_s=e2e_s)


def some_times(random_: random.Random) -> Iterable[float | None]:
    """On a bound, beside it, far beyond all of them, and none."""
    for _ in range(3):
        yield random_.choice([None, 0.0, *BUCKETS_S, random_.uniform(0, 1), random_.uniform(0, 2_000)])


def test_all_samples_are_those_of_the_librarys_own_metrics() -> None:
    random_ = random.Random(5)
    ended, plain = EndedRequests(), Plain()
    registry = CollectorRegistry()
    registry.register(ended)
    for _ in range(600):
        outcome, tier = random_.choice(OUTCOMES), random_.choice(TIERS)
        times = times_of(*some_times(random_))
        tokens, cost = (random_.randrange(500), random_.randrange(500)), random_.randrange(10**9)
        ended.add(outcome, tier, times, *tokens, cost)
        plain.add(outcome, tier, times, tokens, cost)
    found, expected = samples(registry), samples(plain.registry)
    assert len(found) > 3 * 3 * len(BUCKETS_S)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert abs(found[name] - value) <= 1e-9 * value, name


def test_a_tier_is_there_from_its_first_request_on() -> None:
    metrics = Metrics()
    labels = {"tier": "batch"}
    assert metrics.registry.get_sample_value("fairgate_cost_nanousd_total", labels) is None
    metrics.ended.add("completed", "batch", times_of(0.1, 0.2, 0.3), 7, 5, 11)
    assert metrics.registry.get_sample_value("fairgate_cost_nanousd_total", labels) == 11
    assert metrics.registry.get_sample_value("fairgate_ttft_seconds_bucket", labels | {"le": "0.1"}) == 0
    assert metrics.registry.get_sample_value("fairgate_ttft_seconds_bucket", labels | {"le": "0.25"}) == 1
