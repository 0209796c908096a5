"""The histogram of the event loop shows what the library's own shows: it writes to the library's numbers."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.openmetrics.exposition import generate_latest

from gateway.metrics.loop_histogram import LoopHistogram

BUCKETS_S = (0.005, 0.5, 1, 30)


@given(st.lists(st.floats(0, 100) | st.sampled_from([*BUCKETS_S, math.inf])))
def test_it_counts_as_the_librarys_own(amounts: list[float]) -> None:
    shown = []
    for kind in (Histogram, LoopHistogram):
        registry = CollectorRegistry()
        histogram = kind("wait_seconds", "Wait.", ["tier"], buckets=BUCKETS_S, registry=registry)
        for amount in amounts:
            histogram.labels("batch").observe(amount)
        lines = generate_latest(registry).decode().splitlines()
        shown.append([line for line in lines if "_created" not in line])
    assert shown[0] == shown[1]


def test_its_bucket_keeps_the_last_trace_as_an_example() -> None:
    registry = CollectorRegistry()
    histogram = LoopHistogram("wait_seconds", "Wait.", buckets=BUCKETS_S, registry=registry)
    histogram.observe(0.2, {"trace_id": "ab"})
    [line] = [line for line in generate_latest(registry).decode().splitlines() if "# {" in line]
    assert line.startswith('wait_seconds_bucket{le="0.5"} 1.0 # {trace_id="ab"} 0.2 ')
