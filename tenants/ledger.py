"""What was reserved, what was charged, and for whom: the truth that counters are rebuilt from.

Append-only rows, one per (request id, kind), so that whatever is retried there is one reservation and one
charge. `append` returns after COMMIT: the row survives a crash of the process and of the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, cast

from sqlalchemy import ColumnElement, Connection, Table, and_, func, insert, select, true
from sqlalchemy.dialects import postgresql, sqlite

from tenants import queries
from tenants.database import Database
from tenants.errors import Invalid
from tenants.quota import rules
from tenants.records import from_us, to_us
from tenants.tables import ledger, ledger_charges
from tenants.types import Amounts, Limit

Kind = Literal["reserve", "settle", "credit", "adjust"]
KINDS = frozenset({"reserve", "settle", "credit", "adjust"})

MAX_CHARGED_TO = rules.MAX_LIMITS
MAX_DETAIL_FIELDS = 64
_TEXT_COLUMNS = {
    "request_id": 80,
    "tenant_id": 40,
    "project_id": 40,
    "key_id": 40,
    "gateway_id": 80,
    "tier": 16,
    "model": 256,
    "outcome": 64,
}


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One movement. A reserve row says what was held, a settle row what was charged."""

    request_id: str
    kind: Kind
    tenant_id: str
    project_id: str
    key_id: str
    gateway_id: str
    tier: str
    model: str
    amounts: Amounts
    outcome: str
    at: datetime
    """UTC, with its time zone set."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """Numbers and short words worth keeping (never prompts or answers); JSON."""
    charged_to: tuple[str, ...] = ()
    """Reserve rows: `Granted.charged_to`, the counters that this request will be charged to. Counters are
    rebuilt from it, so a reserve row without it counts against no limit after a restart."""


@dataclass(frozen=True, slots=True)
class Total:
    """Charges of one tenant in one tier for one model."""

    tenant_id: str
    tier: str
    model: str
    requests: int
    input_tokens: int
    output_tokens: int
    cost_nanousd: int


class Ledger:
    """Reads and appends; nothing here changes or deletes a row."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def append(self, row: LedgerRow) -> bool:
        """Durable on return. False, changing nothing, when this (request id, kind) exists already.
        Raises `DatabaseUnavailable`, or `Invalid` for a row that cannot be stored."""
        _check(row)
        return await self._database.write(lambda connection: _insert(connection, row))

    async def find(self, request_id: str) -> list[LedgerRow]:
        """Every row of one request, oldest first."""

        def rows(connection: Connection) -> list[LedgerRow]:
            return _rows(
                connection, select(ledger).where(ledger.c.request_id == request_id).order_by(ledger.c.id)
            )

        return await self._database.read(rows)

    async def open_reserves(self, gateway_id: str | None = None, *, most: int = 10_000) -> list[LedgerRow]:
        """Reserve rows without a settle row, oldest first: of one gateway, or of all. After a restart these
        requests must be settled (with what their engine says of them). At most `most`; ask again for more."""

        def rows(connection: Connection) -> list[LedgerRow]:
            query = select(ledger).where(ledger.c.kind == "reserve", ~is_settled(ledger))
            if gateway_id is not None:
                query = query.where(ledger.c.gateway_id == gateway_id)
            return _rows(connection, query.order_by(ledger.c.id).limit(most))

        return await self._database.read(rows)

    async def usage_by_limit(self, limits: Iterable[Limit], now: datetime) -> list[tuple[Limit, int]]:
        """What each limit's counter must say at `now`, from settled rows alone: `QuotaStore.rebuild`
        takes it.

        Windows: the sum of what was charged to the window that `now` lies in. Buckets: what has not
        flowed back, replayed from the charges of twice the time a full refill takes; where older charges
        could matter as well this errs to the tenant's disadvantage by less than one burst. Concurrency:
        0.
        """
        chosen = list(limits)
        now_us = to_us(now)
        return await self._database.read(lambda connection: usage(connection, chosen, now_us))

    async def totals(
        self, *, tenant_id: str | None = None, since: datetime | None = None, until: datetime | None = None
    ) -> list[Total]:
        """Charges (settle rows, plus credits and adjustments as they are signed) per tenant, tier and model,
        by the time of the row: `since` <= at < `until`."""

        def rows(connection: Connection) -> list[Total]:
            groups = (ledger.c.tenant_id, ledger.c.tier, ledger.c.model)
            query = (
                select(
                    *groups,
                    *(func.sum(ledger.c[name]).label(name) for name in _SUMMED),
                )
                .where(ledger.c.kind != "reserve")
                .group_by(*groups)
                .order_by(*groups)
            )
            if tenant_id is not None:
                query = query.where(ledger.c.tenant_id == tenant_id)
            if since is not None:
                query = query.where(ledger.c.at_us >= to_us(since))
            if until is not None:
                query = query.where(ledger.c.at_us < to_us(until))
            return [
                Total(
                    row["tenant_id"], row["tier"], row["model"], **{name: int(row[name]) for name in _SUMMED}
                )
                for row in connection.execute(query).mappings()
            ]

        return await self._database.read(rows)


_SUMMED = ("requests", "input_tokens", "output_tokens", "cost_nanousd")


def _check(row: LedgerRow) -> None:
    if row.kind not in KINDS:
        raise Invalid("kind", f"must be one of {', '.join(sorted(KINDS))}")
    for name, most in _TEXT_COLUMNS.items():
        if len(getattr(row, name)) > most:
            raise Invalid(name, f"has more than {most} characters")
    if not row.request_id:
        raise Invalid("request_id", "is empty")
    if row.at.tzinfo is None:
        raise Invalid("at", "needs a time zone")
    if row.kind in {"reserve", "settle"}:
        rules.check_amounts(row.amounts)
    if len(row.charged_to) > MAX_CHARGED_TO or len(row.detail) > MAX_DETAIL_FIELDS:
        raise Invalid(
            "charged_to" if len(row.charged_to) > MAX_CHARGED_TO else "detail", "has too many entries"
        )


def _insert(connection: Connection, row: LedgerRow) -> bool:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = (
        dialect.insert(ledger)
        .values(
            request_id=row.request_id,
            kind=row.kind,
            tenant_id=row.tenant_id,
            project_id=row.project_id,
            key_id=row.key_id,
            gateway_id=row.gateway_id,
            tier=row.tier,
            model=row.model,
            input_tokens=row.amounts.input_tokens,
            output_tokens=row.amounts.output_tokens,
            cost_nanousd=row.amounts.cost_nanousd,
            requests=row.amounts.requests,
            outcome=row.outcome,
            at_us=to_us(row.at),
            detail=dict(row.detail),
        )
        .on_conflict_do_nothing(index_elements=["request_id", "kind"])
        .returning(ledger.c.id)
    )
    if connection.execute(statement).first() is None:
        return False
    if row.charged_to:
        charges = [{"counter": name, "request_id": row.request_id} for name in dict.fromkeys(row.charged_to)]
        connection.execute(insert(ledger_charges), charges)
    return True


def is_settled(rows: Table) -> ColumnElement[bool]:
    """SQL: has the request of this row of `rows` a settle row?"""
    other = ledger.alias("other")
    return (
        select(other.c.id).where(other.c.request_id == rows.c.request_id, other.c.kind == "settle").exists()
    )


def _rows(connection: Connection, query: Any) -> list[LedgerRow]:
    found = list(connection.execute(query).mappings())
    charged: dict[str, list[str]] = {}
    for chunk in queries.chunks([row["request_id"] for row in found if row["kind"] == "reserve"]):
        charges = select(ledger_charges).where(ledger_charges.c.request_id.in_(chunk))
        for name, request_id in connection.execute(charges.order_by(ledger_charges.c.counter)):
            charged.setdefault(request_id, []).append(name)
    return [
        LedgerRow(
            request_id=row["request_id"],
            kind=cast(Kind, row["kind"]),
            tenant_id=row["tenant_id"],
            project_id=row["project_id"],
            key_id=row["key_id"],
            gateway_id=row["gateway_id"],
            tier=row["tier"],
            model=row["model"],
            amounts=Amounts(row["input_tokens"], row["output_tokens"], row["cost_nanousd"], row["requests"]),
            outcome=row["outcome"],
            at=from_us(row["at_us"]),
            detail=row["detail"],
            charged_to=tuple(charged.get(row["request_id"], ())) if row["kind"] == "reserve" else (),
        )
        for row in found
    ]


# ---------------------------------------------------------------- counters from rows


def usage(connection: Connection, limits: Sequence[Limit], now_us: int) -> list[tuple[Limit, int]]:
    """`Ledger.usage_by_limit` on a connection."""
    names: dict[str, Limit] = {}
    for limit in limits:
        if limit.window is not None:
            names[rules.charge_name(limit, rules.advance(limit, None, now_us))] = limit
    sums = charged_sums(connection, list(names))
    used = {
        rules.identity(limit): sums.get(name, Amounts(requests=0)).of(limit.meter)
        for name, limit in names.items()
    }
    for limit in limits:
        if limit.is_bucket:
            used[rules.identity(limit)] = _bucket_used(connection, limit, now_us)
    return [(limit, used.get(rules.identity(limit), 0)) for limit in limits]


def charged_sums(
    connection: Connection,
    names: list[str],
    kind: Kind = "settle",
    condition: ColumnElement[bool] | None = None,
) -> dict[str, Amounts]:
    """Per counter, the sum of the `kind` rows of the requests that are charged to it."""
    found: dict[str, Amounts] = {}
    join = and_(ledger.c.request_id == ledger_charges.c.request_id, ledger.c.kind == kind)
    for chunk in queries.chunks(names):
        query = (
            select(
                ledger_charges.c.counter,
                func.sum(ledger.c.input_tokens),
                func.sum(ledger.c.output_tokens),
                func.sum(ledger.c.cost_nanousd),
                func.sum(ledger.c.requests),
            )
            .select_from(ledger_charges.join(ledger, join))
            .where(ledger_charges.c.counter.in_(chunk), true() if condition is None else condition)
            .group_by(ledger_charges.c.counter)
        )
        for name, *amounts in connection.execute(query):
            found[name] = Amounts(*(int(amount) for amount in amounts))
    return found


def _bucket_used(connection: Connection, limit: Limit, now_us: int) -> int:
    """Replays the charges of a bucket, by the time they were settled.

    Started empty, which is never more than the true level, a bucket's level is exact after any moment at
    which it was full; so the replay never shows more than there is.
    """
    assert limit.rate_per_s is not None
    fill_us = int(limit.amount / limit.rate_per_s * 1e6) + 1_000
    start_us = now_us - 2 * fill_us
    join = and_(ledger.c.request_id == ledger_charges.c.request_id, ledger.c.kind == "settle")
    charges = (
        select(
            ledger.c.at_us,
            ledger.c.input_tokens,
            ledger.c.output_tokens,
            ledger.c.cost_nanousd,
            ledger.c.requests,
        )
        .select_from(ledger_charges.join(ledger, join))
        .where(
            ledger_charges.c.counter == rules.identity(limit),
            ledger.c.at_us > start_us,
            ledger.c.at_us <= now_us,
        )
        .order_by(ledger.c.at_us)
    )
    counter: rules.Counter = rules.BucketCounter(0, start_us // 1_000, 0)
    for at_us, *amounts in connection.execute(charges):
        counter = rules.advance(limit, counter, at_us)
        counter = rules.settle(limit, counter, 0, Amounts(*amounts).of(limit.meter))
    counter = rules.advance(limit, counter, now_us)
    return rules.view(limit, counter, now_us).used
