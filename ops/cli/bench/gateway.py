"""`fairgate bench contract|gateway`: budgets, and what a gateway costs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from ops.cli.base import Failure
from ops.cli.bench.options import (
    JSON_FILE_OPTION,
    PEERS_DIR_OPTION,
    command,
    counts_given,
    listed,
    names_given,
    verdict,
    whole,
)


@command()
@click.option(
    "--scenario",
    "names",
    metavar="NAME",
    multiple=True,
    help="Only those; * and ? as in a shell; repeatable.",
)
@listed("--gateways", metavar="N,…", default="1,2,4", parse=counts_given, help="For bursts.")
@listed("--concurrency", metavar="N,…", default="50,500", parse=counts_given, help="For bursts.")
@whole("--instants", least=1, most=10_000, default=200, help="For survive-*.")
@click.option(
    "--old-tree",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path, resolve_path=True),
    help="For upgrade: a checkout of the release before.  [default: this one]",
)
@JSON_FILE_OPTION
def contract(json_file: Path | None, **given: Any) -> None:
    """Budgets through bursts, crashes, cancellations and retries, audited from outside.

    \b
    Starts its own PostgreSQL, Redis, engine and gateways, drives clients at hard limits and kills -9 what it
    started; then compares ledger, Redis, the engine's own count and what clients received. Some minutes; all
    of it goes away again. Scenarios: rate, burst-CLIENTSxGATEWAYS-{max,open}-{stream,plain}, disconnects,
    retries, kill-{gateway,engine,redis,postgres,both}, suspension-under-load; only where they are named (an
    hour) survive-{kill,drain,replacement,two-kills,gateway,two-gateways}: streams of every kind over two
    engines, which are killed or drained at random instants, beside the undisturbed ones; and upgrade: two
    gateways are replaced by those of a newer release, this code with one more migration, while clients ask.
    Ends with 1 where a required figure is not met.
    --json answers:
      {"scenarios": [{"scenario": "burst-50x2-open-stream", "gateways": 2, "overshoot_tokens": 0,
       "drift_tokens": 0, "double_charges": 0, "leaked_holds": 0, "cancel_error_tokens": 0,
       "admitted_of_admissible": 0.99, "charged_tokens": 1460, "broken": [], "ok": true, …},
       {"scenario": "survive-kill", "instants": 200, "streams": 2200, "moves": 610, "broken_streams": 0,
       "other_streams": 0, "double_charges": 0, "overshoot_tokens": 0, "drift_tokens": 0, "leaked_holds": 0,
       "pause_p50_s": 0.1, "pause_max_s": 0.6, "broken": [], "ok": true, …},
       {"scenario": "upgrade", "requests": 2400, "streams": 1300, "failed": 0, "server_errors": 0,
       "broken_streams": 0, "drift_tokens": 0, "leaked_holds": 0, "broken": [], "ok": true, …}, …],
       "seconds": 412.0, "ok": true}
    """
    from rich.console import Console

    from ops.bench.budgets.run import BudgetBenchOptions, run, show
    from ops.bench.budgets.testbed import ScenarioFailed
    from ops.sandbox.server import ServerFailed
    from ops.sandbox.services import NoServer

    options = BudgetBenchOptions(**given)
    if options.old_tree is not None and not (options.old_tree / "ops" / "cli" / "main.py").is_file():
        raise click.BadParameter(f"{options.old_tree} is no checkout of Fairgate", param_hint="--old-tree")
    with Console(stderr=True).status("starting") as status:
        try:
            report = asyncio.run(
                run(options, lambda what, done, total: status.update(f"{what}: {done} of {total} done"))
            )
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--scenario") from None
        except (NoServer, ScenarioFailed, ServerFailed) as error:
            raise Failure(str(error)) from None
    verdict(report, lambda: show(report), json_file)


@command()
@listed(
    "--peers",
    metavar="NAMES",
    parse=names_given,
    help="Of nginx, litellm, portkey, with commas; empty: none.  [default: those installed]",
)
@whole("--rounds", least=1, most=100, default=3, help="How often.")
@click.option(
    "--seconds",
    type=click.FloatRange(0.5, 600),
    default=3.0,
    show_default=True,
    help="Of each measurement under load.",
)
@click.option(
    "--tokenizer",
    "tokenizer_dir",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Ours counts prompts with this model's tokenizer.  [default: it estimates them, with a margin]",
)
@PEERS_DIR_OPTION
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(),
    help="On which disk our ledger lies; not one in memory.  [default: here]",
)
@click.option("--without-estimates", is_flag=True, help="Also ours with estimates off: what they cost.")
@whole(
    "--watchers",
    least=0,
    most=200,
    default=0,
    help="Also ours with so many open overviews of its console: what they cost.",
)
@whole(
    "--workers",
    least=0,
    most=64,
    default=0,
    help="Also ours on PostgreSQL and Redis, with one worker and with this many.",
)
@click.option("--traces", is_flag=True, help="Also ours with traces at 1 %: what they cost.")
@click.option(
    "--scraper", is_flag=True, help="Also ours with its metrics scraped every second: what it costs."
)
@JSON_FILE_OPTION
def gateway(json_file: Path | None, **given: Any) -> None:
    """What a gateway costs: ours, with everything on, and its peers before the same upstream, in turn.

    \b
    Added latency on one connection, requests/s on 32, time to the first token, tokens/s of 64 streams,
    processor time and memory. Peers are installed with 'make bench-peers'. Linux only, some minutes; measure
    when nothing else runs: disturbed runs are marked. With --watchers, --traces, --scraper rounds with open
    overviews, with traces, with a scraper and without alternate, at least 3 of each: their medians may be no
    worse than the worst round without. Ends with 1
    where a promise is not kept, with 3 where a run is invalid: the clients were the bottleneck.
    --json answers:
      {"targets": {"fairgate": {"figures": {"added_latency_p50_s": {"median": 0.0008, "least": 0.0007,
       "most": 0.0009, "values": […]}, "requests_per_s": {…}, "cpu_s_per_request": {…}, "tokens_per_s": {…},
       "cpu_s_per_token": {…}, "peak_bytes": {…}, …}, "runs": [{"cores": {…}, "disturbed": false, …}]}, …},
       "promises": [{"what": "requests/s over LiteLLM's", "at_least": 10.0, "median": 14.1, "ok": true, …}],
       "watchers": {"events_per_s": {…}, "cores_throughput": {…}, "cores_streams": {…},
        "figures": [{"figure": "requests_per_s", "without": {…}, "with": {…}, "ok": true}, …]},
       "traces": {"figures": […], …}, "scraper": {"cpu_s_per_scrape": {…}, "page_bytes": {…}, …},
       "skipped": [], "fsync_ms": 0.4, "ok": true}
    """
    from ops.bench.common.errors import CannotBench
    from ops.bench.gateway.report import show
    from ops.bench.gateway.run import GatewayBenchOptions, run

    options = GatewayBenchOptions(**given)
    try:
        report = run(options, lambda line: click.echo(line, err=True))
    except CannotBench as error:
        raise Failure(str(error)) from None
    verdict(report, lambda: show(report), json_file)
