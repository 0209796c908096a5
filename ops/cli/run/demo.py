"""`fairgate demo`: 27 tenants of a recorded trace on one small model."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ops.cli.base import FLAGS_KEY, Command
from ops.cli.options import Number


@click.command(cls=Command)
@click.option("--once", is_flag=True, help="Stop after the report instead of staying up.")
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the report as JSON (- is stdout).",
)
@click.option(
    "--html",
    "html_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the report as a self-contained HTML page.",
)
@click.option(
    "--seconds",
    type=Number(float, 3, 600),
    default=75.0,
    show_default=True,
    help="How long requests arrive. The queue then drains for about half as long.",
)
@click.option("--seed", type=Number(int), default=20, show_default=True, help="Chooses the prompts.")
@click.option("--port", type=Number(int, 0, 65_535), default=0, help="Port; 0 takes a free one.")
@click.option(
    "--max-sequences",
    type=Number(int, 1, 256),
    default=3,
    show_default=True,
    help="Most requests that the engine runs at once; fewer fill the queue sooner.",
)
@click.option(
    "--model", type=str, help="Model directory; it must be the shipped model or one trained like it."
)
def demo(
    once: bool,
    json_file: Path | None,
    html_file: Path | None,
    seconds: float,
    seed: int,
    port: int,
    max_sequences: int,
    model: str | None,
) -> None:
    """Shows 27 tenants of a real trace sharing one small model.

    \b
    Takes 3 to 5 minutes. It starts gateway and engine in a temporary directory (or --data-dir), creates
    tenants with different weights, tiers and limits, measures what this machine can do, and replays a real
    multi-tenant trace over HTTP at about one and a half times that. A live table shows who waits and who is
    served; the report compares service with fair shares, estimates with actuals, and the ledger with the
    counters. Then the server stays up for you to try, until Ctrl-C.
      fairgate demo
      fairgate demo --once --json out.json --html out.html
    The JSON report (exit code 1 when the ledger is not exact, or anybody was served out of turn):
      {"ok": true, "failed": [], "trace": {"requests": 980, …}, "capacity": {…}, "audit": {…}, "tenants":
       [{"tenant": "m00", "weight": 3.0, "service_cost": 41000, "fair_service_cost": 40800, …}, …],
       "tiers": […], "estimates": {…}, "refusals": {…}, "ledger": {"exact": true, "settles": 949, …}, …}
    """
    from ops.demo.run import DemoOptions, run_demo

    flags = click.get_current_context().meta.get(FLAGS_KEY, {})
    data_dir = flags.get("data_dir")
    options = DemoOptions(
        once=once,
        json_file=json_file,
        html_file=html_file,
        span_s=seconds,
        seed=seed,
        port=port,
        max_sequences=max_sequences,
        model=Path(model) if model else None,
        data_dir=Path(data_dir) if data_dir else None,
    )
    sys.exit(run_demo(options))
