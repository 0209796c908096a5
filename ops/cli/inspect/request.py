"""`fairgate request`: requests that wait or run, and the timeline of one as a waterfall."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import click

from ops.cli.base import Failure, answer, group, settings_now
from ops.cli.live import call, require_server, running_server
from ops.reporting import table
from tenants.types import Tier

TIERS = click.Choice([tier.value for tier in Tier])
BAR_CELLS = 48
COLOURS = {
    "received": "white",
    "limits": "magenta",
    "queue": "yellow",
    "engine": "dark_orange",
    "prefill": "cyan",
    "decode": "green",
    "settle": "white",
    "paused": "red",
    "reader": "magenta",
    "budget": "magenta",
}


@group()
def request() -> None:
    """Requests: what waits and runs, and what happened to one, as a waterfall.

    \b
      fairgate request list --tenant acme
      fairgate request show req_…
      fairgate request move req_… interactive
      fairgate request cancel req_…
    A request's id may also be that of its completion (chatcmpl-…, cmpl-…), as OpenAI's SDK shows it.
    """


@request.command(name="list")
@click.option("--tenant", help="Only this tenant's (name or id).")
@click.option("--tier", type=TIERS, help="Only this tier.")
@click.option(
    "--status",
    type=click.Choice(["limited", "waiting", "running"]),
    help="Only these; limited: its tenant's own limits hold it back.",
)
def list_(tenant: str | None, tier: str | None, status: str | None) -> None:
    """Lists the requests that wait or run at the server and the gateways that share its Redis, the oldest
    first.

    \b
    --json answers:
      {"data": [{"id": "req_…", "status": "waiting", "tier": "standard", "model": "fairgate-demo",
       "elapsed_s": 2.1, "input_tokens": 64, "output_tokens": 0, "tenant_id": "ten_…", "tenant": "acme",
       "project_id": "prj_…", "project": "default", "key_id": "key_…", "key_name": "robot", …}, …],
       "has_more": false, "gateways_missing": 0}
    """
    query = {"tenant": tenant, "tier": tier, "status": status}
    found = call(require_server(), "GET", "/requests", query=query)

    def text() -> None:
        rows = [
            (
                each["id"],
                each["tenant"] or each["tenant_id"],
                each["key_name"] or each["key_id"],
                each["tier"],
                each["status"],
                each["model"],
                _seconds(each["elapsed_s"]),
                f"{each['input_tokens']:,} / {each['output_tokens']:,}",
            )
            for each in found["data"]
        ]
        columns = ("id", "tenant", "key", "tier", "status", "model", "since", "tokens in / out")
        table("requests that wait or run", columns, rows)
        if found["has_more"]:
            click.echo("there are more: name a --tenant, a --tier or a --status")
        if found["gateways_missing"]:
            click.echo(f"{found['gateways_missing']} gateways did not answer: theirs are not in the list")

    answer(found, text)


@request.command()
@click.argument("request_id")
def cancel(request_id: str) -> None:
    """Cancels a request that waits or runs; what was emitted is charged. Repeating it changes nothing.

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
@click.option("--preview", is_flag=True, help="Only say what it would cost.")
def move(request_id: str, tier: str, preview: bool) -> None:
    """Moves a waiting request to another tier, at that tier's price, whatever its tenant may ask for.

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
        for each in (before, after):
            click.echo(f"  {each['tier']}: {_price(each)}")

    answer(moved, text)


@request.command()
@click.argument("request_id")
@click.option("--events", is_flag=True, help="Every event of its timeline as well.")
def show(request_id: str, events: bool) -> None:
    """Shows a request: the stretches of its time, an explanation of every wait, and targets it missed.

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
        click.echo(_headline(shown))
        _waterfall(shown.get("stages") or [])
        for sentence in shown.get("explanation") or []:
            click.echo(f"- {sentence}")
        if decoded := decoded_in_words(shown.get("timeline") or []):
            click.echo(f"- {decoded}")
        if others := shown.get("sat_out_for"):
            click.echo(f"- steps sat out while others had the turns: {_others(others)}")
        if shown["status"] == "ended" and shown.get("timeline") is None:
            click.echo("its timeline is not kept (any more)")
        for miss in shown.get("misses") or []:
            actual = "never came" if miss["actual_s"] is None else f"took {miss['actual_s']:.3g} s"
            click.echo(
                f"- missed its target: {miss['metric']} {actual}, target {miss['target_s']:g} s;"
                f" cause: {miss['cause']} ({_evidence(miss['evidence'])})"
            )
        if events and shown.get("timeline"):
            _list_events(shown["timeline"])

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
    from gateway.routes.requests import ended_request
    from ops.serving import datadir
    from tenants.admin.admin import Admin
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
        settled = next((row for row in rows if row.kind == "settle"), None)
        if settled is None:
            what = "has not been settled yet, and no server runs here" if rows else "is not known here"
            raise Failure(f"request {request_id[:80]} {what}")
        admin = Admin(database, datadir.pepper(settings, create=True))
        explanation = await explained(lambda one: timelines.find(database, one), admin, request_id)
        others = await sat_out_for(admin, settled)
        shown = ended_request(settled) | owner(settled) | explanation | {"sat_out_for": others}
        return (await admin.with_names([shown]))[0]
    except (TenancyError, datadir.DataDirRefused) as error:
        raise Failure(str(error)) from None
    finally:
        await database.close()


def _headline(shown: Mapping[str, Any]) -> str:
    whose = " / ".join(str(part) for part in (shown.get("tenant"), shown.get("key_name")) if part)
    words = [
        shown["id"],
        *([whose] if whose else []),
        shown["tier"],
        shown["model"],
        shown.get("outcome") or shown["status"],
    ]
    tokens = f"{shown['input_tokens']:,} tokens in, {shown['output_tokens']:,} out"
    return f"{'  '.join(str(word) for word in words)}  {tokens}"


def _waterfall(stages: Sequence[Mapping[str, Any]]) -> None:
    if not stages:
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    end_s = max(each["end_s"] for each in stages)
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column, justify in (("", "left"), ("from", "right"), ("took", "right"), ("", "left")):
        grid.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for each in stages:
        before, cells = bar(each["start_s"], each["end_s"], end_s)
        drawn = Text(" " * before + "█" * cells, style=COLOURS.get(each["name"], "white"))
        grid.add_row(
            each["name"], _seconds(each["start_s"]), _seconds(each["end_s"] - each["start_s"]), drawn
        )
    Console(highlight=False).print(grid)


def bar(start_s: float, end_s: float, total_s: float) -> tuple[int, int]:
    """Empty cells before the bar, and its own: at least one, and never beyond the end."""
    if total_s <= 0:
        return 0, 1
    before = min(BAR_CELLS - 1, int(start_s / total_s * BAR_CELLS))
    return before, max(1, min(BAR_CELLS, round(end_s / total_s * BAR_CELLS)) - before)


def _list_events(timeline: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            _seconds(each["at_s"]),
            each["event"],
            ", ".join(f"{name} {value}" for name, value in each.items() if name not in ("event", "at_s")),
        )
        for each in timeline
    ]
    table("timeline", ("at", "event", "numbers"), rows)


def _evidence(evidence: Mapping[str, float | None]) -> str:
    said = [f"{name} {value:g}" for name, value in evidence.items() if value]
    return ", ".join(said) or "no counterfactuals"


def decoded_in_words(timeline: Sequence[Mapping[str, Any]]) -> str:
    """How its tokens came: one each step (the floor) or in turns, and the steps that it sat out."""
    decoded = [each for each in timeline if each["event"] == "decoded"]
    if not decoded:
        return ""

    def total(name: str) -> int:
        return sum(each.get(name, 0) for each in decoded)

    return (
        f"its tokens: {total('floor_tokens'):,} one each step, {total('turn_tokens'):,} in turns by weight;"
        f" steps sat out: {total('sat_out_own_steps'):,} for its tenant's other requests,"
        f" {total('sat_out_share_steps'):,} for the share of other tenants,"
        f" {total('sat_out_tier_steps'):,} for higher tiers"
    )


def _price(side: Mapping[str, Any]) -> str:
    each, cost = side["price_per_token_nanousd"], side["cost_nanousd"]
    return (
        f"{each['input']:g} in, {each['output']:g} out nano-dollars a token;"
        f" this request {cost['p50']:,} (p50), {cost['p90']:,} (p90), {cost['max']:,} at most"
    )


def _others(sat_out_for: Sequence[Mapping[str, Any]]) -> str:
    """`acme 40, a tenant that is gone (ten_2) 3`."""
    return ", ".join(
        f"{each['tenant'] or 'a tenant that is gone (' + each['tenant_id'] + ')'} {each['steps']:,}"
        for each in sat_out_for
    )


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 1 else f"{value * 1000:.1f} ms"
