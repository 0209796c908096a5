"""Benchmark of the simulator against the real engine.

What a fresh server served under each policy is simulated with its engine's learned step times, and with the
shortfall of the simulations of the policy's *other* replays (`ops/simulate/figures/shortfall.py`). Times
count from when a request is in line. The tolerances are in `docs/simulating.md`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx

from engine.core.learned_state import learned_path
from ops.bench.common.load import QUIET, BenchTenant, enrol, known, load_client, model_directory, priced
from ops.reporting import Report as Table
from ops.sandbox.server import LocalServer, ServerFailed, local_server
from ops.settings.settings import Settings
from ops.simulate.figures.shortfall import Shortfall
from ops.simulate.machines.machines import Machine
from ops.simulate.machines.profile import read_profile
from ops.simulate.recorded import Recorded, as_it_was, read, records_of
from ops.simulate.run import Scenario, run_policy, simulate
from ops.simulate.slo import SloLimits
from tenants.ledger import timelines
from tenants.storage.database import open_database

POLICIES = ("fcfs", "sjf", "vtc", "hybrid")
PARTIES = (BenchTenant("half", 1.0, 1), BenchTenant("third", 1.0, 1), BenchTenant("rest", 1.0, 1))
SHARES = (0.5, 0.3, 0.2)
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
"""The shortfall of a simulation is learned from the others."""
CALIBRATION_S = 8.0
CONNECTIONS = 2 * MAX_SEQUENCES
BODIES = 500
MOST_ROWS = 100_000
KNOWN_S = 30.0
THROUGHPUT = 0.05
TTFT_P50 = 0.15
TTFT_P99 = 0.25
SPREADS = 1.5

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FidelityOptions:
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
    recorded: Recorded
    machine: Machine
    sent: int

    @property
    def scenario(self) -> Scenario:
        """The gateway knew the lengths: `max_tokens` with `ignore_eos` sets them."""
        return Scenario(self.recorded, self.machine, predictions="exact")


@dataclass(frozen=True, slots=True)
class Pair:
    """One real run and its simulation: figures as `ops.simulate.figures.figures` has them."""

    real: Mapping[str, Any]
    simulated: Mapping[str, Any]
    sent: int


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
    """Each replay with its simulation; the shortfall is drawn from the others."""
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
    arguments = ["--model", str(model_dir), *priced(model_dir), *QUIET, "--policy", policy]
    arguments += [word for name, value in sizes.items() for word in (f"--engine-{name}", str(value))]
    return local_server(directory, arguments=arguments)


async def _capacity(options: FidelityOptions) -> float:
    """Requests a second with all places taken, in closed loops."""
    with tempfile.TemporaryDirectory(prefix="fairgate-fidelity-") as directory:
        async with _server(Path(directory), options, "fcfs") as server:
            keys, _ = await enrol(server, PARTIES)
            rng = random.Random("capacity")
            lengths = ((_lognormal(rng, *WORDS), _lognormal(rng, *OUTPUT_TOKENS)) for _ in range(BODIES))
            bodies = [_body(server.model, rng, *length) for length in lengths]
            url = f"{server.url}/v1/completions"
            async with load_client("half", url, keys["half"], bodies) as client:
                await client.closed(CONNECTIONS)
                await asyncio.sleep(CALIBRATION_S / 2)
                await client.take()
                await asyncio.sleep(CALIBRATION_S)
                seen = await client.stop()
    return max(seen.finished, 1) / CALIBRATION_S


async def _one(options: FidelityOptions, policy: str, asks: list[_Ask]) -> ServedReplay:
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
    database = open_database(Settings(data_dir=directory).resolved_database_url)
    try:
        rows = await timelines.recorded(database, from_us=from_us, to_us=to_us, most=MOST_ROWS)
    finally:
        await database.close()
    return read(rows, policy)


@contextlib.asynccontextmanager
async def _clients(server: LocalServer) -> Any:
    """A function that asks once and waits for the whole answer. Raises `ServerFailed`."""
    keys, _ = await enrol(server, PARTIES)
    async with server.operator() as operator:
        if not await known(operator, dict.fromkeys(keys, 0), KNOWN_S):
            raise ServerFailed(f"it knows its tenants not even after {KNOWN_S:g} s")
    rng = random.Random("words")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=300.0) as client:

        async def ask(what: _Ask) -> None:
            body = _body(server.model, rng, what.words, what.output_tokens)
            headers = {"authorization": f"Bearer {keys[what.party]}"}
            response = await client.post("/v1/completions", json=body, headers=headers)
            response.raise_for_status()

        yield ask


def _body(model: str, rng: random.Random, words: int, output_tokens: int) -> dict[str, Any]:
    prompt = " ".join(rng.choice(("sun", "rain", "wind", "snow")) for _ in range(words))
    return {"model": model, "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True}


async def _send(asks: list[_Ask], ask: Callable[[_Ask], Any]) -> None:
    begun_s = time.monotonic()
    tasks = []
    for what in asks:
        await asyncio.sleep(max(0.0, begun_s + what.at_s - time.monotonic()))
        tasks.append(asyncio.create_task(ask(what)))
    await asyncio.gather(*tasks)


def judge(pairs: Mapping[str, Sequence[Pair]]) -> dict[str, Any]:
    rows = [_row(policy, its) for policy, its in pairs.items()]
    checks = []
    for row in rows:
        policy = row["policy"]
        p99 = max(TTFT_P99, SPREADS * row["real_ttft_p99_spread"])
        checks += [
            _within(f"{policy}, output tokens/s", row["throughput_ratio"], THROUGHPUT),
            _within(f"{policy}, TTFT p50", row["ttft_p50_ratio"], TTFT_P50),
            _within(f"{policy}, TTFT p99", row["ttft_p99_ratio"], p99),
            _check(
                f"{policy}, requests that the record has",
                row["requests"],
                f"all {row['sent']}",
                row["requests"] == row["sent"],
            ),
        ]
    wrong = [
        f"{one['policy']} and {other['policy']}"
        for one, other in combinations(rows, 2)
        if _swapped(one, other)
    ]
    order = f"{', '.join(wrong)} the other way round" if wrong else "the same"
    checks.append(_check("order of policies by TTFT p99", order, "the same", not wrong))
    return {"policies": rows, "checks": checks, "ok": all(check["ok"] for check in checks)}


def _row(policy: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    p99s = [pair.real["ttft_s"]["p99"] for pair in pairs]
    real_p99_s = statistics.median(p99s)
    return {
        "policy": policy,
        "requests": sum(pair.real["requests"] for pair in pairs),
        "sent": sum(pair.sent for pair in pairs),
        "throughput_ratio": statistics.median(
            pair.simulated["output_tokens_per_s"] / pair.real["output_tokens_per_s"] for pair in pairs
        ),
        "real_ttft_p50_s": statistics.median(pair.real["ttft_s"]["p50"] for pair in pairs),
        "ttft_p50_ratio": _ratio(pairs, "p50"),
        "real_ttft_p99_s": real_p99_s,
        "simulated_ttft_p99_s": statistics.median(pair.simulated["ttft_s"]["p99"] for pair in pairs),
        "ttft_p99_ratio": _ratio(pairs, "p99"),
        "real_ttft_p99_spread": (max(p99s) - min(p99s)) / real_p99_s,
    }


def _ratio(pairs: Sequence[Pair], quantile: str) -> float:
    ratios: list[float] = [
        pair.simulated["ttft_s"][quantile] / pair.real["ttft_s"][quantile] for pair in pairs
    ]
    return statistics.median(ratios)


def _within(what: str, ratio: float, most: float) -> dict[str, Any]:
    return _check(what, round(ratio, 4), f"within {100 * most:.0f} %", abs(ratio - 1) <= most)


def _check(what: str, value: object, wanted: str, ok: bool) -> dict[str, Any]:
    return {"what": what, "value": value, "wanted": wanted, "ok": ok}


def _swapped(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the two lie apart in reality, and the other way round in the simulation."""
    apart: float = one["real_ttft_p99_s"] - other["real_ttft_p99_s"]
    spread: float = max(row["real_ttft_p99_spread"] * row["real_ttft_p99_s"] for row in (one, other))
    simulated: float = one["simulated_ttft_p99_s"] - other["simulated_ttft_p99_s"]
    return abs(apart) > spread and apart * simulated < 0


def show(report: Report) -> None:
    rate, load, seconds = (report[name] for name in ("rate_per_s", "load", "seconds"))
    print(f"{rate:g} requests/s ({load:g} of what it can do) for {seconds:g} s")
    Table(
        "simulated over real, median of the repetitions",
        (
            ("policy", "policy"), ("requests", "requests"), ("throughput_ratio", "output tokens/s", ".3f"),
            ("real_ttft_p50_s", "TTFT p50 real, s", ".4f"), ("ttft_p50_ratio", "over it", ".3f"),
            ("real_ttft_p99_s", "p99 real, s", ".4f"), ("ttft_p99_ratio", "over it", ".3f"),
            ("real_ttft_p99_spread", "spread", ".2f"),
        ),
        report["policies"],
    ).show()  # fmt: skip
    for check in report["checks"]:
        print(f"{'ok    ' if check['ok'] else 'NOT OK'} {check['what']}: {check['value']}, {check['wanted']}")
