"""Fairness of a running server: weights, floods, tiers and reservations.

- `weights`: two tenants of weights 1 and 3 that always wait, the light one with ten times the connections.
- `flood`: a tenant at 30 % of the capacity beside one at its half, and beside the same one sending ten times
  as much, in blocks in turn; what comes beyond `MOST_OPEN` open requests is counted and not sent.
- `tiers`: interactive requests over batch that always waits.
- `reservations`: a standard tenant under an interactive flood, with 30 % of the capacity reserved, and
  without.

A tenant that has to wait all the time must do so in every sample of the server's own queue: otherwise its
client was too slow, and the run is invalid, not unfair.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST
from ops.bench.common.load import (
    Bench,
    BenchTenant,
    LoadClient,
    admin_call,
    closed_loops,
    fresh_bench,
    load_clients,
    server_status,
)
from ops.bench.common.load_client import Observed
from ops.demo.prompts.prompts import MAX_TOKENS
from ops.reporting import Report, all_ok, jain_index, quantile, verdict
from ops.sandbox.server import ServerFailed

SAMPLE_S = 0.25
PROC = Path("/proc")
# weights
HEAVY_WEIGHT = 3.0
CONNECTIONS_FACTOR = 10
WEIGHTS_SEQUENCES = 16
WARM_UP_S = 12.0
"""Forecasts learn, and both queues fill."""
TOLERANCE = 0.03
MAX_RUN_S = 600.0
# flood, tiers, reservations
MAX_SEQUENCES = 8
QUIET_SHARE = 0.3
EQUAL_SHARE = 0.5
FLOOD_FACTOR = 10.0
MAX_RATIO = 1.5
BLOCKS = 16
SKIPPED = 20
"""Requests at the start of each block that are not counted: the other tenant's queue fills."""
MOST_OPEN = 100
RESERVED_SHARE = 0.3
LEAST_RESERVED = 0.9
CALIBRATION_S = 16.0
TIERS_REQUESTS = 300
RESERVED_S = 12.0
INPUT_WORDS = (5, 20)
OUTPUT_TOKENS = (60, 300)
"""Long enough for the engine to be the bottleneck."""
BODIES = 500
IDLE_S = 60.0
QUIET, OTHER, DAY, NIGHT, PAID, RUSH = "quiet", "other", "day", "night", "paid", "rush"
SERVICE_TIERS = {DAY: "priority", RUSH: "priority", NIGHT: "flex"}

Figures = dict[str, Any]


async def run(
    scenarios: Sequence[str],
    *,
    runs: int,
    tokens: int,
    connections: int,
    requests: int,
    model: str | None,
    seed: int = 1,
    progress: Callable[[str], None] = lambda name: None,
) -> Figures:
    """`ok` is None where one was invalid and none failed. Raises `ServerFailed`, `CannotBench`."""
    report: Figures = {}
    if "weights" in scenarios:
        progress("weights")
        report["weights"] = judged([await _weights(tokens, connections, model) for _ in range(runs)])
    if of_pool := [name for name in _POOL_SCENARIOS if name in scenarios]:
        async with _pool(model, seed) as pool:
            cores = await pool.set_engine_apart()
            progress("capacity")
            await pool.calibrate()
            report["cores"] = None if cores is None else {"engine": cores[0], "others": cores[1]}
            report["requests_per_s"] = round(pool.requests_per_s, 1)
            report["cost_per_s"] = round(pool.cost_per_s)
            progress(f"{pool.requests_per_s:.1f} requests/s")
            for name in of_pool:
                progress(name)
                report[name] = await _POOL_SCENARIOS[name](pool, requests)
    report["ok"] = all_ok(report[name] for name in SCENARIOS if name in report)
    return report


class QueueSamples:
    """How often the queues of tenants that must always wait were empty, and what their clients used."""

    def __init__(self, *tenants: str) -> None:
        self.samples = 0
        self.empty = dict.fromkeys(tenants, 0)
        self.cpu_shares: dict[str, float] = {}

    def add(self, status: Mapping[str, Any]) -> None:
        self.samples += 1
        for item in status["tenants"]:
            if item["name"] in self.empty:
                self.empty[item["name"]] += not any(item["queued"].values())

    def used(self, tenant: str, observed: Observed) -> Observed:
        self.cpu_shares[tenant] = max(self.cpu_shares.get(tenant, 0.0), observed.cpu_share)
        return observed

    def judge(self, ok: bool) -> Figures:
        """Whether the run was valid, and only then whether it was `ok` (else None)."""
        invalid = "; ".join(
            f"tenant {tenant}'s queue was empty in {math.ceil(100 * empty / self.samples)} % of the samples;"
            f" its client used {100 * self.cpu_shares.get(tenant, 0.0):.0f} % of a core"
            for tenant, empty in self.empty.items()
            if empty
        )
        if not self.samples:
            invalid = "no sample of the queues was taken"
        return {
            "queue_samples": self.samples,
            "empty_samples": self.empty,
            "client_cpu_shares": self.cpu_shares,
            "invalid": invalid or None,
            "ok": None if invalid else ok,
        }


@dataclass(frozen=True)
class _Reading:
    at_s: float
    service: Mapping[str, int]
    light_tokens: int
    queued: Mapping[str, int]


def judged(runs: Sequence[Figures]) -> Figures:
    """All runs of `weights` and their spread; of invalid ones only where there are no others."""
    counted = [run for run in runs if not run["invalid"]] or runs
    ratios = [run["ratio"] for run in counted]
    invalid = [f"run {number}: {run['invalid']}" for number, run in enumerate(runs, 1) if run["invalid"]]
    return {
        "weights": [1, HEAVY_WEIGHT],
        "max_sequences": WEIGHTS_SEQUENCES,
        "runs": list(runs),
        "median_ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
        "worst_deviation": max(run["deviation"] for run in counted),
        "least_jain_index": min(run["jain_index"] for run in counted),
        "widest_gap_over_bound": max(run["gap_over_bound"] for run in counted),
        "invalid": "; ".join(invalid) or None,
        "ok": all_ok(runs),
    }


async def _weights(light_tokens: int, connections: int, model: str | None) -> Figures:
    parties = [
        BenchTenant("light", 1.0, connections * CONNECTIONS_FACTOR),
        BenchTenant("heavy", HEAVY_WEIGHT, connections),
    ]
    samples = QueueSamples("light", "heavy")
    async with (
        fresh_bench(parties, model, ["--engine-max-sequences", str(WEIGHTS_SEQUENCES)]) as bench,
        bench.server.operator() as operator,
        closed_loops(bench, parties) as clients,
    ):
        await asyncio.sleep(WARM_UP_S)
        seen = [await client.take() for client in clients.values()]
        first = await _read(operator, bench, samples)
        readings = [first]
        while readings[-1].light_tokens - first.light_tokens < light_tokens:
            if readings[-1].at_s - first.at_s > MAX_RUN_S:
                raise ServerFailed(f"the light tenant had no {light_tokens} tokens in {MAX_RUN_S:g} s")
            await asyncio.sleep(SAMPLE_S)
            readings.append(await _read(operator, bench, samples))
        seen += [samples.used(name, await client.take()) for name, client in clients.items()]
    longest = max(1, *(client.longest_prompt for client in seen))
    gained = [
        {name: reading.service[name] - first.service[name] for name in bench.ids} for reading in readings[1:]
    ]
    light, heavy = gained[-1]["light"], gained[-1]["heavy"]
    # VTC's bound (Sheng et al., OSDI 2024): 2U, U = the output cost of all tokens that the batch can hold.
    bound = 2 * OUTPUT_TOKEN_COST * WEIGHTS_SEQUENCES * (longest + MAX_TOKENS)
    gap = max(abs(gain["light"] - gain["heavy"] / HEAVY_WEIGHT) for gain in gained)
    deviation = abs(heavy / light / HEAVY_WEIGHT - 1)
    return {
        "light_cost_tokens": light,
        "heavy_cost_tokens": heavy,
        "ratio": heavy / light,
        "deviation": deviation,
        "jain_index": jain_index([light, heavy / HEAVY_WEIGHT]),
        "widest_gap_cost_tokens": round(gap),
        "bound_cost_tokens": bound,
        "gap_over_bound": gap / bound,
        "seconds": readings[-1].at_s - first.at_s,
        "least_queued": {name: min(reading.queued[name] for reading in readings) for name in bench.ids},
        "connections": {party.name: party.connections for party in parties},
        **samples.judge(deviation <= TOLERANCE and gap <= bound),
    }


async def _read(operator: httpx.AsyncClient, bench: Bench, samples: QueueSamples) -> _Reading:
    """Service as the engine counted it, token by token, at one instant. Raises `ServerFailed`."""
    status = await server_status(operator)
    samples.add(status)
    return _Reading(
        at_s=time.monotonic(),
        service=_service(status, bench),
        light_tokens=sum(status["engines"][0]["service"].get(bench.ids["light"], (0, 0))),
        queued={item["name"]: sum(item["queued"].values()) for item in status["tenants"]},
    )


def _service(status: Mapping[str, Any], bench: Bench) -> dict[str, int]:
    service = status["engines"][0].get("service")
    if service is None:
        raise ServerFailed("the engine is down")
    return {
        name: int(computed * INPUT_TOKEN_COST + emitted * OUTPUT_TOKEN_COST)
        for name, tenant_id in bench.ids.items()
        for computed, emitted in [service.get(tenant_id, (0, 0))]
    }


def halves(cores: Set[int]) -> tuple[set[int], set[int]] | None:
    """The engine's cores and the others'; None where there is but one."""
    if len(cores) < 2:
        return None
    ordered = sorted(cores)
    middle = len(ordered) - len(ordered) // 2
    return set(ordered[middle:]), set(ordered[:middle])


def set_apart(engine: int, others: Iterable[int]) -> tuple[int, int] | None:
    """Pins `engine` to half of the cores, `others` to the rest; how many each has, None: not done."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    parts = halves(os.sched_getaffinity(0))
    if parts is None:
        return None
    for process, cores in [(engine, parts[0]), *((other, parts[1]) for other in others)]:
        for task in (PROC / str(process) / "task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # a thread that has ended meanwhile
                os.sched_setaffinity(int(task.name), cores)
    return len(parts[0]), len(parts[1])


@dataclass
class LoadedPool:
    bench: Bench
    clients: Mapping[str, LoadClient]
    operator: httpx.AsyncClient
    requests_per_s: float = 0.0
    cost_per_s: float = 0.0

    async def service(self) -> dict[str, int]:
        return _service(await server_status(self.operator), self.bench)

    async def idle(self) -> None:
        async with asyncio.timeout(IDLE_S):
            while True:
                status = await server_status(self.operator)
                if not status["running"] and not any(status["queued"].values()):
                    return
                await asyncio.sleep(0.1)

    @contextlib.asynccontextmanager
    async def beside(self, tenant: str, per_s: float | None = None) -> AsyncIterator[LoadClient]:
        """While a tenant sends `per_s` requests a second; None: it always has `MOST_OPEN` open."""
        client = self.clients[tenant]
        if per_s is None:
            await client.closed(MOST_OPEN)
        else:
            await client.poisson(per_s, most_open=MOST_OPEN)
        try:
            yield client
        finally:
            await client.stop()

    @contextlib.asynccontextmanager
    async def sampled(self, samples: QueueSamples, after_s: float = 0.0) -> AsyncIterator[None]:
        """Samples the queues until the block ends. Raises `ServerFailed`."""

        async def sample() -> None:
            await asyncio.sleep(after_s)
            while True:
                samples.add(await server_status(self.operator))
                await asyncio.sleep(SAMPLE_S)

        task = asyncio.create_task(sample())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def calibrate(self) -> None:
        """Measures the capacity with all places always taken. Raises `ServerFailed`."""
        async with self.beside(OTHER) as other:
            await asyncio.sleep(CALIBRATION_S / 2)
            before, _ = await self.service(), await other.take()
            await asyncio.sleep(CALIBRATION_S)
            after, seen = await self.service(), await other.take()
        self.cost_per_s = (after[OTHER] - before[OTHER]) / CALIBRATION_S
        self.requests_per_s = seen.finished / CALIBRATION_S
        if self.requests_per_s <= 0:
            raise ServerFailed("no request ended while the capacity was measured")
        await self.idle()

    async def set_engine_apart(self) -> tuple[int, int] | None:
        """Gives the engine half of the cores: `set_apart`. Raises `ServerFailed`."""
        engine = (await server_status(self.operator))["engines"][0]["pid"]
        others = [client.pid for client in self.clients.values()]
        return set_apart(engine, [self.bench.server.process.pid, os.getpid(), *others])


@contextlib.asynccontextmanager
async def _pool(model: str | None, seed: int) -> AsyncIterator[LoadedPool]:
    tiers = ("interactive", "standard", "batch")
    parties = [BenchTenant(name, 1.0, 1, tiers) for name in (QUIET, OTHER, DAY, NIGHT, PAID, RUSH)]
    # Without cores of its own the engine yields to the others, so that it stays the bottleneck.
    arguments = ["--engine-max-sequences", str(MAX_SEQUENCES), "--engine-niceness", "19"]
    async with fresh_bench(parties, model, arguments) as bench:
        bodies = {party.name: _bodies(party.name, bench.server.model, seed) for party in parties}
        async with (
            load_clients(bench, "/v1/completions", bodies) as clients,
            bench.server.operator() as operator,
        ):
            yield LoadedPool(bench, clients, operator)


def _bodies(tenant: str, model: str, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(f"{seed} {tenant}")
    # The first token's time is not looked at in the flood: read as streams it costs the client more.
    streams = {} if tenant == OTHER else {"stream": True, "stream_options": {"include_usage": True}}
    return [
        {
            "model": model,
            "prompt": " ".join(rng.choices(("sun", "rain", "wind", "snow"), k=rng.randint(*INPUT_WORDS))),
            "max_tokens": rng.randint(*OUTPUT_TOKENS),
            "ignore_eos": True,
            "service_tier": SERVICE_TIERS.get(tenant, "default"),
            **streams,
        }
        for _ in range(BODIES)
    ]


async def flood(pool: LoadedPool, requests: int) -> Figures:
    shares = {"equal half": EQUAL_SHARE, "flood": FLOOD_FACTOR * EQUAL_SHARE}
    ttfts: dict[str, list[float]] = {name: [] for name in shares}
    accounts: dict[str, list[float]] = {name: [] for name in shares}
    rows: dict[str, Figures] = {name: {"other_share": share, "unsent": 0} for name, share in shares.items()}
    samples, refused = QueueSamples(OTHER), 0
    quiet, quiet_per_s = pool.clients[QUIET], QUIET_SHARE * pool.requests_per_s
    count = SKIPPED + -(-requests // BLOCKS)
    for _ in range(BLOCKS):
        for name, share in shares.items():
            async with pool.beside(OTHER, share * pool.requests_per_s) as other:
                await quiet.poisson(quiet_per_s, count=count, most_open=10_000)
                if name == "flood":
                    async with pool.sampled(samples, after_s=SKIPPED / quiet_per_s):
                        seen = samples.used(QUIET, await quiet.finish())
                else:
                    seen = samples.used(QUIET, await quiet.finish())
                rows[name]["unsent"] += samples.used(OTHER, await other.take()).unsent
            ttfts[name] += seen.ttfts_s[SKIPPED:]
            accounts[name] += [account["actual"]["ttft_s"] or 0.0 for account in seen.accounts[SKIPPED:]]
            refused += seen.refused
            await pool.idle()
    for name, row in rows.items():
        row["requests"] = len(ttfts[name])
        row["ttft_p50_s"] = round(quantile(ttfts[name], 0.5), 4)
        row["ttft_p99_s"] = round(quantile(ttfts[name], 0.99), 4)
        row["account_ttft_p99_s"] = round(quantile(accounts[name], 0.99), 4)
    ratio = rows["flood"]["ttft_p99_s"] / rows["equal half"]["ttft_p99_s"]
    return {
        "rows": rows,
        "ratio": round(ratio, 4),
        "most": MAX_RATIO,
        "refused_of_quiet": refused,
        **samples.judge(ratio <= MAX_RATIO and not refused),
    }


async def tiers(pool: LoadedPool, requests: int) -> Figures:
    samples, client = QueueSamples(NIGHT), pool.clients[DAY]
    async with pool.beside(NIGHT) as batch:
        await asyncio.sleep(CALIBRATION_S / 4)
        before, _ = await pool.service(), await batch.take()
        async with pool.sampled(samples):
            await client.poisson(QUIET_SHARE * pool.requests_per_s, count=TIERS_REQUESTS, most_open=10_000)
            day = samples.used(DAY, await client.finish())
        after, night = await pool.service(), samples.used(NIGHT, await batch.take())
    await pool.idle()
    gained = {name: after[name] - before[name] for name in (DAY, NIGHT)}
    batch_p50_s = quantile(night.ttfts_s, 0.5)
    day_p99_s = quantile(day.ttfts_s, 0.99)
    places_taken = sum(account["displaced"]["places_taken"] for account in day.accounts)
    return {
        "interactive_requests": len(day.ttfts_s),
        "interactive_ttft_p50_s": round(quantile(day.ttfts_s, 0.5), 4),
        "interactive_ttft_p99_s": round(day_p99_s, 4),
        "batch_ttft_p50_s": round(batch_p50_s, 4),
        "batch_share_of_service": round(gained[NIGHT] / max(1, sum(gained.values())), 4),
        "places_taken": places_taken,
        **samples.judge(places_taken > 0 and day_p99_s < batch_p50_s and not day.refused),
    }


async def reservations(pool: LoadedPool, requests: int) -> Figures:
    reserved = RESERVED_SHARE * pool.cost_per_s
    samples = QueueSamples(RUSH, PAID)
    shares: dict[str, float] = {}
    for name, amount in (("served_of_reserved", reserved), ("without_reservation", 0.0)):
        await admin_call(pool.operator, "PATCH", f"tenants/{PAID}", {"reserved_tokens_per_s": amount})
        async with pool.beside(RUSH) as rush, pool.beside(PAID) as paid:
            await asyncio.sleep(CALIBRATION_S / 4)
            before, _, _ = await pool.service(), await rush.take(), await paid.take()
            async with pool.sampled(samples):
                await asyncio.sleep(RESERVED_S)
            after = await pool.service()
            samples.used(RUSH, await rush.take())
            samples.used(PAID, await paid.take())
        shares[name] = (after[PAID] - before[PAID]) / RESERVED_S / reserved
        await pool.idle()
    return {
        "reserved_cost_per_s": round(reserved),
        **{name: round(share, 4) for name, share in shares.items()},
        "least": LEAST_RESERVED,
        **samples.judge(
            shares["served_of_reserved"] >= LEAST_RESERVED and shares["without_reservation"] < 0.5
        ),
    }


_POOL_SCENARIOS = {"flood": flood, "tiers": tiers, "reservations": reservations}
SCENARIOS = ("weights", *_POOL_SCENARIOS)


def show(report: Figures) -> None:
    parts = {name: report[name] for name in SCENARIOS if name in report}
    if part := parts.get("weights"):
        _show_weights(part)
    if "requests_per_s" in report:
        cores = report["cores"]
        print(f"capacity: {report['requests_per_s']:g} requests/s, {report['cost_per_s']:,} cost tokens/s")
        if cores is not None:
            print(f"cores: {cores['engine']} the engine's own, {cores['others']} of gateway and clients")
    if part := parts.get("flood"):
        Report(
            "flood: a tenant at 30 % of the capacity beside another (real time)",
            (
                ("name", "the other"), ("other_share", "its share", "g"), ("requests", "requests"),
                ("ttft_p50_s", "TTFT p50, s", ".3f"), ("ttft_p99_s", "p99", ".3f"),
                ("account_ttft_p99_s", "of accounts, p99", ".3f"), ("unsent", "not sent"),
            ),
            [{"name": name} | row for name, row in part["rows"].items()],
        ).show()  # fmt: skip
        print(f"flood over equal half: {part['ratio']:.3f}, at most {MAX_RATIO:g}: {verdict(part)}")
    if part := parts.get("tiers"):
        print(
            f"tiers: {part['interactive_requests']} interactive requests, TTFT p50"
            f" {part['interactive_ttft_p50_s']:.3f} s, p99 {part['interactive_ttft_p99_s']:.3f} s over batch"
            f" with p50 {part['batch_ttft_p50_s']:.3f} s and {part['batch_share_of_service']:.1%} of the"
            f" service; {part['places_taken']} places taken: {verdict(part)}"
        )
    if part := parts.get("reservations"):
        print(
            f"reservations: {part['served_of_reserved']:.1%} of {part['reserved_cost_per_s']:,} cost tokens/s"
            f" (at least {LEAST_RESERVED:.0%}), without a reservation {part['without_reservation']:.1%}:"
            f" {verdict(part)}"
        )
    weights = enumerate(report.get("weights", {}).get("runs", ()), 1)
    runs = {f"weights {number}": run for number, run in weights}

    def empty(part: Figures, tenant: str) -> str:
        samples = part["empty_samples"].get(tenant)
        return "-" if samples is None else f"{samples} of {part['queue_samples']}"

    Report(
        "load clients, one process each",
        (
            ("scenario", "scenario"), ("tenant", "tenant"), ("cpu_share", "CPU share", ".1%"),
            ("empty", "queue empty in samples"),
        ),
        [
            {"scenario": name, "tenant": tenant, "cpu_share": share, "empty": empty(part, tenant)}
            for name, part in (runs | parts).items()
            for tenant, share in part.get("client_cpu_shares", {}).items()
        ],
    ).show()  # fmt: skip


def _show_weights(part: Figures) -> None:
    Report(
        "service in cost tokens (input + 2 x output), weights 1:3",
        (
            ("number", "run"), ("light_cost_tokens", "light"), ("heavy_cost_tokens", "heavy"),
            ("ratio", "ratio", ".4f"), ("deviation", "off 3 by", ".2%"), ("seconds", "seconds", ".1f"),
            ("light", "light queued >="), ("heavy", "heavy queued >="),
        ),
        [{"number": number} | run | run["least_queued"] for number, run in enumerate(part["runs"], 1)],
    ).show()  # fmt: skip
    print(
        f"ratio {part['median_ratio']:.4f} (median), {part['least_ratio']:.4f} to {part['most_ratio']:.4f};"
        f" worst deviation {100 * part['worst_deviation']:.2f} %, {100 * TOLERANCE:.0f} % allowed; Jain index"
        f" {part['least_jain_index']:.6f}; widest gap {part['widest_gap_over_bound']:.3f} of the bound 2U:"
        f" {verdict(part)}"
    )
