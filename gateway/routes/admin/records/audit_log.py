"""Admin routes of the audit as a log, for auditors: hashed entries, checkpoints and proofs."""

from __future__ import annotations

import base64
from typing import Any

from litestar import Response, get
from litestar.params import FromQuery

from gateway import errors
from gateway.http.asgi import Request
from gateway.routes.admin.common import READ
from gateway.routes.context import gateway_of, json_response
from gateway.routes.openapi_fields import between
from tenants.audit.checkpoints import StoredCheckpoint
from tenants.audit.log import MAX_ENTRIES
from tenants.instants import from_us

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
    show_audit_log,
    list_audit_entries,
    list_audit_checkpoints,
    prove_audit_consistency,
    prove_audit_entry,
]
