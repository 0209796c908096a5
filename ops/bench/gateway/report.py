"""Tables of a comparison of gateways."""

from __future__ import annotations

from typing import Any

import click

from ops.bench.engine.report import QUIET_CORES
from ops.bench.gateway.peers import DIRECT
from ops.bench.gateway.side_loads import SCRAPE_EVERY_S, TRACE_RATIO
from ops.reporting import Report

BOUNDS = ("at_least", "at_most")
COMPARED_FIGURES = {
    "requests_per_s": ("requests/s on 32 connections", 1, 0),
    "tokens_per_s": ("tokens/s of 64 streams", 1, 0),
    "latency_p50_s": ("ms p50 on one connection", 1e3, 3),
    "first_token_p50_s": ("ms to the first token", 1e3, 3),
}
"""Heading, scale and digits."""
SIDE_LOADS = {
    "watchers": "open overviews",
    "traces": f"traces at {100 * TRACE_RATIO:g} %",
    "scraper": f"a scrape every {SCRAPE_EVERY_S:g} s",
}
SIDE_LOAD_FIGURES = {
    "events_per_s": ("events/s of each overview, beside 32 connections", 1, 2),
    "cores_throughput": ("cores of the load itself, beside 32 connections", 1, 3),
    "cores_streams": ("cores of the load itself, beside 64 streams", 1, 3),
    "cpu_s_per_scrape": ("ms of a processor for a scrape at rest", 1e3, 2),
    "page_bytes": ("kB of the page", 1e-3, 0),
}


def show(report: dict[str, Any]) -> None:
    """The tables for people."""
    machine = report["machine"]
    click.echo(
        f"{machine['cpu']}, {machine['cores']} cores; medians (and ranges) of {report['rounds']} rounds; an "
        f"fsync takes {report['fsync_ms']:g} ms here"
    )
    targets = report["targets"]
    rows = [_row(name, found) for name, found in targets.items()]
    Report("gateways before one upstream", [(heading, heading) for heading in rows[0]], rows).show()
    bare = targets[DIRECT]["figures"]
    click.echo(
        f"{DIRECT}: the upstream alone, p50 {1e3 * bare['latency_p50_s']['median']:.3f} ms; what is "
        "added comes on top."
    )
    Report(
        "cores used at 32 connections, and by 64 streams: gateway, upstream, clients",
        (("gateway", "gateway"), ("throughput", "32 connections"), ("streams", "64 streams")),
        [{"gateway": name} | _cores(found["runs"]) for name, found in targets.items()],
    ).show()
    for line in report["skipped"]:
        click.echo(f"left out: {line}")
    for promise in report["promises"]:
        verdict = "invalid" if report["invalid"] else "ok    " if promise["ok"] else "NOT OK"
        bound = [f"{which.replace('_', ' ')} {promise[which]:g}" for which in BOUNDS if which in promise]
        click.echo(f"{verdict} {promise['what']}: {_spread(promise, 1, 3)}, {bound[0]}")
    for key, load in SIDE_LOADS.items():
        if report[key] is not None:
            _show_side_load(load, report[key])
    for name, found in targets.items():
        for number, run in enumerate(found["runs"], 1):
            if run["invalid"]:
                click.echo(f"invalid: {name}, round {number}: {run['invalid']}")
    if any(run["disturbed"] for found in targets.values() for run in found["runs"]):
        click.echo(
            f"* other processes used more than {QUIET_CORES:g} cores during a run: "
            "measure again when nothing else runs"
        )


def _show_side_load(load: str, found: dict[str, Any]) -> None:
    """With a side load beside without, and what was measured of the load itself."""
    rows = []
    for row in found["figures"]:
        heading, scale, digits = COMPARED_FIGURES[row["figure"]]
        cells = {kind: _spread(row[kind], scale, digits) for kind in ("without", "with")}
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
            f"{heading}: {_spread(found[figure], scale, digits)}"
            for figure, (heading, scale, digits) in SIDE_LOAD_FIGURES.items()
            if figure in found and found[figure]["most"]
        ],
    ).show()


def _spread(found: dict[str, Any], scale: float, digits: int) -> str:
    low, middle, high = (f"{scale * found[key]:,.{digits}f}" for key in ("least", "median", "most"))
    return f"{middle} ({low}-{high})"


def _row(name: str, found: dict[str, Any]) -> dict[str, str]:
    """By heading; of the upstream alone no costs."""

    def of(figure: str, scale: float, digits: int) -> str:
        return _spread(found["figures"][figure], scale, digits)

    row = {
        "gateway": " ".join(filter(None, (name, found["version"]))) + ("*" if _disturbed(found) else ""),
        "added ms p50": of("added_latency_p50_s", 1e3, 3),
        "added ms p99": of("added_latency_p99_s", 1e3, 2),
        "requests/s": of("requests_per_s", 1, 0),
        "CPU µs/request": of("cpu_s_per_request", 1e6, 0),
        "added ms to 1st token": of("added_first_token_p50_s", 1e3, 2),
        "stream tokens/s": of("tokens_per_s", 1, 0),
        "CPU µs/token": of("cpu_s_per_token", 1e6, 1),
        "MB peak": f"{found['figures']['peak_bytes']['most'] / 1e6:,.0f}",
    }
    if name == DIRECT:
        row |= {heading: "-" for heading in row if heading.startswith(("added", "CPU", "MB"))}
    return row


def _disturbed(found: dict[str, Any]) -> bool:
    return any(run["disturbed"] for run in found["runs"])


def _cores(runs: list[dict[str, Any]]) -> dict[str, str]:
    """Of the middle round."""
    cores = runs[len(runs) // 2]["cores"]
    return {
        phase: ", ".join(f"{cores[phase][who]:.2f}" for who in ("gateway", "upstream", "clients"))
        for phase in ("throughput", "streams")
    }
