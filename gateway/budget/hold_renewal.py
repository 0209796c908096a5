"""Renews the holds of running requests and releases orphaned ones.

A hold ends only by the ledger: a charge is in the counters exactly once, whichever process died in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Set

from msgspec.structs import replace

from gateway.background import Site
from gateway.budget.counter_rebuild import CounterRebuilder
from tenants.directory import queries
from tenants.errors import DatabaseUnavailable
from tenants.ledger.ledger import Ledger
from tenants.outcomes import RequestOutcome
from tenants.quota.store import QuotaStore, QuotaStoreUnavailable
from tenants.types import NOTHING

MAX_DOUBTFUL = 100_000

log = logging.getLogger("fairgate.gateway.keeping")


class HoldRenewal:
    """Four times per lease. Use from one event loop."""

    def __init__(
        self,
        site: Site,
        ledger: Ledger,
        quota_store: QuotaStore,
        rebuilder: CounterRebuilder,
        live: Set[str],
    ) -> None:
        """`live`: a view of the requests that hold budget in this process."""
        self._ledger = ledger
        self._quota_store = quota_store
        self._rebuilder = rebuilder
        self._live = live
        self._lease_ttl_s = site.config.lease_ttl_s
        self._now = site.now
        self._doubtful: set[str] = set()
        self.overdue = 0
        """Other gateways' holds that the last round found older than their lease, and left."""

    def doubt(self, request_id: str) -> None:
        """Notes a request that will not run but may have left a hold or a reserve row, as a store failed."""
        if len(self._doubtful) < MAX_DOUBTFUL:
            self._doubtful.add(request_id)

    def doubts(self, request_id: str) -> bool:
        return request_id in self._doubtful

    async def run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lease_ttl_s / 4):
                    await self._rebuilder.recovered.wait()
            self._rebuilder.recovered.clear()
            try:
                await self.keep_once()
            except (DatabaseUnavailable, QuotaStoreUnavailable) as error:
                log.warning("holds could not be renewed: %s", type(error).__name__)
            except Exception:
                log.exception("the keeper of the holds failed; it goes on")

    async def keep_once(self) -> None:
        """Raises `DatabaseUnavailable`, `QuotaStoreUnavailable`."""
        with self._rebuilder.watching:
            if self._live:
                await self._quota_store.renew(sorted(self._live), self._lease_ttl_s)
            await self._end_overdue(await self._quota_store.overdue())
        if self._doubtful:
            await self._settle_doubtful()

    async def _end_overdue(self, overdue: Iterable[str]) -> None:
        """Ends holds whose leases ran out: their gateways are dead or stalled."""
        suspects = [request_id for request_id in overdue if request_id not in self._live]
        self.overdue = 0
        if not suspects:
            return
        # In this order: a request that is neither open now nor settled later has no row.
        open_ids = {found.request_id for found in await self._ledger.open_requests(request_ids=suspects)}
        settled = await self._ledger.settled(suspects)
        self.overdue = len(open_ids - settled.keys())
        for request_id in suspects:
            if request_id in settled:
                await self._quota_store.settle(request_id, settled[request_id].counted)
            elif request_id not in open_ids:
                # Held, but its gateway died (or lost the database) before the reserve row was written.
                await self._quota_store.settle(request_id, NOTHING)
            # An open one stays held until a gateway adopts and settles it (`gateway/cluster/recovery.py`).

    async def _settle_doubtful(self) -> None:
        doubtful = set(self._doubtful)
        while batch := list(doubtful)[: queries.CHUNK]:
            for found in await self._ledger.open_requests(request_ids=batch):
                row = replace(
                    found.reserve,
                    kind="settle",
                    amounts=NOTHING,
                    outcome=RequestOutcome.REFUSED.value,
                    at=self._now(),
                    detail={},
                    charged_to=(),
                )
                await self._ledger.settle(row)
            for request_id in batch:
                await self._quota_store.settle(request_id, NOTHING)
            doubtful.difference_update(batch)
            self._doubtful.difference_update(batch)
