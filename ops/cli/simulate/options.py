"""Options that `fairgate simulate` and `fairgate whatif` share: machine, pictures, progress."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ops.cli.base import answer, page_file

if TYPE_CHECKING:
    from gateway.flow.learned.table_file import LearnedTable
    from ops.simulate.machines.machines import Machine
    from ops.simulate.presets import ScenarioPreset
    from ops.simulate.replay import BaselineRun
    from ops.simulate.run import Scenario
    from ops.simulate.traffic.requests import Source

LINES_KEY = "fairgate.progress"
LINE_EVERY_S = 0.5
DEFAULT_POLICIES = "fcfs,hybrid"
TABLE_POLICIES = "static-padded,static,dynamic,buckets,fcfs,sjf,vtc,hybrid"


def serving_options(
    *, recorded: bool = False, compares: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Options of policies, machine, targets and forecasts. `recorded`: what is not named stays as recorded;
    `compares`: also which policies run, and on padded shapes."""

    def default(text: str) -> str:
        return "" if recorded else f"  [default: {text}]"

    of_policies = (
        click.option(
            "--policy", metavar="A,B,…", help="Policies to compare, or all." + default(DEFAULT_POLICIES)
        ),
        click.option("--padded", is_flag=True, help="All steps have padded shapes, whatever the policy."),
    )
    options = (
        *(of_policies if compares else ()),
        click.option("--replicas", type=click.IntRange(1, 256), help="Engines." + default("1")),
        click.option("--gpu", help="h200, h100, a100, l40s or cpu." + default("h200")),
        click.option("--model", "model_name", help="1b, 8b or 70b." + default("8b")),
        click.option(
            "--tensor-parallel", type=click.IntRange(1, 16), help="GPUs that compute a model together."
        ),
        click.option(
            "--profile",
            metavar="FILE",
            help="Step times that an engine measured, instead of a GPU's roofline.",
        ),
        click.option(
            "--kv-tokens", type=click.IntRange(16), help="KV cache of a replica." + default("what fits")
        ),
        click.option(
            "--max-sequences", type=click.IntRange(1, 4096), help="That run at once." + default("256")
        ),
        click.option(
            "--max-batched-tokens", type=click.IntRange(1, 1 << 20), help="Of one step." + default("2048")
        ),
        click.option(
            "--option",
            "--policy-option",
            "options",
            metavar="NAME=VALUE",
            multiple=True,
            help="An option of the policies, such as batch_size=8 (see `fairgate policy explain`; repeat).",
        ),
        click.option(
            "--slo",
            metavar="TARGETS",
            help="Such as ttft=2,tpot=0.1,e2e=30, in seconds.  [default: ttft=2,tpot=0.1]",
        ),
        click.option(
            "--predictions",
            type=click.Choice(["learned", "exact", "none"]),
            default="learned",
            show_default=True,
            help="What the gateway knows of an answer's length on arrival.",
        ),
    )

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def progress_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option `--progress`: lines of JSON for programs in place of a bar."""

    def remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            # The number of simulations that have begun.
            ctx.meta[LINES_KEY] = 0

    return click.option(
        "--progress",
        is_flag=True,
        expose_value=False,
        callback=remember,
        help="Say on stderr how far it is, in lines of JSON, for programs.",
    )(command)


def machine_of(
    chosen: ScenarioPreset | None, asked: dict[str, Any], served: Machine | None = None
) -> Machine:
    """The machine named by flags; sizes that no flag names are those of `served`."""
    from ops.simulate.machines.machines import roofline_machine
    from ops.simulate.machines.profile import DEFAULT_SIZES, read_profile

    sizes = {name: asked[name] for name in ("max_sequences", "max_batched_tokens")}
    if served is not None and not names_machine(asked):
        named = {name: value for name, value in sizes.items() if value is not None}
        return replace(served, kv_tokens=asked["kv_tokens"] or served.kv_tokens, **named)
    if asked["profile"] is not None:
        for name in ("gpu", "model_name", "tensor_parallel"):
            if asked[name] is not None:
                raise click.UsageError(
                    "--profile stands for a machine: leave out --gpu, --model, --tensor-parallel"
                )
        of_served = {name: getattr(served, name) for name in DEFAULT_SIZES} if served else DEFAULT_SIZES
        return read_profile(Path(asked["profile"]), of_served, kv_tokens=asked["kv_tokens"], **sizes)
    sequences = served.max_sequences if served else chosen.max_sequences if chosen else 256
    return roofline_machine(
        asked["gpu"] or (chosen.gpu if chosen else "h200"),
        asked["model_name"] or (chosen.model if chosen else "8b"),
        gpus=asked["tensor_parallel"] or (chosen.tensor_parallel if chosen else 1),
        max_sequences=sizes["max_sequences"] or sequences,
        max_batched_tokens=sizes["max_batched_tokens"] or (served.max_batched_tokens if served else 2048),
        kv_tokens=asked["kv_tokens"],
    )


def names_machine(asked: dict[str, Any]) -> bool:
    return any(asked[name] is not None for name in ("gpu", "model_name", "tensor_parallel", "profile"))


def options_asked(asked: dict[str, Any]) -> dict[str, str]:
    options = {}
    for text in asked["options"]:
        name, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"--option {text!r} is not NAME=VALUE")
        options[name.strip().replace("-", "_")] = value.strip()
    return options


def scenario_of(
    source: Source, machine: Machine, chosen: ScenarioPreset | None, asked: dict[str, Any]
) -> Scenario:
    from engine.scheduling.policy import options_of
    from gateway.flow.control_rules import ControlMode
    from ops.simulate.run import Scenario
    from ops.simulate.slo import SloLimits

    preset: dict[str, object] = dict(chosen.options.changed()) if chosen else {}
    options = options_of(preset | options_asked(asked))
    return Scenario(
        source,
        machine,
        asked["replicas"] or 1,
        SloLimits.of(asked["slo"]) if asked["slo"] else chosen.slo if chosen else SloLimits(),
        asked["predictions"],
        options,
        padded=asked["padded"],
        claims=dict(chosen.claims) if chosen else {},
        control=ControlMode(asked.get("control") or "off"),
        learned=learned_table_at(options.learned_table, machine.name),
    )


def learned_table_at(path: str, machine: str) -> LearnedTable | None:
    """The learned table of that file; says so where it was fitted for another machine. Raises
    `BadLearnedTable`."""
    from gateway.flow.learned.table_file import LearnedTable

    if not path:
        return None
    table = LearnedTable.load(Path(path))
    if table.machine != machine:
        click.echo(f"{path} was fitted on {table.machine}, and this is {machine}", err=True)
    return table


def policies_of(policy: str | None, default: str) -> list[str]:
    """Names of `--policy`, or the `default` ones, each once. Raises ValueError."""
    from engine.scheduling.policy import LEARNED_POLICIES, POLICIES, SIMULATED, TABLE_POLICIES

    known = [*POLICIES, *SIMULATED, *TABLE_POLICIES, *LEARNED_POLICIES]
    names = [name.strip() for name in (policy or default).split(",") if name.strip()]
    names = [*POLICIES, *SIMULATED] if names == ["all"] else list(dict.fromkeys(names))
    for name in names:
        if name not in known:
            raise ValueError(f"no policy {name!r}; there are {', '.join(sorted(known))}")
    if policy is not None and not names:
        raise ValueError("--policy names no policy")
    return names


def collector(drawn: list[Any], scenario: Scenario) -> Callable[[str, Any], None]:
    from ops.simulate.report.charts import curves

    return lambda name, pool: drawn.append(curves(pool, scenario.slo))


def say_refused(why: str) -> None:
    """With `--progress`, why there is no run, without the flags of a command line."""
    if LINES_KEY in click.get_current_context().meta:
        click.echo(json.dumps({"refused": why}), err=True)


@contextmanager
def progress_of(
    scenario: Scenario, policies: list[str]
) -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    """A progress bar for each policy, on stderr if that is a terminal: half arrivals, half answers."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if not policies:
        yield lambda name: None, lambda rows: None
        return
    if LINES_KEY in click.get_current_context().meta:
        yield _progress_lines(2 * sum(1 for _ in scenario.source))
        return
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        total = 2 * sum(1 for _ in scenario.source)
        tasks = {name: progress.add_task(name, total=total, start=False) for name in policies}
        now = tasks[policies[0]]

        def on_policy(name: str) -> None:
            nonlocal now
            now = tasks[name]
            progress.start_task(now)

        yield on_policy, lambda rows: progress.advance(now, rows)


def _progress_lines(total: int) -> tuple[Callable[[str], None], Callable[[int], None]]:
    meta = click.get_current_context().meta
    line: dict[str, Any] = {"policy": "", "number": 0, "done": 0, "total": total}
    said_s = 0.0

    def say() -> None:
        nonlocal said_s
        said_s = time.monotonic()
        click.echo(json.dumps(line), err=True)

    def on_policy(name: str) -> None:
        meta[LINES_KEY] += 1
        line.update(policy=name, number=meta[LINES_KEY], done=0)
        say()

    def on_rows(rows: int) -> None:
        line["done"] += rows
        if time.monotonic() - said_s >= LINE_EVERY_S:
            say()

    return on_policy, on_rows


def trace_of(name: str, rate: float | None = None, seed: int = 0) -> Source:
    """A trace file, or a shipped trace: `azure`, `arena`, `servegen`. Raises `BadTrace`."""
    from ops.simulate.traffic.generate import TRACES
    from ops.simulate.traffic.trace import TraceFile

    return TraceFile(TRACES.get(name, Path(name)), rate, seed)


def cut(source: Source, speed: float, limit: int | None) -> Source:
    from ops.simulate.traffic.requests import Sped

    return Sped(source, speed, limit) if speed != 1 or limit is not None else source


def run_and_answer(
    scenario: Scenario,
    policies: list[str],
    baseline: BaselineRun | None = None,
    **more: Any,
) -> None:
    """Simulates, draws and answers; the `baseline` comes first, and `more` is added to the report. Raises
    `BadTrace`, ValueError."""
    from ops.reporting import plain
    from ops.simulate.report.charts import charts
    from ops.simulate.report.show import show
    from ops.simulate.run import simulate

    drawn: list[Any] = []
    collect = collector(drawn, scenario) if page_file() else lambda name, pool: None
    if baseline is not None:
        collect(baseline.pool.policy, baseline.pool)
    with progress_of(scenario, policies) as (on_policy, on_rows):
        report = simulate(scenario, policies, on_policy=on_policy, on_rows=on_rows, on_pool=collect)
    report |= plain(more)
    if baseline is not None:
        report["policies"].insert(0, plain(baseline.figures))
        report = plain({"warning": baseline.warning, "baseline": baseline.comparison}) | report
    answer(report, lambda: show(report), charts(drawn, scenario.slo))
