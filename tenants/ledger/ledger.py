"""The append-only ledger of reservations and charges, from which quota counters are rebuilt.

One row per (request id, kind, number), so that retries never reserve or charge twice. A request holds the sum
of its reserve row and its numbered top-up rows; its settle row says what of it was charged. `append` returns
after COMMIT: the row survives a crash of the process and of the machine.

When the quota store has lost its counters they are rebuilt from here. So that no reservation falls between
reading and refilling, each rebuild opens an epoch (`next_epoch`), and a reserve or top-up row is accepted
only under the epoch in which its hold was granted."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Container, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from operator import attrgetter, gt
from typing import Any, cast

import msgspec
from msgspec.structs import replace
from sqlalchemy import ColumnElement, Connection, func, insert, select, text, update

from tenants.directory import queries
from tenants.errors import EpochEnded, Invalid
from tenants.instants import from_us, to_us
from tenants.ledger import counter_sets, replay
from tenants.ledger.batch_insert import insert_rows, insert_sets
from tenants.ledger.rows import (
    AMOUNT_FIELDS,
    KINDS,
    Kind,
    LedgerRow,
    OpenRequest,
    Standing,
    Total,
    is_settled,
)
from tenants.quota import rules
from tenants.storage.database import Database
from tenants.storage.tables import CHARGES, CREDITS, RESERVES, ledger, settings
from tenants.types import Amounts, Limit

EPOCH_SETTING = "quota_epoch"
EPOCH_LOCK = 0x6661697267617465
"""PostgreSQL advisory lock: shared by writers under an epoch, exclusive for opening the next one."""

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
_texts = attrgetter(*_TEXT_COLUMNS)


class Ledger:
    """Reads and appends rows; never changes or deletes one."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known_sets = counter_sets.KnownSets()

    async def append(self, row: LedgerRow, *, epoch: str = "") -> bool:
        """Durable on return. False: this (request id, kind, number) exists, nothing was changed. Raises
        `Invalid` for a row that cannot be stored, `EpochEnded` for another `epoch`, `DatabaseUnavailable`."""
        _check(row)
        new_row = _new_row(row, epoch, self._known_sets)
        is_new = await self._database.write_together(_append, new_row)
        if is_new and not new_row.is_known and new_row.counter_set is not None:
            self._known_sets.add((row.gateway_id, new_row.counter_set))
        return is_new

    async def settle(self, row: LedgerRow) -> LedgerRow:
        """Appends a settle row; returns it, or the existing one. Durable on return; raises as `append`."""
        if await self.append(row):
            return row
        return (await self.settled([row.request_id]))[row.request_id]

    async def settle_with_credit(
        self, row: LedgerRow, credit: LedgerRow, most_nanousd: int
    ) -> tuple[LedgerRow, int]:
        """As `settle`, with `credit` in the same transaction unless a settle row existed, at most what the
        tenant's credits of that day (UTC) leave of `most_nanousd`. Also returns what was credited."""
        _check(row)
        _check(credit)

        def write(connection: Connection) -> tuple[bool, int]:
            [is_new] = _append(connection, [_new_row(row)])
            if not is_new:
                return False, _credited(connection, ledger.c.request_id == credit.request_id)
            left = most_nanousd - _credited_that_day(connection, credit)
            amount = min(-credit.amounts.cost_nanousd, max(0, left))
            if amount > 0:
                amounts = replace(credit.amounts, cost_nanousd=-amount)
                _append(connection, [_new_row(replace(credit, amounts=amounts))])
            return True, amount

        is_new, credited_nanousd = await self._database.write(write)
        effective = row if is_new else (await self.settled([row.request_id]))[row.request_id]
        return effective, credited_nanousd

    async def epoch(self) -> str:
        """The epoch in force; empty before the first."""
        return await self._database.read(_epoch)

    async def next_epoch(self) -> str:
        """Opens a new epoch: rows of the previous one are refused, so a later `standing` is complete."""
        return await self._database.write(_next_epoch)

    async def find(self, request_id: str) -> list[LedgerRow]:
        """Every row of one request, oldest first."""

        return await self._database.read(lambda connection: rows_of(connection, request_id))

    async def settled(self, request_ids: Collection[str]) -> dict[str, LedgerRow]:
        """Of these requests, the settle rows that exist."""

        def rows(connection: Connection) -> dict[str, LedgerRow]:
            found: dict[str, LedgerRow] = {}
            for chunk in queries.chunks(list(request_ids)):
                query = select(ledger).where(ledger.c.request_id.in_(chunk), ledger.c.kind == "settle")
                found |= {row.request_id: row for row in _rows(connection, query)}
            return found

        return await self._database.read(rows)

    async def open_requests(
        self,
        gateway_id: str | None = None,
        *,
        request_ids: Collection[str] | None = None,
        most: int | None = 10_000,
    ) -> list[OpenRequest]:
        """Reserved, unsettled requests, oldest first: of a gateway, of ids, or all. `most` None: no bound."""
        of_gateway = [] if gateway_id is None else [ledger.c.gateway_id == gateway_id]
        chunks: list[list[ColumnElement[bool]]] = [[]]
        if request_ids is not None:
            chunks = [[ledger.c.request_id.in_(chunk)] for chunk in queries.chunks(sorted(request_ids))]
        return await self._database.read(
            lambda connection: [
                each for one in chunks for each in _open(connection, [*of_gateway, *one], most)
            ]
        )

    async def reserved(self, request_ids: Collection[str]) -> list[OpenRequest]:
        """These requests as reserved and topped up, settled or not."""
        conditions = [ledger.c.request_id.in_(chunk) for chunk in queries.chunks(list(request_ids))]
        return await self._database.read(
            lambda connection: [each for one in conditions for each in _reserved(connection, [one], None)]
        )

    async def standing(self, limits: Iterable[Limit], now: datetime) -> Standing:
        """Every limit's counter at `now` (`replay.usage`; a default of end users as each one's limits) and
        every open request, from one snapshot. Input of `QuotaStore.rebuild`."""
        chosen = list(limits)
        now_us = to_us(now)

        def look(connection: Connection) -> Standing:
            open_requests = _open(connection, [], None)
            counted = replay.of_end_users(connection, chosen, open_requests, now_us)
            used = replay.emptied(replay.usage(connection, counted, now_us), open_requests)
            used = replay.without_rested(used, open_requests)
            return Standing(used, open_requests)

        return await self._database.read(look)

    async def totals(
        self, *, tenant_id: str | None = None, since: datetime | None = None, until: datetime | None = None
    ) -> list[Total]:
        """Charges (settle, signed credit and adjust rows) by tenant, tier, model; `since` <= at < `until`."""

        def rows(connection: Connection) -> list[Total]:
            groups = (ledger.c.tenant_id, ledger.c.tier, ledger.c.model)
            query = (
                select(
                    *groups,
                    *(func.sum(ledger.c[name]).label(name) for name in _SUMMED),
                )
                .where(CHARGES)
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


def rows_of(connection: Connection, request_id: str) -> list[LedgerRow]:
    query = select(ledger).where(ledger.c.request_id == request_id)
    return _rows(connection, query.order_by(ledger.c.id))


def append_in(connection: Connection, row: LedgerRow, epoch: str) -> None:
    """Appends one row as part of a larger transaction. Raises `EpochEnded`, `Invalid`."""
    _check(row)
    _append(connection, [_new_row(row, epoch)])


_SUMMED = ("requests", "input_tokens", "output_tokens", "cost_nanousd")


def _credited(connection: Connection, *conditions: ColumnElement[bool]) -> int:
    query = select(func.coalesce(func.sum(ledger.c.cost_nanousd), 0)).where(CREDITS, *conditions)
    return -int(connection.execute(query).scalar_one())


def _credited_that_day(connection: Connection, credit: LedgerRow) -> int:
    """What the tenant of `credit` was credited on its day, at all gateways."""
    if connection.dialect.name == "postgresql":
        # Another gateway's credit of the same tenant is either seen here or waits for this one.
        lock = zlib.crc32(f"credit {credit.tenant_id}".encode())
        connection.execute(select(func.pg_advisory_xact_lock(lock)))
    day = credit.at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return _credited(
        connection,
        ledger.c.tenant_id == credit.tenant_id,
        ledger.c.at_us >= to_us(day),
        ledger.c.at_us < to_us(day + timedelta(days=1)),
    )


def _check(row: LedgerRow) -> None:
    if row.kind not in KINDS:
        raise Invalid("kind", f"must be one of {', '.join(sorted(KINDS))}")
    if any(map(gt, map(len, _texts(row)), _TEXT_COLUMNS.values())):
        name, most = next(each for each in _TEXT_COLUMNS.items() if len(getattr(row, each[0])) > each[1])
        raise Invalid(name, f"has more than {most} characters")
    if not row.request_id:
        raise Invalid("request_id", "is empty")
    if row.at.tzinfo is None:
        raise Invalid("at", "needs a time zone")
    if row.kind in {"reserve", "top_up", "settle"}:
        rules.check_amounts(row.amounts)
        if (counted := row.counted) is not row.amounts:
            rules.check_amounts(counted)
    if (row.kind == "top_up") != (row.number > 0):
        raise Invalid("number", "is 1 or more for a top-up, 0 for any other row")
    if len(row.charged_to) > MAX_CHARGED_TO or len(row.detail) > MAX_DETAIL_FIELDS:
        raise Invalid(
            "charged_to" if len(row.charged_to) > MAX_CHARGED_TO else "detail", "has too many entries"
        )


class _NewRow(msgspec.Struct, frozen=True):
    """A row to append."""

    row: LedgerRow
    epoch: str
    counter_set: str | None
    """Name of the counters that it is charged to."""
    is_known: bool
    """The set is in the database."""


def _new_row(row: LedgerRow, epoch: str = "", known: Container[tuple[str, str]] = ()) -> _NewRow:
    name = counter_sets.set_id(row.charged_to)
    return _NewRow(row, epoch, name, name is None or (row.gateway_id, name) in known)


class _SomeExist(Exception):
    """Some of the rows exist: append them one by one to find out which."""


def _append(connection: Connection, new_rows: Sequence[_NewRow]) -> list[bool]:
    """Appends rows in one batch, under their epochs; returns for each whether it is new."""
    for epoch in {each.epoch for each in new_rows if each.epoch}:
        _require_epoch(connection, epoch)
    new = insert_rows(connection, [_values(each) for each in new_rows])
    if new < len(new_rows):
        if len(new_rows) > 1:
            raise _SomeExist
        return [False]
    members = {
        (each.row.gateway_id, each.counter_set, counter)
        for each in new_rows
        if each.counter_set is not None and not each.is_known
        for counter in each.row.charged_to
    }
    if members:
        insert_sets(connection, sorted(members))
    return [True] * len(new_rows)


def _values(new_row: _NewRow) -> tuple[Any, ...]:
    """In the order of `batch_insert.COLUMNS`."""
    row = new_row.row
    amounts = row.amounts
    return (
        row.request_id,
        row.kind,
        row.number,
        row.tenant_id,
        row.project_id,
        row.key_id,
        row.gateway_id,
        str(row.tier),
        row.model,
        amounts.input_tokens,
        amounts.output_tokens,
        amounts.cost_nanousd,
        amounts.requests,
        amounts.gpu_ms,
        row.counted_input,
        row.counted_output,
        row.counted_cost,
        row.price_version,
        row.outcome,
        to_us(row.at),
        msgspec.json.encode(row.detail).decode(),
        new_row.counter_set,
        msgspec.json.encode(row.labels).decode() if row.labels else None,
    )


def _epoch(connection: Connection) -> str:
    return queries.setting(connection, EPOCH_SETTING) or ""


def _require_epoch(connection: Connection, epoch: str) -> None:
    if connection.dialect.name == "postgresql":
        # Held to the end of the transaction: the next epoch cannot be opened between this check and COMMIT.
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock_shared({EPOCH_LOCK})")
    # Driver-level SQL: it runs with every batch, and SQLAlchemy Core would cost as much as the batch itself.
    found = connection.exec_driver_sql(f"SELECT value FROM settings WHERE name = '{EPOCH_SETTING}'").scalar()
    if (found or "") != epoch:
        raise EpochEnded()


def _next_epoch(connection: Connection) -> str:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": EPOCH_LOCK})
    epoch = str(int(_epoch(connection) or "0") + 1)
    row = settings.c.name == EPOCH_SETTING
    if connection.execute(update(settings).where(row).values(value=epoch)).rowcount == 0:
        connection.execute(insert(settings).values(name=EPOCH_SETTING, value=epoch))
    return epoch


def _open(
    connection: Connection, conditions: list[ColumnElement[bool]], most: int | None
) -> list[OpenRequest]:
    return _reserved(connection, [~is_settled(ledger), *conditions], most)


def _reserved(
    connection: Connection, conditions: list[ColumnElement[bool]], most: int | None
) -> list[OpenRequest]:
    query = select(ledger).where(RESERVES, *conditions)
    reserves = _rows(connection, query.order_by(ledger.c.id).limit(most))
    top_ups: dict[str, list[LedgerRow]] = {}
    for chunk in queries.chunks([row.request_id for row in reserves]):
        more = select(ledger).where(ledger.c.request_id.in_(chunk), ledger.c.kind == "top_up")
        for row in _rows(connection, more.order_by(ledger.c.number)):
            top_ups.setdefault(row.request_id, []).append(row)
    return [OpenRequest(row, tuple(top_ups.get(row.request_id, ()))) for row in reserves]


def _rows(connection: Connection, query: Any) -> list[LedgerRow]:
    found = list(connection.execute(query).mappings())
    charged = counter_sets.counters_of(connection, {row["counter_set"] for row in found} - {None})
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
            amounts=Amounts(**{name: row[name] for name in AMOUNT_FIELDS}),
            outcome=row["outcome"],
            at=from_us(row["at_us"]),
            detail=row["detail"],
            charged_to=charged.get(row["counter_set"], ()),
            number=row["number"],
            counted_input=row["counted_input"],
            counted_output=row["counted_output"],
            counted_cost=row["counted_cost"],
            price_version=row["price_version"],
            labels=row["labels"] or {},
        )
        for row in found
    ]
