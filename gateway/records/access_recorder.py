"""Writes accesses into the audit off the request path: log-ins, refused attempts, reads, merged.

Merged in memory (`tenants/audit/accesses.py`) and written every second in short transactions, so that no
flood makes an act wait for the audit's head. While the database is unavailable rows wait; a killed process
loses the running minute, of reads the running hour. Acts are audited in their own transactions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from prometheus_client import Counter

from gateway.background import Site
from gateway.log_context import CURRENT
from gateway.records.exact_writer import ExactWriter
from tenants.admin.audit import Actor
from tenants.admin.transaction import Transactions
from tenants.audit.accesses import Access, AccessBuffer, MergedAccess
from tenants.people.way_in import LogIn
from tenants.storage.flushes import Flush

MOST_WRITTEN = 50
"""Per transaction: an act waits for the audit's head no longer than they take."""


class AccessRecorder(ExactWriter[Sequence[MergedAccess]]):
    """Use from one event loop."""

    log = logging.getLogger("fairgate.audit")
    task_name = "gateway accesses"
    failed = "accesses could not be audited; it is tried again"
    unavailable = "accesses are audited later"

    def __init__(self, site: Site, transactions: Transactions) -> None:
        super().__init__(site, "accesses")
        self._transactions = transactions
        self._waiting = AccessBuffer()
        self._is_last = False
        self._dropped = Counter(
            "fairgate_audit_accesses_dropped",
            "Log-ins, refused attempts and reads that no row of the audit counts: too many waited.",
            registry=site.prometheus,
        )

    def note(self, action: str, actor: Actor, target: str, why: str = "") -> None:
        ids = (actor.request_id, actor.trace_id)
        self._note(Access(action, actor.name, actor.origin, target, why, *ids))

    def log_in(self, found: LogIn) -> None:
        """Of the current request, successful or not."""
        context, ids = CURRENT.get(), ("", "")
        if context is not None:
            ids = (context.request_id, context.trace_id)
        action = "session.refuse" if found.refused else "session.open"
        self._note(Access(action, f"person:{found.name}", found.address, "console", found.refused, *ids))

    def of_server(self, action: str, gateway_id: str) -> None:
        """What the server does itself."""
        self._note(Access(action, "system", "", gateway_id))

    def _note(self, access: Access) -> None:
        before = self._waiting.dropped
        self._waiting.note(access, self._now_us())
        self._dropped.inc(self._waiting.dropped - before)

    def take(self) -> Sequence[MergedAccess] | None:
        return self._waiting.take(self._now_us(), MOST_WRITTEN, is_last=self._is_last) or None

    async def write(self, batch: Sequence[MergedAccess], flush: Flush) -> None:
        await self._transactions.record_accesses(batch, flush)

    async def close(self) -> None:
        self._is_last = True
        await super().close()
        while len(self._waiting) and self._unanswered is None:
            await self.flush()
