"""Rates of the calls that cost nothing: quotes and tokenizer answers, by tenant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from gateway import errors

MAX_TENANTS = 10_000


class FreeCalls:
    """One kind of call. Use from one event loop."""

    def __init__(self, what: str, per_s: float, clock: Callable[[], float]) -> None:
        """`per_s`: sustained; bursts of twice that."""
        self._what = what
        self._per_s = per_s
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By tenant: level, and its time."""

    def take(self, tenant_id: str) -> None:
        """Counts one call. Raises `ApiError` (429)."""
        rate, burst, now_s = self._per_s, 2 * self._per_s, self._clock()
        level, at_s = self._buckets.pop(tenant_id, (burst, now_s))
        level = min(burst, level + (now_s - at_s) * rate)
        allowed = level >= 1
        self._buckets[tenant_id] = (level - 1 if allowed else level, now_s)
        if len(self._buckets) > MAX_TENANTS:
            self._buckets.popitem(last=False)
        if not allowed:
            raise errors.rate_limited(
                f"A tenant may ask for {rate:g} {self._what} per second.", "requests", (1 - level) / rate
            )
