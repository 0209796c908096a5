"""Writes the minutes of all pools: service, fair shares, engines.

Each minute once it is over, all rows in one transaction. While the database is down minutes wait; beyond
`MAX_WAITING` rows of a kind the oldest are dropped and counted. No account depends on them.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from prometheus_client import Counter

from gateway.background import Site
from gateway.explain.minutes.engine_meter import EngineMeter
from gateway.explain.minutes.flow_meter import FlowMeter
from gateway.records.exact_writer import ExactWriter
from tenants.counts import minute_store
from tenants.counts.minute_store import MinutesCounted
from tenants.storage.flushes import Flush

PURGE_EVERY_S = 600.0
MAX_WAITING = 50_000
SETTLED_S = 5.0
"""After its end."""


class MinuteWriter(ExactWriter[MinutesCounted]):
    """Use from one event loop."""

    task_name = "gateway minutes"
    failed = "minutes could not be written; it is tried again"
    unavailable = "minutes wait"
    purge_every_s = PURGE_EVERY_S

    def __init__(self, site: Site) -> None:
        super().__init__(site, "minutes")
        self.flows: dict[str, FlowMeter] = {}
        self.engines: dict[str, EngineMeter] = {}
        self._gateway_id = site.gateway_id
        self._waiting = MinutesCounted()
        self._dropped = Counter(
            "fairgate_flow_rows_dropped",
            "Rows of service by minute that could not be written in time and were dropped.",
            registry=site.prometheus,
        )

    async def close(self) -> None:
        """Writes what is left, the current minute included, if the database is up."""
        self._collect(None)
        await super().close()

    def take(self) -> MinutesCounted | None:
        self._collect(self._settled_us())
        taken, self._waiting = self._waiting, MinutesCounted()
        return taken if len(taken) else None

    async def write(self, batch: MinutesCounted, flush: Flush) -> None:
        await minute_store.add(self._database, self._gateway_id, batch, flush, self._now_us())

    async def flush(self) -> None:
        await super().flush()
        if self._unanswered is not None:
            self._collect(self._settled_us())

    def _settled_us(self) -> int:
        return round((self._wall_clock() - SETTLED_S) * 1e6)

    async def purge(self) -> None:
        await minute_store.purge(self._database, self._now_us())

    def _collect(self, now_us: int | None) -> None:
        for flow in self.flows.values():
            self._waiting.flow |= flow.take(now_us)
        for engine in self.engines.values():
            self._waiting.engines |= engine.take(now_us)
        self._drop_beyond(self._waiting.flow)
        self._drop_beyond(self._waiting.engines)

    def _drop_beyond(self, waiting: dict[Any, Any]) -> None:
        if (over := len(waiting) - MAX_WAITING) > 0:
            for key in list(islice(waiting, over)):
                del waiting[key]
            self._dropped.inc(over)
