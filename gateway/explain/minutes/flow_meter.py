"""Counts, by minute, what tenants had of a pool, what they were due, and how they waited.

Once a second the service since the last look is divided as it ideally would have been (`ideal_share.py`).
Where gateways share a queue, the others' requests and service come a moment later (`pool_load.py`): the
division is `lag_s` late, and each gateway counts its own service's part of what every tenant was due. Pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from engine.messages import TIER_RANKS
from gateway.explain.ideal_share import FairTerms, IdealShare
from gateway.explain.shares import TenantTier
from tenants.counts.minute_store import MINUTE_US, FlowKey, FlowMinute

MAX_SPANS = 1_024
"""Of other gateways' service that is not divided yet."""
TIERS = tuple(TIER_RANKS)


@dataclass(slots=True)
class _OpenRequest:
    tenant_id: str
    rank: int
    cost: int


@dataclass(slots=True)
class _Sampled:
    until_s: float
    minute_us: int
    had: Mapping[TenantTier, int]


@dataclass(slots=True)
class _Elsewhere:
    since_s: float
    until_s: float
    total: float


@dataclass(slots=True)
class _MinuteSums:
    """A minute being counted: fair shares are still fractional."""

    counts: dict[TenantTier, FlowMinute] = field(default_factory=dict)
    fair: dict[TenantTier, float] = field(default_factory=dict)
    waiting: dict[TenantTier, float] = field(default_factory=dict)

    def of(self, whose: TenantTier) -> FlowMinute:
        counts = self.counts.get(whose)
        if counts is None:
            counts = self.counts[whose] = FlowMinute()
        return counts

    def rows(self) -> dict[TenantTier, FlowMinute]:
        for whose in self.fair.keys() | self.waiting.keys():
            self.of(whose).waiting_token_s = round(self.waiting.get(whose, 0.0))
        total = sum(counts.served_tokens for counts in self.counts.values())
        for whose, tokens in whole_parts(self.fair, total).items():
            self.of(whose).fair_tokens = tokens
        return {whose: counts for whose, counts in self.counts.items() if counts != FlowMinute()}


def whole_parts(parts: Mapping[TenantTier, float], total: int) -> dict[TenantTier, int]:
    """`parts`, about `total` in sum, as whole numbers of exactly that sum (largest remainders round up)."""
    whole = {whose: math.floor(part) for whose, part in parts.items()}
    order = sorted(parts, key=lambda whose: (whole[whose] - parts[whose], whose))
    left = total - sum(whole.values())
    for number, whose in enumerate(order):
        whole[whose] += left // len(order) + (number < left % len(order))
    return whole


class FlowMeter:
    """One pool. One writer: the gateway's event loop."""

    def __init__(self, pool: str, *, lag_s: float = 0.0) -> None:
        """`lag_s`: delay of other gateways' reports; 0: none share the queue."""
        self.pool = pool
        self.on_served: Callable[[float, float, int], None] = lambda since_s, until_s, total: None
        self._lag_s = lag_s
        self._ideal = IdealShare()
        self._open: dict[str, _OpenRequest] = {}
        self._minutes: dict[int, _MinuteSums] = {}
        self._taken: dict[int, _MinuteSums] = {}
        self._minute_us = 0
        self._sampled: deque[_Sampled] = deque()
        self._elsewhere: deque[_Elsewhere] = deque(maxlen=MAX_SPANS)
        self._last_s: float | None = None
        self._owed: dict[TenantTier, float] = {}
        """Due of a stretch without service, by counts that came in."""

    # ------------------------------------------------------------ requests

    def lined_up(
        self,
        request_id: str,
        tenant_id: str,
        rank: int,
        cost: int,
        terms: FairTerms,
        now_s: float,
        before_line_s: float | None,
    ) -> None:
        """A request could run. `before_line_s`: time since its first byte without waits for its tenant's
        limits; None: at another gateway, which counts it."""
        self._open[request_id] = _OpenRequest(tenant_id, rank, cost)
        self._ideal.arrived(now_s, tenant_id, rank, cost, terms)
        if before_line_s is not None:
            counts = self._now().of((tenant_id, rank))
            counts.arrivals += 1
            counts.before_line_us += round(before_line_s * 1e6)

    def ended(self, request_id: str, now_s: float, cost: int) -> None:
        """No effect if unknown."""
        was = self._open.pop(request_id, None)
        if was is not None:
            self._ideal.ended(now_s, was.tenant_id, was.rank, was.cost, cost)

    def served_elsewhere(self, since_s: float, until_s: float, total: int) -> None:
        self._elsewhere.append(_Elsewhere(since_s, until_s, total))

    def recent_arrivals(self) -> dict[TenantTier, tuple[int, int]]:
        """Requests that lined up in this minute and the last, and their microseconds before the line."""
        found: dict[TenantTier, tuple[int, int]] = {}
        for minute_us in (self._minute_us - MINUTE_US, self._minute_us):
            minute = self._minutes.get(minute_us) or self._taken.get(minute_us)
            for whose, counts in ({} if minute is None else minute.counts).items():
                if counts.arrivals:
                    arrivals, before_line_us = found.get(whose, (0, 0))
                    found[whose] = arrivals + counts.arrivals, before_line_us + counts.before_line_us
        return found

    # ------------------------------------------------------------ every second

    def sample(
        self,
        now_s: float,
        wall_s: float,
        had: Mapping[TenantTier, int],
        waiting: Iterable[tuple[TenantTier, int]],
    ) -> None:
        """`had` since the last call; `waiting`: cost tokens in line now."""
        since_s = now_s if self._last_s is None else self._last_s
        self._last_s = now_s
        # What was had since the last look counts in the minute in which that was.
        self._minute_us = int((wall_s - (now_s - since_s)) * 1e6) // MINUTE_US * MINUTE_US
        minute = self._now()
        for whose, tokens in had.items():
            minute.of(whose).served_tokens += tokens
        for whose, tokens in waiting:
            minute.waiting[whose] = minute.waiting.get(whose, 0.0) + tokens * (now_s - since_s)
        total = sum(had.values())
        if total:
            self.on_served(since_s, now_s, total)
        self._sampled.append(_Sampled(now_s, self._minute_us, had))
        while self._sampled and self._sampled[0].until_s <= now_s - self._lag_s:
            self._divide(self._sampled.popleft())

    def take(self, now_us: int | None = None) -> dict[FlowKey, FlowMinute]:
        """Removes and returns the minutes over at `now_us` and divided; None: all that is counted."""
        if now_us is None:
            while self._sampled:
                self._divide(self._sampled.popleft())
        waits = min((sample.minute_us for sample in self._sampled), default=self._minute_us)
        taken: dict[FlowKey, FlowMinute] = {}
        for minute_us in sorted(self._minutes):
            if now_us is None or (minute_us + MINUTE_US <= now_us and minute_us < waits):
                minute = self._minutes.pop(minute_us)
                self._taken = {minute_us: minute}
                for (tenant_id, rank), counts in minute.rows().items():
                    taken[FlowKey(minute_us, self.pool, TIERS[rank], tenant_id)] = counts
        return taken

    # ------------------------------------------------------------ inside

    def _now(self) -> _MinuteSums:
        minute = self._minutes.get(self._minute_us)
        if minute is None:
            minute = self._minutes[self._minute_us] = _MinuteSums()
        return minute

    def _divide(self, sampled: _Sampled) -> None:
        """Counts this gateway's part of what the whole pool's service came to for each tenant."""
        elsewhere = self._had_elsewhere(sampled.until_s)
        due = self._ideal.advance(sampled.until_s, sampled.had, elsewhere)
        for whose, tokens in self._owed.items():
            due[whose] = due.get(whose, 0.0) + tokens
        own, total = sum(sampled.had.values()), sum(due.values())
        self._owed = {} if own + elsewhere else due
        if own:
            fair = self._minutes.setdefault(sampled.minute_us, _MinuteSums()).fair
            for whose, tokens in due.items():
                fair[whose] = fair.get(whose, 0.0) + tokens * own / total

    def _had_elsewhere(self, until_s: float) -> int:
        """Service of other gateways up to now that was not counted yet; that of each span is even."""
        total = 0.0
        for span in self._elsewhere:
            if span.until_s <= until_s:
                part = 1.0
            elif span.since_s < until_s:
                part = (until_s - span.since_s) / (span.until_s - span.since_s)
            else:  # later; a gateway's first span lasts no time
                part = 0.0
            total += part * span.total
            span.total -= part * span.total
            span.since_s = max(span.since_s, min(until_s, span.until_s))
        while self._elsewhere and self._elsewhere[0].total <= 0:
            self._elsewhere.popleft()
        return round(total)
