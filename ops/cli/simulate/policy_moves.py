"""`fairgate policy moves`: what the control loops moved or advised, why, and what it was worth."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from ops.cli.admin.administer import administer
from ops.cli.base import Command, Failure, answer, settings_now
from ops.cli.options import Duration
from ops.reporting import table
from tenants.admin.cursor import MAX_PAGE
from tenants.admin.lists.moves import MoveQuery
from tenants.moves.move import StoredMove

if TYPE_CHECKING:
    from ops.simulate.slo import SloLimits
    from ops.simulate.worth.refused import RefusedCount
    from ops.simulate.worth.replay import MoveWorth
    from tenants.admin.admin import Admin
    from tenants.ledger.timelines import RecordedTimeline
    from tenants.storage.database import Database

MOST_REPLAYED = 50
MOST_ROWS = 50_000
"""Recorded requests of one replay."""
LEAST_TAIL_S = 600.0
"""After the window: answers to what arrived in it have ended by then, as far as they count."""
MOST_MOVES = 1_000
"""Of one model, in the time of one replay."""
MADE = {True: "moved", False: "advised"}


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
@click.option("--worth", "is_worth", is_flag=True, help="Replay recorded traffic with and without each move.")
@click.option(
    "--window", type=Duration(), default="10m", show_default=True, help="After the move, that is looked at."
)
@click.option(
    "--replays",
    type=click.IntRange(1, MOST_REPLAYED),
    default=5,
    show_default=True,
    help="Moves that are replayed: the latest of those listed.",
)
@click.option(
    "--slo", metavar="TARGETS", help="Such as ttft=2,tpot=0.1,e2e=30, in seconds.  [default: ttft=2,tpot=0.1]"
)
def moves(
    model: str | None,
    knob: str | None,
    made: bool | None,
    last: float,
    limit: int,
    is_worth: bool,
    window: float,
    replays: int,
    slo: str | None,
) -> None:
    """The moves of the control loops, made or advised, the newest first, each with its reason.

    They come from the database: of all gateways, for 90 days. What a loop may move says the setting
    gateway.control; where its knobs stand now, `fairgate status`.

    --worth replays the traffic that was recorded around each of the latest moves, on the simulator of
    `fairgate whatif`, once with and once without it: the share of all submitted requests that met their
    targets, the p90 of their waits and of their times to the first token. Beside them stands the simulator's
    own error: how far a replay of what happened is off what was recorded. Less than that says nothing.

    \b
      fairgate policy moves --last 2h
      fairgate policy moves --knob batch_cap --made
      fairgate policy moves --worth --replays 3 --slo ttft=1

    \b
    --json answers, `worth` only where it was asked for:
      {"data": [{"id": "mov_…", "object": "control_move", "at": "2026-01-31T12:00:00+00:00",
       "gateway_id": "gw_…", "model": "m", "knob": "batch_cap", "before": 1.0, "after": 0.875,
       "reason": "KV nearly full (0.95)", "is_made": true, "mode": "acting", "knobs": {"batch_cap": 0.875, …},
       "worth": {"requests": 812, "recorded": {"requests": 812, "attainment": 0.83, "wait_p90_s": 3.1,
       "ttft_p90_s": 3.3}, "as_it_was": {…}, "without": {…}, "with_it": {…}, "error": {"attainment": 0.01,
       "wait_p90_s": 0.2, "ttft_p90_s": 0.2}, "verdict": "worth it", "why": "attainment +13.1 points",
       "notes": []}}, …], "has_more": false}
    """
    targets = _targets(slo) if is_worth else None
    since = datetime.fromtimestamp(time.time() - last, UTC).isoformat()
    query = MoveQuery(model=model, knob=knob, made=made, since=since)

    async def read(admin: Admin) -> tuple[list[StoredMove], bool]:
        page = await admin.read_moves(query, limit=limit)
        return page.rows, page.next_cursor is not None

    rows, has_more = administer(read)
    worths: dict[str, MoveWorth] = {}
    if targets is not None:
        found = asyncio.run(_worths(rows[:replays], targets, window))
        worths = {each.move.move_id: each for each in found}
    data = [
        each.as_json() | ({"worth": worths[each.move_id].as_json()} if each.move_id in worths else {})
        for each in rows
    ]

    def text() -> None:
        if worths:
            for each in worths.values():
                click.echo("\n".join(_in_words(each, window)))
        else:
            _table(rows)
        if len(worths) < len(rows) and worths:
            click.echo(f"{len(rows) - len(worths)} older ones were not replayed (--replays)")
        if has_more:
            click.echo("there are older ones: a higher --limit shows them")

    answer({"data": data, "has_more": has_more}, text)


def _targets(slo: str | None) -> SloLimits:
    from ops.simulate.slo import SloLimits

    try:
        return SloLimits.of(slo) if slo else SloLimits()
    except ValueError as error:
        raise click.UsageError(f"--slo: {error}") from None


def _table(rows: Sequence[StoredMove]) -> None:
    gateways = {each.gateway_id for each in rows}
    table(
        "moves",
        ("at", "model", "what", "knob", "from, to", "why", *(("by",) if len(gateways) > 1 else ())),
        [
            (
                _instant(each),
                each.model,
                MADE[each.is_made],
                each.knob,
                _way(each),
                each.reason,
                *((each.gateway_id,) if len(gateways) > 1 else ()),
            )
            for each in rows
        ],
    )


def _instant(move: StoredMove) -> str:
    return f"{datetime.fromtimestamp(move.at_us / 1e6, UTC):%Y-%m-%d %H:%M:%S}Z"


def _way(move: StoredMove) -> str:
    return f"{move.before:g} -> {move.after:g}"


def _in_words(worth: MoveWorth, window_s: float) -> list[str]:
    """A move, what it was worth, and the figures that say so."""
    from ops.simulate.worth.verdict import seconds

    move = worth.move
    lines = [f"{_instant(move)}  {move.model}: {MADE[move.is_made]} {move.knob} {_way(move)} ({move.reason})"]
    without, with_it, error = worth.without, worth.with_it, worth.error
    if worth.verdict is None or without is None or with_it is None or error is None:
        return [*lines, f"  not known: {worth.why}", *(f"  {note}" for note in worth.notes)]
    lines.append(f"  {worth.verdict.value}" + (f": {worth.why}" if worth.why else ""))
    met, unmet, off = (100 * each.attainment for each in (with_it, without, error))
    lines.append(
        f"  of {worth.requests} requests in the {window_s / 60:g} min after it: met {unmet:.0f} % without,"
        f" {met:.0f} % with (error {off:.1f})"
    )
    lines.append(
        f"  TTFT p90 {seconds(without.ttft_p90_s)} without, {seconds(with_it.ttft_p90_s)} with (error"
        f" {seconds(error.ttft_p90_s)}); wait p90 {seconds(without.wait_p90_s)},"
        f" {seconds(with_it.wait_p90_s)} (error {seconds(error.wait_p90_s)})"
    )
    return [*lines, *(f"  {note}" for note in worth.notes)]


async def _worths(moves: Sequence[StoredMove], slo: SloLimits, window_s: float) -> list[MoveWorth]:
    """Of each move, in the same order. Raises `Failure`."""
    from tenants.errors import TenancyError
    from tenants.storage.database import open_database

    database = open_database(settings_now().resolved_database_url)
    found = []
    try:
        for number, move in enumerate(moves, 1):
            if sys.stderr.isatty():
                click.echo(f"replays move {number} of {len(moves)}", err=True)
            found.append(await _worth(database, move, slo, window_s))
    except TenancyError as error:
        raise Failure(str(error)) from None
    finally:
        await database.close()
    return found


async def _worth(database: Database, move: StoredMove, slo: SloLimits, window_s: float) -> MoveWorth:
    from ops.simulate.origin import ServerUnknown, only_of, replayed_server
    from ops.simulate.recorded import read
    from ops.simulate.traffic.requests import BadTrace
    from ops.simulate.worth.refused import with_refused
    from ops.simulate.worth.replay import CannotReplay, MoveWorth, span_us, worth_of

    try:
        rows, described, meanwhile, is_alone = await _recorded(database, move, window_s)
        try:
            server = replayed_server(rows, described) if rows else None
        except ServerUnknown:
            # Gateways with engines of their own: what this one served.
            rows = only_of(move.gateway_id, rows, described)
            server = replayed_server(rows, described)
            meanwhile = [each for each in meanwhile if each.gateway_id == move.gateway_id]
        recorded = read(rows, "the traffic around it", described)
        if server is None:
            raise CannotReplay("nothing was recorded")
        refused = await _refused(database, move, window_s)
        span = span_us(move.at_us, window_s)
        whole = with_refused(recorded, refused, *span) if is_alone else recorded
        worth = worth_of(move, meanwhile, whole, server, slo, window_s)
        if whole is recorded and (count := sum(each.count for each in refused)):
            worth.notes.append(
                f"about {count} requests were refused as late around it and are not replayed: too many beside"
                " those that were served, or of which model is not known"
            )
    except (BadTrace, CannotReplay) as error:
        return MoveWorth(move, why=str(error).splitlines()[0].removesuffix(":"))
    passed_s = time.time() - move.at_us / 1e6
    if passed_s < window_s:
        worth.notes.append(f"only {passed_s / 60:.1f} of the {window_s / 60:g} minutes have passed")
    return worth


async def _recorded(
    database: Database, move: StoredMove, window_s: float
) -> tuple[list[RecordedTimeline], Mapping[str, bytes], list[StoredMove], bool]:
    """What was served and moved around a move, and whether no other model was served then. Raises
    `CannotReplay`."""
    from ops.simulate.worth.replay import CannotReplay, span_us
    from tenants.ledger import timelines
    from tenants.moves import store
    from tenants.storage.tables import control_moves

    since_us, until_us = span_us(move.at_us, window_s)
    tail_us = round(max(LEAST_TAIL_S, window_s) * 1e6)
    rows = await timelines.recorded(database, from_us=since_us, to_us=until_us + tail_us, most=MOST_ROWS + 1)
    if len(rows) > MOST_ROWS:
        raise CannotReplay(
            f"more than {MOST_ROWS:,} requests ended around it: take a shorter --window than"
            f" {window_s / 60:g} minutes"
        )
    is_alone = {row.model for row in rows} <= {move.model}
    rows = [row for row in rows if row.model == move.model]
    described = await timelines.described(
        database, {each for row in rows for each in (row.server, row.terms) if each is not None}
    )
    of_that_time = [
        control_moves.c.model == move.model,
        control_moves.c.at_us >= since_us,
        control_moves.c.at_us < until_us,
    ]
    meanwhile = await database.read(lambda connection: store.where(connection, of_that_time, MOST_MOVES))
    return rows, described, meanwhile, is_alone


async def _refused(database: Database, move: StoredMove, window_s: float) -> list[RefusedCount]:
    """Requests that were refused as late around a move, of all models."""
    from ops.simulate.worth.refused import CODES, RefusedCount
    from ops.simulate.worth.replay import span_us
    from tenants.refusals import store

    since_s, until_s = (at_us // 1_000_000 for at_us in span_us(move.at_us, window_s))
    # An hour sum begins before the time that is looked for.
    is_by_hour = time.time() - since_s > store.KEPT_MINUTES_S
    span_s = 3600 if is_by_hour else 60
    found = await database.read(
        lambda connection: store.late_by_minute(connection, CODES, since_s - span_s, until_s)
    )
    return [
        RefusedCount(minute_s * 1_000_000, span_s * 1_000_000, tenant, count)
        for minute_s, tenant, count in found
        if minute_s + span_s > since_s
    ]
