"""`fairgate policy learn`: a table of actions by macro-state, learned on the simulator."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ops.cli.base import Command, Failure, answer, settings_now, wants_json
from ops.cli.options import Number
from ops.cli.simulate.options import cut, machine_of, options_asked, serving_options, trace_of

if TYPE_CHECKING:
    from gateway.flow.learned.table_file import LearnedTable
    from ops.simulate.learn.trial import LearningSetup
    from ops.simulate.machines.machines import Machine
    from ops.simulate.traffic.requests import Source

DAY_S = 86_400.0
LINE_EVERY = 0.1
"""Of the budget, off a terminal."""


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Requests, and what served them as far as it is known."""

    source: Source
    model: str
    machine: Machine
    replicas: int
    options: dict[str, Any]
    flow: Callable[[], Any]


@click.command("learn", cls=Command)
@click.option(
    "--trace",
    metavar="FILE",
    help="CSV or CSV.gz, as for `fairgate simulate`; or azure, arena, servegen.",
)
@click.option("--days", type=Number(int, 1, 366), help="Use the recorded traffic of this many days instead.")
@click.option("--of-model", metavar="NAME", help="With --days: this model, where several are served.")
@click.option(
    "--speed", type=Number(float), default=1.0, show_default=True, help="Replay faster: 2 is twice the load."
)
@serving_options(compares=False)
@click.option(
    "--seed", type=Number(int, 0, 1_000_000), default=0, show_default=True, help="Of all that is drawn."
)
@click.option(
    "--budget",
    type=Number(int, 1, 1_000_000_000),
    metavar="REQUESTS",
    help="Simulated requests, all runs together.  [default: 120000]",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File for the table; one that is there is replaced only by a better one.  [default: write none]",
)
def learn(
    trace: str | None,
    days: int | None,
    of_model: str | None,
    speed: float,
    seed: int,
    budget: int | None,
    out: Path | None,
    **asked: Any,
) -> None:
    """Searches the best settings for each kind of load, and tests them on unseen traffic.

    \b
    On the simulator: one vector of actions for each of at most 12 macro-states, tried one change at a time on
    pieces of every other stretch of the trace (hours, where it has many); then pieces of the others, which
    were held out, are served with the table and with hybrid, with several seeds. Minimised, over all
    submitted requests (refused: longest wait, and missed):
      0.25 x mean of min(TTFT / its target, 4) + 1 x share that misses --slo
      + 0.1 x (energy of an output token / hybrid's - 1), where the machine's power is known
    The same traffic, machine, seed and budget give the same table everywhere. Some minutes of one core.
    The table is written only if it wins on the held-out pieces by more than the seeds differ: against
    hybrid, and against the table in --out. Else the exit code is 1, and the answer says so.

    \b
      fairgate policy learn --trace azure --gpu l40s --speed 1.3 --out learned.json
      fairgate policy learn --days 7 --out /etc/fairgate/learned.json

    \b
    --json answers:
      {"trace": "azure2023_conv.csv.gz", "machine": "8b on l40s", "seed": 0, "simulated_requests": 119640,
       "objective": "0.25 x …", "changes": [{"states": [0, …], "action": "admission", "value": 1.0,
       "gain": 0.4, "spread": 0.01}, …], "entries": [{"state": 0, "words": "no queue; …", "share": 0.6,
       "actions": {"slots": 1.0, …}}, …], "judged": {"learned": 0.03, "hybrid": 0.11, "spread": 0.003,
       "wins": true, …}, "is_better": true, "written": "learned.json", "notes": [], …}
    """
    from ops.simulate.learn.learn import DEFAULT_BUDGET
    from ops.simulate.learn.learn import learn as learn_from
    from ops.simulate.learn.segments import MOST_REQUESTS
    from ops.simulate.learn.show import report, show
    from ops.simulate.traffic.requests import BadTrace

    if (trace is None) == (days is None):
        raise click.UsageError("say one of --trace and --days")
    if out is not None and not out.absolute().parent.is_dir():
        raise click.UsageError(f"there is no directory for {str(out)!r}")
    budget = budget or DEFAULT_BUDGET
    try:
        traffic = _of_trace(trace, asked) if trace is not None else _of_days(days or 0, of_model, asked)
        setup = _setup(traffic, asked)
        source = cut(traffic.source, speed, None)
        requests = list(islice(source, MOST_REQUESTS + 1))
        old, notes = _table_there(out, setup)
        with _progress(f"learning from {source.name}") as progress:
            outcome = learn_from(
                source.name,
                requests,
                setup,
                has_prefixes=source.has_prefixes,
                seed=seed,
                budget=budget,
                old=old,
                progress=progress,
            )
    except BadTrace as error:
        raise Failure(str(error)) from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    written = None
    if not outcome.wins:
        notes.append(_why_not(out, outcome.against_hybrid.wins))
    elif out is not None:
        _write(out, outcome.table.encode())
        written = out
    answer(report(outcome, setup, budget, written, notes), lambda: show(outcome, setup, written, notes))
    if not outcome.wins:
        raise click.exceptions.Exit(1)


def _why_not(out: Path | None, beats_hybrid: bool) -> str:
    against = "the table that is there" if beats_hybrid else "hybrid"
    kept = "" if out is None else f", and {out} stays as it is"
    return (
        f"The table does not win against {against} on the held-out pieces by more than the seeds differ:"
        f" it is not taken over{kept}. More traffic (--days, a longer --trace) or a larger --budget may find"
        " a better one; where the load is never above what the machine serves, hybrid is hard to beat."
    )


def _setup(traffic: _Traffic, asked: dict[str, Any]) -> LearningSetup:
    from engine.scheduling.policy import options_of
    from ops.simulate.learn.trial import LearningSetup
    from ops.simulate.slo import SloLimits

    return LearningSetup(
        traffic.model,
        traffic.machine,
        traffic.replicas,
        SloLimits.of(asked["slo"]) if asked["slo"] else SloLimits(),
        predictions=asked["predictions"],
        options=options_of(traffic.options | options_asked(asked)),
        flow=traffic.flow,
    )


def _of_trace(trace: str, asked: dict[str, Any]) -> _Traffic:
    from ops.simulate.learn.trial import queue_as_served

    machine = machine_of(None, asked)
    model = asked["model_name"] or ("8b" if asked["profile"] is None else "")
    return _Traffic(
        trace_of(trace), model, machine, asked["replicas"] or 1, {}, partial(queue_as_served, machine)
    )


def _of_days(days: int, of_model: str | None, asked: dict[str, Any]) -> _Traffic:
    """The recorded traffic, with the server that ran it. Raises `Failure`, `BadTrace`."""
    from ops.cli.simulate.whatif import read_rows, server_named
    from ops.simulate.learn.trial import POLICY, queue_as_served
    from ops.simulate.recorded import read

    until_s = time.time()
    rows, described = asyncio.run(read_rows(settings_now(), until_s - days * DAY_S, until_s, of_model))
    recorded = read(rows, f"the last {days} days" if days > 1 else "the last day", described)
    server = server_named(rows, described, POLICY, asked)
    machine = machine_of(None, asked, None if server is None else server.machine())
    replicas = asked["replicas"] or (1 if server is None else server.replicas)
    return _Traffic(
        recorded,
        rows[0].model,
        machine,
        replicas,
        {} if server is None else server.options_of_others({}).changed(),
        partial(queue_as_served, machine) if server is None else partial(server.flow, machine, replicas),
    )


def _table_there(out: Path | None, setup: LearningSetup) -> tuple[LearnedTable | None, list[str]]:
    """The table that a new one has to beat, and what is to be said of one that it cannot be compared with."""
    from gateway.flow.learned.table_file import BadLearnedTable, LearnedTable

    if out is None or not out.exists():
        return None, []
    rest = "a new table has to beat hybrid alone to replace it"
    try:
        old = LearnedTable.load(out)
    except BadLearnedTable as error:
        return None, [f"What is there cannot be compared: {error}; {rest}."]
    if (old.model, old.machine) != (setup.model, setup.machine.name):
        return None, [
            f"{out} is a table for {old.model!r} on {old.machine!r}, and this is {setup.model!r} on"
            f" {setup.machine.name!r}: {rest}."
        ]
    return old, []


def _write(out: Path, content: bytes) -> None:
    """Replaces the file at once: a gateway that reads it finds a whole table. Raises `Failure`."""
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(out)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise Failure(f"the table could not be written: {error}") from None


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Reports on stderr how many requests are simulated: a bar on a terminal, else a line for every tenth."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn

    console = Console(stderr=True)
    if wants_json():
        yield lambda done, of: None
        return
    if not console.is_terminal:
        yield _lines(title)
        return
    columns: Sequence[Any] = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TextColumn("simulated requests"),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, of: bars.update(task, completed=done, total=of)


def _lines(title: str) -> Callable[[int, int], None]:
    said = -1

    def tell(done: int, of: int) -> None:
        nonlocal said
        if (tenth := int(done / of / LINE_EVERY)) > said:
            said = tenth
            click.echo(f"{title}: {100 * done // of} %, {done:,} of {of:,} simulated requests", err=True)

    return tell
