"""`fairgate request`: the timeline of one request, as a waterfall."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import click

from ops.cli.base import Failure, answer, ask_server, group, settings_now
from ops.reporting import table

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
    """Requests: what happened to one, as a waterfall.

    \b
      fairgate request show req_…
    """


@request.command()
@click.argument("request_id")
@click.option("--events", is_flag=True, help="Every event of its timeline as well.")
def show(request_id: str, events: bool) -> None:
    """Shows a request: the stretches of its time, an explanation of every wait, and targets it missed.

    The running server is asked; without one the database is read, which knows what has ended.

    \b
    --json answers what GET /v1/requests/{id} does:
      {"id": "req_…", "status": "ended", "outcome": "completed", "tier": "standard", "input_tokens": 64,
       "output_tokens": 48, "cost_nanousd": 38400, "explanation": ["waited 2.0 s in line: …", …],
       "waits": {"limits_s": 0.0, "queue_s": 2.0, …}, "stages": [{"name": "queue", "start_s": 0.001, …}],
       "timeline": [{"event": "received", "at_s": 0.0, "input_tokens": 64, …}, …],
       "misses": [{"metric": "ttft", "target_s": 0.5, "actual_s": 2.1, "cause": "quota", "evidence": {…}}],
       "sat_out_for": [{"tenant_id": "ten_…", "tenant": "acme", "steps": 12}]}
    `sat_out_for`, the tenants that had the turns which it sat out, is for operators only.
    """
    shown = ask_server("GET", f"/admin/v1/requests/{request_id}") or asyncio.run(_read(request_id))

    def text() -> None:
        click.echo(_headline(shown))
        _waterfall(shown.get("stages") or [])
        for sentence in shown.get("explanation") or []:
            click.echo(f"- {sentence}")
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


async def _read(request_id: str) -> dict[str, Any]:
    """The ended request, from the database."""
    from gateway.explain.explanation import explained, sat_out_for
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
        return ended_request(settled) | explanation | {"sat_out_for": others}
    except (TenancyError, datadir.DataDirRefused) as error:
        raise Failure(str(error)) from None
    finally:
        await database.close()


def _headline(shown: Mapping[str, Any]) -> str:
    words = [shown["id"], shown["tier"], shown["model"], shown.get("outcome") or shown["status"]]
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


def _others(sat_out_for: Sequence[Mapping[str, Any]]) -> str:
    """`acme 40, a tenant that is gone (ten_2) 3`."""
    return ", ".join(
        f"{each['tenant'] or 'a tenant that is gone (' + each['tenant_id'] + ')'} {each['steps']:,}"
        for each in sat_out_for
    )


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 1 else f"{value * 1000:.1f} ms"
