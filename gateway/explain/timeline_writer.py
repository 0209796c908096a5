"""Writes timelines of finished requests in the background, every second, and deletes old rows.

Unwritten ones wait; beyond `MAX_WAITING` new ones are dropped and counted. A crash loses the last second.
"""

from __future__ import annotations

import logging

from prometheus_client import Counter

from gateway.background import BackgroundWriter, Site
from gateway.explain.describer import StoredDescription
from tenants.ledger import timelines
from tenants.ledger.timelines import StoredTimeline

PURGE_EVERY_S = 600.0
MAX_WAITING = 20_000
MAX_WRITTEN = 2_000


class TimelineWriter(BackgroundWriter):
    """Use from one event loop."""

    task_name = "gateway timelines"
    log = logging.getLogger("fairgate.gateway.timelines")
    failed = "timelines could not be written; it is tried again"
    unavailable = "timelines wait"
    purge_every_s = PURGE_EVERY_S

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._retention_s = site.config.timeline_retention_s
        self._max_rows = site.config.max_timelines
        self._waiting: list[StoredTimeline] = []
        self._described: dict[str, bytes] = {}
        self._dropped = Counter(
            "fairgate_timelines_dropped",
            "Timelines that could not be written in time and were dropped.",
            registry=site.prometheus,
        )

    @property
    def is_kept(self) -> bool:
        return self._retention_s > 0

    def keep(
        self,
        request_id: str,
        tenant_id: str,
        packed: bytes,
        server: StoredDescription | None = None,
        terms: StoredDescription | None = None,
        *,
        ended_us: int | None = None,
        session: str | None = None,
    ) -> None:
        """`server`, `terms`: what ran it, and its key's terms. `ended_us` None: it ended now."""
        if len(self._waiting) >= MAX_WAITING:
            self._dropped.inc()
            return
        ended_us = self._now_us() if ended_us is None else ended_us
        self._described |= {
            description.id: description.content for description in (server, terms) if description is not None
        }
        ids = (server and server.id, terms and terms.id, session)
        self._waiting.append(StoredTimeline(request_id, tenant_id, ended_us, packed, *ids))

    async def find(self, request_id: str) -> StoredTimeline | None:
        """Written or not; None: there is none. Raises `DatabaseUnavailable`."""
        for row in reversed(self._waiting):
            if row.request_id == request_id:
                return row
        return await timelines.find(self._database, request_id)

    async def flush(self) -> None:
        """Raises `DatabaseUnavailable`."""
        while self._waiting:
            rows = self._waiting[:MAX_WRITTEN]
            await timelines.add(self._database, rows, self._described)
            # Not before it is durable: until then `find` reads it from here.
            del self._waiting[: len(rows)]
            left = {description_id for row in self._waiting for description_id in (row.server, row.terms)}
            self._described = {
                description_id: content
                for description_id, content in self._described.items()
                if description_id in left
            }

    async def purge(self) -> None:
        before_us = round((self._wall_clock() - self._retention_s) * 1e6)
        purged = timelines.MAX_PURGED
        while purged >= timelines.MAX_PURGED:
            purged = await timelines.purge(self._database, before_us=before_us, most_rows=self._max_rows)
