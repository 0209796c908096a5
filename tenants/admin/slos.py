"""Admin acts on latency targets, and reports of how they were met."""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import Connection, delete, update

from tenants.admin import validation
from tenants.admin.audit import Actor
from tenants.admin.commands import SloSet
from tenants.admin.transaction import AdminCommands, Change
from tenants.directory import queries
from tenants.directory.keys import new_id
from tenants.errors import Invalid, NotFound
from tenants.slo import store as slo_store
from tenants.slo.slo import DAY_S, METRICS, PERIOD_DAYS, SPAN_S, Missed, Slo, SloReport, SloTally, burning
from tenants.storage import tables
from tenants.types import Tier

MAX_SLOS = 10_000
MIN_TARGET_S = 0.000_1
MAX_TARGET_S = 86_400.0
MAX_PAGE = 1_000


class SloCommands(AdminCommands):
    """Acts on targets."""

    async def set_slo(self, actor: Actor | str, wanted: SloSet) -> Slo:
        """Sets a target: `percentile` per cent of the requests in a tier must have `metric` (`ttft`, `tpot`,
        `e2e`) within `target_s`. `tenant` None: of each tenant without a target of its own. There is one per
        (tenant, tier, metric): setting it again replaces it. What was counted stays."""
        tier, metric = validation.choice("tier", Tier, wanted.tier), _metric(wanted.metric)
        target_us, per_mille = _target_us(wanted.target_s), _per_mille(wanted.percentile)

        def change(connection: Connection, now_us: int) -> Change[Slo]:
            owner = None if wanted.tenant is None else queries.find_tenant(connection, wanted.tenant)
            tenant_id = "" if owner is None else owner.tenant_id
            table = tables.slos
            same = (table.c.tenant_id == tenant_id, table.c.tier == tier.value, table.c.metric == metric)
            before = next(iter(slo_store.slos_where(connection, *same)), None)
            if before is None:
                if queries.count(connection, table) >= MAX_SLOS:
                    raise Invalid(
                        "slo", f"there are {MAX_SLOS} targets already, which is the most; remove one"
                    )
                after = Slo(new_id("slo"), tenant_id, tier, metric, target_us, per_mille)
                slo_store.insert_slo(connection, after, now_us)
            else:
                after = replace(before, target_us=target_us, per_mille=per_mille)
                values = update(table).values(target_us=target_us, per_mille=per_mille)
                connection.execute(values.where(table.c.id == before.slo_id))
            was = None if before is None else before.as_json()
            return Change(after, after.slo_id, tenant_id or None, was, after.as_json())

        return await self._act(actor, "slo.set", change)

    async def remove_slo(self, actor: Actor | str, slo_id: str) -> Slo:
        """Removes a target, and returns it. What was counted stays. Raises `NotFound`."""

        def change(connection: Connection, now_us: int) -> Change[Slo]:
            table = tables.slos
            before = next(iter(slo_store.slos_where(connection, table.c.id == slo_id)), None)
            if before is None:
                raise NotFound("slo", slo_id[:80])
            connection.execute(delete(table).where(table.c.id == slo_id))
            return Change(before, slo_id, before.tenant_id or None, before=before.as_json())

        return await self._act(actor, "slo.remove", change)

    async def list_slos(self, tenant: str | None = None) -> list[Slo]:
        """All targets, or those that bind one tenant."""

        def look(connection: Connection) -> list[Slo]:
            if tenant is None:
                return slo_store.slos_where(connection)
            tenant_id = queries.find_tenant(connection, tenant).tenant_id
            found = slo_store.slos_where(connection, tables.slos.c.tenant_id.in_(["", tenant_id]))
            own = {(each.tier, each.metric) for each in found if each.tenant_id}
            return [each for each in found if each.tenant_id or (each.tier, each.metric) not in own]

        return await self._database.read(look)

    async def slo_report(self, tenant: str | None = None, tier: str | None = None) -> list[SloReport]:
        """How each target was met for each tenant that sent requests, over the period."""
        wanted_tier = None if tier is None else validation.choice("tier", Tier, tier)
        now_s = self._clock()

        def look(connection: Connection) -> list[SloReport]:
            tenant_id = None if tenant is None else queries.find_tenant(connection, tenant).tenant_id
            names = {each.tenant_id: each.name for each in queries.tenants_where(connection)}
            targets = {
                (each.tenant_id, each.tier.value, each.metric): each
                for each in slo_store.slos_where(connection)
            }
            since_s = int(now_s) - PERIOD_DAYS * DAY_S
            by_day = slo_store.counts(connection, DAY_S, since_s - DAY_S + 1, tenant_id)
            by_span = slo_store.counts(connection, SPAN_S, int(now_s) - 3 * DAY_S, tenant_id)
            by_cause = slo_store.causes(connection, since_s * 1_000_000, tenant_id)
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
                        tuple(burning(by_span.get(key, {}), slo.per_mille, now_s)),
                        by_cause.get(key, {}),
                    )
                )
            order = list(Tier)
            return sorted(
                reports,
                key=lambda each: (
                    each.tenant_name,
                    order.index(each.slo.tier),
                    METRICS.index(each.slo.metric),
                ),
            )

        return await self._database.read(look)

    async def list_misses(
        self,
        *,
        tenant: str | None = None,
        tier: str | None = None,
        cause: str | None = None,
        request_id: str | None = None,
        most: int = 100,
    ) -> list[Missed]:
        """Missed targets, the newest first, with their evidence."""
        if not 1 <= most <= MAX_PAGE:
            raise Invalid("limit", f"must lie between 1 and {MAX_PAGE}")
        table = tables.slo_misses

        def look(connection: Connection) -> list[Missed]:
            conditions = []
            if tenant is not None:
                found = queries.find_tenant(connection, tenant)
                conditions.append(table.c.tenant_id == found.tenant_id)
            for column, value in (
                (table.c.tier, tier),
                (table.c.cause, cause),
                (table.c.request_id, request_id),
            ):
                if value is not None:
                    conditions.append(column == value)
            return slo_store.misses(connection, conditions, most)

        return await self._database.read(look)


def _metric(value: str) -> str:
    if value not in METRICS:
        raise Invalid("metric", f"{value!r} is not one of {', '.join(METRICS)}")
    return value


def _target_us(value: float) -> int:
    validation.finite("target_s", value, "a finite number of seconds")
    if not MIN_TARGET_S <= value <= MAX_TARGET_S:
        raise Invalid("target_s", f"must lie between {MIN_TARGET_S} and {MAX_TARGET_S:g} seconds")
    return round(value * 1e6)


def _per_mille(value: float) -> int:
    validation.finite("percentile", value, "a finite number, such as 95")
    if not 1 <= value <= 100 or abs(value * 10 - round(value * 10)) > 1e-6:
        raise Invalid(
            "percentile", "must lie between 1 and 100, with one decimal at most, such as 95 or 99.9"
        )
    return round(value * 10)
