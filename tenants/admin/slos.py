"""Admin acts on latency targets, and reports of how they were met."""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import Connection, delete, update

from tenants.admin import validation
from tenants.admin.audit import Actor
from tenants.admin.commands import SloSet
from tenants.admin.cursor import (
    DEFAULT_PAGE,
    Page,
    Text,
    beyond,
    checked_limit,
    decode_cursor,
    page_of,
)
from tenants.admin.transaction import AdminActs, Change, IfMatch
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


class SloActs(AdminActs):
    async def set(self, actor: Actor | str, wanted: SloSet, *, if_match: IfMatch = None) -> Slo:
        """`percentile` per cent of the requests in a tier must have `metric` (`ttft`, `tpot`, `e2e`) within
        `target_s`. `tenant` None: of each tenant without a target of its own. One per (tenant, tier, metric):
        setting it again replaces it. What was counted stays."""
        draft = new_slo(wanted)

        def change(connection: Connection, now_us: int) -> Change[Slo]:
            owner = None if wanted.tenant is None else queries.find_tenant(connection, wanted.tenant)
            tenant_id = "" if owner is None else owner.tenant_id
            table = tables.slos
            same = (
                table.c.tenant_id == tenant_id,
                table.c.tier == draft.tier.value,
                table.c.metric == draft.metric,
            )
            before = next(iter(slo_store.slos_where(connection, *same)), None)
            if before is None:
                if queries.count(connection, table) >= MAX_SLOS:
                    raise Invalid(
                        "slo", f"there are {MAX_SLOS} targets already, which is the most; remove one"
                    )
                after = replace(draft, slo_id=new_id("slo"), tenant_id=tenant_id)
                slo_store.insert_slo(connection, after, now_us)
            else:
                after = replace(before, target_us=draft.target_us, per_mille=draft.per_mille)
                values = update(table).values(target_us=draft.target_us, per_mille=draft.per_mille)
                connection.execute(values.where(table.c.id == before.slo_id))
            was = None if before is None else before.as_json()
            return Change(after, after.slo_id, tenant_id or None, was, after.as_json())

        return await self._transactions.act(actor, "slo.set", change, if_match)

    async def remove(self, actor: Actor | str, slo_id: str, *, if_match: IfMatch = None) -> Slo:
        """What was counted stays. Raises `NotFound`."""

        def change(connection: Connection, now_us: int) -> Change[Slo]:
            before = _find(connection, slo_id)
            connection.execute(delete(tables.slos).where(tables.slos.c.id == slo_id))
            return Change(before, slo_id, before.tenant_id or None, before=before.as_json())

        return await self._transactions.act(actor, "slo.remove", change, if_match)

    async def all(self, tenant: str | None = None) -> list[Slo]:
        """All targets, or those that bind one tenant."""

        def look(connection: Connection) -> list[Slo]:
            if tenant is None:
                return slo_store.slos_where(connection)
            return slo_store.binding(connection, queries.find_tenant(connection, tenant).tenant_id)

        return await self._transactions.read(look)

    async def show(self, slo_id: str) -> Slo:
        return await self._transactions.read(lambda connection: _find(connection, slo_id))

    async def page(
        self, tenant: str | None = None, *, cursor: str | None = None, limit: int = DEFAULT_PAGE
    ) -> Page[Slo]:
        """By tenant, tier and metric: all, or those that bind one tenant. Raises `Invalid`, `NotFound`."""
        most, filters = checked_limit(limit), {"tenant": tenant}
        table = tables.slos
        columns = (table.c.tenant_id, table.c.tier, table.c.metric)
        last = None if cursor is None else decode_cursor("slos", filters, cursor, tuple[Text, Text, Text])

        def look(connection: Connection) -> list[Slo]:
            wanted = [] if last is None else [beyond(columns, last)]
            if tenant is None:
                return slo_store.slos_where(connection, *wanted, most=most + 1)
            tenant_id = queries.find_tenant(connection, tenant).tenant_id
            binding = sorted(slo_store.binding(connection, tenant_id), key=_slo_key)
            return [slo for slo in binding if last is None or _slo_key(slo) > last]

        rows = await self._transactions.read(look)
        return page_of(rows, most, "slos", filters, _slo_key)

    async def report(self, tenant: str | None = None, tier: str | None = None) -> list[SloReport]:
        """How each target was met for each tenant that sent requests, over the period."""
        wanted_tier = None if tier is None else validation.choice("tier", Tier, tier)
        now_s = self._transactions.clock()

        def look(connection: Connection) -> list[SloReport]:
            tenant_id = None if tenant is None else queries.find_tenant(connection, tenant).tenant_id
            names = {row.tenant_id: row.name for row in queries.tenants_where(connection)}
            targets = {
                (target.tenant_id, target.tier.value, target.metric): target
                for target in slo_store.slos_where(connection)
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
        wanted_tier = None if tier is None else validation.choice("tier", Tier, tier).value
        since_s = int(self._transactions.clock()) - (PERIOD_DAYS + 1) * DAY_S + 1

        def look(connection: Connection) -> dict[int, dict[str, int]]:
            tenant_id = None if tenant is None else queries.find_tenant(connection, tenant).tenant_id
            return slo_store.causes_by_day(connection, since_s, tenant_id, wanted_tier)

        return await self._transactions.read(look)

    async def misses_of(self, request_id: str) -> list[Missed]:
        """The targets that one request missed, with their evidence."""
        is_it = tables.slo_misses.c.request_id == request_id
        return await self._transactions.read(lambda one: slo_store.misses(one, [is_it], len(METRICS)))


def _find(connection: Connection, slo_id: str) -> Slo:
    found = slo_store.slos_where(connection, tables.slos.c.id == queries.plain(slo_id))
    if not found:
        raise NotFound("slo", slo_id[:80])
    return found[0]


def _slo_key(slo: Slo) -> tuple[str, str, str]:
    return slo.tenant_id, slo.tier.value, slo.metric


def _miss_key(missed: Missed) -> tuple[int, str, str]:
    return missed.at_us, missed.request_id, missed.metric


def new_slo(wanted: SloSet) -> Slo:
    """A new target, without id and tenant. Raises `Invalid`."""
    tier, metric = validation.choice("tier", Tier, wanted.tier), _metric(wanted.metric)
    return Slo("", "", tier, metric, _target_us(wanted.target_s), _per_mille(wanted.percentile))


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
