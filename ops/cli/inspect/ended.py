"""The list of `fairgate request list --ended`: requests that have ended, from the database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ops.cli.admin.administer import administer
from ops.cli.inspect.waterfall import seconds
from ops.reporting import table

if TYPE_CHECKING:
    from tenants.admin.admin import Admin
    from tenants.admin.lists.requests import RequestQuery


def ended_requests(query: RequestQuery, cursor: str | None, limit: int) -> dict[str, Any]:
    """What `GET /admin/v1/requests/ended` answers."""
    from gateway.explain.attribution import Cause
    from gateway.explain.explanation import steps_of

    if query.cause not in (None, *Cause):
        raise click.UsageError(f"--cause: {query.cause!r} is not one of {', '.join(Cause)}")

    async def read(admin: Admin) -> dict[str, Any]:
        page = await admin.page_requests(query, cursor=cursor, limit=limit)
        rows = await admin.with_names(each.as_json() | steps_of(each.packed) for each in page.rows)
        return {"data": rows, "next_cursor": page.next_cursor}

    return administer(read)


def show_ended(found: dict[str, Any]) -> None:
    table(
        "requests that have ended",
        ("ended", "id", "tenant", "key", "tier", "model", "outcome", "took", "tokens in / out", "missed"),
        [
            (
                each["ended_at"][:19] + "Z",
                each["id"],
                each["tenant"] or each["tenant_id"],
                each["key_name"] or each["key_id"],
                each["tier"],
                each["model"],
                each["outcome"],
                "" if each["ended_s"] is None else seconds(each["ended_s"]),
                f"{each['input_tokens']:,} / {each['output_tokens']:,}",
                ", ".join(f"{miss['metric']}: {miss['cause']}" for miss in each["misses"]),
            )
            for each in found["data"]
        ],
    )
    if found["next_cursor"]:
        click.echo(f"older ones: the same command with --cursor {found['next_cursor']}")
