"""`fairgate top`: the running server, live in the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ops.cli.base import Command, answer, wants_json
from ops.cli.live import call, require_server

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

EVERY_S = 1.0
LINES_BESIDE_TENANTS = 9
FEWEST_ROWS = 5


@click.command(cls=Command)
@click.option("--once", is_flag=True, help="One frame, then end.")
def top(once: bool) -> None:
    """Shows the running server live. Ctrl-C ends it.

    By tier and tenant: what waits and runs; the part of the tier's service that the tenant had in about the
    last minute, against its fair share by weight among those that wanted some; and how long its last requests
    were told that they would wait (medians of p50 and p90), against how long they did (p50 and p90).

    \b
    --json answers, once, what is on the screen:
      {"model": "fairgate-demo", "policy": "hybrid", "queued": {"interactive": 0, "standard": 7, "batch": 0},
       "running": 4, "tenants": [{"tenant_id": "ten_…", "name": "acme", "tier": "standard", "weight": 2.0,
       "queued": 7, "running": 3, "share": 0.66, "fair_share": 0.67, "waits": {"requests": 64,
       "told_p50_s": 1.2, "told_p90_s": 3.1, "had_p50_s": 1.1, "had_p90_s": 2.7, "within_told_p90": 0.93}}],
       "replicas": [{"model": "fairgate-demo", "replica_id": "engine-0", "is_up": true,
       "is_drained": false, "refusal": "", "running": 4, "places": 32, "waiting": 0, "kv_used": 0.21}],
       "refusals": {"insufficient_quota": 3}}
    """
    server = require_server()

    def frame() -> Frame:
        return frame_of(call(server, "GET", "/status", query={"active": "true"}))

    if once or wants_json():
        first = frame()
        answer(first.as_json(), lambda: _print(first))
        return
    _watch(frame)


def _print(frame: Frame) -> None:
    from rich.console import Console

    Console(highlight=False).print(frame)


def _watch(frame: Any) -> None:
    from rich.console import Console
    from rich.live import Live

    try:
        with Live(frame(), console=Console(highlight=False), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(EVERY_S)
                live.update(frame(), refresh=True)
    except KeyboardInterrupt:
        return


@dataclass(frozen=True)
class Frame:
    model: str
    policy: str
    queued: Mapping[str, int]
    running: int
    tenants: Sequence[Mapping[str, Any]]
    """A row for each tenant and tier."""
    replicas: Sequence[Mapping[str, Any]]
    refusals: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        waits = ", ".join(f"{tier} {number}" for tier, number in self.queued.items() if number) or "nothing"
        head = f"{self.model}, {self.policy}; waiting: {waits}; running: {self.running}"
        yield Text(head, style="bold")
        room = max(FEWEST_ROWS, (options.max_height or 40) - LINES_BESIDE_TENANTS - len(self.replicas))
        most_name = MOST_NAME + max(0, options.max_width - NARROW)
        rows = list(tenant_rows(self.tenants[:room], most_name))
        yield from grid(TENANT_COLUMNS, rows, "no tenant is active")
        if len(self.tenants) > room:
            yield Text(f"… and {len(self.tenants) - room} more", style="dim")
        yield from grid(REPLICA_COLUMNS, list(replica_rows(self.replicas)), "no replica")
        refused = ", ".join(f"{code} {number:,}" for code, number in self.refusals.items()) or "none"
        yield Text(f"refused since the start: {refused}", style="yellow" if self.refusals else "")


TENANT_COLUMNS = ("tenant", "tier", "wait", "run", "share", "fair", "told p50/p90", "had p50/p90")
REPLICA_COLUMNS = ("replica", "state", "running", "waiting", "KV used")
TEXTS = ("tenant", "tier", "replica", "state")
NARROW = 80
MOST_NAME = 16
"""Characters of a name on a terminal of `NARROW` columns; on a wider one as many more as it has."""


def frame_of(status: Mapping[str, Any]) -> Frame:
    """The frame of a status document: the busiest rows of each tier first."""
    rows = [
        {"tenant_id": tenant["tenant_id"], "name": tenant["name"], "tier": tier, "weight": tenant["weight"]}
        | shown
        for tenant in status["tenants"]
        for tier, shown in tenant["tiers"].items()
    ]
    order = list(status["queued"])
    rows.sort(key=lambda row: (order.index(row["tier"]), -row["queued"] - row["running"], row["name"]))
    engines = {engine["replica_id"]: engine for engine in status["engines"]}
    replicas = [
        _replica(model, replica, engines.get(replica["replica_id"], {}))
        for model, pool in status["models"]["pools"].items()
        for replica in pool["replicas"]
    ]
    return Frame(
        model=status["model"],
        policy=status["policy"],
        queued=status["queued"],
        running=status["running"],
        tenants=rows,
        replicas=replicas,
        refusals=status["refusals"],
    )


def _replica(model: str, shown: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
    """One replica. `kv_used`: the part of its KV blocks that sequences hold; None: it does not say."""
    blocks, saturation = engine.get("kv_blocks"), shown.get("saturation")
    kv_used = None if saturation is None else saturation["kv_usage"]
    return {
        "model": model,
        "replica_id": shown["replica_id"],
        "is_up": shown["is_up"],
        "is_drained": shown["is_drained"],
        "refusal": shown["refusal"],
        "running": shown["running"],
        "places": shown["window"],
        "waiting": engine.get("waiting"),
        "kv_used": blocks["referenced"] / max(1, blocks["total"]) if blocks else kv_used,
    }


def tenant_rows(tenants: Sequence[Mapping[str, Any]], most_name: int) -> Iterator[tuple[str, ...]]:
    for row in tenants:
        waits = row["waits"] or {}
        yield (
            _short(row["name"], most_name),
            row["tier"],
            str(row["queued"] or ""),
            str(row["running"] or ""),
            percent(row["share"]),
            percent(row["fair_share"]),
            *(f"{_wait(waits, f'{what}_p50_s')}/{_wait(waits, f'{what}_p90_s')}" for what in ("told", "had")),
        )


def replica_rows(replicas: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for row in replicas:
        yield (
            _short(row["replica_id"], MOST_NAME),
            "drained" if row["is_drained"] else "up" if row["is_up"] else row["refusal"] or "down",
            f"{row['running']} of {row['places']}",
            "" if row["waiting"] is None else str(row["waiting"]),
            percent(row["kv_used"]),
        )


def grid(columns: Sequence[str], rows: Sequence[tuple[str, ...]], empty: str) -> Iterator[Any]:
    """A table for rich, or `empty` without rows."""
    from rich.table import Table
    from rich.text import Text

    if not rows:
        yield Text(empty, style="dim")
        return
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for column in columns:
        shown.add_column(column, justify="left" if column in TEXTS else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    yield shown


def percent(share: float | None) -> str:
    """`42 %`; empty where there is none."""
    return "" if share is None else f"{100 * share:.0f} %"


def _wait(waits: Mapping[str, Any], name: str) -> str:
    """`12ms`, `3.4s`, `210s`; a dash where there is none."""
    wait_s = waits.get(name)
    if wait_s is None:
        return "-"
    if wait_s >= 1:
        return f"{wait_s:.1f}s" if wait_s < 100 else f"{wait_s:.0f}s"
    return f"{1000 * wait_s:.0f}ms"


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
