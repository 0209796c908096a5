"""`fairgate request`: requests that wait or run, and the timeline of one as a waterfall."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from gateway.console.formats import exact_dollars
from ops.cli.administer import administer
from ops.cli.base import Failure, answer, group, settings_now
from ops.cli.inspect.waterfall import (
    decoded_in_words,
    evidence_in_words,
    headline,
    list_events,
    others_in_words,
    seconds,
    waterfall,
)
from ops.cli.live import call, require_server, running_server
from ops.cli.resource_commands import options_of, show_rows
from ops.reporting import table
from tenants.resources.reading import query_of, read_page
from tenants.resources.records.ended import ENDED, EndedQuery
from tenants.types import Tier

if TYPE_CHECKING:
    from tenants.admin.admin import Admin

TIERS = click.Choice([tier.value for tier in Tier])
ONLY_ENDED = ("outcome", "cause", "since", "until")
"""Filters of requests that have ended."""
INCOMPLETE = {"tool_calls": "tool calls", "json": "JSON"}


@group()
def request() -> None:
    """Requests: waiting, running, finished, and one in detail.

    \b
      fairgate request list --tenant acme
      fairgate request list --ended --since 24h --outcome failed
      fairgate request show req_…
      fairgate request move req_… interactive
      fairgate request cancel req_…
    A request's id may also be that of its completion (chatcmpl-…, cmpl-…), as OpenAI's SDK shows it.
    """


@request.command(name="list")
@click.option(
    "--status",
    type=click.Choice(["limited", "waiting", "running"]),
    help="Only requests in this state; limited: held back by its tenant's own limits.",
)
@click.option("--ended", is_flag=True, help="Finished requests, newest first; from the database.")
def list_(status: str | None, ended: bool, limit: int, cursor: str | None, **filters: Any) -> None:
    """Lists waiting and running requests, oldest first; with --ended finished ones, newest first.

    \b
    --json answers:
      {"data": [{"id": "req_…", "status": "waiting", "tier": "standard", "model": "fairgate-demo",
       "elapsed_s": 2.1, "input_tokens": 64, "output_tokens": 0, "tenant_id": "ten_…", "tenant": "acme",
       "project_id": "prj_…", "project": "default", "key_id": "key_…", "key_name": "robot", …}, …],
       "has_more": false, "gateways_missing": 0}
    With --ended:
      {"data": [{"id": "req_…", "status": "ended", "ended_at": "2026-01-31T12:00:00+00:00",
       "outcome": "completed", "tier": "standard", "model": "fairgate-demo", "tenant_id": "ten_…",
       "tenant": "acme", …, "cost_nanousd": 38400, "gpu_ms": 120, "labels": {}, "misses": [],
       "dispatched_s": 2.1, "first_token_s": 2.2, "ended_s": 3.4}, …], "next_cursor": null}
    """
    if ended:
        if status is not None:
            raise click.UsageError("give --status or --ended, not both")
        shown = ended_requests(query_of(EndedQuery, filters), cursor, limit)
        answer(shown, lambda: show_rows(ENDED, shown))
        return
    if cursor is not None or any(filters[name] is not None for name in ONLY_ENDED):
        raise click.UsageError("--outcome, --cause, --since, --until and --cursor need --ended")
    query = {name: filters[name] for name in filters if name not in ONLY_ENDED} | {"status": status}
    document = call(require_server(), "GET", "/requests", query=query)

    def text() -> None:
        rows = [
            (
                row["id"],
                row["tenant"] or row["tenant_id"],
                row["key_name"] or row["key_id"],
                row["tier"],
                row["status"],
                row["model"],
                seconds(row["elapsed_s"]),
                f"{row['input_tokens']:,} / {row['output_tokens']:,}",
            )
            for row in document["data"]
        ]
        columns = ("id", "tenant", "key", "tier", "status", "model", "since", "tokens in / out")
        table("requests that wait or run", columns, rows)
        if document["has_more"]:
            click.echo("there are more: name a --tenant, a --tier or a --status")
        if document["gateways_missing"]:
            click.echo(f"{document['gateways_missing']} gateways did not answer: theirs are not in the list")

    answer(document, text)


def _ended_options() -> list[click.Parameter]:
    """Of the list of ended requests; some are for those that wait or run, too."""
    options = options_of(EndedQuery, ENDED.rows)
    for option in options:
        if option.name in (*ONLY_ENDED, "limit", "cursor") and isinstance(option, click.Option):
            words = option.help or "only those that ended so."
            option.help = f"With --ended: {words[0].lower()}{words[1:]}"
        elif option.name == "model" and isinstance(option, click.Option):
            option.help = "As it was asked for; with --ended the one that served it."
    return options


list_.params[:0] = _ended_options()


@request.command()
@click.argument("request_id")
def cancel(request_id: str) -> None:
    """Cancels a waiting or running request; emitted tokens are charged. Repeating it changes nothing.

    \b
    --json answers what `request list` does of one request, or of one that has ended how it did:
      {"id": "req_…", "status": "cancelled", "tenant": "acme", …}
    """
    shown = call(require_server(), "DELETE", f"/requests/{_part(request_id)}")
    is_over = shown["status"] == "ended"
    what = f"has ended: {shown['outcome']}" if is_over else "is cancelled; what was emitted is charged"
    answer(shown, f"request {shown['id']} of {shown['tenant']} {what}")


@request.command()
@click.argument("request_id")
@click.argument("tier", type=TIERS)
@click.option("--preview", is_flag=True, help="Show the price and the expected wait; change nothing.")
def move(request_id: str, tier: str, preview: bool) -> None:
    """Moves a waiting request to another tier at that tier's price, even one its tenant may not use.

    \b
    --json answers:
      {"id": "req_…", "object": "request.tier", "moved": true, "tier": "interactive",
       "from": {"tier": "standard", "cost_nanousd": {…}, …}, "to": {"tier": "interactive", …}}
    """
    body = {"service_tier": tier, "preview": preview}
    moved = call(require_server(), "POST", f"/requests/{_part(request_id)}/tier", body=body)

    def text() -> None:
        before, after = moved["from"], moved["to"]
        did = "moved to" if moved["moved"] else "would move to" if preview else "was already in"
        click.echo(f"request {moved['id']} {did} {after['tier']}")
        for terms in (before, after):
            left_s = terms.get("time_left_s")
            turn = f"; its turn in {left_s['p50']:.3g} s (p90 {left_s['p90']:.3g} s)" if left_s else ""
            click.echo(f"  {terms['tier']}: {_price(terms)}{turn}")

    answer(moved, text)


@request.command()
@click.argument("request_id")
@click.option("--events", is_flag=True, help="Also every event of its timeline.")
def show(request_id: str, events: bool) -> None:
    """Shows one request: where its time went, why it waited, and which targets it missed.

    The running server is asked; without one the database is read, which knows what has ended.

    \b
    REQUEST_ID may also be the completion's, as OpenAI's SDK shows it (chatcmpl-…).
    --json answers:
      {"id": "req_…", "status": "ended", "outcome": "completed", "tier": "standard", "tenant_id": "ten_…",
       "tenant": "acme", "key_id": "key_…", "key_name": "robot", "input_tokens": 64,
       "output_tokens": 48, "cost_nanousd": 38400, "explanation": ["waited 2.0 s in line: …", …],
       "waits": {"limits_s": 0.0, "queue_s": 2.0, …}, "stages": [{"name": "queue", "start_s": 0.001, …}],
       "timeline": [{"event": "received", "at_s": 0.0, "input_tokens": 64, …}, …],
       "misses": [{"metric": "ttft", "target_s": 0.5, "actual_s": 2.1, "cause": "quota", "evidence": {…}}],
       "sat_out_for": [{"tenant_id": "ten_…", "tenant": "acme", "steps": 12}]}
    `sat_out_for`, the tenants that had the turns which it sat out, is for operators only.
    """
    server = running_server()
    if server is not None:
        shown = call(server, "GET", f"/requests/{_part(request_id)}")
    else:
        shown = asyncio.run(_read(request_id))

    def text() -> None:
        click.echo(headline(shown))
        chained = shown.get("fallback", {"tried": ()})
        for other in chained["tried"]:
            click.echo(f"- asked for {chained['asked']}; {other['model']} was passed over: {other['reason']}")
        if cut := shown.get("incomplete"):
            click.echo(f"- cut in the middle of its {INCOMPLETE.get(cut, cut)}")
        waterfall(shown.get("stages") or [])
        for sentence in shown.get("explanation") or []:
            click.echo(f"- {sentence}")
        if decoded := decoded_in_words(shown.get("timeline") or []):
            click.echo(f"- {decoded}")
        if others := shown.get("sat_out_for"):
            click.echo(f"- steps sat out while others had the turns: {others_in_words(others)}")
        if shown["status"] == "ended" and shown.get("timeline") is None:
            click.echo("its timeline is not kept (any more)")
        for miss in shown.get("misses") or []:
            actual = "never came" if miss["actual_s"] is None else f"took {miss['actual_s']:.3g} s"
            click.echo(
                f"- missed its target: {miss['metric']} {actual}, target {miss['target_s']:g} s;"
                f" cause: {miss['cause']} ({evidence_in_words(miss['evidence'])})"
            )
        if events and shown.get("timeline"):
            list_events(shown["timeline"])

    answer(shown, text)


def _part(request_id: str) -> str:
    """A request's id as a part of a path, whatever was typed."""
    from urllib.parse import quote

    return quote(request_id, safe="")


async def _read(shown_id: str) -> dict[str, Any]:
    """The ended request, from the database."""
    from gateway.domain.ids import request_id_of
    from gateway.explain.explanation import explained, sat_out_for
    from gateway.pools.request_actions import owner
    from gateway.routes.requests import ended_request, settled_of
    from ops.serving import datadir
    from tenants.admin.admin import Admin
    from tenants.admin.transaction import Transactions
    from tenants.errors import TenancyError
    from tenants.ledger import timelines
    from tenants.ledger.ledger import Ledger
    from tenants.storage.database import open_database

    settings = settings_now()
    if not settings.database_url and not (settings.data_dir / "fairgate.db").exists():
        raise Failure(f"no database in {settings.data_dir}: name the right --data-dir")
    request_id = request_id_of(shown_id)
    database = open_database(settings.resolved_database_url)
    try:
        rows = await Ledger(database).find(request_id)
        if not any(row.kind == "settle" for row in rows):
            what = "has not been settled yet, and no server runs here" if rows else "is not known here"
            raise Failure(f"request {request_id[:80]} {what}")
        admin = Admin(Transactions(database, datadir.pepper(settings)))
        explanation = await explained(lambda one: timelines.find(database, one), admin, request_id)
        settled = settled_of(rows)
        others = await sat_out_for(admin, settled)
        shown = ended_request(rows) | owner(settled) | explanation | {"sat_out_for": others}
        return (await admin.with_names([shown]))[0]
    except (TenancyError, datadir.DataDirRefused) as error:
        raise Failure(str(error)) from None
    finally:
        await database.close()


_PRICED = {"input": "in", "output": "out"}


def _price(side: Mapping[str, Any]) -> str:
    each, cost = side["price_per_token_nanousd"], side["cost_nanousd"]
    per_million = ", ".join(f"${each[kind] / 1_000:,.4g} {words}" for kind, words in _PRICED.items())
    this = f"${exact_dollars(cost['p50'])} (p50), ${exact_dollars(cost['p90'])} (p90)"
    return f"{per_million} per million tokens; this request {this}, at most ${exact_dollars(cost['max'])}"


def ended_requests(query: EndedQuery, cursor: str | None, limit: int) -> dict[str, Any]:
    """What `GET /admin/v1/requests/ended` answers."""
    from gateway.routes.views.resource_rows import json_of

    async def read(admin: Admin) -> dict[str, Any]:
        page = await read_page(admin, ENDED, query, cursor=cursor, limit=limit)
        rows = await admin.with_names(json_of(ENDED, row) for row in page.rows)
        return {"data": rows, "next_cursor": page.next_cursor}

    return administer(read)
