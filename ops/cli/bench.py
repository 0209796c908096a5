"""`fairgate bench`: measurements against a server of their own."""

from __future__ import annotations

import asyncio

import click

from ops.cli.base import Failure, answer, group


@group()
def bench() -> None:
    """Measures promises on a running server that it starts itself, on a free port.

    \b
      fairgate bench fairness --runs 3
      fairgate bench estimates --queued 0 --queued 20 --queued 100
    """


MODEL_OPTION = click.option("--model", metavar="DIR", help="Model directory.  [default: the shipped model]")


@bench.command()
@click.option("--runs", type=click.IntRange(1, 50), default=3, show_default=True, help="How often.")
@click.option(
    "--tokens",
    type=click.IntRange(100, 10_000_000),
    default=20_000,
    show_default=True,
    help="Measure until the lighter tenant has had so many tokens.",
)
@click.option(
    "--connections",
    type=click.IntRange(22, 500),
    default=40,
    show_default=True,
    help="Of the heavier tenant; the lighter one has ten times as many.",
)
@MODEL_OPTION
def fairness(runs: int, tokens: int, connections: int, model: str | None) -> None:
    """Two tenants of weights 1 and 3 with the same mix of requests, both always waiting.

    \b
    The light one has ten times the connections. Charged service (input + 2 x output tokens) between two
    snapshots is compared with 1:3. Each run uses a fresh server.
    --json answers:
      {"runs": [{"light_cost_tokens": 34015, "ratio": 3.01, "deviation": 0.0033, "seconds": 41.2,
       "least_queued": {"light": 232, "heavy": 5}, …}], "worst_deviation": 0.0033,
       "median_ratio": 3.01, "ok": true}
    """
    from ops.bench.fairness import run, show
    from ops.local_server import ServerFailed

    try:
        report = asyncio.run(run(runs=runs, light_tokens=tokens, connections=connections, model=model))
    except ServerFailed as error:
        raise Failure(f"the server did not start: {error}") from None
    answer(report, lambda: show(report))
    if not report["ok"]:
        raise click.exceptions.Exit(1)


@bench.command()
@click.option(
    "--queued",
    type=click.IntRange(0, 1000),
    multiple=True,
    default=(0, 20, 100),
    show_default=True,
    help="Requests waiting when an estimate is made (repeat).",
)
@click.option(
    "--probes",
    type=click.IntRange(5, 10_000),
    default=200,
    show_default=True,
    help="Requests measured at each depth.",
)
@MODEL_OPTION
def estimates(queued: tuple[int, ...], probes: int, model: str | None) -> None:
    """Is the estimated wait within a factor of two of the actual one?

    \b
    At each depth as many connections are kept busy as fill the engine and leave that many waiting. What each
    request was told on arrival is compared with what it then waited, beside the best constant that anybody
    could have told to all.
    --json answers:
      {"depths": [{"queued": 20, "requests": 200, "share_within_2x": 0.92, "actual_p50_s": 3.1, …}, …],
       "overall": {"share_within_2x": 0.93, "constant_share_within_2x": 0.35},
       "ok": true}
    """
    from ops.bench.estimates import run, show
    from ops.local_server import ServerFailed

    try:
        report = asyncio.run(run(depths=queued, probes=probes, model=model))
    except ServerFailed as error:
        raise Failure(f"the server did not start: {error}") from None
    answer(report, lambda: show(report))
    if not report["ok"]:
        raise click.exceptions.Exit(1)
