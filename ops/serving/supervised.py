"""The engines that `serve` starts and supervises: one for each GPU, or for an equal share of the cores."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from engine.client.client import EngineClient
from engine.process.options import EngineOptions
from gateway.upstream.capabilities import Capabilities
from gateway.upstream.local_engine import LocalEngine
from ops.serving.supervisor import EngineSupervisor, engine_address
from tenants.errors import Invalid

COUNT_GPUS = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
COUNT_S = 120.0


class Supervisors:
    """Several supervised engines as one."""

    def __init__(self, supervisors: Sequence[EngineSupervisor]) -> None:
        self._supervisors = supervisors
        self._starting: set[asyncio.Task[object]] = set()

    async def start(self) -> None:
        """Raises as `EngineSupervisor.start` does."""
        await asyncio.gather(*(supervisor.start() for supervisor in self._supervisors))

    async def ready(self, timeout_s: float) -> None:
        """Waits until the first serves; the others join when they do. Raises as `EngineSupervisor.ready`
        does, when none serves."""
        self._starting = {
            asyncio.create_task(supervisor.ready(timeout_s)) for supervisor in self._supervisors
        }
        waiting = self._starting
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            failed = [error for task in done if (error := task.exception()) is not None]
            if len(failed) < len(done):
                return
        raise failed[0]

    async def stop(self) -> None:
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(supervisor.stop() for supervisor in self._supervisors))


async def open_supervised(
    options: EngineOptions,
    model_id: str,
    gateway_id: str,
    able: Capabilities,
    closing: contextlib.AsyncExitStack,
) -> tuple[Supervisors, tuple[LocalEngine, ...]]:
    """Starts or adopts `options.count` engines. Raises `Invalid` for too many, and `OSError`."""
    supervisors, engines = [], []
    for own in await asyncio.to_thread(divided, options):
        client = EngineClient(own.address, gateway_id)
        closing.push_async_callback(client.close)
        supervisors.append(EngineSupervisor(own, client))
        engines.append(
            LocalEngine(own.engine_id, client, model_id, able, name=f"{own.engine_id}@{gateway_id}")
        )
    supervisor = Supervisors(supervisors)
    closing.push_async_callback(supervisor.stop)
    await supervisor.start()
    return supervisor, tuple(engines)


def visible_gpus() -> list[str]:
    """As `CUDA_VISIBLE_DEVICES` calls the GPUs that torch sees; in another process: the gateway loads no
    torch."""
    asked = subprocess.run(
        [sys.executable, "-P", "-c", COUNT_GPUS], stdout=subprocess.PIPE, timeout=COUNT_S, check=False
    )
    count = int(asked.stdout or 0)
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return [name.strip() for name in named.split(",")][:count]


def divided(
    options: EngineOptions,
    gpus: Callable[[], list[str]] = visible_gpus,
    cores: Sequence[int] | None = None,
) -> list[EngineOptions]:
    """The options of each of `options.count` engines; of one, unchanged. `cores`: None: this process's.
    Raises `Invalid` where there are fewer GPUs or cores."""
    count, device = options.count, options.device
    if count == 1:
        return [options]
    if device.startswith("cuda:"):
        raise Invalid("engine.count", f"is {count}, but engine.device={device} is one GPU: say cuda")
    cards = [] if device == "cpu" else gpus()
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    kind, there = ("GPUs", len(cards)) if cards or device == "cuda" else ("cores", len(cores))
    if count > there:
        raise Invalid("engine.count", f"is {count}, but there are {there} {kind} here: name at most as many")
    share = there // count
    each = []
    for number in range(count):
        engine_id = f"engine-{number}"
        own = replace(options, engine_id=engine_id, address=engine_address(options.data_dir, engine_id))
        if cards:
            each.append(replace(own, gpu=cards[number]))
        else:
            part = cores[number * share : (number + 1) * share]
            each.append(replace(own, cores=",".join(map(str, part))))
    return each
