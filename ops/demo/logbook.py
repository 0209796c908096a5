"""Turns records of the gateway's dispatch log into events of the audit."""

from __future__ import annotations

from collections.abc import Iterable

from engine.entry import COUNTER_SCALE
from engine.messages import TIER_RANKS
from gateway.flow.dispatch_log import LogRecord
from ops.demo.audit import LogEvent, LogEventKind

TIER_NAMES = {rank: name for name, rank in TIER_RANKS.items()}
_HAPPENED = {
    "arrive": LogEventKind.ARRIVED,
    "dispatch": LogEventKind.DISPATCHED,
    "correct": LogEventKind.CORRECTED,
    "settle": LogEventKind.ENDED,
    "leave": LogEventKind.LEFT,
}
_WITH_COST = (LogEventKind.CORRECTED, LogEventKind.ENDED)


def events_of(records: Iterable[LogRecord]) -> list[LogEvent]:
    """Counters become service per weight in cost tokens; the rest is renamed."""
    events = []
    for record in records:
        happened = _HAPPENED[record.event]
        events.append(
            LogEvent(
                at_s=record.at_s,
                happened=happened,
                request_id=record.request_id,
                tenant=record.tenant_id,
                tier=TIER_NAMES[record.tier],
                weight=record.weight,
                cost=float(record.cost if happened in _WITH_COST else record.predicted_cost),
                beyond=float(record.beyond_cost) if happened is LogEventKind.ENDED else None,
                ranks={waiting.tenant_id: waiting.counter / COUNTER_SCALE for waiting in record.backlog},
                by_reservation=record.rule == "reservation",
            )
        )
    return events
