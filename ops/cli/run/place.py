"""`fairgate place`: engines on the machines of a Ray cluster."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ops.cli.base import Command, Failure, answer, group, settings_now
from ops.cli.live import call, running_server
from ops.reporting import table

if TYPE_CHECKING:
    from ops.placement.placer import Cluster, Placer
    from ops.serving.datadir import ServerFile
    from tenants.directory.placed_engines import PlacedEngines

T = TypeVar("T")
MOST_REPLICAS = 256
RAY_ADDRESS = click.option(
    "--ray-address",
    default="auto",
    show_default=True,
    help="Ray's head, HOST:PORT; this machine is a node of it.",
)
WITHIN = click.option(
    "--within",
    "within_s",
    type=click.FloatRange(0, 86_400),
    default=60.0,
    show_default=True,
    help="Seconds in which a drained replica may become empty, before it is ended.",
)


@group()
def place() -> None:
    """Places engines on the machines of a Ray cluster; needs the extra ray.

    \b
      fairgate place ray --replicas 4 --gpus 1     until Ctrl-C; engines go on without it
      fairgate place status
      fairgate place stop

    Gateways find the engines by rows in the database, under which they are called engine-0, engine-1, …
    """


@place.command(cls=Command)
@click.option("--replicas", type=click.IntRange(1, MOST_REPLICAS), required=True, help="How many engines.")
@click.option("--cpus", type=click.FloatRange(0), default=1.0, show_default=True, help="CPUs of each.")
@click.option("--gpus", type=click.FloatRange(0), default=0.0, show_default=True, help="GPUs of each.")
@click.option(
    "--resource", "resources", multiple=True, metavar="NAME=AMOUNT", help="Another resource of Ray."
)
@click.option("--spread/--pack", default=True, show_default=True, help="Over all machines, or few.")
@RAY_ADDRESS
@WITHIN
def ray(
    replicas: int,
    cpus: float,
    gpus: float,
    resources: tuple[str, ...],
    spread: bool,
    ray_address: str,
    within_s: float,
) -> None:
    """Keeps so many engines on a Ray cluster, in the foreground, until a signal; the engines go on after it.

    Started again it finds them, and drains and ends those that are too many. Each takes the settings that are
    given here (model, engine, policy), and keys and files from this data directory's path on its machine.
    """
    need = {"CPU": cpus, "GPU": gpus} | dict(map(_resource, resources))
    need = {name: amount for name, amount in need.items() if amount}
    names = [f"engine-{number}" for number in range(replicas)]

    async def run(placer: Placer, cluster: Cluster, rows: PlacedEngines) -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await placer.run(names, stop)

    _with_placer(run, ray_address, within_s, need=need, spread=spread)


@place.command(cls=Command)
@RAY_ADDRESS
def status(ray_address: str) -> None:
    """Lists the placed replicas: state, machine, and how long gateways may take the placer's word.

    \b
    --json answers:
      {"data": [{"name": "engine-0", "state": "serves at tcp://10.0.0.5:40001", "place": "10.0.0.5",
       "lease_left_s": 88.2}, …]}
    """

    async def read(placer: Placer, cluster: Cluster, rows: PlacedEngines) -> list[dict[str, Any]]:
        from ops.placement.placer import REPORT_S
        from ops.placement.plan import state_of

        reports = await asyncio.to_thread(cluster.reports, REPORT_S)
        written = {row.name: row for row in await rows.read() if row.placed_by == cluster.kind}
        return [
            {
                "name": name,
                "state": state_of(reports[name], {}, None) if name in reports else "is not placed",
                "place": written[name].place if name in written else "",
                "lease_left_s": max(0.0, written[name].left_s) if name in written else 0.0,
            }
            for name in sorted(reports.keys() | written.keys())
        ]

    found = _with_placer(read, ray_address, 0.0, is_reading=True)
    lines = [(row["name"], row["state"], row["place"], f"{row['lease_left_s']:.0f} s") for row in found]
    answer({"data": found}, lambda: table("replicas", ("replica", "state", "machine", "lease"), lines))


@place.command(cls=Command)
@RAY_ADDRESS
@WITHIN
def stop(ray_address: str, within_s: float) -> None:
    """Drains every placed replica, where a server runs on this data directory, and ends its engine.

    \b
    --json answers:
      {"ended": ["engine-0", "engine-1"]}
    """

    async def end(placer: Placer, cluster: Cluster, rows: PlacedEngines) -> list[str]:
        names = sorted(await placer.everything())
        await placer.retire(names)
        return names

    ended = _with_placer(end, ray_address, within_s)
    answer({"ended": ended}, f"{len(ended)} replicas have ended")


def _resource(text: str) -> tuple[str, float]:
    name, _, amount = text.partition("=")
    try:
        if name and float(amount) > 0:
            return name, float(amount)
    except ValueError:
        pass
    raise click.UsageError(f"--resource {text!r} is not NAME=AMOUNT, with an amount above 0")


def _with_placer(
    act: Callable[[Placer, Cluster, PlacedEngines], Awaitable[T]],
    ray_address: str,
    within_s: float,
    *,
    need: dict[str, float] | None = None,
    spread: bool = True,
    is_reading: bool = False,
) -> T:
    """Connects Ray and the database, and acts. Raises `Failure`."""
    import contextlib

    from ops.placement.placer import ClusterUnavailable, Placer
    from ops.serving import datadir
    from ops.settings.shown import variables_of
    from tenants.directory.placed_engines import PlacedEngines
    from tenants.errors import TenancyError
    from tenants.storage.database import open_database

    settings, server = settings_now(), running_server()
    rotation = None if server is None else LiveRotation(server)

    async def run() -> T:
        database = open_database(settings.resolved_database_url)
        try:
            rows = PlacedEngines(database)
            placer = Placer(cluster, rows, rotation, lambda text: click.echo(text, err=True), within_s)
            return await act(placer, cluster, rows)
        finally:
            await database.close()

    try:
        from ops.placement.ray import RayCluster

        with contextlib.nullcontext() if is_reading else datadir.place_lock(settings.data_dir):
            environment = variables_of(settings)
            if need and need.get("CPU", 0) >= 1:
                environment.setdefault("FAIRGATE_ENGINE_THREADS", str(int(need["CPU"])))
            cluster = RayCluster(ray_address, need or {}, settings.data_dir, environment, spread=spread)
            return asyncio.run(run())
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise Failure("Ray is not installed: pip install 'fairgate[ray]'") from None
    except (ClusterUnavailable, datadir.DataDirRefused, TenancyError) as error:
        raise Failure(str(error)) from None


class LiveRotation:
    """The rotation of a running server, by its admin API."""

    def __init__(self, server: ServerFile) -> None:
        self._server = server

    def drain(self, name: str) -> bool:
        return self._act(name, "drain", {"reason": "its placer ends it"})

    def is_empty(self, name: str) -> bool:
        try:
            pools = call(self._server, "GET", "/upstreams")["data"]
        except Failure:
            return True
        rows = [row for pool in pools for row in pool["replicas"] if row["replica_id"] == name]
        return all(row["state"] != "draining" for row in rows)

    def resume(self, name: str) -> None:
        self._act(name, "resume", None)

    def _act(self, name: str, act: str, body: object) -> bool:
        try:
            call(self._server, "POST", f"/upstreams/{name}/{act}", body=body)
        except Failure as failure:
            click.echo(f"{name}: {act}: {failure.message}", err=True)
            return False
        return True
