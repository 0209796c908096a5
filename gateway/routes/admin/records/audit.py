"""Admin route of the audit log: who did what to whom, from where, and what it changed."""

from __future__ import annotations

from litestar import Response, get
from litestar.params import FromQuery

from gateway import errors
from gateway.http.asgi import Request
from gateway.routes.admin.common import PAGED, PAGES, SHORT_PAGES, paged
from gateway.routes.context import gateway_of
from gateway.routes.openapi_fields import one_of
from tenants.admin.audit import AuditRow
from tenants.admin.cursor import DEFAULT_PAGE
from tenants.admin.lists.audit import KINDS, AuditQuery

ORDERS = ("newest", "oldest")


@get(
    "/admin/v1/audit",
    opt=PAGED | {"parameters": PAGED["parameters"] | {"order": one_of(ORDERS)}},
    summary="The audit log: every admin act, its actor, and what was there before and after",
    description="Filters: `actor` (`cli:root`, `person:ada`, or only `cli`), `subject` (an id, or a name of a"
    " tenant, project or key; `tenant:acme` is one kind), `act` (`tenant.suspend`, or only `tenant`),"
    " `tenant` (rows of all that is its), `since` and `until` (instants with a time zone; the second is"
    f" exclusive). `order`: newest (first) or oldest. {PAGES} {SHORT_PAGES} Kinds: {', '.join(KINDS)}. Rows"
    " hold no secret; of a person who was erased they show `erased person`. `request_id` and `trace_id` are"
    " those of the request that made the row.",
)
async def list_audit(
    request: Request,
    actor: FromQuery[str | None] = None,
    subject: FromQuery[str | None] = None,
    act: FromQuery[str | None] = None,
    tenant: FromQuery[str | None] = None,
    since: FromQuery[str | None] = None,
    until: FromQuery[str | None] = None,
    order: FromQuery[str] = "newest",
    cursor: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
) -> Response[bytes]:
    if order not in ORDERS:
        raise errors.bad_request(
            f"Invalid 'order': '{order[:64]}' is not one of {', '.join(ORDERS)}.", "order"
        )
    query = AuditQuery(
        actor=actor,
        subject=subject,
        act=act,
        tenant=tenant,
        since=since,
        until=until,
        order="oldest" if order == "oldest" else "newest",
    )
    page = await gateway_of(request).deps.admin.read_audit(query, cursor=cursor, limit=limit)
    return await paged(request, page, AuditRow.as_json)


HANDLERS = [list_audit]
