"""Records refused requests off the request path: all counted, the first few of a kind whole.

Written every second. Counts are exact: while the database is down they wait, and beyond `MAX_COUNTS` keys
they are merged, never dropped. Whole rows are bounded by minute, tenant, code and limit, and by tenant and
day, so that no tenant floods them. A killed process loses the last second.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from gateway.background import Site
from gateway.errors import ApiError
from gateway.metrics.registry import Metrics
from gateway.records.exact_writer import ExactWriter
from tenants.counts import refusal_store
from tenants.counts.refusal_store import Counts, RefusalKey, RefusedRequest
from tenants.storage.flushes import Flush

WHOLE_OF_A_KIND = 5
"""Per minute, tenant, code and limit."""
WHOLE_OF_A_DAY = 20_000
"""Per tenant."""
MAX_WHOLE = 20_000
"""Rows waiting to be written; further ones are only counted."""
MAX_COUNTS = 50_000
PURGE_EVERY_S = 600.0
DAY_US = 86_400 * 1_000_000

log = logging.getLogger("fairgate.gateway.records")

Ids = tuple[str, str, str]
"""Of tenant, project and key."""
UNKNOWN: Ids = ("", "", "")


@dataclass(frozen=True, slots=True)
class RefusalBatch:
    counts: Counts
    rows: list[RefusedRequest]


class RefusalRecorder(ExactWriter[RefusalBatch]):
    """Use from one event loop."""

    task_name = "gateway refusals"
    failed = "refusals could not be written; it is tried again"
    unavailable = "refusals wait"
    purge_every_s = PURGE_EVERY_S

    def __init__(self, site: Site, metrics: Metrics) -> None:
        super().__init__(site, "refusals")
        self._metrics = metrics
        self._counts: Counts = {}
        self._rows: list[RefusedRequest] = []
        self._whole_of_kind: dict[RefusalKey, int] = {}
        """In the present minute."""
        self._whole_of_tenant: dict[str, int] = {}
        """On the present day."""
        self._minute_s = self._day = 0

    def note(
        self,
        error: ApiError,
        request_id: str,
        caller: Ids = UNKNOWN,
        *,
        model: str = "",
        tier: str = "",
    ) -> None:
        self._metrics.refused(error.code)
        log.debug("refused: %s", error.code)
        lacked = error.lacked
        refused = RefusedRequest(
            request_id[: refusal_store.MAX_ID_CHARACTERS],
            self._now_us(),
            error.code,
            *caller,
            tier=tier,
            model=_storable(model),
            limit_id="" if lacked is None else lacked.limit_id,
            of_platform=lacked is not None and lacked.of_platform,
            wanted=None if lacked is None else lacked.wanted,
            available=None if lacked is None else lacked.available,
            retry_after_ms=None if error.retry_after_s is None else math.ceil(error.retry_after_s * 1000),
        )
        refusal_store.added(self._counts, {refused.key: 1})
        if len(self._counts) > MAX_COUNTS:
            self._counts = refusal_store.merged(self._counts, MAX_COUNTS // 2)
        if self._is_kept_whole(refused):
            self._rows.append(refused)

    def _is_kept_whole(self, refused: RefusedRequest) -> bool:
        """Whether it is among the first of its kind; counts it as such."""
        key, day = refused.key, refused.at_us // DAY_US
        if key.minute_s != self._minute_s:
            self._minute_s = key.minute_s
            self._whole_of_kind.clear()
        if day != self._day:
            self._day = day
            self._whole_of_tenant.clear()
        of_kind = self._whole_of_kind.get(key, 0)
        of_tenant = self._whole_of_tenant.get(key.tenant_id, 0)
        if of_kind >= WHOLE_OF_A_KIND or of_tenant >= WHOLE_OF_A_DAY or len(self._rows) >= MAX_WHOLE:
            return False
        self._whole_of_kind[key] = of_kind + 1
        self._whole_of_tenant[key.tenant_id] = of_tenant + 1
        return True

    async def find(self, request_id: str) -> RefusedRequest | None:
        """Written or not; None: there is none, or it is only counted. Raises `DatabaseUnavailable`."""
        waiting = self._rows if self._unanswered is None else [*self._unanswered.rows, *self._rows]
        for row in waiting:
            if row.request_id == request_id:
                return row
        return await self._database.read(lambda connection: refusal_store.find(connection, request_id))

    def take(self) -> RefusalBatch | None:
        if not self._counts:
            return None
        batch = RefusalBatch(self._counts, self._rows)
        self._counts, self._rows = {}, []
        return batch

    async def write(self, batch: RefusalBatch, flush: Flush) -> None:
        await refusal_store.add(self._database, batch.counts, batch.rows, flush, self._wall_clock())

    async def purge(self) -> None:
        while await refusal_store.purge(self._database, self._wall_clock()) >= refusal_store.MAX_PURGED:
            pass


def _storable(model: str) -> str:
    """A client's made-up name, in a form that every database takes."""
    return "".join(
        character if character.isprintable() else "?"
        for character in model[: refusal_store.MAX_MODEL_CHARACTERS]
    )
