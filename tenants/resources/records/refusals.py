"""Refused requests that were kept whole: by which limit, what was wanted and available."""

from __future__ import annotations

from typing import Annotated

from sqlalchemy import Connection

from tenants.admin.cursor import PAGES, SortKey
from tenants.counts import refusal_store
from tenants.counts.refusal_store import (
    DAY_S,
    KEPT_ROWS_S,
    MAX_CODE_CHARACTERS,
    MAX_ID_CHARACTERS,
    MAX_MODEL_CHARACTERS,
    RefusedRequest,
)
from tenants.people.roles import Act
from tenants.resources.query import Filter, Kind, ListQuery
from tenants.resources.reading import TIMES, read_rows
from tenants.resources.resource import OwnList, PageRequest, Resource
from tenants.resources.shown import Form, Shown
from tenants.storage.tables import refusals
from tenants.types import Tier

ORDER = (refusals.c.at_us, refusals.c.request_id)


class RefusalQuery(ListQuery, frozen=True, rename=TIMES):
    """Which refusals. None: any."""

    request_id: Annotated[
        str | None,
        Filter(refusals.c.request_id, Kind.REQUEST, label="Request", most=MAX_ID_CHARACTERS),
    ] = None
    tenant: Annotated[str | None, Filter(refusals.c.tenant_id, Kind.TENANT)] = None
    project: Annotated[str | None, Filter(refusals.c.project_id, Kind.PROJECT)] = None
    key: Annotated[str | None, Filter(refusals.c.key_id, Kind.KEY)] = None
    model: Annotated[
        str | None, Filter(refusals.c.model, help="As it was asked for.", most=MAX_MODEL_CHARACTERS)
    ] = None
    tier: Annotated[str | None, Filter(refusals.c.tier, Kind.CHOICE, choices=tuple(Tier))] = None
    code: Annotated[
        str | None,
        Filter(
            refusals.c.code, help="The error's code, such as insufficient_quota.", most=MAX_CODE_CHARACTERS
        ),
    ] = None
    limit_id: Annotated[
        str | None,
        Filter(refusals.c.limit_id, label="Limit", help="The limit that refused it.", most=MAX_ID_CHARACTERS),
    ] = None
    since: Annotated[str | None, Filter(refusals.c.at_us, Kind.SINCE)] = None
    until: Annotated[str | None, Filter(refusals.c.at_us, Kind.UNTIL)] = None


def _read(connection: Connection, request: PageRequest) -> tuple[list[RefusedRequest], SortKey | None]:
    indexes: tuple[str, ...] = ("request_id", "key", "project", "limit_id", "tenant", "code", "model", "tier")
    more = []
    if request.of_tenant is not None:
        # A cursor may name the last row that was scanned: for a tenant that must be one of its own.
        indexes = ("request_id", "key", "project", "tenant")
        if request.query.limit_id is not None:  # it may not learn which limits of the platform there are
            more.append(refusals.c.of_platform.is_(False))
    return read_rows(connection, request, refusal_store.where, ORDER, indexes, more=more)


KEPT = (
    f"The newest first. {PAGES} Of many refusals of one kind in a minute only the first few are kept, for"
    f" {KEPT_ROWS_S // DAY_S} days."
)
REFUSALS = Resource(
    name="refusal",
    plural="refusals",
    title="Refusals",
    menu="requests",
    query=RefusalQuery,
    read=_read,
    order=ORDER,
    as_json=RefusedRequest.as_json,
    scope="admin:read",
    act=Act.READ_TENANT,
    summary="List refused requests: by which limit, what was wanted and available",
    description=f"{KEPT} Requests without a known key have no tenant.",
    own=OwnList(
        path="/v1/refusals",
        scope="usage:read",
        summary="List this tenant's refused requests: by which limit, what was wanted and available",
        description=f"{KEPT} Of a limit on all tenants together (`of_platform`) no numbers are shown.",
        shown=RefusedRequest.for_tenant,
    ),
    shown=(
        Shown("at", "At", Form.INSTANT),
        Shown("request_id", "Request", Form.ID, link="/console/requests/{request_id}"),
        Shown("tenant", "Tenant", Form.TENANT, missing="not known"),
        Shown("key", "key", Form.KEY, beside=True),
        Shown("tier", "tier", on_page=False),
        Shown("model", "Model"),
        Shown("tier", "tier", beside=True, in_table=False),
        Shown("code", "Code", on_page=False),
        Shown("code", "Why", Form.CODE, in_table=False),
        Shown("way_out", "and the way out", below=True, in_table=False),
        Shown("limit_id", "Limit", Form.ID),
        Shown("wanted", "Wanted", Form.NUMBER),
        Shown("available", "Available", Form.NUMBER),
        Shown("retry_after_s", "Retry after", Form.SECONDS, in_table=False),
    ),
    file=(
        *("request_id", "at", "tenant_id", "tenant", "project_id", "project", "key_id", "key_name", "model"),
        *("tier", "code", "limit_id", "of_platform", "wanted", "available", "retry_after_s", "way_out"),
    ),
    empty=(
        "Nothing was refused",
        "With these filters there is none; take one away, or look at another time.",
    ),
    group_help="""Refused requests: which limit, wanted and available.

    \b
      fairgate refusal list --tenant acme --since 24h
      fairgate refusal list --request-id req_…
      fairgate refusal counts --group-by tenant,code --since 7d
    """,
    command_help="""Lists refused requests, newest first; of many of one kind in a minute only the first few.

    \b
    --json answers:
      {"data": [{"request_id": "req_…", "object": "refusal", "at": "2026-01-31T12:00:00+00:00",
       "tenant_id": "ten_…", "tenant": "acme", "project_id": "prj_…", "project": "default",
       "key_id": "key_…", "key_name": "", "tier": "standard", "model": "m", "code": "insufficient_quota",
       "limit_id": "lim_…", "of_platform": false, "wanted": 512, "available": 100,
       "retry_after_s": null}, …], "next_cursor": null}
    """,
)
