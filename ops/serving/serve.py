"""Starts, runs and ends a Fairgate server.

Everything is checked before the first request; a failure is one line and exit code 1. Signals are in
`docs/operating.md`; a second SIGTERM or SIGINT cuts running requests.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import signal
import sys
from functools import partial
from pathlib import Path

import uvloop

from migrations import runner
from ops.serving import datadir
from ops.serving.composition import build
from ops.serving.hub_model import with_local_model
from ops.serving.listeners import Door, StartFailed, doors
from ops.serving.logs import open_log
from ops.serving.members import run_elsewhere
from ops.serving.open_files import OpenFiles, divided, raise_limit
from ops.serving.processes.first_start import Announce, announced
from ops.serving.processes.gateway_process import Stop, Stopped, run_gateway
from ops.serving.processes.refusals import REFUSALS, explain
from ops.serving.processes.workers import run_workers
from ops.settings.settings import Settings

ENGINE_PACKAGES = ("torch", "transformers", "safetensors")
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
LATE_END_S = 5.0
"""After its drain a worker has ended."""

log = logging.getLogger("fairgate.serve")


def serve(settings: Settings, announce: Announce) -> int:
    """Serves until a signal stops it; returns the exit code. `announce` is called once it is up."""
    open_log(settings.log_level, settings.log_format)
    open_files = raise_limit()
    try:
        settings.require_shared_stores()
        limits = divided(settings, open_files)
        if settings.engine.serve:
            if not run_elsewhere(settings):
                check_engine()
            settings = with_local_model(settings)
            check_model(settings.model)
        datadir.ensure(settings.data_dir)
        with datadir.serve_lock(settings.data_dir):
            datadir.wait_for_workers(settings.data_dir, settings.gateway.shutdown_grace_s + LATE_END_S)
            with doors(settings, limits.backlog) as made:
                most = limits.connections.max_connections
                log.info("%d of %d open files are for clients' connections", most, open_files)
                pepper = datadir.pepper(settings)
                runner.prepare(settings.resolved_database_url)
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
                    if settings.workers > 1:
                        loop.run(run_workers(settings, pepper, made, limits, announce))
                    else:
                        loop.run(_run(settings, pepper, made[0], limits, announce))
    except Stopped:
        return 0
    except REFUSALS as error:
        log.debug("start refused", exc_info=error)
        print(f"fairgate serve: {explain(error, settings)}", file=sys.stderr, flush=True)
        return 1
    return 0


def missing_packages() -> list[str]:
    return [name for name in ENGINE_PACKAGES if importlib.util.find_spec(name) is None]


def check_engine() -> None:
    """Raises `StartFailed` where packages of the engine are missing."""
    if missing := missing_packages():
        raise StartFailed(f"the engine needs {', '.join(missing)}: pip install 'fairgate[engine]'")


def check_model(model: Path) -> None:
    """Raises `StartFailed` for a directory without a model, before anything else is begun."""
    if not model.is_dir():
        raise StartFailed(
            f"model {model} is not a directory; --model takes one in Hugging Face format, or the id of a"
            " model on the hub (organisation/name)"
        )
    if not (model / "config.json").is_file():
        raise StartFailed(f"model directory {model} has no config.json; it must be in Hugging Face format")
    if not any(True for pattern in WEIGHT_FILES for _ in model.glob(pattern)):
        raise StartFailed(
            f"model directory {model} has no weights (*.safetensors); download or save them there first"
        )


async def _run(settings: Settings, pepper: bytes, door: Door, limits: OpenFiles, announce: Announce) -> None:
    stop = Stop()
    stop.at_signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    async with build(settings, pepper) as running:
        in_force = running.directory.refresh
        token, admin = running.control_token, running.admin
        when_up = partial(announced, settings, pepper, token, admin, door, in_force, announce)
        await run_gateway(running, door, limits, stop, when_up)
