"""Admin route of the audit log: who did what to whom, from where, and what it changed."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get
from litestar.params import FromQuery

from gateway import errors
from gateway.routes.admin_common import READ
from gateway.routes.context import gateway_of, json_response
from tenants.admin.audit_query import KINDS, MAX_PAGE, AuditQuery

ORDERS = ("newest", "oldest")


@get(
    "/admin/v1/audit",
    opt=READ,
    summary="The audit log: every admin act, its actor, and what was there before and after",
    description="Filters: `actor` (`cli:root`, or only `cli`), `subject` (an id, or a name of a tenant,"
    " project or key; `tenant:acme` is one kind), `act` (`tenant.suspend`, or only `tenant`), `tenant` (rows"
    " of all that is its), `since` and `until` (instants with a time zone; the second is exclusive). `order`:"
    f" newest (first) or oldest. At most `limit` rows, up to {MAX_PAGE}; `next_cursor` gives the next page as"
    f" `cursor`, with the same filter. Kinds: {', '.join(KINDS)}. Rows hold no secret.",
)
async def list_audit(
    request: Request[Any, Any, Any],
    actor: FromQuery[str | None] = None,
    subject: FromQuery[str | None] = None,
    act: FromQuery[str | None] = None,
    tenant: FromQuery[str | None] = None,
    since: FromQuery[str | None] = None,
    until: FromQuery[str | None] = None,
    order: FromQuery[str] = "newest",
    cursor: FromQuery[str | None] = None,
    limit: FromQuery[int] = 100,
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
    admin = gateway_of(request).deps.admin
    page = await admin.read_audit(query, cursor=cursor, limit=limit)
    rows = await admin.with_names(row.as_json() for row in page.rows)
    return json_response({"object": "list", "data": rows, "next_cursor": page.next_cursor})


HANDLERS = [list_audit]
