"""Prometheus histograms of the time that databases and Redis take. The gateway registers them."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Histogram

BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0)
"""Up to the longest that a statement may take."""


def latency_histogram(name: str, about: str, labels: Sequence[str] = ()) -> Histogram:
    """One that no registry has yet: an object counts for itself, and tests have several in one process."""
    return Histogram(name, about, labels, buckets=BUCKETS_S, registry=None)
