"""`fairgate flow`: service by minute, of tenants against their fair shares, and of engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ops.cli.administer import administer
from ops.cli.base import answer, group
from ops.cli.options import PastInstant
from ops.reporting import table
from tenants.admin.cursor import MAX_PAGE
from tenants.admin.lists.flow import WINDOWS_US
from tenants.types import Tier

if TYPE_CHECKING:
    from tenants.admin.admin import Admin

SINCE = click.option("--from", "since", type=PastInstant(), help="From then on: an instant, or 3h ago.")
UNTIL = click.option("--to", "until", type=PastInstant(), help="Before then: the same.  [default: now]")
POOL = click.option("--pool", help="Only of this model.")
ROWS = click.option(
    "--limit", type=click.IntRange(1, MAX_PAGE), default=100, show_default=True, help="Rows at most."
)
CURSOR = click.option("--cursor", help="Next page of a list with the same filter.")


@group()
def flow() -> None:
    """Service by minute, kept for 14 days.

    \b
      fairgate flow show --tenant acme --from 3h
      fairgate flow show --window hour --from 7d
      fairgate flow engines --from 30m
    """


@flow.command()
@click.option("--window", type=click.Choice(list(WINDOWS_US)), default="minute", show_default=True)
@POOL
@click.option("--tier", type=click.Choice([tier.value for tier in Tier]), help="Only this tier.")
@click.option("--tenant", help="Only this tenant's (name or id).")
@SINCE
@UNTIL
@ROWS
@CURSOR
def show(**asked: Any) -> None:
    """Shows what tenants had of each pool against their fair shares, the oldest first.

    In cost tokens (input + 2 x output). At most 24 hours of minutes, or 14 days of hours, at once; without
    --from the last hour, or of hours the last day.

    \b
    --json answers:
      {"data": [{"start": "2026-01-31T12:00:00+00:00", "pool": "llama", "tier": "standard",
       "tenant_id": "ten_…", "tenant": "acme", "served_tokens": 5120, "fair_tokens": 4800,
       "mean_waiting_tokens": 210.5, "arrivals": 12, "mean_before_line_s": 0.004}, …],
       "next_cursor": null}
    """

    async def read(admin: Admin) -> dict[str, Any]:
        page = await admin.flow.page(**asked)
        rows = await admin.with_names(row.as_json() for row in page.rows)
        return {"data": rows, "next_cursor": page.next_cursor}

    document = administer(read)
    columns = ("from", "pool", "tier", "tenant", "served", "fair share", "waiting", "arrivals", "before line")

    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        return (
            row["start"][:16] + "Z",
            row["pool"],
            row["tier"],
            row["tenant"] or row["tenant_id"],
            f"{row['served_tokens']:,}",
            f"{row['fair_tokens']:,}",
            f"{row['mean_waiting_tokens']:,.0f}",
            f"{row['arrivals']:,}",
            f"{row['mean_before_line_s']:.3g} s",
        )

    answer(document, lambda: _show(document, columns, [cells(row) for row in document["data"]]))


@flow.command()
@POOL
@click.option("--replica", help="Only this replica.")
@SINCE
@UNTIL
@ROWS
@CURSOR
def engines(**asked: Any) -> None:
    """Shows what engines did, minute by minute, the oldest first; without --from the last hour.

    Servers that are no engine of ours report no steps: their counts of steps and tokens are 0.

    \b
    --json answers:
      {"data": [{"start": "2026-01-31T12:00:00+00:00", "pool": "llama", "replica": "llama-a", "state": "up",
       "seen_s": 60.0, "up_s": 60.0, "idle_s": 12.5, "steps": 1800, "mean_step_s": 0.026,
       "mean_batch": 6.2, "computed_tokens": 40210, "emitted_tokens": 11160, "recomputed_tokens": 0,
       "preemptions": 0, "kv_share": 0.41}, …], "next_cursor": null}
    """

    async def read(admin: Admin) -> dict[str, Any]:
        page = await admin.flow.page_engines(**asked)
        return {"data": [row.as_json() for row in page.rows], "next_cursor": page.next_cursor}

    document = administer(read)
    columns = ("from", "pool", "replica", "state", "idle", "steps", "a step", "batch", "tokens", "KV cache")

    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        return (
            row["start"][:16] + "Z",
            row["pool"],
            row["replica"],
            row["state"],
            f"{row['idle_s']:.3g} s",
            f"{row['steps']:,}",
            f"{row['mean_step_s']:.3g} s",
            f"{row['mean_batch']:.3g}",
            f"{row['computed_tokens']:,} / {row['emitted_tokens']:,}",
            f"{row['kv_share']:.0%}",
        )

    answer(document, lambda: _show(document, columns, [cells(row) for row in document["data"]]))


def _show(document: dict[str, Any], columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table("windows", columns, rows)
    if document["next_cursor"]:
        click.echo(f"later ones: the same command with --cursor {document['next_cursor']}")
