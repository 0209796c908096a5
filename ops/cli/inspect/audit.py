"""`fairgate audit`: the log of admin acts, as a list and as an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ops.cli.administer import actor, administer
from ops.cli.base import answer, group, opened
from ops.cli.inspect import audit_follow, audit_log, audit_verify
from ops.cli.inspect.audit_log import signing_key, write_log
from ops.cli.options import OUTPUT
from ops.cli.resource_commands import add_to
from ops.cli.resource_options import filter_option
from tenants.admin.cursor import MAX_PAGE
from tenants.audit.accesses import Access
from tenants.resources.query import filters_of
from tenants.resources.reading import read_page
from tenants.resources.records.audit import AUDIT, AuditQuery

if TYPE_CHECKING:
    from tenants.admin.admin import Admin


@group()
def audit() -> None:
    """The audit log: every admin act, who did it, from where, and what it changed.

    \b
      fairgate audit list --since 24h
      fairgate audit list --subject tenant:acme --act tenant.suspend
      fairgate audit list --actor cli:root --since 2026-01-31T18:00:00+01:00
      fairgate audit export --output audit.jsonl
      fairgate audit verify
    """


for _command in (*audit_log.COMMANDS, audit_verify.verify, audit_follow.follow):
    audit.add_command(_command)
add_to(audit, AUDIT)


@audit.command()
@OUTPUT
def export(output: Path | None, **given: Any) -> None:
    """Writes the audit as JSON lines, the oldest row first, every column of each.

    \b
    Without a filter the file can be checked without the database (`fairgate audit verify --export FILE`): it
    has each row's bytes and the checkpoints, and is signed up to now where the key is here. With one it is a
    list for reading. Pages are written as they are read, so that a log of any length needs little memory.
    --json answers, with --output:
      {"rows": 1812, "output": "audit.jsonl"}
    """
    query, own = AuditQuery(**given, order="oldest"), signing_key()

    async def write(admin: Admin) -> int:
        whose = actor()
        access = Access("access.export", whose.name, whose.origin, "fairgate audit export")
        await admin.transactions.note_access(access)
        with opened(output) as file:
            if query != AuditQuery(order="oldest"):
                return await _write_list(file, admin, query)
            return await write_log(file, admin, own)

    rows = administer(write)
    if output is not None:
        answer({"rows": rows, "output": str(output)}, f"{rows:,} rows written to {output}")


export.params[:0] = [
    filter_option(one) for one in filters_of(AuditQuery) if one.field not in ("order", "seq")
]


async def _write_list(file: TextIO, admin: Admin, query: AuditQuery) -> int:
    from tenants.audit.export import ExportHead, head_line

    file.write(head_line(ExportHead(None, None, None)))
    rows, cursor = 0, None
    while True:
        page = await read_page(admin, AUDIT, query, cursor=cursor, limit=MAX_PAGE)
        for row in await admin.with_names(row.as_json() for row in page.rows):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        rows, cursor = rows + len(page.rows), page.next_cursor
        if cursor is None:
            return rows
