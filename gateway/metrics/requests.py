"""What does Prometheus get to see of the requests that held budget and came to their end?

Plain numbers, which one event loop adds to and which are put into words when somebody asks: of the library's
own counters each takes a lock, and a request would move ten of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.domain.estimate import Times

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_BOUNDS = [*(str(float(bound)) for bound in BUCKETS_S), "+Inf"]


@dataclass(slots=True)
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * len(_BOUNDS))
    """By bucket; the last one has no bound."""
    sum_s: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds


@dataclass(slots=True)
class _OfTier:
    outcomes: dict[str, int] = field(default_factory=dict)
    input_tokens: int = 0
    output_tokens: int = 0
    cost_nanousd: int = 0
    wait: _Histogram = field(default_factory=_Histogram)
    ttft: _Histogram = field(default_factory=_Histogram)
    e2e: _Histogram = field(default_factory=_Histogram)


class EndedRequests(Collector):
    """`fairgate_requests_total{outcome, tier}`, `fairgate_tokens_total{kind, tier}`,
    `fairgate_cost_nanousd_total{tier}` and three histograms by tier. Use from one event loop."""

    def __init__(self) -> None:
        self._by_tier: dict[str, _OfTier] = {}

    def add(
        self, outcome: str, tier: str, times: Times, input_tokens: int, output_tokens: int, cost_nanousd: int
    ) -> None:
        """One more, with what it was charged."""
        of_tier = self._by_tier.get(tier)
        if of_tier is None:
            of_tier = self._by_tier[tier] = _OfTier()
        of_tier.outcomes[outcome] = of_tier.outcomes.get(outcome, 0) + 1
        of_tier.input_tokens += input_tokens
        of_tier.output_tokens += output_tokens
        of_tier.cost_nanousd += cost_nanousd
        if (wait_s := times.wait_s) is not None:
            of_tier.wait.observe(wait_s)
        if (ttft_s := times.ttft_s) is not None:
            of_tier.ttft.observe(ttft_s)
        if outcome == "completed" and (e2e_s := times.e2e_s) is not None:
            of_tier.e2e.observe(e2e_s)

    def collect(self) -> Iterator[Metric]:
        """The families, as they are now."""
        requests = CounterMetricFamily(
            "fairgate_requests", "Requests that came to an end.", labels=["outcome", "tier"]
        )
        tokens = CounterMetricFamily("fairgate_tokens", "Tokens charged.", labels=["kind", "tier"])
        cost = CounterMetricFamily("fairgate_cost_nanousd", "Nano-dollars charged.", labels=["tier"])
        for tier, of_tier in self._by_tier.items():
            for outcome, count in of_tier.outcomes.items():
                requests.add_metric([outcome, tier], count)
            tokens.add_metric(["input", tier], of_tier.input_tokens)
            tokens.add_metric(["output", tier], of_tier.output_tokens)
            cost.add_metric([tier], of_tier.cost_nanousd)
        yield from (requests, tokens, cost)
        by_tier = self._by_tier.items()
        yield _family(
            "fairgate_wait_seconds", "Arrival to dispatch.", ((tier, each.wait) for tier, each in by_tier)
        )
        yield _family(
            "fairgate_ttft_seconds", "Arrival to first token.", ((tier, each.ttft) for tier, each in by_tier)
        )
        yield _family("fairgate_e2e_seconds", "Arrival to end.", ((tier, each.e2e) for tier, each in by_tier))


def _family(name: str, about: str, histograms: Iterable[tuple[str, _Histogram]]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, about, labels=["tier"])
    for tier, each in histograms:
        buckets = list(zip(_BOUNDS, accumulate(each.counts), strict=True))
        family.add_metric([tier], buckets, each.sum_s)
    return family
