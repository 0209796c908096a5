"""`fairgate engine`: one engine process by itself."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ops.cli.base import Command, Failure, settings_now


@click.command(cls=Command)
@click.option(
    "--model", type=str, help="Model directory, or a model's id on the hub.  [default: the shipped model]"
)
@click.option(
    "--address", help="ZeroMQ address to bind (ipc:// or loopback tcp://).  [default: in the data directory]"
)
@click.option("--engine-id", default="engine-0", show_default=True, help="Its name in the data directory.")
def engine(model: str | None, address: str | None, engine_id: str) -> None:
    """Runs one engine process in the foreground. `fairgate serve` starts and supervises its own.

    \b
    It holds its lock in the data directory while it lives, and takes its sizes from the engine settings
    (FAIRGATE_ENGINE_…, or [engine] in the TOML file). It logs to stderr and answers nothing on stdout.
      fairgate engine --model /models/qwen3-0.6b --data-dir /var/lib/fairgate
    """
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
            address=address or engine_address(settings.data_dir, engine_id),
            data_dir=Path(settings.data_dir),
        )
    except (datadir.DataDirRefused, ModelMissing, TenancyError, ValueError) as error:
        raise Failure(str(error)) from None
    sys.exit(run_engine(options))
