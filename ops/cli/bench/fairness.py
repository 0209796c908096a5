"""`fairgate bench fairness|estimates|calibration|routing`: fairness, estimates and routing of the queue."""

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
    "--virtual",
    is_flag=True,
    help="On virtual time, without a server: floods, weights, tiers and reservations. Takes no other option.",
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
def fairness(virtual: bool, decode: bool, scenarios: tuple[str, ...], **given: Any) -> None:
    """Floods, weights, tiers and reservations, on a real server or on virtual time.

    Three benchmarks: on a real server (the default; takes --scenario, --runs, --tokens, --connections,
    --requests and --model), inside steps (--decode; takes --model) and on virtual time (--virtual).

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
    --virtual --json answers:
      {"flood": {"rows": {"flood": {"ttft_p99_s": 0.11, …}, …}, "ratios": {"equal half": 1.05, …}, …},
       "weights": {"ratio": 2.99, "jain_index": 0.999996, "gap_over_bound": 0.022, "ok": true, …},
       "tiers": {…}, "reservations": {…}, "few_places": {"rows": {…}, "ratio": 0.4, "ok": true}, "ok": true}
    """
    if virtual and decode:
        raise Failure("--virtual and --decode are two benchmarks: give one of them")
    if virtual or decode:
        _refuse_others("--decode" if decode else "--virtual", {"decode", "model"} if decode else {"virtual"})
    if virtual:
        from ops.bench.fairness import virtual as on_virtual_time

        report = on_virtual_time.run(progress=tell)
        verdict(report, lambda: on_virtual_time.show(report))
        return
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
@whole(
    "--queued",
    "depths",
    least=0,
    most=1_000,
    multiple=True,
    default=(0, 20, 100),
    help="Requests waiting when an estimate is made (repeat).",
)
@whole("--probes", least=5, most=10_000, default=200, help="Requests measured at each depth.")
@MODEL_OPTION
def estimates(**given: Any) -> None:
    """Is the estimated wait within a factor of two of the actual one?

    \b
    At each depth as many connections are kept busy as fill the engine and leave that many waiting. What each
    request was told on arrival is compared with what it then waited, beside the best constant that anybody
    could have told to all. Then sixteen at once into an idle engine with two places, and bursts of 4 to 200
    into a warm one, by the wait that was told: printed, not judged.
    --json answers:
      {"depths": [{"queued": 20, "requests": 200, "share_within_2x": 0.92, "actual_p50_s": 3.1, …}, …],
       "bursts": [{"bursts": "bursts, warm engine", "told": "up to 1.62 s", "requests": 90,
       "share_within_2x": 0.9, "p90_coverage": 0.9}, …],
       "overall": {"share_within_2x": 0.93, "constant_share_within_2x": 0.35},
       "ok": true}
    """
    from ops.bench.estimates.estimates import run, show
    from ops.sandbox.server import ServerFailed

    try:
        report = asyncio.run(run(**given))
    except ServerFailed as error:
        raise Failure(f"the server did not start: {error}") from None
    verdict(report, lambda: show(report))


@command()
@whole(
    "--requests", least=100, most=1_000_000, default=5_000, help="Judged in each scenario, after the warm-up."
)
@whole("--seed", least=0, default=1, help="Of everything that is drawn.")
def calibration(requests: int, seed: int) -> None:
    """Do the times that requests are told on arrival, or quoted, hold as often as they say?

    \b
    On virtual time: the gateway's queue and estimator before a virtual engine, several tenants and tiers, at
    50, 80 and 95 % load; then 50 clients that quote together and all redeem. Takes some minutes.
    --json answers:
      {"scenarios": [{"name": "load 0.8", "groups": {"plain": {"requests": 5000, "ttft": {"p50": 0.50,
       "p90": 0.90, "pinball_p90": 0.01, …}, "e2e": {…}, …}}, "ok": true}, …], "ok": true}
    """
    from ops.bench.estimates.calibration import run, show
    from ops.bench.estimates.calibration_chart import reliability_charts

    report = run(seed=seed, requests=requests, progress=tell)
    verdict(report, lambda: show(report), charts=reliability_charts(report))


@command()
@whole("--requests", least=100, most=2_000, default=2000, help="So many first requests of the trace.")
def routing(requests: int) -> None:
    """Four virtual replicas on a trace of conversations: round robin, least loaded, predicted TTFT.

    \b
    --json answers:
      {"requests": 2000, "shared_cache_hits": 13757, "routers": {"predicted TTFT": {"block_hits": 12657,
       "hits_of_shared": 0.92, "ttft_p99_s": 8.3, …}, …}, "ok": true}
    """
    from ops.bench.routing import run, show

    report = run(requests=requests, progress=tell)
    verdict(report, lambda: show(report))
