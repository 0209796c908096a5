"""Prometheus collector of password hashing, which takes a core and 64 MiB for each log-in."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tenants.people.hashing_gate import HashingGate


class HashingCollector(Collector):
    def __init__(self, gate: HashingGate) -> None:
        self._gate = gate

    def collect(self) -> Iterator[Metric]:
        gate = self._gate
        yield CounterMetricFamily("fairgate_password_hashes", "Passwords hashed.", gate.hashed)
        yield CounterMetricFamily(
            "fairgate_password_hashes_refused", "Log-ins that found the line for it full.", gate.refused
        )
        yield GaugeMetricFamily(
            "fairgate_password_hashes_open", "Passwords that are hashed now, or wait for it.", gate.inside
        )
