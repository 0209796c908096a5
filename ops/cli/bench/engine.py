"""`fairgate bench engine|scheduler`: speed of the engine, and cost of a scheduling step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ops.cli.base import Failure, answer
from ops.cli.bench.options import PEERS_DIR_OPTION, command, counts_given, listed, names_given, whole


@command()
@click.option(
    "--model",
    metavar="DIR|tiny|small",
    default="tiny",
    show_default=True,
    help="Model directory, or the shape of one with random weights that is made here.",
)
@click.option(
    "--workload",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSON file with the requests.  [default: 64 requests of mixed lengths]",
)
@listed(
    "--peers",
    metavar="NAMES",
    parse=names_given,
    help="Of transformers, openvino, with commas; empty: none.  [default: those installed]",
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--arrivals",
    type=click.Choice(["burst", "poisson"]),
    default="burst",
    show_default=True,
    help="All at once, or one after another at random.",
)
@click.option(
    "--rate",
    "rate_per_s",
    type=click.FloatRange(min=0, min_open=True),
    help="Poisson: requests a second.  [default: 0.7 x what the slowest engine can serve, measured first]",
)
@whole(
    "--requests",
    "poisson_requests",
    least=1,
    most=100_000,
    default=500,
    help="Poisson: how many, drawn from the workload's.",
)
@whole("--repetitions", least=1, most=100, default=3)
@whole("--threads", least=1, most=1_024, help="Of every engine.  [default: all cores]")
@whole("--sequences", "max_sequences", least=1, most=4_096, default=64, help="That run at once.")
@whole(
    "--batched-tokens",
    "max_batched_tokens",
    least=1,
    most=1_000_000,
    default=512,
    help="That a step computes at most.",
)
@click.option("--policy", metavar="NAME", help="Our engine's.  [default: hybrid]")
@click.option(
    "--detokenize", is_flag=True, help="Our engine also makes text; the peers answer with ids only."
)
@PEERS_DIR_OPTION
@click.option("--no-roofline", is_flag=True, help="Do not measure what the machine could do at best.")
def engine(workload: Path | None, no_roofline: bool, **given: Any) -> None:
    """Our engine and its peers on the same requests, in turn, each run in a process of its own.

    \b
    Greedy, EOS ignored; the tokens of all engines are compared. Peers other than transformers are
    installed with 'make bench-peers'. Measure when nothing else runs: disturbed runs are marked.
    --json answers:
      {"engines": {"fairgate": {"output_tokens_per_s": {"median": 4100.0, …},
       "runs": [{"ttft_s": {"p50": 0.1, "p99": 0.3}, "serving_peak_bytes": 400000000, …}, …]}, …},
       "ratios": {"openvino": {"output_tokens_per_s": {"median": 0.9, "least": 0.88, "most": 0.91}, …}},
       "agreement": {"openvino": {"divergences": 0, …}}, "mask_s": 4e-05,
       "roofline": {"share_of_ideal": {…}, …}}
    """
    from ops.bench.common.errors import CannotBench
    from ops.bench.engine.report import show
    from ops.bench.engine.run import EngineBenchOptions, run
    from ops.bench.engine.workload import SHIPPED_WORKLOAD

    options = EngineBenchOptions(workload=workload or SHIPPED_WORKLOAD, **given)
    if no_roofline:
        options = replace(options, roofline_s=0.0)
    try:
        report = run(options, lambda line: click.echo(line, err=True))
    except CannotBench as error:
        raise Failure(str(error)) from None
    answer(report, lambda: show(report))


@command()
@listed("--running", metavar="N,…", default="256", parse=counts_given, help="Sequences that run.")
@listed("--waiting", metavar="N,…", default="1000,10000", parse=counts_given, help="Sequences that wait.")
@listed("--tenants", metavar="N,…", default="1,1000", parse=counts_given, help="Their tenants.")
@listed("--policy", "policies", metavar="NAME,…", default="hybrid,vtc,fcfs", parse=names_given, help="Which.")
@whole("--steps", least=100, most=1_000_000, default=1000, help="Timed of each.")
def scheduler(**given: Any) -> None:
    """What a scheduling step costs without a model.

    \b
    Steady states: sequences decode, now and then one ends and the next is admitted. Measure when nothing
    else runs.
    --json answers:
      {"cases": [{"policy": "hybrid", "running": 256, "waiting": 10000, "tenants": 1000,
       "schedule_us": {"p50": 180.0, "p99": 390.0, "most": 700.0}, "books_us": {…}, "step_us": {…}, …}, …],
       "growth": [{"policy": "hybrid", "tenants": 1000, "waiting": [1000, 10000], "ratio": 1.04}, …]}
    """
    from engine.scheduling.policy import UnknownPolicy
    from ops.bench.engine import scheduler_cost

    try:
        report = scheduler_cost.run(**given)
    except UnknownPolicy as error:
        raise click.BadParameter(str(error), param_hint="--policy") from None
    except RuntimeError as error:
        raise Failure(str(error)) from None
    answer(report, lambda: scheduler_cost.show(report))
