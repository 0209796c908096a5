"""Reads usage: the sums, plus the unfolded rows of the ledger, on one snapshot.

Exact, unless more than `MOST_UNFOLDED` charges are not folded: they are left out, and the answer says so."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import Any

from sqlalchemy import Connection, Select, and_, collate, func, literal_column, select, tuple_
from sqlalchemy.sql import ColumnElement

from tenants.errors import Invalid
from tenants.storage.tables import ledger, usage_labels, usage_sums
from tenants.usage.fold import charges_beyond, charges_query, position
from tenants.usage.query import LABEL, UsageQuery, check, edges, grain_for, labelled_groups
from tenants.usage.sums import AMOUNTS, NOTHING, Charge, Grain, labels_of, plus

MOST_UNFOLDED = 10_000
MOST_LEDGER_ROWS = 20_000
"""Charges that one answer reads from the ledger."""

GroupKey = tuple[Any, ...]
"""The start of the window in microseconds, and the value of each group; empty: none."""


@dataclass(frozen=True, slots=True)
class UsageRow:
    key: GroupKey
    end_us: int
    """Of the window; exclusive."""
    amounts: tuple[int, ...]
    """In the order of `AMOUNTS`."""


@dataclass(frozen=True, slots=True)
class UsageFound:
    rows: list[UsageRow]
    has_more: bool
    folded_us: int
    """The newest instant that is in the sums; 0: none."""
    includes_unfolded: bool


def usage(connection: Connection, query: UsageQuery, after: GroupKey | None, most: int) -> UsageFound:
    """At most `most` rows behind `after`. Raises `Invalid`."""
    check(query)
    at, now = edges(query), position(connection)
    folded_id, folded_us, hours_from_us = (
        (0, 0, 0) if now is None else (now.folded_id, now.folded_us, now.hours_from_us)
    )
    grain = grain_for(query, at, hours_from_us)
    if grain is None:
        charges, summed = _of_ledger(connection, query), {}
    else:
        charges = charges_beyond(connection, folded_id, most=MOST_UNFOLDED + 1)
        summed = _summed(connection, query, grain, at, after, most + 1)
    is_whole = grain is None or len(charges) <= MOST_UNFOLDED
    sums = dict(summed)
    for key, amounts in grouped(charges if is_whole else (), query, at).items():
        if after is None or key > after:
            sums[key] = plus(sums.get(key, NOTHING), amounts)
    ends = dict(pairwise(at))
    rows = [UsageRow(key, ends[key[0]], sums[key]) for key in sorted(sums)]
    return UsageFound(rows[:most], len(rows) > most, folded_us, is_whole)


def _of_ledger(connection: Connection, query: UsageQuery) -> list[Charge]:
    of_tenant = charges_query(
        ledger.c.tenant_id == query.tenant_id,
        ledger.c.at_us >= query.from_us,
        ledger.c.at_us < query.to_us,
    )
    rows = connection.execute(of_tenant.order_by(ledger.c.at_us).limit(MOST_LEDGER_ROWS + 1))
    charges = list(starmap(Charge, rows))
    if len(charges) > MOST_LEDGER_ROWS:
        raise Invalid(
            "from",
            f"this is kept in the ledger only, which has more than {MOST_LEDGER_ROWS} requests of that time:"
            " ask for less, or for whole days in UTC",
        )
    return charges


def grouped(
    charges: Iterable[Charge], query: UsageQuery, at: Sequence[int]
) -> dict[GroupKey, tuple[int, ...]]:
    """Sums of the query's charges, by window and groups. Pure."""
    sums: dict[GroupKey, tuple[int, ...]] = {}
    wanted = {name: value for name, value in _filters(query).items() if value is not None}
    for charge in charges:
        if not query.from_us <= charge.at_us < query.to_us:
            continue
        if any(getattr(charge, name) != value for name, value in wanted.items()):
            continue
        labels = labels_of(charge.labels)
        if any(labels.get(name) != value for name, value in query.labels):
            continue
        start_us = at[bisect_right(at, charge.at_us) - 1]
        key = (start_us, *(_group_of(charge, labels, group) for group in query.group_by))
        sums[key] = plus(sums.get(key, NOTHING), charge.amounts())
    return {key: amounts for key, amounts in sums.items() if amounts != NOTHING}


def _group_of(charge: Charge, labels: Mapping[str, str], group: str) -> str:
    if group.startswith(LABEL):
        return labels.get(group.removeprefix(LABEL), "")
    value: str = getattr(charge, COLUMNS[group])
    return value


COLUMNS = {
    "tenant": "tenant_id",
    "project": "project_id",
    "key": "key_id",
    "model": "model",
    "tier": "tier",
    "outcome": "outcome",
}
"""Group -> its column."""


def _filters(query: UsageQuery) -> dict[str, str | None]:
    return {
        "tenant_id": query.tenant_id,
        "project_id": query.project_id,
        "key_id": query.key_id,
        "model": query.model,
        "tier": query.tier,
        "outcome": query.outcome,
    }


def _summed(
    connection: Connection,
    query: UsageQuery,
    grain: Grain,
    at: Sequence[int],
    after: GroupKey | None,
    most: int,
) -> dict[GroupKey, tuple[int, ...]]:
    statement = statement_of(connection.dialect.name, query, grain, at, after).limit(most)
    split = 1 + len(query.group_by)
    return {
        tuple(row[:split]): tuple(map(int, row[split:])) for row in map(tuple, connection.execute(statement))
    }


def statement_of(
    dialect: str, query: UsageQuery, grain: Grain, at: Sequence[int], after: GroupKey | None = None
) -> Select[Any]:
    conditions = [
        usage_sums.c.grain == grain.value,
        # No row of an earlier window is behind `after`.
        usage_sums.c.start_us >= (query.from_us if after is None else max(query.from_us, after[0])),
        usage_sums.c.start_us < query.to_us,
        *(usage_sums.c[name] == value for name, value in _filters(query).items() if value is not None),
    ]
    source: Any = usage_sums
    values: dict[str, ColumnElement[str]] = {}
    for name in labelled_groups(query):
        label = usage_labels.alias()
        is_it = and_(label.c.label_set == usage_sums.c.label_set, label.c.name == name)
        source = source.outerjoin(label, is_it)
        values[name] = func.coalesce(label.c.value, "")
    conditions += [values[name] == value for name, value in query.labels]

    def group(name: str) -> ColumnElement[Any]:
        column = values[name.removeprefix(LABEL)] if name.startswith(LABEL) else usage_sums.c[COLUMNS[name]]
        # As Python compares text.
        return collate(column, "C") if dialect == "postgresql" else column

    start = _start(query, grain, at)
    groups = [start, *map(group, query.group_by)]
    if after is not None:
        conditions.append(tuple_(*groups) > tuple_(*after))
    named = [column.label(f"group_{number}") for number, column in enumerate(groups)]
    names = [column.name for column in named]
    sums = [func.sum(usage_sums.c[name]) for name in AMOUNTS]
    return select(*named, *sums).select_from(source).where(*conditions).group_by(*names).order_by(*names)


def _start(query: UsageQuery, grain: Grain, at: Sequence[int]) -> ColumnElement[int]:
    """The start of a row's window, in literals: the database must see the same expression everywhere."""
    if len(at) > 2 and all(right - left == grain.span_us for left, right in pairwise(at)):
        return usage_sums.c.start_us
    cases = [f"WHEN usage_sums.start_us < {right} THEN {left}" for left, right in pairwise(at[:-1])]
    return literal_column(f"CASE {' '.join(cases)} ELSE {at[-2]} END" if cases else str(at[0]))
