"""Tables of a comparison of gateways."""

from __future__ import annotations

from typing import Any

import click

from ops.bench.common.report import DISTURBED, spread_text
from ops.bench.gateway.peers import DIRECT
from ops.bench.gateway.side_loads import SCRAPE_EVERY_S, TRACE_RATIO
from ops.reporting import Report

BOUNDS = ("at_least", "at_most")
COMPARED_FIGURES: dict[str, tuple[Any, ...]] = {
    "requests_per_s": ("requests/s on 32 connections", ",.0f", 1),
    "tokens_per_s": ("tokens/s of 64 streams", ",.0f", 1),
    "latency_p50_s": ("ms p50 on one connection", ".3f", 1e3),
    "first_token_p50_s": ("ms to the first token", ".3f", 1e3),
}
COLUMNS: dict[str, tuple[Any, ...]] = {
    "added_latency_p50_s": ("added ms p50", ".3f", 1e3),
    "added_latency_p99_s": ("added ms p99", ".2f", 1e3),
    "requests_per_s": ("requests/s", ",.0f", 1),
    "cpu_s_per_request": ("CPU µs/request", ",.0f", 1e6),
    "added_first_token_p50_s": ("added ms to 1st token", ".2f", 1e3),
    "tokens_per_s": ("stream tokens/s", ",.0f", 1),
    "cpu_s_per_token": ("CPU µs/token", ".1f", 1e6),
}
SIDE_LOADS = {
    "watchers": "open overviews",
    "traces": f"traces at {100 * TRACE_RATIO:g} %",
    "scraper": f"a scrape every {SCRAPE_EVERY_S:g} s",
}
SIDE_LOAD_FIGURES: dict[str, tuple[Any, ...]] = {
    "events_per_s": ("events/s of each overview, beside 32 connections", ".2f", 1),
    "cores_throughput": ("cores of the load itself, beside 32 connections", ".3f", 1),
    "cores_streams": ("cores of the load itself, beside 64 streams", ".3f", 1),
    "cpu_s_per_scrape": ("ms of a processor for a scrape at rest", ".2f", 1e3),
    "page_bytes": ("kB of the page", ",.0f", 1e-3),
}


def show(report: dict[str, Any]) -> None:
    machine = report["machine"]
    click.echo(
        f"{machine['cpu']}, {machine['cores']} cores; medians (and ranges) of {report['rounds']} rounds; an "
        f"fsync takes {report['fsync_ms']:g} ms here"
    )
    targets = report["targets"]
    rows = [_row(name, part) for name, part in targets.items()]
    Report("gateways before one upstream", [(heading, heading) for heading in rows[0]], rows).show()
    bare = targets[DIRECT]["figures"]
    click.echo(
        f"{DIRECT}: the upstream alone, p50 {1e3 * bare['latency_p50_s']['median']:.3f} ms; what is "
        "added comes on top."
    )
    Report(
        "cores used at 32 connections, and by 64 streams: gateway, upstream, clients",
        (("gateway", "gateway"), ("throughput", "32 connections"), ("streams", "64 streams")),
        [{"gateway": name} | _cores(part["runs"]) for name, part in targets.items()],
    ).show()
    for line in report["skipped"]:
        click.echo(f"left out: {line}")
    for promise in report["promises"]:
        verdict = "invalid" if report["invalid"] else "ok    " if promise["ok"] else "NOT OK"
        bound = [f"{which.replace('_', ' ')} {promise[which]:g}" for which in BOUNDS if which in promise]
        click.echo(f"{verdict} {promise['what']}: {spread_text(promise, '.3f')}, {bound[0]}")
    for key, load in SIDE_LOADS.items():
        if report[key] is not None:
            _show_side_load(load, report[key])
    for name, part in targets.items():
        for number, run in enumerate(part["runs"], 1):
            if run["invalid"]:
                click.echo(f"invalid: {name}, round {number}: {run['invalid']}")
    if any(run["disturbed"] for part in targets.values() for run in part["runs"]):
        click.echo(DISTURBED)


def _show_side_load(load: str, part: dict[str, Any]) -> None:
    rows = []
    for row in part["figures"]:
        heading, *form = COMPARED_FIGURES[row["figure"]]
        cells = {kind: spread_text(row[kind], *form) for kind in ("without", "with")}
        rows.append({"figure": heading, **cells, "ok": "within" if row["ok"] else "NOT within"})
    Report(
        f"with {load}, and whether their median is no worse than the worst round without",
        (
            ("figure", "figure"),
            ("without", "without"),
            ("with", f"with {load}"),
            ("ok", "the rounds without"),
        ),
        rows,
        notes=[
            f"{heading}: {spread_text(part[figure], *form)}"
            for figure, (heading, *form) in SIDE_LOAD_FIGURES.items()
            if figure in part and part[figure]["most"]
        ],
    ).show()


def _row(name: str, part: dict[str, Any]) -> dict[str, str]:
    row = {
        heading: spread_text(part["figures"][figure], *form) for figure, (heading, *form) in COLUMNS.items()
    }
    row = {
        "gateway": " ".join(filter(None, (name, part["version"]))) + ("*" if _disturbed(part) else ""),
        **row,
        "MB peak": f"{part['figures']['peak_bytes']['most'] / 1e6:,.0f}",
    }
    if name == DIRECT:
        row |= {heading: "-" for heading in row if heading.startswith(("added", "CPU", "MB"))}
    return row


def _disturbed(part: dict[str, Any]) -> bool:
    return any(run["disturbed"] for run in part["runs"])


def _cores(runs: list[dict[str, Any]]) -> dict[str, str]:
    cores = runs[len(runs) // 2]["cores"]
    return {
        phase: ", ".join(f"{cores[phase][who]:.2f}" for who in ("gateway", "upstream", "clients"))
        for phase in ("throughput", "streams")
    }
