"""`fairgate bench`: measurements of promises, of speed and of choices."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from ops.cli.base import Failure, answer, group


@group()
def bench() -> None:
    """Measures promises on a running server that it starts itself, on a free port; and the engine's speed.

    \b
      fairgate bench fairness --runs 3
      fairgate bench estimates --queued 0 --queued 20 --queued 100
      fairgate bench engine --model tiny --peers transformers,openvino
      fairgate bench scheduler
      fairgate bench policies --case mixed
      fairgate bench batch-or-wait
      fairgate bench ledger
      fairgate bench contract --scenario 'kill-*'
    """


REQUIRED_SETTLEMENTS_PER_S = 2_000

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


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """A list with commas; None stays None."""
    if value is None:
        return None
    return tuple(name.strip() for name in value.split(",") if name.strip())


def _counts(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Whole numbers of at least 1, with commas."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= 1_000_000 for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of numbers from 1 to 1000000 such as 1000,10000")
    return tuple(int(part) for part in parts)


@bench.command()
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
@click.option(
    "--peers",
    metavar="NAMES",
    callback=_names,
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
    type=click.FloatRange(min=0, min_open=True),
    help="Poisson: requests a second.  [default: 0.7 x what the slowest engine can serve, measured first]",
)
@click.option(
    "--requests",
    type=click.IntRange(1, 100_000),
    default=500,
    show_default=True,
    help="Poisson: how many, drawn from the workload's.",
)
@click.option("--repetitions", type=click.IntRange(1, 100), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(1, 1024), help="Of every engine.  [default: all cores]")
@click.option(
    "--sequences", type=click.IntRange(1, 4096), default=64, show_default=True, help="That run at once."
)
@click.option(
    "--batched-tokens",
    type=click.IntRange(1, 1_000_000),
    default=512,
    show_default=True,
    help="That a step computes at most.",
)
@click.option("--policy", metavar="NAME", help="Our engine's.  [default: hybrid]")
@click.option(
    "--detokenize", is_flag=True, help="Our engine also makes text; the peers answer with ids only."
)
@click.option(
    "--peers-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".bench-peers"),
    show_default=True,
    help="Where 'make bench-peers' put them.",
)
@click.option("--no-roofline", is_flag=True, help="Do not measure what the machine could do at best.")
def engine(
    model: str,
    workload: Path | None,
    peers: tuple[str, ...] | None,
    dtype: str,
    device: str,
    arrivals: str,
    rate: float | None,
    requests: int,
    repetitions: int,
    threads: int | None,
    sequences: int,
    batched_tokens: int,
    policy: str | None,
    detokenize: bool,
    peers_dir: Path,
    no_roofline: bool,
) -> None:
    """Our engine and its peers on the same requests, in turn, each run in a process of its own.

    \b
    Greedy, EOS ignored; the tokens of all engines are compared. Peers other than transformers are
    installed with 'make bench-peers'. Measure when nothing else runs: disturbed runs are marked.
    --json answers:
      {"engines": {"fairgate": {"output_tokens_per_s": {"median": 4100.0, …},
       "runs": [{"ttft_s": {"p50": 0.1, "p99": 0.3}, "serving_peak_bytes": 400000000, …}, …]}, …},
       "ratios": {"openvino": {"output_tokens_per_s": {"median": 0.9, "least": 0.88, "most": 0.91}, …}},
       "agreement": {"openvino": {"divergences": 0, …}}, "roofline": {"share_of_ideal": {…}, …}}
    """
    from ops.bench.engine import CannotBench, Options, run
    from ops.bench.engine_report import show
    from ops.bench.engine_workload import SHIPPED_WORKLOAD

    options = Options(
        model=model,
        workload=workload or SHIPPED_WORKLOAD,
        peers=peers,
        dtype=dtype,
        device=device,
        arrivals=arrivals,
        rate_per_s=rate,
        poisson_requests=requests,
        repetitions=repetitions,
        threads=threads,
        max_sequences=sequences,
        max_batched_tokens=batched_tokens,
        policy=policy,
        detokenize=detokenize,
        peers_dir=peers_dir,
        **({"roofline_s": 0.0} if no_roofline else {}),
    )
    try:
        report = run(options, lambda line: click.echo(line, err=True))
    except CannotBench as error:
        raise Failure(str(error)) from None
    answer(report, lambda: show(report))


@bench.command()
@click.option("--case", "cases", metavar="NAME", multiple=True, help="Only this benchmark (repeat).")
@click.option("--policy", "policies", metavar="NAME", multiple=True, help="Only this policy (repeat).")
def policies(cases: tuple[str, ...], policies: tuple[str, ...]) -> None:
    """Scheduling policies on a virtual clock: where each wins, where it loses, and what was promised.

    \b
    Cases: mixed, predictions, contests, composition, batching, buckets, templates, published. All of them
    take some minutes of one core. Nothing is timed by a real clock: the figures are the same on every
    machine and may be made while others use it.
    --json answers:
      {"cases": {"mixed": {"title": "short requests among long ones", "rows": [{"policy": "hybrid",
       "short_ttft_p99_s": {"median": 0.15, "least": 0.14, "most": 0.17}, …}, …],
       "checks": [{"what": "…", "value": 0.1, "at_most": 0.333, "ok": true}, …], "ok": true}, …},
       "ok": true}
    """
    from engine.scheduling.policy import UnknownPolicy
    from ops.bench.policies import as_json, run_cases, show

    try:
        reports = run_cases(cases, policies)
    except (ValueError, UnknownPolicy) as error:
        raise click.UsageError(str(error)) from None
    report = as_json(reports)
    answer(report, lambda: show(reports))
    if not report["ok"]:
        raise click.exceptions.Exit(1)


@bench.command()
@click.option(
    "--running", metavar="N,…", default="256", show_default=True, callback=_counts, help="Sequences that run."
)
@click.option(
    "--waiting",
    metavar="N,…",
    default="1000,10000",
    show_default=True,
    callback=_counts,
    help="Sequences that wait.",
)
@click.option(
    "--tenants", metavar="N,…", default="1,1000", show_default=True, callback=_counts, help="Their tenants."
)
@click.option(
    "--policy", metavar="NAME,…", default="hybrid,vtc,fcfs", show_default=True, callback=_names, help="Which."
)
@click.option(
    "--steps", type=click.IntRange(100, 1_000_000), default=1000, show_default=True, help="Timed of each."
)
@click.option("--no-granularity", is_flag=True, help="Leave out the table of step and chunk sizes.")
def scheduler(
    running: tuple[int, ...],
    waiting: tuple[int, ...],
    tenants: tuple[int, ...],
    policy: tuple[str, ...],
    steps: int,
    no_granularity: bool,
) -> None:
    """What a scheduling step costs without a model, and what too fine and too coarse steps cost.

    \b
    Steady states: sequences decode, now and then one ends and the next is admitted. Then, on virtual time,
    step and chunk sizes against throughput and latencies. Measure when nothing else runs.
    --json answers:
      {"cases": [{"policy": "hybrid", "running": 256, "waiting": 10000, "tenants": 1000,
       "schedule_us": {"p50": 180.0, "p99": 390.0, "most": 700.0}, "books_us": {…}, "step_us": {…}, …}, …],
       "growth": [{"policy": "hybrid", "tenants": 1000, "waiting": [1000, 10000], "ratio": 1.04}, …],
       "granularity": {"rows": [{"step_tokens": 512, "chunk_tokens": 64, "ttft_p99_s": 2.8, …}, …]}}
    """
    from engine.scheduling.policy import UnknownPolicy
    from ops.bench import scheduler_cost, scheduler_granularity

    try:
        report = scheduler_cost.run(
            running=running, waiting=waiting, tenants=tenants, policies=policy, steps=steps
        )
    except UnknownPolicy as error:
        raise click.BadParameter(str(error), param_hint="--policy") from None
    except RuntimeError as error:
        raise Failure(str(error)) from None
    if not no_granularity:
        report["granularity"] = scheduler_granularity.run(policy[0])

    def show() -> None:
        scheduler_cost.show(report)
        if not no_granularity:
            scheduler_granularity.show(report["granularity"])

    answer(report, show)


@bench.command()
@click.option(
    "--settlements", type=click.IntRange(100, 1_000_000), default=10_000, show_default=True, help="How many."
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 10_000),
    multiple=True,
    default=(1, 64, 512),
    show_default=True,
    help="Settlements that wait at once; repeatable.",
)
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(),
    help="On which disk; not one in memory.  [default: here]",
)
def ledger(settlements: int, concurrency: tuple[int, ...], directory: Path) -> None:
    """Durable settlements a second on SQLite, with fsync on, and what group commit makes of it.

    \b
    One at a time each settlement waits for its own commit, so a hundredth as many are made there.
    --json answers:
      {"runs": [{"database": "sqlite", "concurrency": 512, "settlements": 10000, "seconds": 2.1,
       "settlements_per_s": 4700, "rows_per_commit": 181.8, "fsync_ms": 1.3,
        "synchronous": "synchronous=2"}, …],
       "required_per_s": 2000, "ok": true}
    """
    from ops.bench.ledger import as_json, measure

    runs = [
        asyncio.run(measure(directory, max(100, settlements // (100 if most == 1 else 1)), most))
        for most in concurrency
    ]
    report = as_json(runs, REQUIRED_SETTLEMENTS_PER_S)

    def show() -> None:
        click.echo(f"SQLite, {runs[-1].synchronous} (2: FULL); an fsync takes {runs[-1].fsync_ms:g} ms here")
        for run in runs:
            click.echo(
                f"  {run.concurrency:>5} at once: {run.settlements_per_s:>7,.0f} settlements/s, "
                f"{run.rows_per_commit:g} a commit"
            )

    answer(report, show)
    if not report["ok"]:
        raise click.exceptions.Exit(1)


@bench.command("batch-or-wait")
@click.option(
    "--requests", type=click.IntRange(1000, 1_000_000), default=2000, show_default=True, help="At each load."
)
@click.option("--seeds", type=click.IntRange(1, 100), default=3, show_default=True, help="Streams a load.")
@click.option(
    "--line",
    type=click.Choice(["length", "arrival"]),
    default="length",
    show_default=True,
    help="Order of the queue; by arrival, fixed policies that reorder it are not tried either.",
)
def batch_or_wait(requests: int, seeds: int, line: str) -> None:
    """The batch-or-wait table against the best fixed batch size and window, on a virtual clock.

    \b
    An engine on a virtual clock serves with the admissions `table` and `dynamic`. One table is solved and
    used at all loads; at each load every size and 26 windows are tried on the very arrivals that the table
    serves. Compared is the table's objective (`fairgate policy solve --help`). Takes some minutes; all
    figures but that of a lookup are the same on every machine.
    --json answers:
      {"line": "length", "capacity_per_s": 3.93, "loads": [{"load": "high", "rate_per_s": 2.36, "gain": 0.154,
       "least_gain": 0.151, "table": {"cost": 2.55, "latency_s": 1.4, "own_latency_s": 1.3, "watts": 161,
       "late": 0.177, "batch": 1.9}, "best_fixed": {"size": 4, "window_s": 0.12, "line": "length", …}}, …],
       "won": ["medium", "high", …], "not_won": ["low"], "lookup_us": 1.7, "ok": true, …}
    """
    from ops.bench.batch_or_wait import run, show
    from ops.cli.policy import progress_bar

    with progress_bar("solving and trying") as progress:
        report = run(requests=requests, seeds=seeds, short_first=line == "length", progress=progress)
    answer(report, lambda: show(report))
    if not report["ok"]:
        raise click.exceptions.Exit(1)


@bench.command()
@click.option(
    "--scenario",
    "names",
    metavar="NAME",
    multiple=True,
    help="Only those; * and ? as in a shell; repeatable.",
)
@click.option(
    "--gateways", metavar="N,…", default="1,2,4", show_default=True, callback=_counts, help="For bursts."
)
@click.option(
    "--concurrency", metavar="N,…", default="50,500", show_default=True, callback=_counts, help="For bursts."
)
@click.option("--peers", type=click.Choice(["litellm"]), multiple=True, help="Also: its limits, same bursts.")
@click.option(
    "--peers-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".bench-peers"),
    show_default=True,
    help="Where 'make bench-peers' put them.",
)
@click.option(
    "--json-file", type=click.Path(path_type=Path, dir_okay=False), help="Also write the JSON report there."
)
def contract(
    names: tuple[str, ...],
    gateways: tuple[int, ...],
    concurrency: tuple[int, ...],
    peers: tuple[str, ...],
    peers_dir: Path,
    json_file: Path | None,
) -> None:
    """Budgets through bursts, crashes, cancellations and retries, audited from outside.

    \b
    Starts its own PostgreSQL, Redis, engine and gateways, drives clients at hard limits and kills -9 what it
    started; then compares ledger, Redis, the engine's own count and what clients received. Some minutes; all
    of it goes away again. Scenarios: rate, burst-CLIENTSxGATEWAYS-{max,open}-{stream,plain}, disconnects,
    retries, kill-{gateway,engine,redis,postgres,both}. Ends with 1 where a required figure is not met.
    --json answers:
      {"scenarios": [{"scenario": "burst-50x2-open-stream", "gateways": 2, "overshoot_tokens": 0,
       "drift_tokens": 0, "double_charges": 0, "leaked_holds": 0, "cancel_error_tokens": 0,
       "admitted_of_admissible": 0.99, "charged_tokens": 1460, "broken": [], "ok": true, …}, …],
       "seconds": 412.0, "ok": true}
    """
    import json

    from rich.console import Console

    from ops.bench.contract import Options, run
    from ops.bench.contract_house import ScenarioFailed
    from ops.bench.contract_peer import PeerMissing
    from ops.bench.contract_report import show
    from ops.local_server import ServerFailed
    from ops.local_services import NoServer

    options = Options(names, gateways, concurrency, peers, peers_dir)
    with Console(stderr=True).status("starting") as status:
        try:
            report = asyncio.run(
                run(options, lambda what, done, total: status.update(f"{what}: {done} of {total} done"))
            )
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--scenario") from None
        except (NoServer, PeerMissing, ScenarioFailed, ServerFailed) as error:
            raise Failure(str(error)) from None
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    answer(report, lambda: show(report))
    if not report["ok"]:
        raise click.exceptions.Exit(1)
