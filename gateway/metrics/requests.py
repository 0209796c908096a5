"""Prometheus counters and histograms of finished requests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from prometheus_client import Counter
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine.messages import DecodeShare
from gateway.domain.estimate import Times
from gateway.metrics.loop_histogram import LoopHistogram

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class EndedRequests(Collector):
    """`fairgate_requests_total{outcome, tier}`, `fairgate_tokens_total{kind, tier}`,
    `fairgate_cost_nanousd_total{tier}`, `fairgate_decode_tokens_total{way, tier}`,
    `fairgate_decode_sat_out_steps_total{cause, tier}` and four histograms by tier. A tier has those of
    waits and latencies from its first request on."""

    def __init__(self) -> None:
        requests = Counter(
            "fairgate_requests", "Requests that came to an end.", ["outcome", "tier"], registry=None
        )
        tokens = Counter("fairgate_tokens", "Tokens charged.", ["kind", "tier"], registry=None)
        cost = Counter("fairgate_cost_nanousd", "Nano-dollars charged.", ["tier"], registry=None)
        decoded = Counter(
            "fairgate_decode_tokens",
            "Tokens by how they came: one each step (floor), or in turns by weight (turn).",
            ["way", "tier"],
            registry=None,
        )
        sat_out = Counter(
            "fairgate_decode_sat_out_steps",
            "Steps without a token, by who had them: its tenant's other sequences, other tenants, "
            "higher tiers.",
            ["cause", "tier"],
            registry=None,
        )
        wait, ttft, e2e, before_line = (
            LoopHistogram(f"fairgate_{name}_seconds", about, ["tier"], buckets=BUCKETS_S, registry=None)
            for name, about in (
                ("wait", "Arrival to dispatch."),
                ("ttft", "Arrival to first token."),
                ("e2e", "Arrival to end."),
                ("before_line", "First byte to the queue, without the wait for its tenant's own limits."),
            )
        )
        self._metrics = (requests, tokens, cost, decoded, sat_out, wait, ttft, e2e, before_line)
        self._before_line = cache(before_line.labels)
        self._decoded, self._sat_out = cache(decoded.labels), cache(sat_out.labels)
        # Cached: `labels` takes a lock and builds strings, at half of a request's cost here.
        self._requests, self._tokens, self._cost = (
            cache(requests.labels),
            cache(tokens.labels),
            cache(cost.labels),
        )
        self._wait, self._ttft, self._e2e = cache(wait.labels), cache(ttft.labels), cache(e2e.labels)

    def add(
        self, outcome: str, tier: str, times: Times, input_tokens: int, output_tokens: int, cost_nanousd: int
    ) -> None:
        self._requests(outcome, tier).inc()
        self._tokens("input", tier).inc(input_tokens)
        self._tokens("output", tier).inc(output_tokens)
        self._cost(tier).inc(cost_nanousd)
        wait, ttft, e2e = self._wait(tier), self._ttft(tier), self._e2e(tier)
        if (wait_s := times.wait_s) is not None:
            wait.observe(wait_s)
        if (ttft_s := times.ttft_s) is not None:
            ttft.observe(ttft_s)
        if outcome == "completed" and (e2e_s := times.e2e_s) is not None:
            e2e.observe(e2e_s)

    def lined_up(self, tier: str, before_line_s: float) -> None:
        self._before_line(tier).observe(before_line_s)

    def decoded(self, tier: str, share: DecodeShare) -> None:
        for counter, number in (
            (self._decoded("floor", tier), share.floor_tokens),
            (self._decoded("turn", tier), share.turn_tokens),
            (self._sat_out("own", tier), share.sat_out_own),
            (self._sat_out("share", tier), share.sat_out_share),
            (self._sat_out("tier", tier), share.sat_out_tier),
        ):
            if number:  # other servers than our engines tell none of it
                counter.inc(number)

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics:
            yield from metric.collect()
