"""The page of the audit log: who did what, from where, before and after, and the same as a file."""

from __future__ import annotations

from dataclasses import dataclass

from litestar import Response
from msgspec.structs import replace

from gateway.console.access import page, visit_of
from gateway.console.csv_file import FILE_ROWS, csv_list
from gateway.console.form_errors import FormProblem
from gateway.console.pages.new_rows import MOST_NEW, NEW, new_rows, newer_than
from gateway.console.pages.platform.audit_view import FieldChange, as_stored, changes
from gateway.console.pages.questions import FILTER_ERRORS, asked_of, cursor_of, filter_problem, instant
from gateway.console.rendering import page_response
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.routes.context import admin_of, gateway_of
from tenants.admin.audit import AuditRow
from tenants.admin.cursor import MAX_PAGE, Page
from tenants.admin.lists.audit import KINDS, AuditQuery
from tenants.people.roles import Act

PATH = "/console/audit"
FIELDS = ("actor", "act", "subject", "tenant", "from", "to")
CALLED_HERE = {"since": "from", "until": "to"}
MOST_SHOWN = 50
COLUMNS = (
    *("seq", "at", "actor", "origin", "action", "target", "target_name", "tenant_id", "tenant"),
    *("request_id", "trace_id", "before", "after"),
)


@dataclass(frozen=True)
class AuditEntry:
    """An act as shown."""

    row: AuditRow
    at_us: int
    tenant: str | None
    changes: list[FieldChange]


def query_of(asked: dict[str, str]) -> AuditQuery:
    return AuditQuery(
        actor=asked["actor"] or None,
        subject=asked["subject"] or None,
        act=asked["act"] or None,
        tenant=asked["tenant"] or None,
        since=instant(asked["from"]),
        until=instant(asked["to"]),
    )


@page(PATH, act=Act.READ_PLATFORM)
async def audit_page(request: Request) -> Response[str]:
    """The newest acts first. A page looks at a bounded number of rows, and says so where the list goes on."""
    admin = admin_of(request)
    asked, cursor = asked_of(request, *FIELDS), cursor_of(request)
    try:
        entries = await admin.audit.read(query_of(asked), cursor=cursor, limit=MOST_SHOWN)
    except FILTER_ERRORS as error:
        return await _shown(request, asked, problem=filter_problem(error, FIELDS, CALLED_HERE))
    return await _shown(request, asked, entries, is_first=cursor is None)


async def _shown(
    request: Request,
    asked: dict[str, str],
    found: Page[AuditRow] | None = None,
    *,
    is_first: bool = True,
    problem: FormProblem | None = None,
) -> Response[str]:
    following = found.next_cursor if found else None
    acts = await _entries(request, found) if found else []
    return page_response(
        "platform/audit.html",
        visit_of(request),
        problem=problem,
        acts=acts,
        log=await gateway_of(request).deps.audit.state(),
        asked=asked,
        kinds=KINDS,
        newer=newer_than(PATH, asked, acts[0].at_us if acts else None, is_first=is_first) if found else "",
        is_filtered=any(asked.values()),
        first_page="" if is_first else with_query(PATH, asked),
        here_again=with_query(PATH, asked),
        next_page=with_query(PATH, asked | {"cursor": following}) if following else "",
        file=with_query(f"{PATH}/csv", asked),
        file_rows=FILE_ROWS,
    )


async def _entries(request: Request, found: Page[AuditRow]) -> list[AuditEntry]:
    named = await admin_of(request).with_names({"tenant_id": row.tenant_id} for row in found.rows)
    return [
        AuditEntry(row, round(row.at.timestamp() * 1e6), names["tenant"], changes(row.before, row.after))
        for row, names in zip(found.rows, named, strict=True)
    ]


@page(f"{PATH}/{NEW}", act=Act.READ_PLATFORM)
async def new_acts(request: Request) -> Response[str]:
    asked = asked_of(request, *FIELDS)
    return new_rows(await admin_of(request).audit.read(query_of(asked), limit=MOST_NEW))


@page(f"{PATH}/csv", act=Act.READ_PLATFORM)
async def audit_file(request: Request) -> Response[str]:
    asked = asked_of(request, *FIELDS)

    async def read(cursor: str | None) -> Page[dict[str, object]]:
        query = replace(query_of(asked), order="oldest")
        entries = await admin_of(request).audit.read(query, cursor=cursor, limit=MAX_PAGE)
        return Page([_file_row(entry) for entry in await _entries(request, entries)], entries.next_cursor)

    try:
        return await csv_list(
            "audit",
            COLUMNS,
            read,
            cursor_of(request),
            lambda cursor: with_query(f"{PATH}/csv", asked | {"cursor": cursor}),
        )
    except FILTER_ERRORS as error:
        return await _shown(request, asked, problem=filter_problem(error, FIELDS, CALLED_HERE))


def _file_row(entry: AuditEntry) -> dict[str, object]:
    row = entry.row
    shown = {"at": row.at.isoformat(), "tenant": entry.tenant}
    shown |= {name: as_stored(getattr(row, name)) for name in ("before", "after")}
    return {name: shown[name] if name in shown else getattr(row, name) for name in COLUMNS}


HANDLERS = [audit_page, new_acts, audit_file]
