"""`fairgate status`: the running server on one page, what an operator on call reads first."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ops.cli.base import Command, answer
from ops.cli.inspect.top import (
    MOST_NAME,
    NARROW,
    REPLICA_COLUMNS,
    TENANT_COLUMNS,
    frame_of,
    grid,
    replica_rows,
    tenant_rows,
)
from ops.cli.live import call, require_server

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_TENANTS = 20
MOST_MOVES = 5
"""Of each model, the latest last."""
WIDTH_OF_FILES = 120
"""Columns where stdout is no terminal."""
MODES = {"off": "off", "advice": "advice: it says what it would change", "acting": "acting"}
SHARES = ("batch_cap", "token_budget", "batch_share", "long_share", "reserve_quantile", "quota", "slots")
UNITS = {
    "admission": " x expected time",
    "ageing": " x ageing times",
    "early_refusal": " x expected wait",
    "lookahead": " sequences",
    "partial_prefills": " prompts",
    "reserve_permille": " thousandths",
}
"""Of knobs that are no share."""


@click.command(cls=Command)
def status() -> None:
    """Shows the running server on one page.

    Readiness, what waits and runs, brakes, refusals; of each model's control loop its mode, the gateway that
    decides, what it changes, and its last moves with their reasons. Live: `fairgate top`.

    Exit code 0: the server is ready. 1: it is not (the page says whether engine, database or quota store is
    missing), or no server runs.

    \b
    --json answers the whole document of GET /admin/v1/status, all tenants and their limits included:
      {"gateway_id": "gw_…", "model": "fairgate-demo", "policy": "hybrid", "policy_from": "settings",
       "policy_problem": "", "queued": {"interactive": 0, "standard": 7, "batch": 0}, "running": 4,
       "readiness": {"status": "ready", "checks": {"database": "ok", "quota_store": "ok", "engine": "ok"}},
       "brakes": [], "settlements_pending": 0, "refusals": {"insufficient_quota": 3}, "engines": [{…}],
       "models": {"pools": {"fairgate-demo": {"is_up": true, "control": {"mode": "advice",
       "knobs": {"batch_cap": 0.875}, "moves": [{"at_s": 61.5, "knob": "batch_cap", "before": 1.0,
       "after": 0.875, "reason": "KV nearly full (0.95)", "is_made": false}]}, "replicas": [{…}]}},
       "aliases": {}}, "tenants": [{…}], …}
    """
    server = require_server()
    shown = call(server, "GET", "/status")
    answer(shown, lambda: _print(shown, server.url))
    if shown["readiness"]["status"] != "ready":
        click.get_current_context().exit(1)


def _print(shown: Mapping[str, Any], url: str) -> None:
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
    for part in page_of(shown, url, console.width):
        console.print(part)


def page_of(shown: Mapping[str, Any], url: str, width: int = NARROW) -> Iterator[RenderableType]:
    """The page of a status document, for rich. `width`: columns for names."""
    from rich.text import Text

    frame = frame_of(shown)
    yield _headline(shown, url)
    waiting = ", ".join(f"{tier} {number:,}" for tier, number in frame.queued.items() if number)
    yield Text(
        f"waiting: {waiting or 'nothing'}; running: {frame.running};"
        f" settlements pending: {shown['settlements_pending']}"
    )
    for brake in shown["brakes"]:
        reason = f": {brake['reason']}" if brake["reason"] else ""
        until = brake["until"][:16].replace("T", " ")
        share = f"{100 * brake['share']:.0f} %"
        yield Text(f"brake on {brake['tier']}: at most {share} until {until} UTC, by {brake['by']}{reason}")
    yield Text(f"refused since the start: {_counts(frame.refusals) or 'none'}")
    yield Text("")
    yield from grid(REPLICA_COLUMNS, list(replica_rows(frame.replicas)), "no replica")
    yield Text("")
    active = [row for row in frame.tenants if row["queued"] or row["running"]]
    most_name = MOST_NAME + max(0, width - NARROW)
    rows = list(tenant_rows(active[:MOST_TENANTS], most_name))
    yield from grid(TENANT_COLUMNS, rows, "no tenant waits or runs")
    if len(active) > MOST_TENANTS:
        yield Text(f"… and {len(active) - MOST_TENANTS} more tenants and tiers (fairgate top)")
    for name, pool in shown["models"]["pools"].items():
        yield Text("")
        yield from _loop(name, pool["control"], shown["gateway_id"], shown["clock_s"])


def _headline(shown: Mapping[str, Any], url: str) -> RenderableType:
    from rich.text import Text

    readiness, policy = shown["readiness"], f"policy {shown['policy']}"
    missing = [
        f"{name.replace('_', ' ')}: {said}" for name, said in readiness["checks"].items() if said != "ok"
    ]
    ready = readiness["status"] == "ready"
    head = Text(f"{shown['gateway_id']} at {url}: ")
    head.append("ready" if ready else "NOT READY", style="bold" if ready else "bold red")
    if missing:
        head.append(f" ({'; '.join(missing)})")
    if shown["policy_from"] == "stored":
        policy += " (stored by `fairgate policy set`)"
    head.append(f"\n{', '.join(shown['models']['pools'])}; {policy}")
    if shown["policy_problem"]:
        head.append(f"\n{shown['policy_problem']}", style="red")
    return head


def _counts(counts: Mapping[str, int], most: int = 8) -> str:
    """The counts above 0, the largest first."""
    largest = sorted(((number, name) for name, number in counts.items() if number), reverse=True)
    words = [f"{name} {number:,}" for number, name in largest[:most]]
    return ", ".join([*words, f"and {len(largest) - most} more"] if len(largest) > most else words)


def _loop(
    model: str, control: Mapping[str, Any], gateway_id: str, clock_s: float
) -> Iterator[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    head = Text(f"control loop of {model}: ", style="bold")
    head.append(MODES.get(control["mode"], control["mode"]), style="not bold")
    if holder := control.get("holder"):
        term = f" (term {control['term']})" if control.get("term") is not None else ""
        head.append(f"; {holder} decides{term}", style="not bold")
    yield head
    if control["mode"] == "off" and not control["moves"]:
        return
    yield Text(f"  {knobs_in_words(control)}")
    moves = control["moves"][-MOST_MOVES:]
    if not moves:
        elsewhere = holder is not None and holder != gateway_id
        yield Text("  no move decided here (fairgate policy moves)" if elsewhere else "  no move yet")
        return
    listed = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    for column in ("when", "what", "knob", "from, to", "why"):
        listed.add_column(column, no_wrap=column != "why", overflow="fold")
    for move in moves:
        listed.add_row(
            f"  {ago(clock_s - move['at_s'])}",
            "changed" if move["is_made"] else "advises",
            move["knob"],
            f"{_value(move['knob'], move['before'])} -> {_value(move['knob'], move['after'])}",
            move["reason"],
        )
    yield listed


def knobs_in_words(control: Mapping[str, Any]) -> str:
    """`would change admission from 0 to 1.5 x expected time`."""
    knobs, rests = control["knobs"], control.get("rests")
    if rests is None:
        return f"settings: {', '.join(f'{name} {_value(name, value)}' for name, value in knobs.items())}"
    changes = [
        f"{name} from {_value(name, rests[name])} to {_value(name, value)}"
        for name, value in knobs.items()
        if value != rests.get(name, value)
    ]
    verb = "changed" if control["mode"] == "acting" else "would change"
    return f"{verb} {', '.join(changes)}" if changes else "no change needed"


def _value(knob: str, value: float) -> str:
    return f"{value * 100:g} %" if knob in SHARES else f"{value:g}{UNITS.get(knob, '')}"


def ago(seconds: float) -> str:
    """`3s ago`, `2m ago`, `5h ago`, `3d ago`."""
    units: Sequence[tuple[str, float]] = (("d", 86_400), ("h", 3_600), ("m", 60))
    for unit, size in units:
        if seconds >= size:
            return f"{seconds / size:.0f}{unit} ago"
    return f"{max(0.0, seconds):.0f}s ago"
