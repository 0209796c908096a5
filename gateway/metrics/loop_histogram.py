"""A Prometheus histogram without a lock for each of its numbers. Only the event loop adds to it."""

from __future__ import annotations

import time
from bisect import bisect_left

from prometheus_client import Histogram
from prometheus_client.samples import Exemplar


class LoopHistogram(Histogram):
    """Observed from one event loop only; never NaN."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._sum._value += amount
        bucket = self._buckets[bisect_left(self._upper_bounds, amount)]
        bucket._value += 1.0
        if exemplar:
            bucket.set_exemplar(Exemplar(exemplar, amount, time.time()))
