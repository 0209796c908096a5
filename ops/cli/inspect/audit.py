"""`fairgate audit`: the log of admin acts, as a list and as an export."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
import msgspec

from ops.cli.administer import actor, administer
from ops.cli.base import answer, group, opened
from ops.cli.inspect import audit_follow, audit_log, audit_verify
from ops.cli.inspect.audit_log import signing_key, write_log
from ops.cli.options import OUTPUT, PastInstant
from ops.reporting import table
from tenants.admin.cursor import MAX_PAGE
from tenants.admin.lists.audit import AuditQuery
from tenants.audit.accesses import Access

if TYPE_CHECKING:
    from tenants.admin.admin import Admin

MOST_CHANGES = 6
"""Fields shown of one change; the JSON has all."""
MOST_CHARACTERS = 40


def _filters(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        (
            click.option(
                "--actor",
                metavar="ACTOR",
                help="`cli:root`, `key:fg_live_…`, `person:ada`; or only `cli`, `key`, `person`.",
            ),
            click.option(
                "--subject",
                metavar="[KIND:]WHAT",
                help="What the act was done to: an id, or a name of a tenant, project or key (tenant:acme).",
            ),
            click.option("--act", metavar="ACT", help="`tenant.suspend`, or only the kind: `tenant`."),
            click.option("--tenant", help="Rows of this tenant and of all that is its (name or id)."),
            click.option("--since", type=PastInstant(), help="From then on: an instant, or 24h, 7d ago."),
            click.option("--until", type=PastInstant(), help="Before then: an instant, or 24h, 7d ago."),
        )
    ):
        command = option(command)
    return command


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


@audit.command(name="list")
@_filters
@click.option(
    "--limit", type=click.IntRange(1, MAX_PAGE), default=50, show_default=True, help="Rows at most."
)
@click.option("--cursor", help="Next page of a list with the same filter.")
def list_(limit: int, cursor: str | None, **given: Any) -> None:
    """Lists admin acts, the newest first.

    \b
    --json answers:
      {"data": [{"seq": 17, "at": "2026-01-31T12:00:00+00:00", "actor": "cli:root", "origin": "cli",
       "action": "tenant.suspend", "target": "ten_…", "target_name": "acme", "tenant_id": "ten_…",
       "tenant": "acme", "before": {"status": "active", …}, "after": {"status": "suspended", …},
       "request_id": null, "trace_id": null}, …],
       "next_cursor": null}
    """
    query = AuditQuery(**given)

    async def read(admin: Admin) -> dict[str, Any]:
        page = await admin.audit.read(query, cursor=cursor, limit=limit)
        rows = await admin.with_names(row.as_json() for row in page.rows)
        return {"data": rows, "next_cursor": page.next_cursor}

    document = administer(read)

    def text() -> None:
        table(
            "acts",
            ("at", "actor", "from", "act", "subject", "tenant", "changed"),
            [
                (
                    row["at"][:19] + "Z",
                    row["actor"],
                    row["origin"],
                    row["action"],
                    f"{row['target_name']} ({row['target']})" if row["target_name"] else row["target"],
                    row["tenant"] or row["tenant_id"],
                    changed(row["before"], row["after"]),
                )
                for row in document["data"]
            ],
        )
        if document["next_cursor"]:
            click.echo(f"older ones: {_again(query, limit)} --cursor {document['next_cursor']}")

    answer(document, text)


@audit.command()
@_filters
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


async def _write_list(file: TextIO, admin: Admin, query: AuditQuery) -> int:
    from tenants.audit.export import ExportHead, head_line

    file.write(head_line(ExportHead(None, None, None)))
    rows, cursor = 0, None
    while True:
        page = await admin.audit.read(query, cursor=cursor, limit=MAX_PAGE)
        for row in await admin.with_names(row.as_json() for row in page.rows):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        rows, cursor = rows + len(page.rows), page.next_cursor
        if cursor is None:
            return rows


def changed(before: dict[str, Any] | None, after: dict[str, Any] | None) -> str:
    """`weight 1.0 -> 3.0`; of what was made or removed only that."""
    if before is None or after is None:
        return "" if before is after else "made" if before is None else "removed"
    differ = [
        f"{name} {_short(before.get(name))} -> {_short(after.get(name))}"
        for name in before | after
        if before.get(name) != after.get(name)
    ]
    more = f" and {len(differ) - MOST_CHANGES} more" if len(differ) > MOST_CHANGES else ""
    return ", ".join(differ[:MOST_CHANGES]) + more


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"


def _again(query: AuditQuery, limit: int) -> str:
    """The command of this very list: a time ago is the instant that it meant."""
    given = msgspec.to_builtins(query) | {"limit": limit}
    options = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    return shlex.join(["fairgate", "audit", "list", *options])
