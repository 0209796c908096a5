"""`fairgate place`: engines on the machines of a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import click

from ops.cli.base import Failure, answer, group, settings_now
from ops.cli.live import call, running_server
from ops.cli.options import Number
from ops.reporting import table

if TYPE_CHECKING:
    from ops.placement.placer import Placer

HEAD = click.option("--ray-address", envvar="RAY_ADDRESS", default="auto", help="Ray's head, HOST:PORT.")
WITHIN = click.option("--within", default=60.0, show_default=True, help="Seconds to empty a drained replica.")


@group()
def place() -> None:
    """Places engines on the machines of a Ray cluster.

    This machine must be part of the cluster, and the extra `ray` installed.

    \b
      fairgate place ray --replicas 4 --need GPU=1
      fairgate place status
      fairgate place stop
    """


@place.command()
@click.option("--replicas", type=Number(int, 1, 256), required=True, help="Engines: engine-0, engine-1, …")
@click.option(
    "--need", multiple=True, default=["CPU=1"], help="NAME=AMOUNT of each, in Ray.  [default: CPU=1]"
)
@click.option("--spread/--pack", default=True, show_default=True, help="On many machines, or few.")
@HEAD
@WITHIN
def ray(replicas: int, need: tuple[str, ...], spread: bool, ray_address: str, within: float) -> None:
    """Keeps engines on a Ray cluster until a signal; they continue after it and are found again.

    Each takes the settings that are given here, and keys and files from this data directory's path on its own
    machine. Those that are too many are drained and ended. `fairgate place status --json` answers what runs.
    """

    async def run(placer: Placer) -> None:
        names = [f"engine-{number}" for number in range(replicas)]
        task = asyncio.ensure_future(placer.run(names, within))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    _act(run, ray_address, dict(map(_amount, need)), "SPREAD" if spread else "DEFAULT")


@place.command()
@HEAD
def status(ray_address: str) -> None:
    """Lists what is placed.

    \b
    --json answers:
      {"data": [{"name": "engine-0", "state": "serves at tcp://10.0.0.5:40001"}, …]}
    """
    from ops.placement.plan import state_of

    reports, _ = _act(lambda placer: placer.known(), ray_address)
    rows = [(name, state_of(report)) for name, report in sorted(reports.items())]
    data = [{"name": name, "state": state} for name, state in rows]
    answer({"data": data}, lambda: table("replicas", ("replica", "state"), rows))


@place.command()
@HEAD
@WITHIN
def stop(ray_address: str, within: float) -> None:
    """Drains the placed engines, if a server runs on this data directory, and ends them.

    \b
    --json answers:
      {"ended": ["engine-0", "engine-1"]}
    """

    async def end(placer: Placer) -> list[str]:
        reports, written = await placer.known()
        await placer.retire(names := sorted({*reports, *written}), within)
        return names

    ended = _act(end, ray_address, {})
    answer({"ended": ended}, f"{len(ended)} replicas have ended")


def _amount(text: str) -> tuple[str, float]:
    name, _, amount = text.partition("=")
    try:
        return name, float(amount)
    except ValueError:
        raise click.UsageError(f"--need {text!r} is not NAME=AMOUNT, such as GPU=1") from None


def _act(act: Callable[[Placer], Awaitable[Any]], ray_address: str, *placing: Any) -> Any:
    """Connects to Ray and the database, and acts; with `placing`, alone. Raises `Failure`."""
    from ops.placement.placer import ClusterUnavailable, Placer
    from ops.serving import datadir
    from ops.settings.shown import variables_of
    from tenants.directory.placed_engines import PlacedEngines
    from tenants.errors import TenancyError
    from tenants.storage.database import open_database

    settings, server = settings_now(), running_server()

    def ask(method: str, path: str) -> dict[str, Any]:
        with contextlib.suppress(Failure):
            return {} if server is None else call(server, method, path)
        return {}

    async def run() -> Any:
        database = open_database(settings.resolved_database_url)
        try:
            return await act(
                Placer(cluster, PlacedEngines(database), ask, lambda text: click.echo(text, err=True))
            )
        finally:
            await database.close()

    try:
        from ops.placement.ray import RayCluster

        datadir.ensure(settings.data_dir)
        with (settings.data_dir / "place.lock").open("w") as lock:
            if placing:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            cluster = RayCluster(ray_address, (settings.data_dir, variables_of(settings)), *placing)
            return asyncio.run(run())
    except BlockingIOError:
        raise Failure(f"another `fairgate place` runs on {settings.data_dir}: end it first") from None
    except ModuleNotFoundError as error:
        raise Failure(f"{error.name} is not installed: pip install 'fairgate[ray]'") from None
    except (ClusterUnavailable, datadir.DataDirRefused, TenancyError) as error:
        raise Failure(str(error)) from None
