"""`fairgate engine`: one engine process by itself; `fairgate engine keys`: its keys for tcp addresses."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ops.cli.base import Failure, answer, group, settings_now
from ops.reporting import table


@group(invoke_without_command=True)
@click.option(
    "--model", type=str, help="Model directory, or a model's id on the hub.  [default: the shipped model]"
)
@click.option(
    "--address",
    help="ZeroMQ address to bind: ipc://PATH, or tcp://HOST:PORT (needs keys).  [default: in the data"
    " directory]",
)
@click.option(
    "--engine-id", default="engine-0", show_default=True, help="Its name, in the pool and its data directory."
)
@click.pass_context
def engine(context: click.Context, model: str | None, address: str | None, engine_id: str) -> None:
    """Runs one engine process in the foreground. `fairgate serve` starts and supervises its own.

    \b
    It holds its lock in the data directory while it lives, and takes its sizes from the engine settings
    (FAIRGATE_ENGINE_…, or [engine] in the TOML file). It logs to stderr and answers nothing on stdout.
      fairgate engine --model /models/qwen3-0.6b --data-dir /var/lib/fairgate
    For gateways on other hosts it needs keys first:
      fairgate engine keys --data-dir /var/lib/fairgate
      fairgate engine --address tcp://10.0.0.5:5555 --data-dir /var/lib/fairgate
    To list the engines that run elsewhere:
      fairgate engine list
    """
    if context.invoked_subcommand is not None:
        return
    settings = settings_now({"model": model})
    from msgspec.structs import replace

    from engine.process.server import run_engine
    from ops.serving import datadir
    from ops.serving.composition import engine_options
    from ops.serving.hub_model import ModelMissing, with_local_model
    from ops.serving.supervisor import engine_address
    from tenants.errors import TenancyError

    try:
        datadir.ensure(settings.data_dir)
        settings = with_local_model(settings)
        options = replace(
            engine_options(settings),
            engine_id=engine_id,
            count=1,
            address=address or engine_address(settings.data_dir, engine_id),
            data_dir=Path(settings.data_dir),
        )
    except (datadir.DataDirRefused, ModelMissing, TenancyError, ValueError) as error:
        raise Failure(str(error)) from None
    sys.exit(run_engine(options))


@engine.command(name="list")
def list_() -> None:
    """Lists the engines that run elsewhere, and why one does not serve. Needs a running server.

    \b
    --json answers:
      {"data": [{"name": "engine-1", "address": "tcp://10.0.0.6:5555", "source": "sql", "state": "away",
       "why": "nothing is heard from it for 12 s"}]}
    """
    from ops.cli.live import call, require_server

    members = call(require_server(), "GET", "/upstreams")["members"]
    columns = ("name", "address", "source", "state", "why")
    rows = [tuple(str(row[column]) for column in columns) for row in members]
    answer({"data": members}, lambda: table("engines that run elsewhere", columns, rows))


@engine.command()
@click.option("--rotate", is_flag=True, help="Replace the keys that there are.")
@click.option(
    "--name", default="", help="Of this engine only.  [default: of all that have none of their own]"
)
def keys(rotate: bool, name: str) -> None:
    """Creates the keys with which engines and gateways authenticate each other over TCP.

    \b
    Two files in the data directory (or engine.keys_dir), readable by its owner only:
      engine-server.keys    belongs into that of each engine
      engine-gateway.keys   belongs into that of each gateway that uses them
    With --name engine-1 a pair for that engine alone: engine-server.engine-1.keys, and so on.
    After --rotate copy them anew, and start engines and gateways again.

    \b
    With --json:
      {"engine": ".../engine-server.keys", "gateway": ".../engine-gateway.keys", "made": true}
    """
    settings = settings_now()
    from engine.client.keys import ENGINE_FILE, GATEWAY_FILE, make_keys, own_file
    from gateway.membership import NAME
    from ops.serving import datadir

    if name and not NAME.fullmatch(name):
        raise Failure(f"--name must be 1 to 64 letters, digits, - and _, not {name[:64]!r}")
    directory = Path(settings.engine.keys_dir or settings.data_dir)
    ours, theirs = directory / own_file(ENGINE_FILE, name), directory / own_file(GATEWAY_FILE, name)
    try:
        datadir.ensure(settings.data_dir)
        is_new = rotate or not ours.exists()
        if is_new:
            make_keys(directory, name)
    except datadir.DataDirRefused as error:
        raise Failure(str(error)) from None
    except OSError as error:
        raise Failure(f"the keys cannot be written: {error}") from None
    answer(
        {"engine": str(ours), "gateway": str(theirs), "made": is_new},
        f"{'Made keys' if is_new else 'There are keys already (--rotate replaces them)'}:\n"
        f"  {ours}   for {name or 'each engine'}\n"
        f"  {theirs}  copy it into the data directory of each gateway that uses the engine (mode 600)",
    )
