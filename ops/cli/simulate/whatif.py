"""`fairgate whatif`: recorded traffic with other policies, sizes or machines, on a virtual clock."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ops.cli.base import Command, Failure, settings_now
from ops.cli.options import Duration
from ops.cli.simulate.options import (
    check_outputs,
    cut,
    machine_of,
    picture_options,
    policies_of,
    run_and_answer,
    scenario_of,
    serving_options,
)

if TYPE_CHECKING:
    from ops.settings.settings import Settings
    from ops.simulate.figures.shortfall import Shortfall
    from ops.simulate.recorded import Recorded
    from ops.simulate.run import Scenario

MOST_ROWS = 500_000
"""Timelines read per query."""
DATES = ["%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d"]


@click.command(cls=Command)
@click.option(
    "--last", type=Duration(), default="1h", show_default=True, help="So far back, such as 30m or 24h."
)
@click.option("--from", "from_", type=click.DateTime(DATES), help="Since then (UTC), instead of --last.")
@click.option("--to", type=click.DateTime(DATES), help="Until then (UTC).  [default: now]")
@click.option("--of-model", metavar="NAME", help="Requests of this model, where several are served.")
@click.option("--tenant", "tenants", metavar="NAME", multiple=True, help="Only theirs (repeat).")
@serving_options
@click.option(
    "--served-by",
    metavar="POLICY",
    help="The policy that served it: what its simulation falls short of what happened is added to all.",
)
@click.option("--limit", type=click.IntRange(1), metavar="ROWS", help="The first requests alone.")
@click.option("--speed", type=float, default=1.0, show_default=True, help="So many times as fast as it was.")
@picture_options
def whatif(
    last: float,
    from_: datetime | None,
    to: datetime | None,
    of_model: str | None,
    tenants: tuple[str, ...],
    served_by: str | None,
    policy: str | None,
    limit: int | None,
    speed: float,
    plot: str | None,
    html: str | None,
    **asked: Any,
) -> None:
    """Serves recorded traffic again, on a virtual clock: other policies, other sizes, other GPUs.

    The traffic comes from the ledger and the timelines of requests that ended in that time. The machine is
    the one that served them, by the step times that its engine has learned, unless --gpu or --profile names
    another. What really happened stands beside what would have. See docs/simulating.md.

    \b
      fairgate whatif --policy vtc,fcfs,hybrid --served-by vtc
      fairgate whatif --last 24h --replicas 2 --slo ttft=1
      fairgate whatif --from 2026-03-02T09:00 --to 2026-03-02T10:00 --speed 2 --html twice-the-load.html

    \b
    --json answers what `fairgate simulate --json` does, and
      {"recorded": {"policy": "as it was", "requests": 812, "ttft_s": {"p50": 0.4, …}, "attainment": 0.97,
       "tenants": {…}, …}, "unserved": 3, …}
    """
    from ops.simulate.recorded import as_it_was
    from ops.simulate.traffic.requests import BadTrace

    settings = settings_now()
    until_s = time.time() if to is None else to.replace(tzinfo=UTC).timestamp()
    since_s = until_s - last if from_ is None else from_.replace(tzinfo=UTC).timestamp()
    if not since_s < until_s:
        raise click.UsageError("--from must lie before --to")
    check_outputs(plot, html)
    if asked["gpu"] is None and asked["model_name"] is None and asked["profile"] is None:
        asked |= _what_served(settings, asked)
    elif served_by is not None:
        raise click.UsageError(
            "--served-by compares with the machine that served: leave out --gpu, --model and --profile"
        )
    try:
        recorded = asyncio.run(_read(settings, since_s, until_s, of_model, tenants))
        scenario = scenario_of(cut(recorded, speed, limit), machine_of(None, asked), None, asked)
        if served_by is not None:
            scenario = replace(scenario, shortfall=_shortfall(recorded, scenario, served_by))
        run_and_answer(
            scenario,
            policies_of(policy, None, sustained=False),
            plot,
            html,
            recorded=as_it_was(recorded, scenario.slo),
            unserved=recorded.unserved,
        )
    except BadTrace as error:
        raise Failure(str(error)) from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _shortfall(recorded: Recorded, scenario: Scenario, served_by: str) -> Shortfall:
    """The shortfall of the recorded traffic as it came. Raises ValueError."""
    from ops.simulate.figures.shortfall import Shortfall
    from ops.simulate.recorded import records_of
    from ops.simulate.run import run_policy

    policy, *more = policies_of(served_by, None, sustained=False)
    if more:
        raise ValueError("--served-by names the one policy that was in force")
    pool, _ = run_policy(replace(scenario, source=recorded), policy)
    return Shortfall.of(records_of(recorded), pool.records)


def _what_served(settings: Settings, asked: dict[str, Any]) -> dict[str, Any]:
    """The machine that this data directory's engine learned, with the sizes of its settings."""
    from engine.core.learned_state import learned_path
    from engine.process.capacity import DEFAULTS, step_sizes

    path = learned_path(Path(settings.data_dir), "engine-0")
    if not path.is_file():
        raise Failure(
            f"no engine has learned its step times in {settings.data_dir}: name the machine with --gpu and "
            "--model, or a file with --profile"
        )
    engine = settings.engine
    device = _device_of(path)
    # Sizes at auto are what the engine derived them to be.
    steps = step_sizes(device, engine)
    found: dict[str, Any] = {"profile": str(path)}
    for name in ("max_sequences", "max_batched_tokens"):
        if asked[name] is None:
            found[name] = getattr(steps, name)
    if asked["kv_tokens"] is None and engine.num_blocks:
        found["kv_tokens"] = engine.num_blocks * (engine.block_tokens or DEFAULTS[device].block_tokens)
    return found


def _device_of(learned: Path) -> str:
    """`cpu` or `cuda`: where the engine computed that learned this file."""
    try:
        device = str(json.loads(learned.read_bytes())["key"]["device"])
    except (OSError, ValueError, KeyError, TypeError):
        return "cpu"  # whether the file is usable is for who reads all of it to say
    return device.partition(":")[0] if device.startswith("cuda") else "cpu"


async def _read(
    settings: Settings, since_s: float, until_s: float, of_model: str | None, tenants: tuple[str, ...]
) -> Recorded:
    """Raises `BadTrace`, `Failure`."""
    from ops.simulate.recorded import read
    from tenants.errors import TenancyError
    from tenants.ledger import timelines
    from tenants.storage.database import open_database

    if not settings.database_url and not (Path(settings.data_dir) / "fairgate.db").exists():
        raise Failure(f"no database in {settings.data_dir}: name the right --data-dir")
    database = open_database(settings.resolved_database_url)
    try:
        rows = await timelines.recorded(
            database, from_us=int(since_s * 1e6), to_us=int(until_s * 1e6), most=MOST_ROWS + 1
        )
    except TenancyError as error:
        raise Failure(str(error)) from None
    finally:
        await database.close()
    if len(rows) > MOST_ROWS:
        raise Failure(f"more than {MOST_ROWS:,} requests ended in that time: take a shorter one")
    models = sorted({row.model for row in rows})
    if of_model is None and len(models) > 1:
        raise Failure(f"several models were served ({', '.join(models)}): say which one with --of-model")
    if of_model is not None and models and of_model not in models:
        raise Failure(f"no request of model {of_model!r} ended in that time; there are {', '.join(models)}")
    known = sorted({row.tenant for row in rows})
    for name in tenants:
        if rows and name not in known:
            raise Failure(
                f"no request of tenant {name!r} ended in that time; there are {', '.join(known[:20])}"
            )
    chosen = [
        row
        for row in rows
        if (of_model is None or row.model == of_model) and (not tenants or row.tenant in tenants)
    ]
    since, until = (datetime.fromtimestamp(at_s, UTC) for at_s in (since_s, until_s))
    return read(chosen, f"traffic of {since:%Y-%m-%d %H:%M} to {until:%H:%M} UTC")
