"""Records events of soft and shadow limits off the request path.

Counted in memory and written every second, many grants as one row. Unwritten counts are kept; beyond
`MAX_WAITING` keys new ones are dropped, which a metric reports. A crash loses up to a second of them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from gateway.background import BackgroundWriter, Site
from gateway.metrics.registry import Metrics
from tenants.errors import DatabaseUnavailable
from tenants.quota import alerts as limit_events
from tenants.quota.alerts import AlertTally, EventKey, EventKind, noticed
from tenants.quota.store import Granted

MAX_WAITING = 10_000
MAX_REMEMBERED = 10_000
"""Thresholds already alerted on."""

log = logging.getLogger("fairgate.gateway.limits")


class LimitAlerts(BackgroundWriter):
    """Use from one event loop."""

    task_name = "gateway limit events"
    log = log
    unavailable = "limit events wait"
    failed = "limit events could not be written; those of the last second are lost"

    def __init__(self, site: Site, metrics: Metrics) -> None:
        super().__init__(site)
        self._metrics = metrics
        self._waiting: dict[EventKey, AlertTally] = {}
        self._alerted: OrderedDict[EventKey, None] = OrderedDict()

    def note(self, granted: Granted) -> None:
        keys = noticed(granted)
        if not keys:
            return
        now_us = self._now_us()
        for key in keys:
            if key.kind is EventKind.WOULD_DENY or self._is_first(key):
                self._metrics.limit_event(key.kind)
            tally = self._waiting.get(key)
            if tally is not None:
                self._waiting[key] = tally.and_at(now_us)
            elif len(self._waiting) < MAX_WAITING:
                self._waiting[key] = AlertTally(1, now_us, now_us)
            else:
                self._metrics.limit_event("dropped")

    def _is_first(self, key: EventKey) -> bool:
        if key in self._alerted:
            return False
        self._alerted[key] = None
        if len(self._alerted) > MAX_REMEMBERED:
            self._alerted.popitem(last=False)
        log.warning("soft limit %s has reached %d %% of its amount", key.limit_id, key.level)
        return True

    async def flush(self) -> None:
        tallies, self._waiting = self._waiting, {}
        if not tallies:
            return
        try:
            await limit_events.add(self._database, tallies)
        except DatabaseUnavailable:
            for key, tally in tallies.items():
                newer = self._waiting.get(key)
                self._waiting[key] = tally if newer is None else tally.with_newer(newer)
            raise
