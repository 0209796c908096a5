"""Missed targets, with their causes and evidence."""

from __future__ import annotations

from typing import Annotated, Any

from sqlalchemy import ColumnElement, Connection, select

from tenants.admin.cursor import PAGES, SHORT_PAGES, SortKey
from tenants.outcomes import Cause
from tenants.people.roles import Act
from tenants.resources.query import Filter, Kind, ListQuery
from tenants.resources.reading import TIMES, read_rows
from tenants.resources.resource import PageRequest, Resource
from tenants.resources.shown import Form, Shown
from tenants.slo import store
from tenants.slo.slo import Missed
from tenants.storage.tables import ledger, slo_misses
from tenants.types import Tier

_missed = slo_misses.c


def _of_request(column: ColumnElement[Any]) -> ColumnElement[Any]:
    """What the ledger has of the request that missed."""
    settled = select(column).where(ledger.c.request_id == _missed.request_id, ledger.c.kind == "settle")
    return settled.correlate(slo_misses).scalar_subquery()


class MissQuery(ListQuery, frozen=True, rename=TIMES):
    """Which misses. None: any."""

    tenant: Annotated[str | None, Filter(_missed.tenant_id, Kind.TENANT)] = None
    project: Annotated[str | None, Filter(_of_request(ledger.c.project_id), Kind.PROJECT)] = None
    key: Annotated[str | None, Filter(_of_request(ledger.c.key_id), Kind.KEY)] = None
    model: Annotated[str | None, Filter(_of_request(ledger.c.model), help="The one that served it.")] = None
    tier: Annotated[str | None, Filter(_missed.tier, Kind.CHOICE, choices=tuple(Tier))] = None
    cause: Annotated[str | None, Filter(_missed.cause, Kind.CHOICE, choices=tuple(Cause))] = None
    since: Annotated[str | None, Filter(_missed.at_us, Kind.SINCE)] = None
    until: Annotated[str | None, Filter(_missed.at_us, Kind.UNTIL)] = None


def _read(connection: Connection, request: PageRequest) -> tuple[list[Missed], SortKey | None]:
    return read_rows(connection, request, store.misses, store.MISS_ORDER, ("tenant", "cause"))


MISSES = Resource(
    name="slo",
    plural="slo/misses",
    title="Missed targets",
    menu="requests",
    query=MissQuery,
    read=_read,
    order=store.MISS_ORDER,
    as_json=Missed.as_json,
    scope="admin:read",
    act=Act.READ_TENANT,
    summary="Missed targets, the newest first, with their cause and its evidence",
    description=f"`cause`: {', '.join(Cause)}. {PAGES} {SHORT_PAGES}",
    shown=(
        Shown("ended_us", "Ended", Form.INSTANT),
        Shown("request_id", "Request", Form.ID, link="/console/requests/{request_id}#miss-{metric}"),
        Shown("tenant", "Tenant", Form.TENANT),
        Shown("tier", "tier", beside=True),
        Shown("metric", "Metric", on_page=False),
        Shown("metric_words", "Metric", in_table=False),
        Shown("target_s", "Target", Form.SECONDS),
        Shown("actual_s", "Happened", Form.SECONDS, missing="never"),
        Shown("cause", "Cause", Form.BADGE),
        Shown("why", "", below=True, in_table=False),
        Shown("evidence", "Had it been", on_page=False),
        Shown("todo", "What to do", in_table=False),
    ),
    file=(
        *("request_id", "ended_at", "tenant_id", "tenant", "tier", "metric", "target_s", "actual_s", "cause"),
        "evidence",
    ),
    empty=("No target was missed", "With these filters there is no miss."),
    command="misses",
    command_help="""Lists missed targets, newest first, with their cause and its evidence.

    \b
    --json answers:
      {"data": [{"request_id": "req_…", "tenant_id": "ten_…", "tenant": "acme", "tier": "interactive",
       "metric": "ttft", "cause": "capacity", "target_s": 0.5, "actual_s": 1.2, "ended_us": 1700000000000000,
       "evidence": {…}}, …], "next_cursor": null}
    """,
)
