"""Admin routes of the audit: its rows, and for auditors its hashed entries, checkpoints and proofs."""

from __future__ import annotations

import base64
import re
from typing import Any

from litestar import Response, get
from litestar.params import FromQuery

from gateway import errors
from gateway.http.asgi import Request
from gateway.routes.admin.common import PAGED, READ, paged
from gateway.routes.context import admin_of, gateway_of, json_response
from gateway.routes.openapi_fields import between, form, one_of
from tenants.admin.audit import MAX_TEXT, AuditRow
from tenants.admin.cursor import DEFAULT_PAGE, PAGES, SHORT_PAGES
from tenants.admin.lists.audit import KINDS, AuditQuery
from tenants.audit.checkpoints import StoredCheckpoint
from tenants.audit.log import MAX_ENTRIES
from tenants.directory.records import from_us

ORDERS = ("newest", "oldest")
ACTS = form(re.compile(rf"({'|'.join(KINDS)})(\.[!-~]+)?"), MAX_TEXT)


@get(
    "/admin/v1/audit",
    opt=PAGED | {"parameters": PAGED["parameters"] | {"order": one_of(ORDERS), "act": ACTS}},
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
    page = await admin_of(request).audit.read(query, cursor=cursor, limit=limit)
    return await paged(request, page, AuditRow.as_json)


MAX_SEQ = 2**53
SEQ = between(0, MAX_SEQ)
LIMIT = between(1, MAX_ENTRIES)


@get(
    "/admin/v1/audit/log",
    opt=READ,
    summary="The audit as a log: its size, root and public key, and its newest checkpoint",
    description="`checkpoint.note` is a C2SP checkpoint (signed note, Ed25519) of the first `checkpoint.size`"
    " rows; keep it where this server's operator cannot change it. `public_key` is what this server says:"
    " take the one to check with from elsewhere.",
)
async def show_audit_log(request: Request) -> Response[bytes]:
    state = await gateway_of(request).deps.audit.state()
    return json_response(
        {
            "size": state.size,
            "root": base64.b64encode(state.root).decode(),
            "public_key": None if state.public_key is None else str(state.public_key),
            "checkpoint": None if state.newest is None else _checkpoint(state.newest),
        }
    )


@get(
    "/admin/v1/audit/entries",
    opt=READ | {"parameters": {"first": SEQ, "limit": LIMIT}},
    summary="The audit's rows as they are hashed, in order",
    description="Rows from number `first` on, at most `limit`, up to"
    f" {MAX_ENTRIES}. `entry` is the text whose bytes are the leaf. `next_first`: where the next page begins;"
    " null: there are no more now.",
)
async def list_audit_entries(
    request: Request, first: FromQuery[int] = 0, limit: FromQuery[int] = MAX_ENTRIES
) -> Response[bytes]:
    _within("first", first, 0, MAX_SEQ)
    _within("limit", limit, 1, MAX_ENTRIES)
    rows = await gateway_of(request).deps.audit.rows(first, limit)
    data = [{"seq": row.seq, "entry": row.entry.decode("ascii", "replace")} for row in rows]
    following = rows[-1].seq + 1 if len(rows) == limit else None
    return json_response({"object": "list", "data": data, "next_first": following})


@get(
    "/admin/v1/audit/checkpoints",
    opt=READ | {"parameters": {"after": SEQ, "limit": LIMIT}},
    summary="The audit's checkpoints, the smallest first",
    description="Those of more than `after` rows, at most `limit`.",
)
async def list_audit_checkpoints(
    request: Request, after: FromQuery[int] = 0, limit: FromQuery[int] = MAX_ENTRIES
) -> Response[bytes]:
    _within("after", after, 0, MAX_SEQ)
    _within("limit", limit, 1, MAX_ENTRIES)
    checkpoints = await gateway_of(request).deps.audit.checkpoints(after, limit)
    return json_response({"object": "list", "data": [_checkpoint(checkpoint) for checkpoint in checkpoints]})


@get(
    "/admin/v1/audit/consistency",
    opt=READ | {"parameters": {"old": SEQ, "new": SEQ}},
    summary="The proof that the log of `new` rows begins with that of `old` rows",
    description="RFC 6962, 2.1.2: hashes in base64, checked against the roots of two checkpoints.",
)
async def prove_audit_consistency(
    request: Request, old: FromQuery[int], new: FromQuery[int]
) -> Response[bytes]:
    proof = await gateway_of(request).deps.audit.consistency(old, new)
    return json_response(
        {"old": old, "new": new, "proof": [base64.b64encode(digest).decode() for digest in proof]}
    )


@get(
    "/admin/v1/audit/proof",
    opt=READ | {"parameters": {"seq": SEQ}},
    summary="The proof that a row is in the log",
    description="`proof` is a C2SP tlog-proof with the newest checkpoint; its `extra` is the entry. A row"
    " that is not signed yet has none.",
)
async def prove_audit_entry(request: Request, seq: FromQuery[int]) -> Response[bytes]:
    _within("seq", seq, 0, MAX_SEQ)
    proof = await gateway_of(request).deps.audit.prove(seq)
    return json_response({"seq": seq, "proof": proof.text})


def _checkpoint(stored: StoredCheckpoint) -> dict[str, Any]:
    return {"size": stored.size, "note": stored.note, "at": from_us(stored.at_us).isoformat()}


def _within(name: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise errors.bad_request(f"Invalid '{name}': must be from {lowest} to {highest}.", name)


HANDLERS = [
    list_audit,
    show_audit_log,
    list_audit_entries,
    list_audit_checkpoints,
    prove_audit_consistency,
    prove_audit_entry,
]
