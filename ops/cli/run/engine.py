"""`fairgate engine`: one engine process by itself; `fairgate engine keys`: its keys for tcp addresses."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ops.cli.base import Failure, answer, group, settings_now


@group(invoke_without_command=True)
@click.option(
    "--model", type=str, help="Model directory, or a model's id on the hub.  [default: the shipped model]"
)
@click.option(
    "--address",
    help="ZeroMQ address to bind: ipc://PATH, or tcp://HOST:PORT (needs keys).  [default: in the data"
    " directory]",
)
@click.option("--engine-id", default="engine-0", show_default=True, help="Its name in the data directory.")
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


@engine.command()
@click.option("--rotate", is_flag=True, help="Replace the keys that there are.")
def keys(rotate: bool) -> None:
    """Makes the keys with which an engine and its gateways know one another over tcp.

    \b
    Two files in the data directory, readable by its owner only:
      engine-server.keys    stays with the engine
      engine-gateway.keys   belongs into the data directory of each gateway that uses it (engine.address)
    After --rotate copy the second one anew, and start engine and gateways again.

    \b
    With --json:
      {"engine": ".../engine-server.keys", "gateway": ".../engine-gateway.keys", "made": true}
    """
    settings = settings_now()
    from engine.client.keys import ENGINE_FILE, GATEWAY_FILE, make_keys
    from ops.serving import datadir

    ours, theirs = settings.data_dir / ENGINE_FILE, settings.data_dir / GATEWAY_FILE
    try:
        datadir.ensure(settings.data_dir)
        is_new = rotate or not ours.exists()
        if is_new:
            make_keys(settings.data_dir)
    except datadir.DataDirRefused as error:
        raise Failure(str(error)) from None
    except OSError as error:
        raise Failure(f"the keys cannot be written: {error}") from None
    answer(
        {"engine": str(ours), "gateway": str(theirs), "made": is_new},
        f"{'Made keys' if is_new else 'There are keys already (--rotate replaces them)'}:\n"
        f"  {ours}   stays with the engine\n"
        f"  {theirs}  copy it into the data directory of each gateway that uses the engine (mode 600)",
    )
