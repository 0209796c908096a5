"""Rebuilds the quota store's counters from the ledger after they were lost.

A store that has lost its counters reports it (`QuotaStoreRecovering`, by its epoch). One gateway wins the
rebuild (`begin_rebuild`) and opens the next epoch in the ledger: reserve and top-up rows of the epoch before
are refused from then on, so its snapshot of charges and open holds is complete. It fills both in and lets the
store serve (`finish_rebuild`); until then the store admits and settles nothing. A settlement in the snapshot
finds no hold and changes nothing, a later one finds the restored hold: each is counted once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType

from gateway.background import Site
from tenants.errors import DatabaseUnavailable
from tenants.ledger.ledger import Ledger
from tenants.quota import rules
from tenants.quota.store import (
    Hold,
    QuotaNodeUnavailable,
    QuotaStore,
    QuotaStoreRecovering,
    QuotaStoreUnavailable,
)
from tenants.types import Limit

RECOVER_EVERY_S = 0.25
REBUILD_TTL_S = 30.0
"""Then another gateway may take over."""

log = logging.getLogger("fairgate.gateway.mending")


class _FailureWatch:
    """Context manager that sets an event when the store failed. Stateless: may be entered concurrently."""

    def __init__(self, failed: asyncio.Event, quota_store: QuotaStore) -> None:
        self._failed = failed
        self._quota_store = quota_store

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A node of a cluster that is away has lost nothing yet; where it has, the next call says so.
        lacks_all = isinstance(error, QuotaStoreUnavailable) and not isinstance(error, QuotaNodeUnavailable)
        if self._quota_store.is_local or lacks_all:
            self._failed.set()


class CounterRebuilder:
    """Use from one event loop."""

    def __init__(
        self,
        site: Site,
        ledger: Ledger,
        quota_store: QuotaStore,
        all_limits: Callable[[], list[Limit]],
    ) -> None:
        self._site = site
        self._ledger = ledger
        self._quota_store = quota_store
        self._all_limits = all_limits
        self._failed = asyncio.Event()
        self.recovered = asyncio.Event()
        """Set each time that the store serves again; the waiting task clears it."""
        self.watching = _FailureWatch(self._failed, quota_store)
        """Wrap every use of the store in this: after a failure, recovery starts."""

    @property
    def is_needed(self) -> bool:
        """The store failed and has not recovered: nothing is admitted, or only what local slices allow."""
        return self._failed.is_set()

    async def run(self) -> None:
        while True:
            await self._failed.wait()
            try:
                await self.recover()
            except (DatabaseUnavailable, QuotaStoreUnavailable):
                await asyncio.sleep(RECOVER_EVERY_S)
            except Exception:
                log.exception("the counters could not be rebuilt; it is tried again")
                await asyncio.sleep(RECOVER_EVERY_S)

    async def recover(self) -> None:
        """Returns when counters are right. Raises `QuotaStoreUnavailable`, `DatabaseUnavailable`: retry."""
        try:
            await self._quota_store.ping()
        except QuotaStoreRecovering:
            if not await self._quota_store.begin_rebuild(self._site.gateway_id, REBUILD_TTL_S):
                raise
            await self.rebuild()
        self._failed.clear()
        self.recovered.set()
        log.info("the quota store serves")

    async def rebuild(self) -> None:
        """Fills the counters; this gateway must own the rebuild. Raises as `recover`."""
        epoch = await self._ledger.next_epoch()
        standing = await self._ledger.standing(self._all_limits(), self._site.now())
        await self._quota_store.rebuild(standing.used)
        by_identity = {limit.identity: limit for limit, _ in standing.used}
        for open_request in standing.open_requests:
            row, held = open_request.reserve, open_request.held
            path = [
                by_identity[name]
                for name in map(rules.identity_in, open_request.charged_to)
                if name in by_identity
            ]
            hold = Hold(held, held, open_request.worst, open_request.may_be_cut)
            await self._quota_store.restore(
                row.request_id,
                path,
                open_request.charged_to,
                hold,
                open_request.used,
                self._site.config.lease_ttl_s,
                tenant_id=row.tenant_id,
            )
        await self._quota_store.finish_rebuild(self._site.gateway_id, epoch)
        log.info(
            "counters of %d limits and %d open requests were filled in from the ledger",
            len(standing.used),
            len(standing.open_requests),
        )
