"""`fairgate refusal`: requests that were refused, and how many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ops.cli.admin.administer import administer
from ops.cli.base import answer, group
from ops.cli.options import SINCE, UNTIL
from ops.reporting import table
from tenants.admin.cursor import MAX_PAGE
from tenants.admin.lists.counts import ALL_REFUSAL_GROUPS, WINDOWS_S, RefusalCountQuery
from tenants.admin.lists.refusals import RefusalQuery
from tenants.types import Tier

if TYPE_CHECKING:
    from tenants.admin.admin import Admin

ROWS = click.option(
    "--limit", type=click.IntRange(1, MAX_PAGE), default=50, show_default=True, help="Rows at most."
)
CURSOR = click.option("--cursor", help="Next page of a list with the same filter.")


@group()
def refusal() -> None:
    """Requests that were refused: by which limit, what was wanted and available.

    \b
      fairgate refusal list --tenant acme --from 24h
      fairgate refusal list --request-id req_…
      fairgate refusal counts --group-by tenant,code --from 7d
    """


@refusal.command(name="list")
@click.option("--request-id", metavar="ID")
@click.option("--tenant", help="Name or id.")
@click.option("--project", help="Id, or beside --tenant its name.")
@click.option("--key", help="Id or visible prefix.")
@click.option("--model", help="As it was asked for.")
@click.option("--tier", type=click.Choice([tier.value for tier in Tier]))
@click.option("--code", help="The error's code, such as insufficient_quota.")
@click.option("--limit-id", metavar="ID", help="The limit that refused it.")
@SINCE
@UNTIL
@ROWS
@CURSOR
def list_(limit: int, cursor: str | None, **given: Any) -> None:
    """Lists refused requests, the newest first. Of many of one kind in a minute the first few are kept.

    \b
    --json answers:
      {"data": [{"request_id": "req_…", "object": "refusal", "at": "2026-01-31T12:00:00+00:00",
       "tenant_id": "ten_…", "tenant": "acme", "project_id": "prj_…", "project": "default",
       "key_id": "key_…", "key_name": "", "tier": "standard", "model": "m", "code": "insufficient_quota",
       "limit_id": "lim_…", "of_platform": false, "wanted": 512, "available": 100,
       "retry_after_s": null}, …], "next_cursor": null}
    """
    query = RefusalQuery(**given)

    async def read(admin: Admin) -> dict[str, Any]:
        page = await admin.refusals.read(query, cursor=cursor, limit=limit)
        rows = await admin.with_names(row.as_json() for row in page.rows)
        return {"data": rows, "next_cursor": page.next_cursor}

    document = administer(read)

    def text() -> None:
        table(
            "refusals",
            ("at", "request", "tenant", "key", "tier", "model", "code", "limit", "wanted", "available"),
            [
                (
                    row["at"][:19] + "Z",
                    row["request_id"],
                    row["tenant"] or row["tenant_id"],
                    row["key_name"] or row["key_id"],
                    row["tier"],
                    row["model"],
                    row["code"],
                    row["limit_id"],
                    row["wanted"],
                    row["available"],
                )
                for row in document["data"]
            ],
        )
        if document["next_cursor"]:
            click.echo(f"older ones: the same command with --cursor {document['next_cursor']}")

    answer(document, text)


@refusal.command()
@click.option("--window", type=click.Choice(list(WINDOWS_S)), default="hour", show_default=True)
@click.option(
    "--group-by",
    default=ALL_REFUSAL_GROUPS,
    show_default=True,
    help="Some of these, with commas between them; empty: by time alone.",
)
@click.option("--tenant", help="Name or id.")
@click.option("--code", help="The error's code, such as insufficient_quota.")
@click.option("--limit-id", metavar="ID", help="The limit that refused them.")
@SINCE
@UNTIL
@ROWS
@CURSOR
def counts(limit: int, cursor: str | None, **given: Any) -> None:
    """Counts refused requests exactly, the oldest first; without --from those of the last hour or day.

    \b
    --json answers, with the groups that were asked for:
      {"data": [{"start": "2026-01-31T12:00:00+00:00", "tenant_id": "ten_…", "tenant": "acme",
       "code": "insufficient_quota", "limit_id": "lim_…", "count": 1812}, …], "next_cursor": null}
    """
    query = RefusalCountQuery(**given)

    async def read(admin: Admin) -> dict[str, Any]:
        page = await admin.counts.refusals(query, cursor=cursor, limit=limit)
        return {"data": await admin.with_names(page.rows), "next_cursor": page.next_cursor}

    document = administer(read)

    def text() -> None:
        table(
            "refusals",
            ("from", "tenant", "code", "limit", "count"),
            [
                (
                    row["start"][:16] + "Z" if "start" in row else None,
                    row.get("tenant") or row.get("tenant_id"),
                    row.get("code"),
                    row.get("limit_id"),
                    row["count"],
                )
                for row in document["data"]
            ],
        )
        if document["next_cursor"]:
            click.echo(f"later ones: the same command with --cursor {document['next_cursor']}")

    answer(document, text)
