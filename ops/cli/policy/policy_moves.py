"""`fairgate policy moves`: what the control loops moved or advised, and why."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from ops.cli.administer import administer
from ops.cli.base import Command, answer
from ops.cli.options import Duration
from ops.reporting import table
from tenants.admin.cursor import MAX_PAGE
from tenants.admin.lists.moves import MoveQuery
from tenants.counts.move_store import StoredMove

if TYPE_CHECKING:
    from tenants.admin.admin import Admin


@click.command(cls=Command)
@click.option("--model", metavar="NAME", help="Of this model.")
@click.option("--knob", metavar="KNOB", help="Of this knob, such as batch_cap.")
@click.option("--made/--advised", "made", default=None, help="Only those that were made, or only advised.")
@click.option(
    "--last", type=Duration(), default="24h", show_default=True, help="So far back, such as 30m or 7d."
)
@click.option(
    "--limit", type=click.IntRange(1, MAX_PAGE), default=50, show_default=True, help="Rows at most."
)
def moves(
    model: str | None,
    knob: str | None,
    made: bool | None,
    last: float,
    limit: int,
) -> None:
    """The moves of the control loops, made or advised, the newest first, each with its reason.

    They come from the database: of all gateways, for 90 days. What a loop may move says the setting
    gateway.control; where its knobs stand now, `fairgate status`.

    \b
      fairgate policy moves --last 2h
      fairgate policy moves --knob batch_cap --made

    \b
    --json answers:
      {"data": [{"id": "mov_…", "object": "control_move", "at": "2026-01-31T12:00:00+00:00",
       "gateway_id": "gw_…", "model": "m", "knob": "batch_cap", "before": 1.0, "after": 0.875,
       "reason": "KV nearly full (0.95)", "is_made": true, "mode": "acting",
       "knobs": {"batch_cap": 0.875, …}}, …], "has_more": false}
    """
    since = datetime.fromtimestamp(time.time() - last, UTC).isoformat()
    query = MoveQuery(model=model, knob=knob, made=made, since=since)

    async def read(admin: Admin) -> tuple[list[StoredMove], bool]:
        page = await admin.moves.read(query, limit=limit)
        return page.rows, page.next_cursor is not None

    rows, has_more = administer(read)

    def text() -> None:
        _table(rows)
        if has_more:
            click.echo("there are older ones: a higher --limit shows them")

    answer({"data": [move.as_json() for move in rows], "has_more": has_more}, text)


def _table(rows: Sequence[StoredMove]) -> None:
    by_gateway = len({move.gateway_id for move in rows}) > 1
    table(
        "moves",
        ("at", "model", "what", "knob", "from, to", "why", *(("by",) if by_gateway else ())),
        [
            (
                f"{datetime.fromtimestamp(move.at_us / 1e6, UTC):%Y-%m-%d %H:%M:%S}Z",
                move.model,
                "moved" if move.is_made else "advised",
                move.knob,
                f"{move.before:g} -> {move.after:g}",
                move.reason,
                *((move.gateway_id,) if by_gateway else ()),
            )
            for move in rows
        ],
    )
