"""When are the quota store's counters right again after it failed?

A store that only did not answer still has them: then nothing is to be done. One that has lost them says so
(`QuotaStoreRecovering`, by its epoch), and they are filled from the ledger. Of all gateways one does it:

1. it wins the right to (`begin_rebuild`); the others wait until the store serves again;
2. it opens the next epoch in the ledger: a reserve or top-up row of the epoch before is refused from now on,
   so what is read next is complete;
3. it reads what was settled and what is still held, of all gateways, in one snapshot;
4. it fills both in, and lets the store serve under the new epoch (`finish_rebuild`).

Meanwhile the store admits, tops up and settles nothing. A settlement whose row was in the snapshot finds no
hold any more and changes nothing; one whose row came later finds the hold that was filled in. Either way it
is counted once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from types import TracebackType

from tenants.errors import DatabaseUnavailable
from tenants.ledger.ledger import Ledger
from tenants.quota.store import Hold, QuotaStore, QuotaStoreRecovering, QuotaStoreUnavailable
from tenants.types import Limit

MEND_EVERY_S = 0.25
REBUILD_TTL_S = 30.0
"""Who began a rebuild and is silent for so long has lost the right to it."""

log = logging.getLogger("fairgate.gateway.mending")


class _Noticing:
    """One for all uses, several at a time: it keeps nothing of any."""

    def __init__(self, failed: asyncio.Event, quota_store: QuotaStore) -> None:
        self._failed = failed
        self._quota_store = quota_store

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._quota_store.is_local or isinstance(error, QuotaStoreUnavailable):
            self._failed.set()


class CounterRebuilder:
    """Knows whether the store can be relied on, and makes it so. Use from one event loop."""

    def __init__(
        self,
        ledger: Ledger,
        quota_store: QuotaStore,
        gateway_id: str,
        *,
        lease_ttl_s: float,
        now: Callable[[], datetime],
        all_limits: Callable[[], list[Limit]],
    ) -> None:
        """`all_limits`: every limit in force."""
        self._ledger = ledger
        self._quota_store = quota_store
        self._gateway_id = gateway_id
        self._lease_ttl_s = lease_ttl_s
        self._now = now
        self._all_limits = all_limits
        self._failed = asyncio.Event()
        self.mended = asyncio.Event()
        """Set each time that the store serves again; whoever waits for it clears it."""
        self.noticing = _Noticing(self._failed, quota_store)
        """Around every use of the store: after a failure it is looked after."""

    @property
    def is_needed(self) -> bool:
        """The store failed, and is not known to be right yet: nothing is admitted, or only what its local
        slices allow."""
        return self._failed.is_set()

    async def run(self) -> None:
        """Mends whenever something failed, for ever."""
        while True:
            await self._failed.wait()
            try:
                await self.mend()
            except (DatabaseUnavailable, QuotaStoreUnavailable):
                await asyncio.sleep(MEND_EVERY_S)
            except Exception:
                log.exception("the counters could not be rebuilt; it is tried again")
                await asyncio.sleep(MEND_EVERY_S)

    async def mend(self) -> None:
        """Returns when the store serves with right counters. Raises `QuotaStoreUnavailable` (also while
        another gateway rebuilds) and `DatabaseUnavailable`: ask again then."""
        try:
            await self._quota_store.ping()
        except QuotaStoreRecovering:
            if not await self._quota_store.begin_rebuild(self._gateway_id, REBUILD_TTL_S):
                raise
            await self.rebuild()
        self._failed.clear()
        self.mended.set()
        log.info("the quota store serves")

    async def rebuild(self) -> None:
        """Fills the counters; the right to do so is this gateway's. Raises as `mend`."""
        epoch = await self._ledger.next_epoch()
        limits = self._all_limits()
        standing = await self._ledger.standing(limits, self._now())
        await self._quota_store.rebuild(standing.used)
        by_subject: dict[str, list[Limit]] = {}
        for limit in limits:
            by_subject.setdefault(limit.subject_id, []).append(limit)
        for each in standing.open_requests:
            row, held = each.reserve, each.held
            path = [
                limit
                for subject_id in dict.fromkeys((row.key_id, row.project_id, row.tenant_id))
                for limit in by_subject.get(subject_id, [])
            ]
            hold = Hold(held, held, each.worst, each.may_be_cut)
            await self._quota_store.restore(
                row.request_id, path, row.charged_to, hold, each.used, self._lease_ttl_s
            )
        await self._quota_store.finish_rebuild(self._gateway_id, epoch)
        log.info(
            "counters of %d limits and %d open requests were filled in from the ledger",
            len(standing.used),
            len(standing.open_requests),
        )
