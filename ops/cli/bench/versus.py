"""`fairgate bench versus`: Fairgate beside LiteLLM and vLLM, and inside vLLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ops.cli.base import Failure
from ops.cli.bench.options import (
    JSON_FILE_OPTION,
    PEERS_DIR_OPTION,
    command,
    listed,
    names_given,
    verdict,
    whole,
)


@command()
@listed(
    "--parts",
    metavar="NAMES",
    default="stacks",
    parse=names_given,
    help="Of stacks, leases, shares, limits, caches, texts, speed, with commas.",
)
@listed(
    "--stacks",
    metavar="NAMES",
    parse=names_given,
    help="Of litellm, vllm, plugin, engine, with commas.  [default: all four]",
)
@whole("--rounds", least=1, most=50, default=3, help="How often stacks and speed are measured.")
@whole(
    "--requests", least=5, most=10_000, default=75, help="Of the quiet tenant, alone and beside the flood."
)
@click.option(
    "--seconds",
    type=click.FloatRange(1, 600),
    default=20.0,
    show_default=True,
    help="Of each measurement of weights.",
)
@click.option(
    "--vllm-version", metavar="VERSION", default="0.32.0", show_default=True, help="Of the installed."
)
@PEERS_DIR_OPTION
@JSON_FILE_OPTION
def versus(
    stacks: tuple[str, ...] | None,
    requests: int,
    seconds: float,
    json_file: Path | None,
    **given: Any,
) -> None:
    """LiteLLM + vLLM, Fairgate + vLLM, the same with the plug-in in vLLM, and Fairgate's own engine, in turn.

    \b
    stacks: the shipped model, the same clients, 16 sequences a step. A quiet tenant's first token beside a
    flood of 32 streams, weights 1:3, tokens over a hard limit with 50 requests at once, tokens on no bill
    after kill -9 of the gateway, and whether it says why a request waited. 'make bench-versus' installs what
    is compared. Linux; some 25 minutes on two cores, with nothing else running.
    The other parts are about the plug-in inside a real vLLM, stock vLLM beside it ('make bench-vllm'):
    leases: they rest, are topped up and end to the token, also with evictions; signatures; kill -9.
    shares: tokens of weights 1 and 3 with long and with short answers, within 1 % over any 1,000 steps.
    limits: 50 requests at once on a hard limit, also with evictions and kill -9 of gateway and of vLLM.
    caches: a tenant's prompt is not found in the cache by another tenant.
    texts: the same as stock vLLM's, with evictions and with schemas.
    speed: tokens a second, printed only.
    Ends with 1 where a figure is not what it must be, with 3 where a client was the bottleneck.
    --json answers:
      {"summary": {"Fairgate + vLLM": {"flood_ratio": {"median": 12.1, "least": 11.0, "most": 14.2},
       "weights_ratio": {…}, "overshoot_tokens": {…}, "uncharged_tokens": {…}, "why": true, …}, …},
       "stacks": {"Fairgate + vLLM": [{"alone_s": {"p50": 0.05, "p99": 0.08}, …}, …]}, "invalid": [],
       "shares": [{"case": "32 + 32, long answers", "ratio": 3.0, "furthest_off": 0.002, "ok": true, …}, …],
       "limits": [{"case": "all blocks, kill -9 of vllm", "overshoot_tokens": 0, "ok": true, …}, …],
       "versions": {…}, "machine": {…}, "date": "2026-11-25", "ok": true, …}
    """
    from ops.bench.common.errors import CannotBench, PeerMissing
    from ops.bench.versus.phases import PhaseSizes
    from ops.bench.versus.report import show, versus_charts
    from ops.bench.versus.run import VersusOptions, run
    from ops.sandbox.services import NoServer

    options = VersusOptions(sizes=PhaseSizes(requests, seconds), **given)
    if stacks is not None:
        options = replace(options, stacks=stacks)
    try:
        report = run(options, lambda line: click.echo(line, err=True))
    except (CannotBench, NoServer, PeerMissing) as error:
        raise Failure(str(error)) from None
    verdict(report, lambda: show(report), json_file, versus_charts(report))
