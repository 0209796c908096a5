"""`fairgate policy`: scheduling policies, and tables worked out in advance."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ops.cli.base import Failure, answer, group, settings_now, wants_json
from ops.cli.policy.policy_learn import learn
from ops.cli.policy.policy_live import set_policy, show
from ops.cli.resource_commands import add_to
from ops.reporting import table
from tenants.resources.records.moves import MOVES

if TYPE_CHECKING:
    from engine.messages import StepTime
    from engine.scheduling.batch_or_wait.batch_model import RequestLengths
    from engine.scheduling.options import PolicyOptions

MOST_BATCH = 64


@group()
def policy() -> None:
    """Scheduling policies: list, explain, set, learn.

    \b
      fairgate policy list
      fairgate policy explain hybrid
      fairgate policy show
      fairgate policy moves --since 2h
      fairgate policy set hybrid
      fairgate policy solve --max-batch 8 --slo-s 1.5 --out table.json
      fairgate policy learn --trace azure --gpu l40s --speed 1.3 --out learned.json
    """


@policy.command("list")
def list_policies() -> None:
    """Lists the presets: a choice for each of the four decisions, and what they promise.

    A promise is kept by a policy if all four choices keep it: work conservation, freedom from starvation, the
    fairness bound, exactness, conservation of KV blocks, progress.

    \b
    --json answers:
      {"policies": [{"policy": "vtc", "order": "vtc", "admit": "predicted-reserve", "compose": "decode-first",
       "evict": "fair-victim", "options": {}, "claims": ["exactness", …]}, …],
       "need_table": ["table", "learned"]}
    """
    from engine.scheduling.policy import LEARNED_POLICIES, POLICIES, TABLE_POLICIES, make_policy

    options = _options()
    tables = (
        (TABLE_POLICIES, options.batch_or_wait_table is not None),
        (LEARNED_POLICIES, bool(options.learned_table)),
    )
    names = [*POLICIES, *(name for named, has_table in tables if has_table for name in named)]
    needing = [name for named, has_table in tables if not has_table for name in named]
    described = [make_policy(name, options).describe() for name in names]

    def text() -> None:
        table(
            "policies",
            ("policy", "order", "admit", "compose", "evict", "promises"),
            [
                (
                    item["policy"],
                    item["order"],
                    item["admit"],
                    item["compose"],
                    item["evict"],
                    ", ".join(item["claims"]),
                )
                for item in described
            ],
        )
        for name in needing:
            command, setting = ("learn", "learned_table") if name in LEARNED_POLICIES else ("solve", "table")
            click.echo(f"{name}: needs a table (`fairgate policy {command}`) in the setting policy.{setting}")

    answer({"policies": described, "need_table": needing}, text)


def _options() -> PolicyOptions:
    """Policy options, with the tables that the settings name; a learned one is not read."""
    from engine.scheduling.batch_or_wait.table_file import BadTable
    from engine.scheduling.options import PolicyOptions
    from engine.scheduling.policy import with_table

    try:
        named = settings_now().policy.options
        return with_table(PolicyOptions(table=named.table, learned_table=named.learned_table))
    except BadTable as error:
        raise Failure(f"setting policy.table: {error}") from None


@policy.command()
@click.argument("name")
@click.option(
    "--learned-table",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With the policy learned: the table to explain.  [default: that of the settings]",
)
def explain(name: str, learned_table: Path | None) -> None:
    """Explains policy NAME: its choices, options, promises, and when it loses.

    Of the policy learned also its table, in words: in each macro-state what it does otherwise than hybrid,
    what it was fitted on, and whether it wins on requests that it had not seen.

    \b
    --json answers:
      {"policy": "vtc", "made_for": "a calm tenant …", "loses_when": "tenants differ …",
       "claims": ["exactness", …], "options": {},
       "choices": [{"decision": "order", "choice": "vtc", "rule": "Who has had the least service? …"}, …],
       "all_options": [{"option": "slots", "value": 0, "default": 0, "takes": "a whole number from 0 to …",
       "help": "Decode tokens …"}, …],
       "learned": {"fit": {"model": "8b", "machine": "8b on h100", …}, "judged": {"learned": 41.2, …},
       "verdict": "it wins on …", "states": [{"state": 0, "words": "no queue; …", "share": 0.4, "actions":
       {"slots": 1.0, …}, "unlike_hybrid": ["50% of the sequences …", …]}, …]}}
    """
    from engine.scheduling.counters import ServiceCounters
    from engine.scheduling.options import OPTIONS
    from engine.scheduling.policy import CHOICES, LEARNED_POLICIES, UnknownPolicy, make_order, make_policy
    from engine.scheduling.reasons import CLAIM_WORDS, PURPOSES

    if learned_table is not None and name not in LEARNED_POLICIES:
        raise click.UsageError(f"--learned-table is for {', '.join(LEARNED_POLICIES)}, not for {name}")
    try:
        made = make_policy(name, _options())
    except UnknownPolicy as error:
        raise click.UsageError(f"{error} (`fairgate policy list` shows them)") from None
    described = made.describe()
    parts = {
        "order": make_order(made.order, ServiceCounters()),
        "admit": made.admit,
        "compose": made.compose,
        "evict": made.evict,
    }
    choices = [
        {"decision": decision, "choice": described[decision], "rule": _rule(type(part))}
        for decision, part in parts.items()
    ]

    def text() -> None:
        for choice in choices:
            click.secho(f"{choice['decision']}: {choice['choice']}", bold=True)
            click.echo("  " + choice["rule"].replace("\n", "\n  ").replace("\n  \n", "\n\n") + "\n")
        for claim in described["claims"]:
            click.echo(f"{name} promises {CLAIM_WORDS[claim]}")
        click.echo(f"{name} is made for: {made_for}")
        click.echo(f"{name} loses when: {loses_when}\n")
        if learned is not None:
            _print_learned(learned)
        table(
            "options (`fairgate policy set " + name + " --option NAME=VALUE`)",
            ("option", "value", "default", "takes", "meaning"),
            [
                (row["option"], _shown(row["value"]), _shown(row["default"]), row["takes"], row["help"])
                for row in options
            ],
        )

    path = learned_table or (Path(made.options.learned_table) if made.options.learned_table else None)
    learned = _learned(path) if name in LEARNED_POLICIES and path is not None else None
    made_for, loses_when = PURPOSES[name]
    options = [
        {
            "option": option.name,
            "value": getattr(made.options, option.name),
            "default": option.default,
            "takes": f"one of {', '.join(sorted(CHOICES[option.name]))}"
            if option.name in CHOICES
            else option.accepts,
            "help": option.help,
        }
        for option in OPTIONS.values()
    ]
    report = {
        "policy": name,
        "made_for": made_for,
        "loses_when": loses_when,
        "claims": described["claims"],
        "options": described["options"],
        "choices": choices,
        "all_options": options,
    }
    if learned is not None:
        report["learned"] = learned
    answer(report, text)


def _learned(path: Path) -> dict[str, Any]:
    from gateway.flow.learned.report import table_as_json
    from gateway.flow.learned.table_file import BadLearnedTable, LearnedTable

    try:
        return table_as_json(LearnedTable.load(path))
    except BadLearnedTable as error:
        raise Failure(str(error)) from None


def _print_learned(learned: dict[str, Any]) -> None:
    from gateway.flow.learned.report import state_words

    fit = learned["fit"]
    click.echo(
        f"fitted on {fit['trace']} for {fit['model']} on {fit['machine']}, with seed {fit['seed']} and"
        f" {fit['simulated_requests']:,} simulated requests"
    )
    click.echo(
        "outside of it (more than "
        + ", ".join(f"{name} {most:.4g}" for name, most in fit["most_seen"].items())
        + ") it is hybrid"
    )
    click.echo(learned["verdict"] + "\n")
    table(
        "macro-states, and what is done otherwise than by hybrid",
        ("", "macro-state", "of the looks", "otherwise"),
        [
            (state["state"], state["words"], f"{state['share']:.1%}", state_words(state))
            for state in learned["states"]
        ],
    )
    click.echo("")


def _shown(value: object) -> str:
    return (
        "the policy's own"
        if value in (None, "")
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _rule(choice: type) -> str:
    """The docstrings of the choice's module and class."""
    texts = [inspect.getdoc(sys.modules[choice.__module__]), inspect.getdoc(choice)]
    return "\n\n".join(dict.fromkeys(text for text in texts if text))


class _Lengths(click.ParamType["RequestLengths"]):
    """`96,16`: prompt and output tokens."""

    name = "prompt,output"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> RequestLengths:
        from engine.scheduling.batch_or_wait.batch_model import RequestLengths

        try:
            prompt, output = (int(part) for part in str(value).split(","))
            return RequestLengths(prompt, output)
        except ValueError:
            self.fail(
                f"{value!r} must be prompt and output tokens, both at least 1, such as 96,16", param, ctx
            )


class _StepTime(click.ParamType["StepTime"]):
    """A JSON file, or the coefficients."""

    name = "file|numbers"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> StepTime:
        from engine.messages import StepTime

        names = ("base_s", "per_token_s", "per_context_token_s", "per_sequence_s")
        text = str(value)
        try:
            if Path(text).is_file():
                stored = json.loads(Path(text).read_text())
                numbers = [float(stored[name]) for name in names]
            else:
                numbers = [float(part) for part in text.split(",")]
                numbers += [0.0] * (len(names) - len(numbers))
        except (OSError, ValueError, KeyError, TypeError):
            numbers = []
        if len(numbers) != len(names) or not (numbers[0] > 0 and all(0 <= item < 1e6 for item in numbers)):
            self.fail(
                f"{text!r} must be a JSON file with {', '.join(names)}, or these numbers, the first above 0"
                " and none negative, such as 0.012,0.0003",
                param,
                ctx,
            )
        base_s, per_token_s, context_s, sequence_s = numbers
        return StepTime(base_s, per_token_s, context_s, sequence_s, samples=0, relative_error=0.0)


def _rates(ctx: click.Context, param: click.Parameter, value: str | None) -> list[float]:
    try:
        rates = [float(part) for part in value.split(",")] if value else []
    except ValueError:
        raise click.BadParameter(f"{value!r} must be numbers, such as 0.5,1,2") from None
    if any(not 0 < rate < 1e6 for rate in rates):
        raise click.BadParameter(f"{value!r}: arrivals a second lie above 0 and below a million")
    return sorted(set(rates))


def _pressures(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} must be parts of the pool, such as 0,0.5,0.75") from None


@policy.command()
@click.option(
    "--rates",
    "--lambda",
    callback=_rates,
    metavar="RATE,...",
    help="Arrivals a second to solve for.  [default: 8, from a tenth to all of what full batches serve]",
)
@click.option(
    "--alpha", type=float, default=1.0, show_default=True, help="Cost of a second of mean latency; 0 or more."
)
@click.option(
    "--beta", type=float, default=0.005, show_default=True, help="Cost of a watt of mean power; 0 or more."
)
@click.option(
    "--gamma", type=float, default=2.0, show_default=True, help="Cost of all starting too late; 0 or more."
)
@click.option(
    "--slo-s", type=float, default=1.5, show_default=True, help="Starting later than this is too late."
)
@click.option(
    "--max-batch", type=click.IntRange(1, MOST_BATCH), default=8, show_default=True, help="Largest batch."
)
@click.option(
    "--step-time",
    type=_StepTime(),
    default="0.012,0.0003,0.00000015,0.0004",
    show_default=True,
    help="Seconds of a step: constant, per token, per token attended to, per sequence.",
)
@click.option(
    "--short", type=_Lengths(), default="96,16", show_default=True, help="A short request's tokens."
)
@click.option(
    "--long", type=_Lengths(), default="512,128", show_default=True, help="A long request's tokens."
)
@click.option(
    "--long-share", type=float, default=0.2, show_default=True, help="Part of them that is long, 0 to 1."
)
@click.option("--padded", is_flag=True, help="Every row is computed at the longest row's length.")
@click.option(
    "--busy-watts", type=float, default=200.0, show_default=True, help="Power of running, above idle."
)
@click.option("--launch-joules", type=float, default=0.0, show_default=True, help="Energy to start a batch.")
@click.option(
    "--longest-wait-s", type=float, help="Nobody waits longer for others.  [default: twice --slo-s]"
)
@click.option(
    "--wait-buckets",
    type=click.IntRange(min=1),
    default=12,
    show_default=True,
    help="Steps of time waited that are told apart, up to --longest-wait-s.",
)
@click.option(
    "--line",
    type=click.Choice(["length", "arrival"]),
    default="length",
    show_default=True,
    help="What the queue is ordered by: short ones first (sjf, srpt), or first come, first served.",
)
@click.option(
    "--pool-tokens",
    type=int,
    default=0,
    show_default=True,
    help="KV pool; 0: it never limits a batch, and the next two do not matter.",
)
@click.option(
    "--kv-pressures",
    callback=_pressures,
    default="0,0.5,0.75",
    metavar="PART,...",
    show_default=True,
    help="Parts of the pool that others may hold (paused sequences), told apart.",
)
@click.option(
    "--pressure-hold-s",
    type=float,
    default=30.0,
    show_default=True,
    help="Mean seconds until the KV pressure changes to one next to it.",
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="File for the table."
)
def solve(
    rates: list[float],
    alpha: float,
    beta: float,
    gamma: float,
    slo_s: float,
    max_batch: int,
    step_time: StepTime,
    short: RequestLengths,
    long: RequestLengths,
    long_share: float,
    padded: bool,
    busy_watts: float,
    launch_joules: float,
    longest_wait_s: float | None,
    wait_buckets: int,
    line: str,
    pool_tokens: int,
    kv_pressures: tuple[float, ...],
    pressure_hold_s: float,
    out: Path,
) -> None:
    """Computes when a batch should run and when it should wait, as a table.

    \b
    For batches that run to completion. What is minimised, at each arrival rate:
      alpha x mean latency [s] + beta x mean power [W] + gamma x share that starts later than --slo-s
    over the number waiting, how long the first has waited, how many are long and how much KV others hold. How
    it is done, and where it is worth it: docs/batch-or-wait.md. `run from` in the answer: from how many
    waiting, 0, 1, 2, ... of them long, a batch runs at once. Some seconds an arrival rate without a pool,
    up to a minute with one.
    --json answers:
      {"out": "table.json", "bytes": 18300, "capacity_per_s": 3.93, "longest_wait_s": 3.0, "long_tokens": 268,
       "policies": [{"rate_per_s": 0.39, "kv_pressure": 0.0, "cost": 1.02, "least_cost": 1.02,
       "most_cost": 1.02, "saturated": false, "run_from": [1, 1, 2, 3, 4, 5]}, …]}
    """
    from engine.scheduling.batch_or_wait.batch_model import BatchModel
    from engine.scheduling.batch_or_wait.kv_pool import KvMemory
    from engine.scheduling.batch_or_wait.objective import Objective
    from engine.scheduling.batch_or_wait.states import Grid
    from engine.scheduling.batch_or_wait.table import solve_table
    from engine.scheduling.batch_or_wait.value_iteration import NotSolved

    try:
        model = BatchModel(step_time, short, long, long_share, padded, busy_watts, launch_joules)
        objective = Objective(alpha, beta, gamma, slo_s)
        wait_s = 2 * slo_s if longest_wait_s is None else longest_wait_s
        grid = Grid(max_batch, wait_s, wait_buckets, short_first=line == "length")
        capacity = model.capacity_per_s(max_batch)
        rates = rates or [capacity * 0.1 ** (1 - step / 7) for step in range(8)]
        with progress_bar(f"solving {len(rates)} arrival rates") as progress:
            pool = KvMemory(pool_tokens, kv_pressures, pressure_hold_s)
            solved = solve_table(model, rates, objective, grid, pool, progress=progress)
    except NotSolved as error:
        raise Failure(str(error)) from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    try:
        solved.save(out)
    except OSError as error:
        raise Failure(f"the table could not be written: {error}") from None
    report: dict[str, Any] = {
        "out": str(out),
        "bytes": out.stat().st_size,
        "capacity_per_s": capacity,
        "longest_wait_s": solved.longest_wait_s,
        "long_tokens": solved.long_tokens,
        "policies": solved.summary(),
    }

    def text() -> None:
        table(
            f"cost and control limits; full batches serve {capacity:.3g}/s",
            ("arrivals/s", "KV held by others", "cost", "run from", ""),
            [
                (
                    f"{item['rate_per_s']:.3g}",
                    f"{100 * item['kv_pressure']:.0f} %",
                    f"{item['cost']:.4f}",
                    " ".join(str(count) for count in item["run_from"]),
                    "more arrives than can be served" if item["saturated"] else "",
                )
                for item in report["policies"]
            ],
        )
        click.echo(f"{out}: {report['bytes']:,} bytes")

    answer(report, text)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[float], None]]:
    """A progress bar on stderr, fed with the part done; none with `--json` or off a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=wants_json() or not console.is_terminal) as bars:
        task = bars.add_task(title, total=1.0)
        yield lambda done: bars.update(task, completed=done)


policy.add_command(learn)
policy.add_command(show)
policy.add_command(set_policy)
add_to(policy, MOVES)
