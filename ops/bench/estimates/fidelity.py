"""Benchmark of the simulator against the real engine.

For each policy a fresh server of the shipped model serves a drawn stream of requests in real time: three
tenants of unlike rates, prompts and answers of lognormal lengths, answers of exactly the length asked for, at
a stated part of what the server can do (measured first, with its places always taken). What it served is read
from its ledger and timelines, as `fairgate whatif` does, and simulated under the same policy with the step
times that its engine has learned, and with what the simulations of the policy's *other* replays fell short of
(`ops/simulate/figures/shortfall.py`; no replay has a part in its own simulation). Compared with the simulated
times are its own, from when a request is in line: what comes before (HTTP, authentication, the hold in the
ledger) is not simulated.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from engine.core.learned_state import learned_path
from ops.bench.common.load import BenchTenant, enrol, model_directory, priced
from ops.bench.estimates.fidelity_figures import Pair, judge
from ops.reporting import table
from ops.sandbox.server import LocalServer, ServerFailed, local_server, until
from ops.settings.settings import Settings
from ops.simulate.figures.shortfall import Shortfall
from ops.simulate.machines.machines import Machine
from ops.simulate.machines.profile import read_profile
from ops.simulate.recorded import Recorded, as_it_was, read, records_of
from ops.simulate.run import Scenario, run_policy, simulate
from ops.simulate.slo import SloLimits
from tenants.ledger import timelines
from tenants.storage.database import open_database
from tenants.storage.task_stop import stop

POLICIES = ("fcfs", "sjf", "vtc", "hybrid")
PARTIES = (BenchTenant("half", 1.0, 1), BenchTenant("third", 1.0, 1), BenchTenant("rest", 1.0, 1))
SHARES = (0.5, 0.3, 0.2)
"""Of the rate."""
MAX_SEQUENCES = 16
KV_BLOCKS = 4096
BLOCK_TOKENS = 16
MAX_BATCHED_TOKENS = 256
WORDS = (40, 0.7, 200)
OUTPUT_TOKENS = (48, 0.6, 250)
"""Lognormal: median, sigma, most."""
WARM_UP_S = 20.0
"""Of requests that count for nothing: the engine compiles, and learns its step times."""
LEAST_REPETITIONS = 2
"""What a simulation falls short of is learned from the others."""
CALIBRATION_S = 8.0
CONNECTIONS = 2 * MAX_SEQUENCES
MOST_ROWS = 100_000
KNOWN_S = 30.0

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FidelityOptions:
    """What to run."""

    policies: tuple[str, ...] = POLICIES
    repetitions: int = 3
    seconds: float = 180.0
    load: float = 0.7
    seed: int = 1
    model: str | None = None


@dataclass(frozen=True, slots=True)
class _Ask:
    at_s: float
    party: str
    words: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class ServedReplay:
    """What one server served, and the machine that its engine learned to be."""

    recorded: Recorded
    machine: Machine
    sent: int

    @property
    def scenario(self) -> Scenario:
        """The gateway knew the lengths: `max_tokens` with `ignore_eos` says them."""
        return Scenario(self.recorded, self.machine, predictions="exact")


def run(options: FidelityOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """The whole comparison. Raises `ServerFailed`, and ValueError for too few repetitions."""
    if options.repetitions < LEAST_REPETITIONS:
        raise ValueError(f"at least {LEAST_REPETITIONS} repetitions, not {options.repetitions}")
    rate = options.load * asyncio.run(_capacity(options))
    progress(f"{rate:.1f} requests/s, {options.load:g} of what it can do")
    replays: dict[str, list[ServedReplay]] = {policy: [] for policy in options.policies}
    for repetition in range(options.repetitions):
        for policy in options.policies:
            asks = drawn(rate, options.seconds, f"{options.seed} {repetition}")
            replay = asyncio.run(_one(options, policy, asks))
            replays[policy].append(replay)
            p50_s = as_it_was(replay.recorded, SloLimits(), from_line=True)["ttft_s"]["p50"]
            progress(f"{repetition + 1}/{options.repetitions} {policy}: TTFT p50 {p50_s * 1e3:.1f} ms")
    pairs = {policy: compared(policy, its) for policy, its in replays.items()}
    return {"rate_per_s": round(rate, 2), "load": options.load, "seconds": options.seconds, **judge(pairs)}


def compared(policy: str, replays: Sequence[ServedReplay]) -> list[Pair]:
    """Each with its simulation; what that falls short of is drawn from the others."""
    fallen = []
    for replay in replays:
        pool, _ = run_policy(replay.scenario, policy)
        fallen.append(Shortfall.of(records_of(replay.recorded, from_line=True), pool.records).residuals)
    pairs = []
    for index, replay in enumerate(replays):
        others = [residual for other, its in enumerate(fallen) if other != index for residual in its]
        scenario = replace(replay.scenario, shortfall=Shortfall(tuple(others)))
        [simulated] = simulate(scenario, [policy])["policies"]
        pairs.append(Pair(as_it_was(replay.recorded, SloLimits(), from_line=True), simulated, replay.sent))
    return pairs


def drawn(rate: float, seconds: float, seed: str) -> list[_Ask]:
    """Poisson arrivals; the same seed draws the same ones, for every policy."""
    rng = random.Random(f"fidelity {seed}")
    asks, at_s = [], rng.expovariate(rate)
    while at_s < seconds:
        [party] = rng.choices(PARTIES, SHARES)
        asks.append(_Ask(at_s, party.name, _lognormal(rng, *WORDS), _lognormal(rng, *OUTPUT_TOKENS)))
        at_s += rng.expovariate(rate)
    return asks


def _lognormal(rng: random.Random, median: float, sigma: float, most: int) -> int:
    return max(1, min(most, round(median * rng.lognormvariate(0.0, sigma))))


def _server(
    directory: Path, options: FidelityOptions, policy: str
) -> contextlib.AbstractAsyncContextManager[LocalServer]:
    model_dir = model_directory(options.model)
    sizes = {
        "max-sequences": MAX_SEQUENCES,
        "kv-blocks": KV_BLOCKS,
        "block-tokens": BLOCK_TOKENS,
        "max-batched-tokens": MAX_BATCHED_TOKENS,
        # A core of its own, so that its steps do not wait for the gateway and the clients.
        "threads": max(1, (os.cpu_count() or 2) - 1),
    }
    arguments = ["--model", str(model_dir), *priced(model_dir), "--log-level", "warning", "--policy", policy]
    arguments += [each for name, value in sizes.items() for each in (f"--engine-{name}", str(value))]
    return local_server(directory, arguments=arguments)


async def _capacity(options: FidelityOptions) -> float:
    """Requests a second with all places taken, in closed loops."""
    with tempfile.TemporaryDirectory(prefix="fairgate-fidelity-") as directory:
        async with _server(Path(directory), options, "fcfs") as server, _clients(server) as ask:
            rng, ended = random.Random("capacity"), 0

            async def loop() -> None:
                nonlocal ended
                while True:
                    await ask(_Ask(0.0, "half", _lognormal(rng, *WORDS), _lognormal(rng, *OUTPUT_TOKENS)))
                    ended += 1

            loops = {asyncio.create_task(loop()) for _ in range(CONNECTIONS)}
            try:
                await _for_ever(loops, CALIBRATION_S / 2)
                before, begun_s = ended, time.monotonic()
                await _for_ever(loops, CALIBRATION_S)
                per_s = (ended - before) / (time.monotonic() - begun_s)
            finally:
                await stop(loops)
    return max(per_s, 1 / CALIBRATION_S)


async def _for_ever(loops: set[asyncio.Task[None]], seconds: float) -> None:
    """Waits; raises what the first loop that ended raised."""
    done, _ = await asyncio.wait(loops, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for each in done:
        each.result()


async def _one(options: FidelityOptions, policy: str, asks: list[_Ask]) -> ServedReplay:
    """One policy serves these requests."""
    with tempfile.TemporaryDirectory(prefix="fairgate-fidelity-") as name:
        directory = Path(name)
        async with _server(directory, options, policy) as server, _clients(server) as ask:
            await _send(drawn(len(asks) / options.seconds, WARM_UP_S, "warm-up"), ask)
            begun_us = time.time_ns() // 1000
            await _send(asks, ask)
        # It has ended, and has written everything.
        machine = read_profile(
            learned_path(directory, "engine-0"),
            kv_tokens=KV_BLOCKS * BLOCK_TOKENS,
            max_sequences=MAX_SEQUENCES,
            max_batched_tokens=MAX_BATCHED_TOKENS,
        )
        recorded = await _recorded(directory, policy, begun_us, time.time_ns() // 1000)
        return ServedReplay(recorded, machine, len(asks))


async def _recorded(directory: Path, policy: str, from_us: int, to_us: int) -> Recorded:
    """What ended between the two instants."""
    database = open_database(Settings(data_dir=directory).resolved_database_url)
    try:
        rows = await timelines.recorded(database, from_us=from_us, to_us=to_us, most=MOST_ROWS)
    finally:
        await database.close()
    return read(rows, policy)


@contextlib.asynccontextmanager
async def _clients(server: LocalServer) -> Any:
    """A function that asks once and waits for the whole answer."""
    keys, _ = await enrol(server, PARTIES)
    rng = random.Random("words")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=300.0) as client:

        async def ask(what: _Ask) -> None:
            body = {
                "model": server.model,
                "prompt": " ".join(rng.choice(("sun", "rain", "wind", "snow")) for _ in range(what.words)),
                "max_tokens": what.output_tokens,
                "ignore_eos": True,
            }
            response = await client.post("/v1/completions", json=body, headers=_bearer(keys[what.party]))
            response.raise_for_status()

        await _known(client, keys.values())
        yield ask


async def _known(client: httpx.AsyncClient, keys: Iterable[str]) -> None:
    """Waits until the gateway has heard of them. Raises `ServerFailed`."""
    for key in keys:

        async def knows(key: str = key) -> bool:
            return (await client.get("/v1/models", headers=_bearer(key))).status_code != 401

        if not await until(knows, KNOWN_S):
            raise ServerFailed(f"it knows its tenants not even after {KNOWN_S:g} s")


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def _send(asks: list[_Ask], ask: Callable[[_Ask], Any]) -> None:
    begun_s = time.monotonic()
    tasks = []
    for each in asks:
        await asyncio.sleep(max(0.0, begun_s + each.at_s - time.monotonic()))
        tasks.append(asyncio.create_task(ask(each)))
    await asyncio.gather(*tasks)


def show(report: Report) -> None:
    """The table for people."""
    rate, load, seconds = (report[name] for name in ("rate_per_s", "load", "seconds"))
    print(f"{rate:g} requests/s ({load:g} of what it can do) for {seconds:g} s")
    table(
        "simulated over real, median of the repetitions",
        (
            "policy",
            "requests",
            "output tokens/s",
            "TTFT p50 real, s",
            "over it",
            "p99 real, s",
            "over it",
            "spread",
        ),
        [
            (
                row["policy"],
                f"{row['requests']:,}",
                f"{row['throughput_ratio']:.3f}",
                f"{row['real_ttft_p50_s']:.4f}",
                f"{row['ttft_p50_ratio']:.3f}",
                f"{row['real_ttft_p99_s']:.4f}",
                f"{row['ttft_p99_ratio']:.3f}",
                f"{row['real_ttft_p99_spread']:.2f}",
            )
            for row in report["policies"]
        ],
    )
    for check in report["checks"]:
        print(f"{'ok    ' if check['ok'] else 'NOT OK'} {check['what']}: {check['value']}, {check['wanted']}")
