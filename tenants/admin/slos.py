"""Admin acts on latency targets, and reports of how they were met."""

from __future__ import annotations

from sqlalchemy import Connection

from tenants.admin.audit import Actor
from tenants.admin.table_noun import TableNoun
from tenants.admin.transaction import AdminActs, IfMatch
from tenants.directory import queries
from tenants.nouns import checks
from tenants.slo import store as slo_store
from tenants.slo.slo import DAY_S, PERIOD_DAYS, SPAN_S, Missed, SloReport, SloTally, burning
from tenants.slo.target import METRICS, Slo, SloSet, as_row, draft_of, of_row
from tenants.storage import tables
from tenants.types import Tier

TARGETS = TableNoun(
    "slo",
    "targets",
    tables.slos,
    Slo,
    names=("tenant_id", "tier", "metric"),
    order=(tables.slos.c.tenant_id, tables.slos.c.tier, tables.slos.c.metric),
    as_row=as_row,
    as_json=Slo.as_json,
    of_row=of_row,
    draft_of=draft_of,
)


class SloActs(AdminActs):
    async def set(self, actor: Actor | str, wanted: SloSet, *, if_match: IfMatch = None) -> Slo:
        """`percentile` per cent of the requests in a tier must have `metric` (`ttft`, `tpot`, `e2e`) within
        `target_s`. `tenant` None: of each tenant without a target of its own. What was counted stays."""
        return await TARGETS.set(self._transactions, actor, wanted, if_match)

    async def remove(self, actor: Actor | str, slo_id: str, *, if_match: IfMatch = None) -> Slo:
        """What was counted stays. Raises `NotFound`."""
        return await TARGETS.remove(self._transactions, actor, slo_id, if_match)

    async def report(self, tenant: str | None = None, tier: str | None = None) -> list[SloReport]:
        """How each target was met for each tenant that sent requests, over the period."""
        wanted_tier = None if tier is None else checks.choice("tier", Tier, tier)
        now_s = self._transactions.clock()

        def look(connection: Connection) -> list[SloReport]:
            tenant_id = None if tenant is None else queries.find_tenant(connection, tenant).tenant_id
            names = {row.tenant_id: row.name for row in queries.tenants_where(connection)}
            targets = {
                (target.tenant_id, target.tier.value, target.metric): target
                for target in TARGETS.rows(connection)
            }
            since_s = int(now_s) - PERIOD_DAYS * DAY_S
            by_day = slo_store.counts(connection, DAY_S, since_s - DAY_S + 1, tenant_id)
            by_span = slo_store.counts(connection, SPAN_S, int(now_s) - 3 * DAY_S, tenant_id)
            by_cause = slo_store.causes(connection, since_s - DAY_S + 1, tenant_id)
            reports: list[SloReport] = []
            for key, days in by_day.items():
                slo = targets.get((key.tenant_id, key.tier, key.metric)) or targets.get(
                    ("", key.tier, key.metric)
                )
                if slo is None or wanted_tier not in (None, slo.tier):
                    continue
                reports.append(
                    SloReport(
                        slo,
                        key.tenant_id,
                        names.get(key.tenant_id, key.tenant_id),
                        sum(days.values(), SloTally()),
                        tuple(
                            burning(
                                by_span.get(key, {}), slo.per_mille, now_s, self._transactions.alert_misses
                            )
                        ),
                        by_cause.get(key, {}),
                    )
                )
            order = list(Tier)
            return sorted(
                reports,
                key=lambda report: (
                    report.tenant_name,
                    order.index(report.slo.tier),
                    METRICS.index(report.slo.metric),
                ),
            )

        return await self._transactions.read(look)

    async def causes_by_day(
        self, tenant: str | None = None, tier: str | None = None
    ) -> dict[int, dict[str, int]]:
        """Misses by cause and day of the period (its start, Unix seconds), also of removed targets."""
        wanted_tier = None if tier is None else checks.choice("tier", Tier, tier).value
        since_s = int(self._transactions.clock()) - (PERIOD_DAYS + 1) * DAY_S + 1

        def look(connection: Connection) -> dict[int, dict[str, int]]:
            tenant_id = None if tenant is None else queries.find_tenant(connection, tenant).tenant_id
            return slo_store.causes_by_day(connection, since_s, tenant_id, wanted_tier)

        return await self._transactions.read(look)

    async def misses_of(self, request_id: str) -> list[Missed]:
        """The targets that one request missed, with their evidence."""
        is_it = tables.slo_misses.c.request_id == request_id
        return await self._transactions.read(lambda one: slo_store.misses(one, [is_it], len(METRICS)))
