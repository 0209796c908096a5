"""The comparison with LiteLLM and vLLM, and what our plug-in has to keep inside a real vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import platform
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from ops.bench.budgets.scenarios import question_chats
from ops.bench.common.errors import CannotBench
from ops.bench.common.processes import distribution_of
from ops.bench.common.report import Progress, machine, rotated
from ops.bench.versus.figures import TOO_BUSY, bottlenecks, summary
from ops.bench.versus.leases import leases
from ops.bench.versus.litellm import LiteLlmGateway, installed_proxy
from ops.bench.versus.ours import OurGateway, plugin_upstream, stock_upstream
from ops.bench.versus.phases import PhaseSizes, Row, StackPhases
from ops.bench.versus.plugin_parts import VllmBench, caches, limits, shares, speed, texts
from ops.bench.versus.stack import PLACES, SLOTS, Contestant
from ops.bench.versus.vllm_server import VERSIONS, VllmOptions, vllm_home, vllm_server, vllm_version
from ops.sandbox.server import ServerFailed
from ops.sandbox.services import start_redis

LITELLM, STOCK, PLUGIN, OWN = "litellm", "vllm", "plugin", "engine"
STACKS = (LITELLM, STOCK, PLUGIN, OWN)
COMPARISON = "stacks"
PLUGIN_PARTS: dict[str, Callable[[VllmBench, int], Awaitable[list[Row]]]] = {
    "leases": leases,
    "shares": shares,
    "limits": limits,
    "caches": caches,
    "texts": texts,
    "speed": speed,
}
PARTS = (COMPARISON, *PLUGIN_PARTS)


@dataclass(frozen=True, slots=True)
class VersusOptions:
    parts: Sequence[str] = (COMPARISON,)
    stacks: Sequence[str] = STACKS
    rounds: int = 3
    """Of the comparison, and of the speed."""
    vllm_version: str = VERSIONS[0]
    peers_dir: Path = Path(".bench-peers")
    sizes: PhaseSizes = field(default_factory=PhaseSizes)

    @property
    def home(self) -> Path:
        return vllm_home(self.peers_dir, self.vllm_version)


def run(options: VersusOptions, progress: Progress = lambda line: None) -> dict[str, Any]:
    """`progress` gets a line for each turn. Raises `CannotBench`, `PeerMissing`, `NoServer`."""
    for given, known, kind in ((options.parts, PARTS, "part"), (options.stacks, STACKS, "stack")):
        if unknown := [name for name in given if name not in known]:
            raise CannotBench(f"no {kind} {unknown[0]!r}; there are {', '.join(known)}")
    # From this thread: it dies with the thread that started it.
    needs_redis = COMPARISON in options.parts and LITELLM in options.stacks
    redis = start_redis() if needs_redis else None
    begun_s = time.monotonic()
    try:
        results = asyncio.run(_parts(options, redis.url if redis else "", progress))
    except (ServerFailed, OSError) as error:
        raise CannotBench(str(error) or type(error).__name__) from None
    finally:
        if redis is not None:
            redis.stop()
    stacks = results.pop(COMPARISON, {})
    invalid = bottlenecks(stacks) + [
        f"{row['case']}: a client used more than {TOO_BUSY:.0%} of a core"
        for row in results.get("shares", ())
        if row["client_cpu_share"] > TOO_BUSY
    ]
    kept = all(row.get("ok") is not False for rows in results.values() for row in rows)
    return {
        "machine": machine() | {"system": platform.platform()},
        "versions": versions(options),
        "date": datetime.date.today().isoformat(),
        "slots": SLOTS,
        "rounds": options.rounds,
        "seconds": round(time.monotonic() - begun_s),
        "stacks": stacks,
        "summary": summary(stacks),
        **results,
        "invalid": invalid,
        # The comparison promises nothing.
        "ok": None if invalid else kept,
    }


def versions(options: VersusOptions) -> dict[str, str]:
    return {
        "fairgate": metadata.version("fairgate"),
        "litellm": distribution_of(options.peers_dir / "litellm", "litellm").removeprefix("litellm-"),
        "vllm": vllm_version(options.home),
        "torch": metadata.version("torch"),
    }


async def _parts(options: VersusOptions, redis_url: str, progress: Progress) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="fairgate-versus-", ignore_cleanup_errors=True) as name:
        bench = VllmBench(options.home, Path(name), progress)
        for part in options.parts:
            if part == COMPARISON:
                results[part] = await _rounds(options, bench, redis_url)
            else:
                results[part] = await PLUGIN_PARTS[part](bench, options.rounds)
    return results


async def _rounds(options: VersusOptions, bench: VllmBench, redis_url: str) -> dict[str, list[Row]]:
    questions = await asyncio.to_thread(question_chats)
    async with _contestants(options, bench, redis_url) as contestants:
        rounds: dict[str, list[Row]] = {contestant.name: [] for contestant in contestants.values()}
        for number in range(options.rounds):
            for stack in rotated(list(contestants), number):
                contestant = contestants[stack]
                begun_s = time.monotonic()
                directory = bench.directory / f"{stack}-{number}"
                directory.mkdir()
                place = f"{number + 1}/{options.rounds} {contestant.name}"

                def tell(phase: str, place: str = place) -> None:
                    bench.progress(f"{place}: {phase}")

                async with contestant.open(directory) as served:
                    phases = StackPhases(contestant, served, options.sizes, questions, tell)
                    row = await phases.run(number)
                rounds[contestant.name].append(row)
                bench.progress(
                    f"{place}: beside a flood"
                    f" {row['flood_ratio']:.1f}x, weights 1:{row['weights_ratio']:.2f},"
                    f" over the limit {row['overshoot_tokens']}, not charged {row['uncharged_tokens']}"
                    f" ({time.monotonic() - begun_s:.0f} s)"
                )
        return rounds


@contextlib.asynccontextmanager
async def _contestants(
    options: VersusOptions, bench: VllmBench, redis_url: str
) -> AsyncIterator[dict[str, Contestant]]:
    """The stacks, with the servers that outlive a turn."""
    async with contextlib.AsyncExitStack() as closing:
        stacks: dict[str, Contestant] = {}
        if LITELLM in options.stacks or STOCK in options.stacks:
            bench.progress("starting vLLM")
            server = vllm_server(bench.home, bench.directory / "stock", VllmOptions(SLOTS))
            stock = await closing.enter_async_context(server)
            if LITELLM in options.stacks:
                stacks[LITELLM] = LiteLlmGateway(installed_proxy(options.peers_dir), stock.url, redis_url)
            if STOCK in options.stacks:
                stacks[STOCK] = OurGateway("Fairgate + vLLM", stock_upstream(stock.url))
        if PLUGIN in options.stacks:
            bench.progress("starting vLLM with the plug-in")
            with_plugin = VllmOptions(PLACES, bench.plugin(SLOTS))
            server = vllm_server(bench.home, bench.directory / "plugin", with_plugin)
            plugin = await closing.enter_async_context(server)
            upstream = plugin_upstream(plugin.url, bench.key_file())
            stacks[PLUGIN] = OurGateway("Fairgate + vLLM with the plug-in", upstream)
        if OWN in options.stacks:
            stacks[OWN] = OurGateway("Fairgate's engine")
        yield stacks
