"""One page of metrics from those of all workers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics.exposition import generate_latest

from gateway.metrics.loop_histogram import LoopHistogram
from gateway.workers.metrics_sum import Family, MergedRegistry, families_of, merged


def page(requests: int, waits_s: tuple[float, ...], steps: int, queued: int, coverage: float) -> list[Family]:
    registry = CollectorRegistry()
    Counter("fairgate_requests", "R", ["code"], registry=registry).labels("ok").inc(requests)
    waits = LoopHistogram("fairgate_wait_seconds", "W", buckets=(1.0, 2.0), registry=registry)
    for wait_s in waits_s:
        waits.observe(wait_s, {"trace_id": f"{wait_s:g}"})
    Counter("fairgate_engine_steps", "S", registry=registry).inc(steps)
    for name, value in (("queued", queued), ("engine_up", steps > 0), ("estimate_coverage", coverage)):
        Gauge(f"fairgate_{name}", "G", registry=registry).set(value)
    return families_of(registry)


def test_each_family_is_merged_by_its_rule_and_counters_outlive_their_worker() -> None:
    living = [page(3, (0.5, 1.5), 40, 2, 0.8), page(4, (1.5,), 41, 5, 0.6)]
    text = generate_latest(MergedRegistry(merged(living, [page(100, (0.5,), 99, 50, 0.0)]))).decode()
    for line in (
        'fairgate_requests_total{code="ok"} 107.0',
        'fairgate_wait_seconds_bucket{le="1.0"} 2.0',
        "fairgate_wait_seconds_count 4.0",
        "fairgate_wait_seconds_sum 4.0",
        "fairgate_engine_steps_total 41.0",
        "fairgate_queued 7.0",
        "fairgate_engine_up 1.0",
        "fairgate_estimate_coverage 0.7",
    ):
        assert any(each.partition(" #")[0] == line for each in text.splitlines()), (line, text)
    assert '# {trace_id="1.5"} 1.5' in text


def test_series_that_one_worker_alone_has_are_kept() -> None:
    def of(code: str) -> list[Family]:
        registry = CollectorRegistry()
        Histogram("fairgate_x", "X", ["code"], registry=registry).labels(code).observe(1)
        return families_of(registry)

    (family,) = merged([of("a"), of("b")])
    codes = [each.labels["code"] for each in family.series]
    assert codes == sorted(codes)
    assert set(codes) == {"a", "b"}
