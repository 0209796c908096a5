"""Ended requests: their settlements in the ledger, newest or slowest first, by any filter.

Time, tenant, key, a rare outcome and a cause are each read along an index. The rest is checked row by row, a
bounded number of rows a page (`scans.py`): each further index costs a write with every request. So is the
duration, from the instant in a request's id: the slowest are those of the rows that one page looks at."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, TextClause, and_, exists, select

from tenants.admin.cursor import PAGES, SHORT_PAGES, SortKey, beyond
from tenants.admin.lists.scans import MOST_SCANNED, end_of_scan
from tenants.directory import queries
from tenants.errors import Invalid
from tenants.instants import from_us
from tenants.outcomes import Cause, RequestOutcome
from tenants.people.roles import Act
from tenants.resources.query import Filter, Kind, ListQuery
from tenants.resources.reading import TIMES, Conditions, conditions_of, times_of
from tenants.resources.resource import PageRequest, Resource
from tenants.resources.shown import Form, Shown
from tenants.storage.tables import CHARGES, RARE_OUTCOMES, SETTLES, ledger, slo_misses, timelines
from tenants.types import Tier

Condition = ColumnElement[bool] | TextClause
_settle = ledger.c
NEWEST, SLOWEST = "newest", "slowest"
_ID = re.compile(r"req_([0-9a-hjkmnp-tv-z]{10})[0-9a-hjkmnp-tv-z]{16}")
"""Ours: its first part is the millisecond of the arrival, in Crockford's base 32."""
_DIGITS = str.maketrans("0123456789abcdefghjkmnpqrstvwxyz", "0123456789abcdefghijklmnopqrstuv")


class EndedQuery(ListQuery, frozen=True, rename=TIMES):
    """Which ended requests. None: any."""

    tenant: Annotated[str | None, Filter(_settle.tenant_id, Kind.TENANT)] = None
    project: Annotated[str | None, Filter(_settle.project_id, Kind.PROJECT)] = None
    key: Annotated[str | None, Filter(_settle.key_id, Kind.KEY)] = None
    model: Annotated[str | None, Filter(_settle.model, help="The one that served it.")] = None
    tier: Annotated[str | None, Filter(_settle.tier, Kind.CHOICE, choices=tuple(Tier))] = None
    outcome: Annotated[str | None, Filter(_settle.outcome, Kind.CHOICE, choices=tuple(RequestOutcome))] = None
    cause: Annotated[
        str | None,
        Filter(
            kind=Kind.CHOICE,
            choices=tuple(Cause),
            label="Cause of miss",
            help="It missed a target for this cause.",
        ),
    ] = None
    min_duration_s: Annotated[
        str | None,
        Filter(
            label="At least (s)",
            help="It took so many seconds or more, from its arrival to its end.",
            schema={"type": "number", "minimum": 0},
        ),
    ] = None
    since: Annotated[str | None, Filter(_settle.at_us, Kind.SINCE, help="It ended from then on.")] = None
    until: Annotated[str | None, Filter(_settle.at_us, Kind.UNTIL, help="It ended before then.")] = None
    sort: Annotated[
        str,
        Filter(
            kind=Kind.CHOICE,
            choices=(NEWEST, SLOWEST),
            label="Sort",
            help=f"Which first; the slowest of each {MOST_SCANNED:,} requests.",
        ),
    ] = NEWEST


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
    key: SortKey = field(default=(), compare=False)
    """In the list that it was read with."""

    def as_json(self) -> dict[str, Any]:
        took_us = duration_us(self.request_id, self.ended_us)
        return {
            "id": self.request_id,
            "object": "request",
            "status": "ended",
            "ended_at": from_us(self.ended_us).isoformat(),
            "duration_s": None if took_us is None else took_us / 1e6,
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


def duration_us(request_id: str, ended_us: int) -> int | None:
    """From its arrival to its end, to the millisecond; None: the id says no instant."""
    found = _ID.fullmatch(request_id)
    if found is None:
        return None
    return max(0, ended_us - int(found[1].translate(_DIGITS), 32) * 1_000)


def _read(connection: Connection, request: PageRequest) -> tuple[list[SettledRequest], SortKey | None]:
    query, given = request.query, conditions_of(connection, request)
    order: tuple[ColumnElement[Any], ...] = (ledger.c.at_us, ledger.c.id)
    if query.project is not None and query.tenant is None:  # an index finds its tenant's
        owner = queries.find_project(connection, query.project).tenant_id
        given["tenant"] = ledger.c.tenant_id == owner
    # The kind's condition is word for word that of the indexes: SQLite uses a partial index for no other.
    along, rest = _indexed(query, given), [*given.values()]
    if query.cause is not None:
        order = (slo_misses.c.at_us, slo_misses.c.request_id)
        along = [slo_misses.c.cause == query.cause]
    along += times_of(query, order[0])
    if request.after is not None:
        along.append(beyond(order, request.after, newest_first=True))
    end = end_of_scan(connection, order, along)
    if end is not None:
        along.append(~beyond(order, end, newest_first=True))
    places = [column.label(f"along_{n}") for n, column in enumerate(order)]

    def found(*columns: Any) -> Select[Any]:
        rows = select(*columns, *places)
        if query.cause is not None:
            rows = rows.join_from(slo_misses, ledger, ledger.c.request_id == slo_misses.c.request_id)
            rows = rows.where(_is_its_first_miss())
        return rows.where(SETTLES, *along, *rest).order_by(*(column.desc() for column in order))

    least_us = _least_us(query.min_duration_s)
    if query.sort == NEWEST and not least_us:
        rows = connection.execute(found(ledger).limit(request.most)).mappings()
        return _with_what_happened(connection, [dict(row) for row in rows]), end
    looked_at = connection.execute(found(ledger.c.id, ledger.c.request_id, ledger.c.at_us)).mappings().all()
    picked = _picked(looked_at, least_us, request.most, slowest=query.sort == SLOWEST)
    whole = select(ledger).where(ledger.c.id.in_([row["id"] for row in picked]))
    by_id = {row["id"]: row for row in connection.execute(whole).mappings()}
    return _with_what_happened(connection, [{**by_id[row["id"]], **row} for row in picked]), end


def _least_us(text: str | None) -> int:
    """Raises `Invalid`."""
    try:
        least_us = round(float(text or 0) * 1e6)
    except (ValueError, OverflowError):
        least_us = -1
    if not 0 <= least_us < 10**15:
        raise Invalid("min_duration_s", f"{str(text)[:40]!r} is no number of seconds, such as 2 or 0.5")
    return least_us


def _picked(
    looked_at: Sequence[RowMapping], least_us: int, most: int, *, slowest: bool
) -> Sequence[RowMapping]:
    """Those that took so long. After the slowest, the next page goes on behind the scan."""
    took = ((duration_us(row["request_id"], row["at_us"]) or 0, row) for row in looked_at)
    kept = [(took_us, row) for took_us, row in took if took_us >= least_us]
    if slowest:
        kept = sorted(kept, key=lambda each: -each[0])[: most - 1]
    return [row for _, row in kept[:most]]


def _indexed(query: EndedQuery, given: Conditions) -> list[Condition]:
    """The conditions that an index serves: the most selective filter given."""
    if "key" in given:
        return [SETTLES, given["key"]]
    if query.outcome not in (None, RequestOutcome.COMPLETED):  # most requests', which no index is for
        return [SETTLES, RARE_OUTCOMES, given["outcome"]]
    if "tenant" in given:
        return [SETTLES, CHARGES, given["tenant"]]
    return [SETTLES]


def _is_its_first_miss() -> Condition:
    """One row of each request, however many of its targets were missed for the same cause."""
    other = slo_misses.alias("other")
    same = and_(other.c.request_id == slo_misses.c.request_id, other.c.cause == slo_misses.c.cause)
    return ~exists().where(same, other.c.metric < slo_misses.c.metric)


def _with_what_happened(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> list[SettledRequest]:
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
            (row["along_0"], row["along_1"]),
        )
        for row in rows
    ]


ENDED = Resource(
    name="request",
    plural="requests/ended",
    page="requests",
    title="Requests",
    query=EndedQuery,
    read=_read,
    order=lambda query: (int, int) if query.cause is None else (int, str),
    key_of=lambda settled: settled.key,
    as_json=SettledRequest.as_json,
    scope="admin:read",
    act=Act.READ_TENANT,
    summary="List requests that have ended, the newest or the slowest first",
    description="With the targets that each missed, and when it was dispatched, had its first token and"
    " ended, in seconds since its arrival (null: its timeline is not kept); `duration_s` is known without it."
    f" With `sort=slowest` a page has the slowest of the {MOST_SCANNED:,} that it looks at, and the next one"
    f" those of the {MOST_SCANNED:,} before. {PAGES} {SHORT_PAGES} An index"
    " finds those of a time, tenant, key, cause, or outcome but `completed`; of the others one page looks at"
    f" {MOST_SCANNED:,} requests.",
    shown=(
        Shown("ended_at", "Ended", Form.INSTANT),
        Shown("id", "Request", Form.ID, link="/console/requests/{id}"),
        Shown("tenant", "Tenant", Form.TENANT),
        Shown("project", "Project", Form.PROJECT, in_table=False),
        Shown("key", "key", Form.KEY, beside=True),
        Shown("model", "Model"),
        Shown("tier", "tier", beside=True),
        Shown("outcome", "Outcome", Form.BADGE, good=RequestOutcome.COMPLETED),
        Shown("dispatched_s", "Wait", Form.SECONDS, in_table=False),
        Shown("first_token_s", "First", Form.SECONDS, in_table=False),
        Shown("ended_s", "Took", Form.SECONDS),
        Shown("input_tokens", "Input", Form.NUMBER),
        Shown("output_tokens", "Output", Form.NUMBER),
        Shown("cost_nanousd", "Cost", Form.MONEY, in_table=False),
        Shown("missed", "Missed", Form.LINKS, in_table=False),
        Shown("misses", "Missed", on_page=False),
    ),
    file=(
        *("id", "ended_at", "outcome", "tenant_id", "tenant", "project_id", "project", "key_id", "key_name"),
        *("model", "tier", "input_tokens", "output_tokens", "cost_nanousd", "charged_usd", "gpu_ms"),
        *("dispatched_s", "first_token_s", "ended_s", "duration_s", "misses", "labels"),
    ),
    empty=("No request has ended", "Send one with an API key, or take a filter away."),
    command="ended",
)
