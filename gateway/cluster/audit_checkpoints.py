"""Signs the audit, verifies it, and audits digests of the ledger, periodically.

Several gateways with the key may sign: there is one checkpoint for each head. Checkpoints are logged whole,
because only those kept elsewhere show that rows at the end are missing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math

from prometheus_client import Gauge

from gateway.background import BackgroundWriter, Site
from tenants.audit.checkpoints import is_due
from tenants.audit.log import AuditLog
from tenants.audit.verify import Verdict
from tenants.errors import AuditDamaged, Invalid
from tenants.ledger.digests import LedgerDigests

OF_THE_LOG = ("the audit is damaged", "the audit is not signed")


class AuditCheckpoints(BackgroundWriter):
    task_name = "gateway audit"
    log = logging.getLogger("fairgate.audit")
    failed = "the audit was not signed; it goes on"
    unavailable = "the audit is signed later"

    def __init__(self, site: Site, audit: AuditLog) -> None:
        super().__init__(site)
        self._settings = site.config.audit
        self._audit = audit
        self._digests = LedgerDigests(site.database, site.wall_clock, self._settings.ledger_s)
        self._verified_at_s = -math.inf
        self._complaints: dict[str, str] = {}
        self._checking: asyncio.Task[Verdict] | None = None
        self._size = Gauge("fairgate_audit_rows", "Rows of the audit.", registry=site.prometheus)
        self._age = Gauge(
            "fairgate_audit_checkpoint_age_seconds",
            "Age of the audit's newest checkpoint while there are rows that it does not cover; 0: it covers"
            " all.",
            registry=site.prometheus,
        )
        self._damaged = Gauge(
            "fairgate_audit_damaged",
            "1: the last check of the whole audit found damage, or its head could not be signed; 0: neither.",
            registry=site.prometheus,
        )

    @property
    def complaint(self) -> str:
        """What is wrong with the audit; empty: nothing known."""
        return next((f"{what}: {why}" for what, why in self._complaints.items()), "")

    async def check(self) -> Verdict:
        """Verifies the whole audit; calls during a check share its result. Raises `DatabaseUnavailable`."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check())
        return await asyncio.shield(self._checking)

    async def _check(self) -> Verdict:
        verdict = await self._audit.own_verdict()
        self._verified_at_s = self._wall_clock()
        self._note("the audit is damaged", "" if verdict.finding is None else str(verdict.finding))
        return verdict

    async def flush(self) -> None:
        """Verifies the audit, closes a span of the ledger and signs the head, if due. Raises
        `DatabaseUnavailable`, and `AuditDamaged` if there is no head."""
        try:
            if self._wall_clock() - self._verified_at_s >= self._settings.verify_s:
                await self.check()
            await self._sign_what_is_due()
        finally:
            self._damaged.set(any(what in self._complaints for what in OF_THE_LOG))

    async def _sign_what_is_due(self) -> None:
        if self._audit.can_sign:
            await self._close_span()
        state = await self._audit.state()
        self._size.set(state.size)
        rows, seconds = self._settings.checkpoint_rows, self._settings.checkpoint_s
        age_s = self._wall_clock() - state.newest.at_us / 1e6 if state.newest is not None else seconds
        due = is_due(state.size, state.signed, age_s, rows=rows, seconds=seconds)
        if due and self._audit.can_sign and await self._sign():
            age_s = 0.0
        self._age.set(0.0 if state.size == state.signed else max(0.0, age_s))

    async def _sign(self) -> bool:
        try:
            made = await self._audit.make_checkpoint()
        except (AuditDamaged, Invalid) as error:
            self._note("the audit is not signed", str(error))
            return False
        self._note("the audit is not signed", "")
        self.log.debug("audit checkpoint %s", json.dumps(made.note, ensure_ascii=False))
        return True

    async def _close_span(self) -> None:
        why = ""
        try:
            await self._digests.close_due()
        except (AuditDamaged, Invalid) as error:
            why = str(error)
        self._note("the ledger is not digested", why)

    def _note(self, what: str, why: str) -> None:
        """Logs a problem once; empty: it is over."""
        if not why:
            self._complaints.pop(what, None)
        elif self._complaints.get(what) != why:
            self._complaints[what] = why
            self.log.error("%s: %s", what, why)

    async def close(self) -> None:
        """Signs the last rows, if due and the database is up."""
        try:
            await super().close()
        except AuditDamaged as error:
            self.log.warning("%s: %s", self.unavailable, type(error).__name__)
