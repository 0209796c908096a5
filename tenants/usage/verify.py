"""Compares the sums of usage with the ledger, and corrects them.

Tenant by tenant, each on one snapshot of the rows up to the position. A correction adds the difference, so
the fold may go on meanwhile: what it adds is on neither side of the difference."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import groupby, islice, starmap

from sqlalchemy import Column, Connection, Table, TextClause, func, select, true, update
from sqlalchemy.sql import ColumnElement

from tenants.errors import Invalid
from tenants.storage.database import Database
from tenants.storage.tables import CHARGES, ledger, usage_fold, usage_labels, usage_sums
from tenants.usage.fold import add, add_labels, charges_query, drop_zeros, position
from tenants.usage.sums import AMOUNTS, DAY_US, NOTHING, Charge, Grain, SumKey, minus, sums_of

MOST_EXAMPLES = 20
FETCHED = 2_000
"""Ledger rows in memory at a time."""
CORRECTED = 500
"""Sums corrected in one transaction."""


@dataclass(slots=True)
class Differences:
    """What must be added to the stored sums of one tenant, and missing labels."""

    amounts: dict[SumKey, tuple[int, ...]] = field(default_factory=dict)
    gone: set[SumKey] = field(default_factory=set)
    """Those of them without charges in the ledger."""
    labels: dict[str, dict[str, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.amounts or self.labels)

    def problems(self) -> Iterator[str]:
        for key, amounts in self.amounts.items():
            start = datetime.fromtimestamp(key.start_us // 1_000_000, UTC)
            off = ", ".join(
                f"{name} {-amount:+d}" for name, amount in zip(AMOUNTS, amounts, strict=True) if amount
            )
            whose = " ".join(filter(None, (key.tenant_id, key.key_id, key.model, key.tier, key.outcome)))
            yield f"usage of {whose} in the {key.grain} of {start:%Y-%m-%d %H:%M}: off by {off}"
        for set_id in self.labels:
            yield f"usage: the labels of set {set_id} are missing"


async def usage_problems(database: Database) -> list[str]:
    """At most `MOST_EXAMPLES`. Raises `DatabaseUnavailable`."""
    problems: list[str] = []
    for tenant_id in await database.read(tenants_charged):
        wrong = await database.read(partial(differences, tenant_id))
        problems += islice(wrong.problems(), MOST_EXAMPLES + 1 - len(problems))
        if len(problems) > MOST_EXAMPLES:
            return [*problems[:MOST_EXAMPLES], "and more sums of usage differ from the ledger"]
    return problems


async def rebuild_usage(database: Database) -> int:
    """Returns how many were wrong. Raises `DatabaseUnavailable`, `Invalid` where another rebuild begins."""
    rebuild_id = secrets.token_hex(16)
    begin = update(usage_fold).values(rebuild_id=rebuild_id)
    await database.write(lambda connection: connection.execute(begin).rowcount)
    corrected = 0
    for tenant_id in await database.read(tenants_charged):
        wrong = await database.read(partial(differences, tenant_id))
        keys = sorted(wrong.amounts)
        for start in range(0, len(keys) or bool(wrong.labels), CORRECTED):
            some = {key: wrong.amounts[key] for key in keys[start : start + CORRECTED]}
            await database.write(partial(_correct, rebuild_id, some, wrong))
        corrected += len(keys)
    return corrected


def _correct(
    rebuild_id: str,
    amounts: Mapping[SumKey, Sequence[int]],
    wrong: Differences,
    connection: Connection,
) -> None:
    at = position(connection, locked=True, waits=True)
    if at is None or at.rebuild_id != rebuild_id:
        raise Invalid("usage", "another rebuild is running: wait until it has finished")
    kept = {
        key: amounts[key]
        for key in amounts
        if key.grain != Grain.HOUR.value or key.start_us >= at.hours_from_us
    }
    add_labels(connection, wrong.labels)
    add(connection, kept)
    drop_zeros(connection, [key for key in kept if key in wrong.gone])


def tenants_charged(connection: Connection) -> list[str]:
    """Ids of all tenants with charges or sums, without reading all of either."""
    ids = {*_distinct(connection, ledger, ledger.c.tenant_id, CHARGES)}
    ids.update(_distinct(connection, usage_sums, usage_sums.c.tenant_id, true()))
    return sorted(ids)


def _distinct(
    connection: Connection, table: Table, column: Column[str], condition: ColumnElement[bool] | TextClause
) -> Iterator[str]:
    query = select(func.min(column)).select_from(table).where(condition)
    last = connection.execute(query).scalar()
    while last is not None:
        yield last
        last = connection.execute(query.where(column > last)).scalar()


def differences(tenant_id: str, connection: Connection) -> Differences:
    """Differences of one tenant's sums, day by day."""
    at, result = position(connection), Differences()
    if at is None:
        return result
    visited: set[int] = set()
    query = charges_query(ledger.c.tenant_id == tenant_id, ledger.c.id <= at.folded_id)
    rows = connection.execute(query.order_by(ledger.c.at_us).execution_options(yield_per=FETCHED))
    for day, charges in groupby(starmap(Charge, rows), lambda charge: charge.at_us // DAY_US):
        visited.add(day)
        sums = sums_of(charges, at.hours_from_us)
        _compare(result, sums.amounts, _stored(connection, tenant_id, day))
        result.labels |= {
            name: labels for name, labels in sums.labels.items() if _labels(connection, name) != labels
        }
    for day in _days(connection, tenant_id) - visited:
        _compare(result, {}, _stored(connection, tenant_id, day))
    return result


def _compare(
    result: Differences,
    right: Mapping[SumKey, tuple[int, ...]],
    stored: Mapping[SumKey, tuple[int, ...]],
) -> None:
    for key in sorted(right.keys() | stored.keys()):
        difference = minus(right.get(key, NOTHING), stored.get(key, NOTHING))
        if difference != NOTHING:
            result.amounts[key] = difference
            if key not in right:
                result.gone.add(key)


def _stored(connection: Connection, tenant_id: str, day: int) -> dict[SumKey, tuple[int, ...]]:
    keys = [usage_sums.c[name] for name in SumKey._fields]
    query = select(*keys, *(usage_sums.c[name] for name in AMOUNTS)).where(
        usage_sums.c.tenant_id == tenant_id,
        usage_sums.c.grain.in_(list(Grain)),
        usage_sums.c.start_us >= day * DAY_US,
        usage_sums.c.start_us < (day + 1) * DAY_US,
    )
    return {
        SumKey(*row[: len(keys)]): tuple(row[len(keys) :]) for row in map(tuple, connection.execute(query))
    }


def _days(connection: Connection, tenant_id: str) -> set[int]:
    query = select(usage_sums.c.start_us).where(usage_sums.c.tenant_id == tenant_id).distinct()
    return {start_us // DAY_US for start_us in connection.execute(query).scalars()}


def _labels(connection: Connection, set_id: str) -> dict[str, str]:
    query = select(usage_labels.c.name, usage_labels.c.value).where(usage_labels.c.label_set == set_id)
    return {row.name: row.value for row in connection.execute(query)}
