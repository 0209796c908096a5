"""Rates of the calls that cost nothing: quotes and tokenizer answers, by tenant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable

from gateway import errors

MAX_TENANTS = 10_000
QUOTES, TOKEN_CALLS = "quotes", "tokenizer answers"

Asked = Callable[..., Awaitable[float | None]]
"""Asks what is kept for several processes (`gateway/workers/keeper.py`): a name and words."""


class FreeCalls:
    """One kind of call. Use from one event loop."""

    def __init__(
        self, what: str, per_s: float, clock: Callable[[], float], asked: Asked | None = None
    ) -> None:
        """`per_s`: sustained; bursts of twice that. `asked`: where it is counted instead, if that answers."""
        self._what = what
        self._per_s = per_s
        self._clock = clock
        self._asked = asked
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By tenant: level, and its time."""

    async def take(self, tenant_id: str) -> None:
        """Counts one call. Raises `ApiError` (429)."""
        wait_s = None if self._asked is None else await self._asked(self._what, tenant_id)
        if wait_s is None:
            wait_s = self.wait_s(tenant_id)
        if wait_s > 0:
            raise errors.rate_limited(
                f"A tenant may ask for {self._per_s:g} {self._what} per second.", "requests", wait_s
            )

    def wait_s(self, tenant_id: str) -> float:
        """Counts one call and returns 0; or returns how long to wait, and counts nothing."""
        rate, burst, now_s = self._per_s, 2 * self._per_s, self._clock()
        level, at_s = self._buckets.pop(tenant_id, (burst, now_s))
        level = min(burst, level + (now_s - at_s) * rate)
        allowed = level >= 1
        self._buckets[tenant_id] = (level - 1 if allowed else level, now_s)
        if len(self._buckets) > MAX_TENANTS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - level) / rate
