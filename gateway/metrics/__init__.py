"""Prometheus metrics. Counters have no `_created` samples: they would double the series."""

from prometheus_client import disable_created_metrics

disable_created_metrics()  # type: ignore[no-untyped-call]
