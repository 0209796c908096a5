"""The comparison: LiteLLM and vLLM, ours and vLLM, ours and vLLM with our scheduler in it, our own engine.

The two vLLM servers stay up for all rounds, our engine comes with its gateway. Each round goes through all
stacks, each time from another one on, so that a machine that becomes faster or slower meets all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import platform
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from ops.bench.budgets import prompts
from ops.bench.common.errors import CannotBench
from ops.bench.engine.run import machine_name, rotated
from ops.bench.versus.figures import bottlenecks, summary
from ops.bench.versus.litellm import LiteLlmGateway, installed_proxy
from ops.bench.versus.ours import OurGateway, plugin_upstream, stock_upstream
from ops.bench.versus.phases import PhaseSizes, StackPhases
from ops.bench.versus.stack import PLACES, SLOTS, Contestant, StackFailed
from ops.bench.versus.vllm_server import PluginOptions, VllmOptions, vllm_home, vllm_server, vllm_version
from ops.sandbox.server import ServerFailed
from ops.sandbox.services import start_redis
from ops.settings.settings import SHIPPED_MODEL

LITELLM, STOCK, PLUGIN, OWN = "litellm", "vllm", "plugin", "engine"
STACKS = (LITELLM, STOCK, PLUGIN, OWN)
KEY_BYTES = 32

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class VersusOptions:
    """What to compare."""

    stacks: Sequence[str] = STACKS
    rounds: int = 3
    peers_dir: Path = Path(".bench-peers")
    sizes: PhaseSizes = field(default_factory=PhaseSizes)


def run(options: VersusOptions, progress: Progress = lambda line: None) -> dict[str, Any]:
    """The whole comparison; `progress` gets a line for each turn. Raises `CannotBench`, `PeerMissing`,
    `NoServer`."""
    if unknown := [name for name in options.stacks if name not in STACKS]:
        raise CannotBench(f"no stack {unknown[0]!r}; there are {', '.join(STACKS)}")
    # From this thread: it dies with the thread that started it.
    redis = start_redis() if LITELLM in options.stacks else None
    begun_s = time.monotonic()
    try:
        rounds = asyncio.run(_rounds(options, redis.url if redis else "", progress))
    except (StackFailed, ServerFailed, OSError) as error:
        raise CannotBench(str(error)) from None
    finally:
        if redis is not None:
            redis.stop()
    invalid = bottlenecks(rounds)
    return {
        "machine": {"cpu": machine_name(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": versions(options.peers_dir),
        "date": datetime.date.today().isoformat(),
        "slots": SLOTS,
        "rounds": options.rounds,
        "seconds": round(time.monotonic() - begun_s),
        "stacks": rounds,
        "summary": summary(rounds),
        "invalid": invalid,
        # A comparison promises nothing.
        "ok": None if invalid else True,
    }


def versions(peers_dir: Path) -> dict[str, str]:
    """Of all programs that are compared."""
    litellm = sorted((peers_dir / "litellm").glob("lib/python*/site-packages/litellm-[0-9]*.dist-info"))
    return {
        "fairgate": metadata.version("fairgate"),
        "litellm": litellm[-1].name.split("-")[1].removesuffix(".dist") if litellm else "",
        "vllm": vllm_version(vllm_home(peers_dir)),
        "torch": metadata.version("torch"),
    }


async def _rounds(
    options: VersusOptions, redis_url: str, progress: Progress
) -> dict[str, list[dict[str, Any]]]:
    questions = await asyncio.to_thread(prompts.make, SHIPPED_MODEL)
    with tempfile.TemporaryDirectory(prefix="fairgate-versus-", ignore_cleanup_errors=True) as name:
        async with _contestants(options, Path(name), redis_url, progress) as contestants:
            rounds: dict[str, list[dict[str, Any]]] = {each.name: [] for each in contestants.values()}
            for number in range(options.rounds):
                for stack in rotated(list(contestants), number):
                    contestant = contestants[stack]
                    begun_s = time.monotonic()
                    directory = Path(name) / f"{stack}-{number}"
                    directory.mkdir()
                    place = f"{number + 1}/{options.rounds} {contestant.name}"

                    def tell(phase: str, place: str = place) -> None:
                        progress(f"{place}: {phase}")

                    async with contestant.open(directory) as served:
                        phases = StackPhases(contestant, served, options.sizes, questions, tell)
                        row = await phases.run(number)
                    rounds[contestant.name].append(row)
                    progress(
                        f"{place}: beside a flood"
                        f" {row['flood_ratio']:.1f}x, weights 1:{row['weights_ratio']:.2f},"
                        f" over the limit {row['overshoot_tokens']}, not charged {row['uncharged_tokens']}"
                        f" ({time.monotonic() - begun_s:.0f} s)"
                    )
            return rounds


@contextlib.asynccontextmanager
async def _contestants(
    options: VersusOptions, directory: Path, redis_url: str, progress: Progress
) -> AsyncIterator[dict[str, Contestant]]:
    """The stacks, with the servers that outlive a turn."""
    home = vllm_home(options.peers_dir)
    async with contextlib.AsyncExitStack() as closing:
        found: dict[str, Contestant] = {}
        if LITELLM in options.stacks or STOCK in options.stacks:
            progress("starting vLLM")
            server = VllmOptions(SLOTS)
            stock = await closing.enter_async_context(vllm_server(home, directory / "stock", server))
            if LITELLM in options.stacks:
                found[LITELLM] = LiteLlmGateway(installed_proxy(options.peers_dir), stock.url, redis_url)
            if STOCK in options.stacks:
                found[STOCK] = OurGateway("Fairgate + vLLM", stock_upstream(stock.url))
        if PLUGIN in options.stacks:
            progress("starting vLLM with the plug-in")
            key_file = directory / "plugin.key"
            key_file.write_text(secrets.token_hex(KEY_BYTES) + "\n", encoding="ascii")
            key_file.chmod(0o600)
            with_plugin = VllmOptions(PLACES, PluginOptions(SLOTS, key_file))
            plugin = await closing.enter_async_context(vllm_server(home, directory / "plugin", with_plugin))
            found[PLUGIN] = OurGateway(
                "Fairgate + vLLM with the plug-in", plugin_upstream(plugin.url, key_file)
            )
        if OWN in options.stacks:
            found[OWN] = OurGateway("Fairgate's engine")
        yield found
