"""Independent audit of a dispatch log: requests that were served out of turn.

Pure, and independent of the scheduler's code: it reads what the log records (arrivals, dispatches, charges),
and the number by which each waiting tenant was ranked at each dispatch.

At each dispatch the *fair level* of its tier is the service per weight of all tenants waiting there together.

- An *inversion*: the request that goes belongs to a tenant above the level, while an earlier-arrived
  request of a tenant below it still waits.
- An *unfair dispatch*: the same, in whatever order the two arrived. FCFS commits these all the time and
  never an inversion, since it always sends the earliest; a fair queue must commit neither.

Service per weight is recomputed from the charges alone, and each rank must equal it plus the tenant's lift
(Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024: a returning tenant is raised to the
others, so that idle time earns nothing), which may only grow, and only when the tenant returns. A rank that
fits no such lift is an *untrue rank*. Output beyond the prediction is charged as it comes, between two lines
of the log, so service is known as an interval. A log without ranks is judged by recomputed service and lifts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

TOLERANCE = 0.01
"""Cost tokens per weight; the log's rounding stays below it."""
MAX_EXAMPLES = 5


class LogEventKind(StrEnum):
    ARRIVED = "arrived"
    DISPATCHED = "dispatched"
    CORRECTED = "corrected"
    """Its charge changes: its engine foresees another length."""
    ENDED = "ended"
    """The request is over and its final cost known."""
    LEFT = "left"
    """It left the queue without a turn: refused, cancelled, expired."""


@dataclass(frozen=True, slots=True)
class LogEvent:
    at_s: float
    happened: LogEventKind
    request_id: str
    tenant: str
    tier: str
    weight: float = 1.0
    cost: float = 0.0
    """Dispatched: the predicted cost, charged at once. Corrected: the new charge. Ended: the final cost."""
    beyond: float | None = None
    """Ended: the most charged meanwhile for output beyond the prediction; None: what the costs imply."""
    ranks: Mapping[str, float] = field(default_factory=dict)
    """Dispatched: service per weight, lift included, by which each waiting tenant was ranked."""
    by_reservation: bool = False
    """Dispatched by its tenant's reservation: out of turn, and rightly so."""


@dataclass(frozen=True)
class Unfair:
    at_s: float
    tier: str
    dispatched: str
    dispatched_tenant: str
    waiting: str
    waiting_tenant: str
    above_by: float
    below_by: float


@dataclass
class AuditReport:
    """`compared` counts dispatches with another tenant waiting in the same tier: 0 proves nothing."""

    dispatches: int = 0
    compared: int = 0
    inversions: int = 0
    unfair_dispatches: int = 0
    untrue_ranks: int = 0
    backlog_s: float = 0.0
    """How long at least two tenants of one tier waited."""
    examples: list[Unfair] = field(default_factory=list)


def audit(events: Sequence[LogEvent]) -> AuditReport:
    """Counts dispatches out of turn. Raises `ValueError` for a log that contradicts itself."""
    return _Audit(events).report


@dataclass(slots=True)
class _AuditedWait:
    request_id: str
    arrived: int
    """Place in the log: no two arrivals are equal."""


@dataclass(slots=True)
class _TierLine:
    by_tenant: dict[str, list[_AuditedWait]] = field(default_factory=dict)
    last_to_leave: str | None = None

    def remove(self, tenant: str, request_id: str) -> bool:
        waiting = self.by_tenant.get(tenant, [])
        for place, request in enumerate(waiting):
            if request.request_id == request_id:
                del waiting[place]
                if not waiting:
                    del self.by_tenant[tenant]
                    self.last_to_leave = tenant
                return True
        return False


class _Audit:
    def __init__(self, events: Sequence[LogEvent]) -> None:
        self.report = AuditReport()
        self._ends: dict[str, list[LogEvent]] = defaultdict(list)
        """By request, the last one first: one that was put back runs, and ends, again."""
        for event in reversed(events):
            if event.happened is LogEventKind.ENDED:
                self._ends[event.request_id].append(event)
        self._charged: dict[str, float] = {}
        self._bounds: dict[str, float] = {}
        """By dispatched request: its part of `_unlogged`."""
        self._service: dict[str, float] = defaultdict(float)
        self._unlogged: dict[str, float] = defaultdict(float)
        """By tenant: bound on what may have been charged besides, for output beyond predictions."""
        self._weights: dict[str, float] = {}
        self._lines: dict[str, _TierLine] = defaultdict(_TierLine)
        self._lifts: dict[tuple[str, str], tuple[float, float]] = {}
        """By tier and tenant: the lift lies between these."""
        self._recomputed_lifts: dict[tuple[str, str], float] = defaultdict(float)
        previous_s = -math.inf
        for place, event in enumerate(events):
            if any(len(line.by_tenant) >= 2 for line in self._lines.values()):
                self.report.backlog_s += max(0.0, event.at_s - previous_s)
            previous_s = event.at_s
            self._weights[event.tenant] = event.weight
            match event.happened:
                case LogEventKind.ARRIVED:
                    self._arrived(event, place)
                case LogEventKind.DISPATCHED:
                    self._dispatched(event)
                case LogEventKind.CORRECTED:
                    self._correct(event)
                case LogEventKind.ENDED:
                    self._ended(event)
                case LogEventKind.LEFT:
                    self._lines[event.tier].remove(event.tenant, event.request_id)

    def _arrived(self, event: LogEvent, place: int) -> None:
        line = self._lines[event.tier]
        if event.tenant not in line.by_tenant:
            where = (event.tier, event.tenant)
            least, _ = self._lifts.get(where, (0.0, 0.0))
            self._lifts[where] = (least, math.inf)
            self._lift(event.tenant, event.tier, line)
        line.by_tenant.setdefault(event.tenant, []).append(_AuditedWait(event.request_id, place))

    def _lift(self, tenant: str, tier: str, line: _TierLine) -> None:
        if line.by_tenant:
            floor = min(self._rank(other, tier) for other in line.by_tenant)
        elif line.last_to_leave is not None:
            floor = self._rank(line.last_to_leave, tier)
        else:
            return
        self._recomputed_lifts[tier, tenant] += max(0.0, floor - self._rank(tenant, tier))

    def _rank(self, tenant: str, tier: str) -> float:
        return self._service[tenant] + self._recomputed_lifts[tier, tenant]

    def _dispatched(self, event: LogEvent) -> None:
        line = self._lines[event.tier]
        own = next(
            (item for item in line.by_tenant.get(event.tenant, []) if item.request_id == event.request_id),
            None,
        )
        if own is None:
            raise ValueError(f"{event.request_id} was dispatched but never waited")
        self.report.dispatches += 1
        ranks = event.ranks or {name: self._rank(name, event.tier) for name in line.by_tenant}
        missing = line.by_tenant.keys() - ranks.keys()
        if missing:
            raise ValueError(f"{event.request_id}: no rank for {', '.join(sorted(missing))}, who wait too")
        if event.ranks:
            self._check_truth(event)
        if not event.by_reservation:
            self._judge(event, own, line, ranks)
        line.remove(event.tenant, event.request_id)
        self._charged[event.request_id] = event.cost
        self._service[event.tenant] += event.cost / event.weight
        bound = self._bounds[event.request_id] = self._beyond(event)
        self._unlogged[event.tenant] += bound / event.weight

    def _beyond(self, event: LogEvent) -> float:
        ends = self._ends[event.request_id]
        if not ends:
            return math.inf
        end = ends.pop()
        return max(0.0, end.cost - event.cost) if end.beyond is None else end.beyond

    def _correct(self, event: LogEvent) -> None:
        if event.request_id in self._charged:
            self._service[event.tenant] += (event.cost - self._charged[event.request_id]) / event.weight
            self._charged[event.request_id] = event.cost

    def _ended(self, event: LogEvent) -> None:
        if event.request_id not in self._charged:
            return
        self._unlogged[event.tenant] -= self._bounds.pop(event.request_id) / event.weight
        self._correct(event)
        del self._charged[event.request_id]

    def _check_truth(self, event: LogEvent) -> None:
        """Each rank narrows its tenant's possible lift; an empty interval is an untrue rank."""
        for tenant, rank in event.ranks.items():
            where = (event.tier, tenant)
            least, most = self._lifts.get(where, (0.0, math.inf))
            service = self._service[tenant]
            low = max(least, rank - service - self._unlogged[tenant])
            high = min(most, rank - service)
            if low > high + TOLERANCE:
                self.report.untrue_ranks += 1
                low, high = 0.0, math.inf
            self._lifts[where] = (low, max(low, high))

    def _judge(self, event: LogEvent, own: _AuditedWait, line: _TierLine, ranks: Mapping[str, float]) -> None:
        if len(line.by_tenant) < 2:
            return
        self.report.compared += 1
        weights = {name: self._weights[name] for name in line.by_tenant}
        level = sum(ranks[name] * weights[name] for name in weights) / sum(weights.values())
        below = [name for name in line.by_tenant if ranks[name] < level - TOLERANCE]
        above_by = ranks[event.tenant] - level
        if above_by <= TOLERANCE or not below:
            return
        self.report.unfair_dispatches += 1
        oldest, whose = min(
            ((line.by_tenant[name][0], name) for name in below), key=lambda pair: pair[0].arrived
        )
        self.report.inversions += oldest.arrived < own.arrived
        if len(self.report.examples) < MAX_EXAMPLES:
            self.report.examples.append(
                Unfair(
                    at_s=event.at_s,
                    tier=event.tier,
                    dispatched=event.request_id,
                    dispatched_tenant=event.tenant,
                    waiting=oldest.request_id,
                    waiting_tenant=whose,
                    above_by=above_by,
                    below_by=level - ranks[whose],
                )
            )
