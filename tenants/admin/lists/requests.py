"""Pages of ended requests: their settlements in the ledger, newest first, by any filter.

Time, tenant, key, a rare outcome and a cause are each read along an index. The rest is checked row by row, a
bounded number of rows a page (`scans.py`): each further index costs a write with every request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, RowMapping, TextClause, and_, exists, select

from tenants.admin import validation
from tenants.admin.cursor import (
    DEFAULT_PAGE,
    Number,
    Page,
    Text,
    beyond,
    checked_limit,
    decode_cursor,
    page_of,
)
from tenants.admin.lists.scans import between, end_of_scan
from tenants.admin.transaction import AdminActs
from tenants.directory import queries
from tenants.directory.records import from_us
from tenants.storage.tables import CHARGES, RARE_OUTCOMES, SETTLES, ledger, slo_misses, timelines
from tenants.types import Tier

Condition = ColumnElement[bool] | TextClause
COMPLETED = "completed"
"""The outcome of most requests, which no index is for."""


class RequestQuery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which requests. None: any."""

    tenant: str | None = None
    """Name or id."""
    project: str | None = None
    """Id, or with `tenant` a name."""
    key: str | None = None
    """Id or visible prefix."""
    model: str | None = None
    """The one that served it."""
    tier: str | None = None
    outcome: str | None = None
    cause: str | None = None
    """It missed a target for this cause."""
    since: str | None = None
    until: str | None = None


@dataclass(frozen=True, slots=True)
class SettledRequest:
    """One request that was settled."""

    request_id: str
    ended_us: int
    tenant_id: str
    project_id: str
    key_id: str
    gateway_id: str
    tier: str
    model: str
    outcome: str
    input_tokens: int
    output_tokens: int
    cost_nanousd: int
    gpu_ms: int
    labels: dict[str, str]
    misses: tuple[tuple[str, str], ...] = ()
    """Metric and cause of each target that it missed."""
    packed: bytes | None = None
    """Its timeline; None: not kept (any more)."""

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": "request",
            "status": "ended",
            "ended_at": from_us(self.ended_us).isoformat(),
            "outcome": self.outcome,
            "tenant_id": self.tenant_id,
            "project_id": self.project_id,
            "key_id": self.key_id,
            "gateway_id": self.gateway_id,
            "tier": self.tier,
            "model": self.model,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "cost_nanousd": self.cost_nanousd,
            "gpu_ms": self.gpu_ms,
            "labels": self.labels,
            "misses": [{"metric": metric, "cause": cause} for metric, cause in self.misses],
        }


class RequestReads(AdminActs):
    async def page(
        self, wanted: RequestQuery | None = None, *, cursor: str | None = None, limit: int = DEFAULT_PAGE
    ) -> Page[SettledRequest]:
        """Newest first. A page may be shorter than `limit` before the end. Raises `Invalid`, `NotFound`."""
        query = RequestQuery() if wanted is None else wanted
        most, filters = checked_limit(limit), msgspec.to_builtins(query)
        key = tuple[Number, Number] if query.cause is None else tuple[Number, Text]
        last = None if cursor is None else decode_cursor("ended requests", filters, cursor, key)

        def look(connection: Connection) -> tuple[list[_Listed], tuple[int | str, ...] | None]:
            settled = _settled(connection, query)
            order: tuple[ColumnElement[Any], ...]
            if query.cause is not None:
                order, along = (slo_misses.c.at_us, slo_misses.c.request_id), [_missed_for(query.cause)]
            else:
                order, along = (ledger.c.at_us, ledger.c.id), _indexed(query, settled)
            along += between(order[0], query.since, query.until)
            if last is not None:
                along.append(beyond(order, last, newest_first=True))
            end = end_of_scan(connection, order, along)
            if end is not None:
                along.append(~beyond(order, end, newest_first=True))
            rows = select(ledger, *(column.label(f"along_{n}") for n, column in enumerate(order)))
            if query.cause is not None:
                rows = rows.join_from(slo_misses, ledger, ledger.c.request_id == slo_misses.c.request_id)
                along.append(_is_its_first_miss())
            rows = rows.where(*along, *settled.values())
            rows = rows.order_by(*(column.desc() for column in order)).limit(most + 1)
            return _with_what_happened(connection, list(connection.execute(rows).mappings())), end

        listed, end = await self._transactions.read(look)
        page = page_of(listed, most, "ended requests", filters, lambda row: row.key, scanned_to=end)
        return Page([row.request for row in page.rows], page.next_cursor)


@dataclass(frozen=True, slots=True)
class _Listed:
    """A row of the list, and its sort key."""

    request: SettledRequest
    key: tuple[int | str, ...]


def _settled(connection: Connection, query: RequestQuery) -> dict[str, Condition]:
    """Conditions on the settlement, by filter. Raises `Invalid`, `NotFound`."""
    # Both conditions word for word those of the indexes: SQLite uses a partial index for no others.
    conditions: dict[str, Condition] = {"kind": SETTLES}
    owner = None if query.tenant is None else queries.find_tenant(connection, query.tenant)
    if owner is not None:
        conditions["tenant"] = ledger.c.tenant_id == owner.tenant_id
    if query.project is not None:
        project = queries.find_project(connection, query.project, owner)
        conditions |= {
            "project": ledger.c.project_id == project.project_id,
            "tenant": ledger.c.tenant_id == project.tenant_id,
        }
    if query.key is not None:
        key = queries.find_key(connection, query.key, None if owner is None else owner.tenant_id)
        conditions["key"] = ledger.c.key_id == key.key_id
    if query.model is not None:
        conditions["model"] = ledger.c.model == validation.plain_text("model", query.model)
    if query.tier is not None:
        conditions["tier"] = ledger.c.tier == validation.choice("tier", Tier, query.tier).value
    if query.outcome is not None:
        conditions["outcome"] = ledger.c.outcome == validation.plain_text("outcome", query.outcome)
    return conditions


def _indexed(query: RequestQuery, settled: dict[str, Condition]) -> list[Condition]:
    """The conditions that an index serves: the most selective filter given."""
    if "key" in settled:
        return [SETTLES, settled["key"]]
    if query.outcome not in (None, COMPLETED):
        return [SETTLES, RARE_OUTCOMES, settled["outcome"]]
    if "tenant" in settled:
        return [SETTLES, CHARGES, settled["tenant"]]
    return [SETTLES]


def _missed_for(cause: str) -> Condition:
    return slo_misses.c.cause == validation.plain_text("cause", cause)


def _is_its_first_miss() -> Condition:
    """One row of each request, however many of its targets were missed for the same cause."""
    other = slo_misses.alias("other")
    same = and_(other.c.request_id == slo_misses.c.request_id, other.c.cause == slo_misses.c.cause)
    return ~exists().where(same, other.c.metric < slo_misses.c.metric)


def _with_what_happened(connection: Connection, rows: list[RowMapping]) -> list[_Listed]:
    """The rows with their misses and timelines: two statements, however many rows there are."""
    ids = [row["request_id"] for row in rows]
    missed: dict[str, list[tuple[str, str]]] = {}
    columns = (slo_misses.c.request_id, slo_misses.c.metric, slo_misses.c.cause)
    for miss in connection.execute(
        select(*columns).where(slo_misses.c.request_id.in_(ids)).order_by(*columns[:2])
    ):
        missed.setdefault(miss.request_id, []).append((miss.metric, miss.cause))
    kept = select(timelines.c.request_id, timelines.c.packed).where(timelines.c.request_id.in_(ids))
    packed: dict[str, bytes] = {row.request_id: row.packed for row in connection.execute(kept)}
    return [
        _Listed(
            SettledRequest(
                row["request_id"],
                row["at_us"],
                row["tenant_id"],
                row["project_id"],
                row["key_id"],
                row["gateway_id"],
                row["tier"],
                row["model"],
                row["outcome"],
                row["input_tokens"],
                row["output_tokens"],
                row["cost_nanousd"],
                row["gpu_ms"],
                row["labels"] or {},
                tuple(missed.get(row["request_id"], ())),
                packed.get(row["request_id"]),
            ),
            (row["along_0"], row["along_1"]),
        )
        for row in rows
    ]
