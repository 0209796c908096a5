"""`fairgate whatif`: recorded traffic with other policies, sizes or machines, on a virtual clock."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ops.cli.base import Failure, PageCommand, settings_now
from ops.cli.options import SHORT_TIMES, Duration
from ops.cli.simulate.options import (
    cut,
    learned_table_at,
    machine_of,
    names_machine,
    options_asked,
    policies_of,
    progress_of,
    progress_option,
    run_and_answer,
    say_refused,
    scenario_of,
    serving_options,
)
from tenants.typed import instant_typed

if TYPE_CHECKING:
    from ops.settings.settings import Settings
    from ops.simulate.origin import ReplayedServer
    from ops.simulate.recorded import Recorded
    from ops.simulate.replay import BaselineRun
    from ops.simulate.run import Scenario
    from tenants.ledger.timelines import RecordedTimeline

MOST_ROWS = 500_000
"""Timelines read per query."""
DATES = ["%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S.%f", "%Y-%m-%d"]


class Utc(click.DateTime):
    """Also the times that other commands take."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        at = instant_typed(value, datetime.now(UTC)) if isinstance(value, str) else None
        return super().convert(value, param, ctx) if at is None else at.astimezone(UTC).replace(tzinfo=None)


@click.command(cls=PageCommand)
@click.option("--last", type=Duration(), default="1h", show_default=True, help="How far back: 30m or 24h.")
@click.option("--since", "--from", "from_", type=Utc(DATES), help=f"From this time on (UTC): {SHORT_TIMES}.")
@click.option("--until", "--to", "to", type=Utc(DATES), help="Before this time (UTC).  [default: now]")
@click.option(
    "--of-model", metavar="NAME", help="Only requests of this model; needed where several are served."
)
@click.option("--gateway", metavar="ID", help="Only what this gateway served.")
@click.option(
    "--tenant", "tenants", metavar="NAME", multiple=True, help="Only this tenant's requests (repeat)."
)
@serving_options(recorded=True)
@click.option(
    "--weight",
    "weights",
    metavar="TENANT=WEIGHT",
    multiple=True,
    help="Change a tenant's weight (repeat).",
)
@click.option(
    "--limits",
    "limits_file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Use the limits of this file (as for `fairgate apply`).",
)
@click.option(
    "--rows", "most_rows", type=click.IntRange(1), metavar="ROWS", help="Only the first N requests."
)
@click.option(
    "--speed", type=float, default=1.0, show_default=True, help="Replay faster: 2 is twice the load."
)
@progress_option
def whatif(
    last: float,
    from_: datetime | None,
    to: datetime | None,
    of_model: str | None,
    gateway: str | None,
    tenants: tuple[str, ...],
    policy: str | None,
    weights: tuple[str, ...],
    limits_file: Path | None,
    most_rows: int | None,
    speed: float,
    **asked: Any,
) -> None:
    """Replays recorded traffic with other policies, sizes or GPUs.

    The traffic comes from the ledger and the timelines of requests that ended in that time. They name the
    server that ran them: its engines and their step times, its policy, queue, weights and limits; the
    settings of this shell do not matter. First comes the baseline, a simulation of that server under its
    policy, with the error that the rest may have. What a flag names replaces what was, and the report says
    so. See docs/simulating.md.

    \b
      fairgate whatif
      fairgate whatif --policy vtc,fcfs,hybrid
      fairgate whatif --last 24h --replicas 2 --slo ttft=1
      fairgate whatif --weight acme=3 --limits limits.yaml
      fairgate whatif --since 2026-03-02T09:00 --until 2026-03-02T10:00 --speed 2 --html twice-the-load.html

    \b
    --json answers what `fairgate simulate --json` does, and
      {"warning": null, "baseline": [{"figure": "ttft_p50", "served_s": 0.41, "baseline_s": 0.40,
        "off": -0.02, "stated_error": 0.06, "is_within": true, "simulated_alone_s": 0.31}, …],
       "overrides": ["replicas 2 (served: 1)"], "recorded": {"policy": "as it was", "requests": 812,
        "ttft_s": {"p50": 0.4, …}, "attainment": 0.97, "tenants": {…}, …}, "unserved": 3,
       "policies": [{"policy": "vtc", "is_baseline": true, …}, …], …}
    """
    from ops.simulate.changed_terms import limits_in_file, weights_asked, with_terms
    from ops.simulate.origin import only_of
    from ops.simulate.recorded import as_it_was, read
    from ops.simulate.traffic.requests import BadTrace
    from tenants.config_file.yaml_reader import BadFile

    settings = settings_now()
    until_s = time.time() if to is None else to.replace(tzinfo=UTC).timestamp()
    since_s = until_s - last if from_ is None else from_.replace(tzinfo=UTC).timestamp()
    if not since_s < until_s:
        raise click.UsageError("--since must lie before --until")
    try:
        rows, described = asyncio.run(read_rows(settings, since_s, until_s, of_model))
        if gateway is not None:
            rows = only_of(gateway, rows, described)
        since, until = (datetime.fromtimestamp(at_s, UTC) for at_s in (since_s, until_s))
        name = f"traffic of {since:%Y-%m-%d %H:%M} to {until:%H:%M} UTC"
        recorded = read(rows, name, described, most_rows)
        part = recorded.of(tenants) if tenants else recorded
        limits = limits_in_file(_content(limits_file)) if limits_file is not None else []
        changed, terms = with_terms(part, rows[0].model, weights_asked(weights), limits)
        server = server_named(rows, described, policy, asked)
        machine = machine_of(None, asked, None if server is None else server.machine())
        scenario = scenario_of(cut(changed, speed, None), machine, None, asked)
        baseline, overrides = None, terms
        if limits:
            scenario = replace(scenario, begins_s=recorded.begins_s)
        names = policies_of(policy, "")
        if server is not None:
            overrides = [*_overrides(server, scenario, asked), *terms]
            scenario, baseline = _as_served(server, recorded, scenario, asked)
            if overrides or part is not recorded or speed != 1:
                names = names or [server.policy]
            else:  # the baseline is just that
                names = [name for name in names if name != server.policy]
        run_and_answer(
            scenario,
            names,
            baseline,
            recorded=as_it_was(part, scenario.slo),
            unserved=recorded.unserved,
            overrides=overrides,
        )
    except BadTrace as error:
        say_refused(error.why)
        raise Failure(str(error)) from None
    except BadFile as error:
        raise click.UsageError(f"{limits_file}: {error}") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _content(file: Path) -> bytes:
    """Raises `Failure`."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise Failure(f"{error.filename}: cannot be read ({error.strerror})") from None


def server_named(
    rows: list[RecordedTimeline], described: dict[str, bytes], policy: str | None, asked: dict[str, Any]
) -> ReplayedServer | None:
    """The server that the rows name; None where they name none and flags say all of it. Raises `BadTrace`."""
    from ops.simulate.origin import ServerUnknown, replayed_server

    try:
        server = replayed_server(rows, described)
        server.machine()
    except ServerUnknown:
        if policy is None or not names_machine(asked):
            raise
        return None
    return server


def _as_served(
    server: ReplayedServer, recorded: Recorded, scenario: Scenario, asked: dict[str, Any]
) -> tuple[Scenario, BaselineRun]:
    """The scenario with what the server had and no flag names, and the baseline. Raises ValueError."""
    from ops.simulate.replay import BaselineRun

    options, machine = options_asked(asked), server.machine()
    served_options = server.options({})
    learned = scenario.learned or learned_table_at(served_options.learned_table, machine.name)
    served = replace(
        scenario,
        source=recorded,
        machine=machine,
        replicas=server.replicas,
        predictions="learned",
        options=served_options,
        flow=partial(server.flow, machine, server.replicas),
        begins_s=recorded.begins_s,
        padded=False,
        learned=learned,
    )
    with progress_of(served, [server.policy]) as (on_policy, on_rows):
        on_policy(server.policy)
        run = BaselineRun.of(recorded, served, server.policy, on_rows)
    replicas = asked["replicas"] or server.replicas
    otherwise = replace(
        scenario,
        replicas=replicas,
        options=server.options_of_others(options),
        options_by_policy={server.policy: server.options(options)},
        flow=partial(server.flow, scenario.machine, replicas),
        begins_s=recorded.begins_s,
        learned=learned,
        # What another machine falls short of is not known.
        shortfall=None if names_machine(asked) else run.baseline.shortfall,
    )
    return otherwise, run


def _overrides(server: ReplayedServer, scenario: Scenario, asked: dict[str, Any]) -> list[str]:
    """What flags put in the place of what served, in words. Raises ValueError."""
    served, machine = server.machine(), scenario.machine
    pairs: list[tuple[str, object, object]] = [
        ("machine", machine.name, served.name),
        ("replicas", asked["replicas"] or server.replicas, server.replicas),
    ]
    sizes = ("kv_tokens", "max_sequences", "max_batched_tokens")
    pairs += [(name, getattr(machine, name), getattr(served, name)) for name in sizes]
    before = server.options({}).changed()
    for name, value in server.options(options_asked(asked)).changed().items():
        pairs.append((f"option {name}", value, before.get(name, "default")))
    pairs += [("predictions", scenario.predictions, "learned"), ("padded", scenario.padded, False)]
    return [f"{name} {value} (served: {was})" for name, value, was in pairs if value != was]


async def read_rows(
    settings: Settings, since_s: float, until_s: float, of_model: str | None
) -> tuple[list[RecordedTimeline], dict[str, bytes]]:
    """Requests that ended in that time, and the descriptions that they name. Raises `Failure`."""
    from tenants.errors import TenancyError
    from tenants.ledger import timelines
    from tenants.storage.database import open_database

    if not settings.database_url and not (Path(settings.data_dir) / "fairgate.db").exists():
        raise Failure(f"no database in {settings.data_dir}: name the right --data-dir")
    database = open_database(settings.resolved_database_url)
    try:
        rows = await timelines.recorded(
            database, from_us=round(since_s * 1e6), to_us=round(until_s * 1e6), most=MOST_ROWS + 1
        )
        if len(rows) > MOST_ROWS:
            raise Failure(f"more than {MOST_ROWS:,} requests ended in that time: take a shorter one")
        models = sorted({row.model for row in rows})
        if of_model is None and len(models) > 1:
            raise Failure(f"several models were served ({', '.join(models)}): say which one with --of-model")
        if of_model is not None and models and of_model not in models:
            raise Failure(
                f"no request of model {of_model!r} ended in that time; there are {', '.join(models)}"
            )
        chosen = [row for row in rows if of_model is None or row.model == of_model]
        ids = {digest for row in chosen for digest in (row.server, row.terms) if digest is not None}
        return chosen, await timelines.described(database, ids)
    except TenancyError as error:
        raise Failure(str(error)) from None
    finally:
        await database.close()
