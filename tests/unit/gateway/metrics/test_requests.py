"""Exposition of finished requests: names, types, help texts, labels, buckets and values."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.messages import DecodeShare
from gateway.domain.estimate import Times
from gateway.metrics.registry import Metrics
from gateway.metrics.requests import BUCKETS_S, EndedRequests

Sample = tuple[str, tuple[tuple[str, str], ...]]
TIERS = ("interactive", "standard", "batch")
OUTCOMES = ("completed", "cancelled", "refused")
BOUNDS = [*(str(float(bound)) for bound in BUCKETS_S), "+Inf"]


def samples(registry: CollectorRegistry) -> dict[Sample, float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


class Recount:
    """Every observation as it came, and the samples that follow from them."""

    def __init__(self) -> None:
        self.values: dict[Sample, float] = {}

    def add(self, outcome: str, tier: str, times: Times, tokens: tuple[int, int], cost: int) -> None:
        self._count("fairgate_requests_total", 1, outcome=outcome, tier=tier)
        for kind, amount in zip(("input", "output"), tokens, strict=True):
            self._count("fairgate_tokens_total", amount, kind=kind, tier=tier)
        self._count("fairgate_cost_nanousd_total", cost, tier=tier)
        self._observe("wait", times.wait_s, tier)
        self._observe("ttft", times.ttft_s, tier)
        self._observe("e2e", times.e2e_s if outcome == "completed" else None, tier)

    def _observe(self, name: str, seconds: float | None, tier: str) -> None:
        self._count(f"fairgate_{name}_seconds_count", seconds is not None, tier=tier)
        self._count(f"fairgate_{name}_seconds_sum", seconds or 0.0, tier=tier)
        for bound in BOUNDS:
            is_within = seconds is not None and seconds <= float(bound)
            self._count(f"fairgate_{name}_seconds_bucket", is_within, tier=tier, le=bound)

    def _count(self, name: str, amount: float, **labels: str) -> None:
        key = (name, tuple(sorted(labels.items())))
        self.values[key] = self.values.get(key, 0) + amount


def times_of(wait_s: float | None, ttft_s: float | None, e2e_s: float | None) -> Times:
    return Times(0.0, dispatched_s=wait_s, first_token_s=ttft_s, ended_s=e2e_s)


def some_times(random_: random.Random) -> Iterable[float | None]:
    """On a bound, beside it, far beyond all of them, and none."""
    for _ in range(3):
        yield random_.choice([None, 0.0, *BUCKETS_S, random_.uniform(0, 1), random_.uniform(0, 2_000)])


def test_every_request_is_in_its_samples_and_no_other() -> None:
    random_ = random.Random(5)
    ended, recount = EndedRequests(), Recount()
    registry = CollectorRegistry()
    registry.register(ended)
    for _ in range(600):
        outcome, tier = random_.choice(OUTCOMES), random_.choice(TIERS)
        times = times_of(*some_times(random_))
        tokens, cost = (random_.randrange(500), random_.randrange(500)), random_.randrange(10**9)
        ended.add(outcome, tier, times, *tokens, cost)
        recount.add(outcome, tier, times, tokens, cost)
    found = samples(registry)
    assert len(found) > 3 * 3 * len(BUCKETS_S)
    assert found.keys() == recount.values.keys(), "and no `_created` among them"
    for name, value in recount.values.items():
        assert abs(found[name] - value) <= 1e-9 * value, name


def test_families_keep_their_types_and_help_texts() -> None:
    registry = CollectorRegistry()
    registry.register(EndedRequests())
    lines = generate_latest(registry).decode().splitlines()
    assert list(pairwise(lines))[::2] == [
        (f"# HELP fairgate_{name} {about}", f"# TYPE fairgate_{name} {kind}")
        for name, about, kind in (
            ("requests_total", "Requests that came to an end.", "counter"),
            ("tokens_total", "Tokens charged.", "counter"),
            ("cost_nanousd_total", "Nano-dollars charged.", "counter"),
            (
                "decode_tokens_total",
                "Tokens by how they came: one each step (floor), or in turns by weight (turn).",
                "counter",
            ),
            (
                "decode_sat_out_steps_total",
                "Steps without a token, by who had them: its tenant's other sequences, other tenants, "
                "higher tiers.",
                "counter",
            ),
            ("wait_seconds", "Arrival to dispatch.", "histogram"),
            ("ttft_seconds", "Arrival to first token.", "histogram"),
            ("e2e_seconds", "Arrival to end.", "histogram"),
            (
                "before_line_seconds",
                "First byte to the queue, without the wait for its tenant's own limits.",
                "histogram",
            ),
        )
    ]


def test_a_tier_is_there_from_its_first_request_on() -> None:
    metrics = Metrics()
    labels = {"tier": "batch"}
    assert metrics.registry.get_sample_value("fairgate_cost_nanousd_total", labels) is None
    metrics.ended.add("completed", "batch", times_of(0.1, 0.2, 0.3), 7, 5, 11)
    assert metrics.registry.get_sample_value("fairgate_cost_nanousd_total", labels) == 11
    assert metrics.registry.get_sample_value("fairgate_ttft_seconds_bucket", labels | {"le": "0.1"}) == 0
    assert metrics.registry.get_sample_value("fairgate_ttft_seconds_bucket", labels | {"le": "0.25"}) == 1


def test_tokens_are_counted_by_the_way_they_came_and_steps_sat_out_by_cause() -> None:
    metrics = Metrics()
    for _ in range(2):
        metrics.ended.decoded("standard", DecodeShare(12, 8, 3, 40, 5, {"rival": 40}))
    read = metrics.registry.get_sample_value
    for way, tokens in (("floor", 24), ("turn", 16)):
        assert read("fairgate_decode_tokens_total", {"way": way, "tier": "standard"}) == tokens
    for cause, steps in (("own", 6), ("share", 80), ("tier", 10)):
        assert read("fairgate_decode_sat_out_steps_total", {"cause": cause, "tier": "standard"}) == steps
