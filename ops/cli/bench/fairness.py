"""`fairgate bench fairness|calibration`: fairness of the queue, and how often estimates hold."""

from __future__ import annotations

import asyncio
from typing import Any

import click
from click.core import ParameterSource

from ops.cli.base import Failure
from ops.cli.bench.options import MODEL_OPTION, command, tell, verdict, whole


@command()
@whole("--runs", least=1, most=50, default=3, help="How often.")
@whole(
    "--tokens",
    least=100,
    most=10_000_000,
    default=20_000,
    help="Measure until the lighter tenant has had so many tokens.",
)
@whole(
    "--connections",
    least=22,
    most=500,
    default=40,
    help="Of the heavier tenant; the lighter one has ten times as many.",
)
@click.option(
    "--decode",
    is_flag=True,
    help="Tokens inside steps, counted from the server's log of steps: turns by weight, long prompts beside"
    " short chats. Takes --model and no other option.",
)
@click.option(
    "--scenario",
    "scenarios",
    type=click.Choice(["weights", "flood", "tiers", "reservations"]),
    multiple=True,
    help="Only this one (repeat).  [default: all]",
)
@whole(
    "--requests",
    least=40,
    most=100_000,
    default=2_000,
    help="Of the tenant beside the flood, counted in each half.",
)
@MODEL_OPTION
def fairness(decode: bool, scenarios: tuple[str, ...], **given: Any) -> None:
    """Floods, weights, tiers and reservations on a real server.

    Two benchmarks: of the queue (the default; takes --scenario, --runs, --tokens, --connections, --requests
    and --model) and inside steps (--decode; takes --model).

    \b
    weights: two tenants of weights 1 and 3 with the same mix of requests, both always waiting, the light one
      with ten times the connections. Charged service (input + 2 x output tokens) between two snapshots is
      compared with 1:3. Each run uses a fresh server.
    flood: a tenant at 30 % of the capacity beside one at its share, and at ten times that.
    tiers: interactive requests over batch that always waits.
    reservations: a tenant that reserved 30 % of the capacity under an interactive flood.
    Ends with 1 where a promise is not kept; with 3 where a run is invalid: the queue of a tenant that always
    waits was empty in a sample of the server's, because its client was too slow.
    --json answers:
      {"weights": {"runs": [{"light_cost_tokens": 34015, "ratio": 3.01, "deviation": 0.0033, "seconds": 41.2,
       "least_queued": {"light": 232, "heavy": 5}, "queue_samples": 160, "empty_samples": {"light": 0, …},
       "client_cpu_shares": {"light": 0.1, …}, "invalid": null, …}], "worst_deviation": 0.0033,
       "median_ratio": 3.01, "least_jain_index": 0.999998, "widest_gap_over_bound": 0.03, "ok": true},
       "flood": {"rows": {"flood": {"ttft_p99_s": 0.31, …}, …}, "ratio": 1.2, "ok": true},
       "tiers": {…}, "reservations": {…}, "ok": true}
    --decode --json answers:
      {"turns": {"steps": 2031, "decode_tokens": {"light": 8124, "heavy": 24372}, "off_1_to_3": 0.0, …},
       "decode_first": {…, "off_1_to_1": 0.0}, "short_alone": {"ttft_s": {"p5": 0.01, …}, "tpot_s": {…}},
       "short_beside_long": {…, "least_surplus_tokens": 0.0, "idle_tokens": 0}, "checks": […], "ok": true}
    """
    if decode:
        _refuse_others("--decode", {"decode", "model"})
    from ops.bench.common.errors import CannotBench
    from ops.bench.fairness import decode as in_steps
    from ops.bench.fairness import live
    from ops.sandbox.server import ServerFailed

    try:
        if decode:
            report = asyncio.run(in_steps.run(model=given["model"], progress=tell))
            verdict(report, lambda: in_steps.show(report))
            return
        report = asyncio.run(live.run(scenarios or live.SCENARIOS, progress=tell, **given))
    except ServerFailed as error:
        raise Failure(f"the server did not start: {error}") from None
    except CannotBench as error:
        raise Failure(str(error)) from None
    verdict(report, lambda: live.show(report))


def _refuse_others(benchmark: str, taken: set[str]) -> None:
    """Refuses options of the benchmark on a real server, which another one would ignore."""
    ctx = click.get_current_context()
    for param in ctx.command.params:
        if not param.expose_value or param.name is None or param.name in taken:
            continue
        if ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{param.opts[0]} does not go with {benchmark}")


@command()
@whole("--seeds", least=1, most=100, default=10, help="From 1 on: so many runs of each load.")
@click.option(
    "--load",
    "loads",
    type=click.FloatRange(0, 5, min_open=True),
    multiple=True,
    help="Above 1 the demo's plan, so overloaded; else a stationary stream.  [default: 1.8 and 0.95]",
)
@click.option(
    "--policy", type=click.Choice(("hybrid", "vtc")), default="hybrid", show_default=True, help="That orders."
)
@click.option("--bursts", is_flag=True, help="Then also bursts into a real engine: printed, not judged.")
@MODEL_OPTION
def calibration(seeds: int, loads: tuple[float, ...], policy: str, bursts: bool, model: str | None) -> None:
    """Do the times that requests are told on arrival, or quoted, hold as often as they say?

    \b
    On virtual time: the demo's requests before the gateway's queue and estimator and an engine as fast as the
    demo's; waits by tier, and by when in the run a request came. Then groups that quote together and all
    redeem. Takes some minutes. With --bursts, on servers that it starts: sixteen at once into ten fresh ones
    and an idle engine with two places, and bursts of 4 to 200 into a warm one, by the wait that was told.
    --json answers:
      {"policy": "hybrid", "scenarios": [{"name": "load 1.8", "groups": {"batch, before 25 s": {"within_2x":
       {"mean": 0.4, "least": 0.3, "most": 0.5}, "under_p90": {…}, …}, …}, "ok": true}, …],
       "quotes": {"quoted": {"ttft": 0.90, "e2e": 0.90, …}, …},
       "bursts": [{"bursts": "bursts, warm engine", "told": "up to 1.62 s", "requests": 90,
       "share_within_2x": 0.9, "p90_coverage": 0.9}, …], "ok": true}
    """
    from ops.bench.estimates import bursts as in_bursts
    from ops.bench.estimates.calibration import reliability_charts, run, show
    from ops.sandbox.server import ServerFailed

    report = run(seeds=seeds, loads=loads, policy=policy, progress=tell)
    if bursts:
        tell("bursts")
        try:
            report["bursts"] = asyncio.run(in_bursts.run(model))
        except ServerFailed as error:
            raise Failure(f"the server did not start: {error}") from None

    def text() -> None:
        show(report)
        if bursts:
            in_bursts.show(report["bursts"])

    verdict(report, text, charts=reliability_charts(report))
