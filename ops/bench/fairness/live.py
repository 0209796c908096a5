"""Does a real pool keep its promises of fairness: floods, tiers, reservations?

A fresh server with its engine, in processes of their own, and requests of one mix over HTTP. The engine has
half of the cores to itself (`ops/bench/common/cores.py`), or a flood would keep it from its work and not from
its places. What it can do is measured first; rates are parts of that.

- `flood`: a tenant that uses 30 % of the capacity beside another of the same weight that uses exactly its
  share (half), and beside the same one sending ten times as much. The two take turns in blocks, so that a
  machine that becomes faster or slower meets both. TTFT is measured at the client, from sending to the first
  event of the stream. No more than `MOST_OPEN` requests of the other are open at a time: what comes beyond
  that is counted and not sent, as a client with a bounded pool would do.
- `tiers`: interactive requests over batch that always waits.
- `reservations`: a standard tenant that reserved 30 % of the capacity under an interactive flood, and the
  same one without.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST
from ops.bench.common.cores import set_apart
from ops.bench.common.load import ACTOR, Bench, BenchTenant, fresh_bench, server_status
from ops.bench.policies.figures import quantile
from ops.reporting import table
from ops.sandbox.server import ServerFailed
from ops.serving import datadir
from ops.settings.settings import Settings
from tenants.admin.admin import Admin
from tenants.admin.commands import TenantChange
from tenants.storage.database import open_database

MAX_SEQUENCES = 8
QUIET_SHARE = 0.3
EQUAL_SHARE = 0.5
FLOOD_FACTOR = 10.0
MAX_RATIO = 1.5
BLOCKS = 16
SKIPPED = 20
"""Requests at the start of each block that are not counted: the other tenant's queue fills."""
MOST_OPEN = 100
REFUSED_S = 0.2
"""A client that always asks rests so long after a refusal."""
RESERVED_SHARE = 0.3
LEAST_RESERVED = 0.9
CALIBRATION_S = 16.0
TIERS_REQUESTS = 300
RESERVED_S = 12.0
INPUT_WORDS = (5, 20)
OUTPUT_TOKENS = (60, 300)
"""So long that the engine is what is scarce: with a tenth of it the flood kept the clients' process busy, and
they saw their own waits."""
IDLE_S = 60.0
QUIET, OTHER, DAY, NIGHT, PAID, RUSH = "quiet", "other", "day", "night", "paid", "rush"
SERVICE_TIERS = {DAY: "priority", RUSH: "priority", NIGHT: "flex"}
SCENARIOS = ("flood", "tiers", "reservations")

Report = dict[str, Any]


@dataclass
class TenantObserved:
    """What one tenant's clients saw."""

    ttfts_s: list[float] = field(default_factory=list)
    """At the client."""
    account_ttfts_s: list[float] = field(default_factory=list)
    """As the accounts say: without what passes before the gateway has read a request. Far below the clients'
    it tells that the gateway's processor was scarce, and not the engine: then the run says nothing of who
    goes first."""
    finished: int = 0
    refused: int = 0
    unsent: int = 0
    """Came while as many as may were open."""
    places_taken: int = 0


class Clients:
    """Everybody's requests, over one HTTP client."""

    def __init__(self, bench: Bench, client: httpx.AsyncClient, seed: int) -> None:
        self.heard: dict[str, TenantObserved] = {name: TenantObserved() for name in bench.keys}
        self._bench = bench
        self._client = client
        self._rng = random.Random(seed)

    async def poisson(self, tenant: str, per_s: float, *, count: int | None = None, most_open: int) -> None:
        """Sends `count` requests at random instants (None: until it is cancelled), and waits for their ends.
        Cancelled, it leaves no request open."""
        loop = asyncio.get_running_loop()
        due_s, sent = loop.time(), 0
        is_open: set[asyncio.Task[None]] = set()
        try:
            while count is None or sent < count:
                due_s += self._rng.expovariate(per_s)
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                if len(is_open) >= most_open:
                    self.heard[tenant].unsent += 1
                    continue
                sent += 1
                task = asyncio.create_task(self._one(tenant))
                is_open.add(task)
                task.add_done_callback(is_open.discard)
            await asyncio.gather(*is_open)
        finally:
            for task in is_open:
                task.cancel()
            await asyncio.gather(*is_open, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def beside(self, tenant: str, per_s: float) -> AsyncIterator[None]:
        """While another tenant sends so many a second, or always has as many open as may be (inf)."""
        if per_s == float("inf"):
            tasks = [asyncio.create_task(self._always(tenant)) for _ in range(MOST_OPEN)]
        else:
            tasks = [asyncio.create_task(self.poisson(tenant, per_s, most_open=MOST_OPEN))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _always(self, tenant: str) -> None:
        while True:
            refused = self.heard[tenant].refused
            await self._one(tenant)
            if self.heard[tenant].refused > refused:
                await asyncio.sleep(REFUSED_S)

    async def _one(self, tenant: str) -> None:
        heard = self.heard[tenant]
        words, output_tokens = self._rng.randint(*INPUT_WORDS), self._rng.randint(*OUTPUT_TOKENS)
        body = {
            "model": self._bench.server.model,
            "prompt": " ".join(self._rng.choice(("sun", "rain", "wind", "snow")) for _ in range(words)),
            "max_tokens": output_tokens,
            "ignore_eos": True,
            # Nobody looks at when the flood's answers begin: read as streams they keep the clients busy.
            **({} if tenant == OTHER else {"stream": True, "stream_options": {"include_usage": True}}),
            "service_tier": SERVICE_TIERS.get(tenant, "default"),
        }
        headers = {"authorization": f"Bearer {self._bench.keys[tenant]}"}
        clock = asyncio.get_running_loop().time
        sent_s, last = clock(), ""
        try:
            async with self._client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                if response.status_code != 200:
                    heard.refused += 1
                    return
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        if not last:
                            heard.ttfts_s.append(clock() - sent_s)
                        last = line
        except httpx.HTTPError:
            heard.refused += 1
            return
        heard.finished += 1
        account = json.loads(last.removeprefix("data: ")).get("fairgate") if last else None
        if account:
            heard.places_taken += account["displaced"]["places_taken"]
            heard.account_ttfts_s.append(account["actual"]["ttft_s"] or 0.0)


@dataclass
class FairnessServer:
    """A server that is up, and what it can do."""

    bench: Bench
    clients: Clients
    operator: httpx.AsyncClient
    admin: Admin
    requests_per_s: float = 0.0
    cost_per_s: float = 0.0

    async def service(self) -> dict[str, int]:
        """Cost tokens by tenant, as the engine counted them so far. Raises `ServerFailed`."""
        engine = (await self._status())["engines"][0]
        if engine.get("service") is None:
            raise ServerFailed("the engine is down")
        return {
            name: int(had[0] * INPUT_TOKEN_COST + had[1] * OUTPUT_TOKEN_COST)
            for name, tenant_id in self.bench.ids.items()
            for had in [engine["service"].get(tenant_id, (0, 0))]
        }

    async def idle(self) -> None:
        """Returns when nothing waits or runs. Raises `ServerFailed` if that takes too long."""
        async with asyncio.timeout(IDLE_S):
            while True:
                status = await self._status()
                if not status["running"] and not any(status["queued"].values()):
                    return
                await asyncio.sleep(0.1)

    async def calibrate(self) -> None:
        """Measures what it can do with its places always taken."""
        async with self.clients.beside(OTHER, float("inf")):
            await asyncio.sleep(CALIBRATION_S / 2)
            before, had = await self.service(), self.clients.heard[OTHER].finished
            await asyncio.sleep(CALIBRATION_S)
            after = await self.service()
        self.cost_per_s = (after[OTHER] - before[OTHER]) / CALIBRATION_S
        self.requests_per_s = (self.clients.heard[OTHER].finished - had) / CALIBRATION_S
        if self.requests_per_s <= 0:
            raise ServerFailed("no request ended while the capacity was measured")
        await self.idle()

    async def set_engine_apart(self) -> tuple[int, int] | None:
        """Half of the cores are the engine's own from now on: `set_apart`. Raises `ServerFailed`."""
        engine = (await self._status())["engines"][0]["pid"]
        return set_apart(engine, [self.bench.server.process.pid, os.getpid()])

    async def _status(self) -> dict[str, Any]:
        return await server_status(self.operator)


async def run(
    *,
    requests: int,
    model: str | None,
    scenarios: tuple[str, ...] = SCENARIOS,
    seed: int = 1,
    progress: Callable[[str], None] = lambda name: None,
) -> Report:
    """`requests` of the quiet tenant are counted in each half of the flood. Raises `ServerFailed`."""
    parties = [BenchTenant(name, 1.0, 1) for name in (QUIET, OTHER, DAY, NIGHT, PAID, RUSH)]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    # Where it has no cores of its own the engine stands back, so that it is what is scarce.
    arguments = ["--engine-max-sequences", str(MAX_SEQUENCES), "--engine-niceness", "19"]
    async with fresh_bench(parties, model, arguments) as bench:
        settings = Settings(data_dir=bench.server.data_dir)
        database = open_database(settings.resolved_database_url)
        try:
            admin = Admin(database, datadir.pepper(settings, create=False))
            for party in parties:
                await admin.update_tenant(
                    ACTOR,
                    party.name,
                    TenantChange(tier="standard", tiers=["interactive", "standard", "batch"]),
                )
            async with (
                httpx.AsyncClient(base_url=bench.server.url, limits=limits, timeout=300.0) as client,
                bench.server.operator() as operator,
            ):
                house = FairnessServer(bench, Clients(bench, client, seed), operator, admin)
                cores = await house.set_engine_apart()
                progress("capacity")
                await house.calibrate()
                report: Report = {
                    "cores": None if cores is None else {"engine": cores[0], "others": cores[1]},
                    "requests_per_s": round(house.requests_per_s, 1),
                    "cost_per_s": round(house.cost_per_s),
                }
                progress(f"{house.requests_per_s:.1f} requests/s")
                for name in scenarios:
                    progress(name)
                    report[name] = await _SCENARIOS[name](house, requests)
        finally:
            await database.close()
    report["ok"] = all(report[name]["ok"] for name in scenarios)
    return report


async def flood(house: FairnessServer, requests: int) -> Report:
    """Blocks beside a tenant at its share and beside a flood, in turn."""
    shares = {"equal half": EQUAL_SHARE, "flood": FLOOD_FACTOR * EQUAL_SHARE}
    ttfts: dict[str, list[float]] = {name: [] for name in shares}
    accounts: dict[str, list[float]] = {name: [] for name in shares}
    rows: dict[str, Report] = {name: {"other_share": share, "unsent": 0} for name, share in shares.items()}
    quiet, other = house.clients.heard[QUIET], house.clients.heard[OTHER]
    quiet_per_s = QUIET_SHARE * house.requests_per_s
    for _ in range(BLOCKS):
        for name, share in shares.items():
            quiet.ttfts_s, quiet.account_ttfts_s, other.unsent = [], [], 0
            count = SKIPPED + -(-requests // BLOCKS)
            async with house.clients.beside(OTHER, share * house.requests_per_s):
                await house.clients.poisson(QUIET, quiet_per_s, count=count, most_open=10_000)
            ttfts[name] += quiet.ttfts_s[SKIPPED:]
            accounts[name] += quiet.account_ttfts_s[SKIPPED:]
            rows[name]["unsent"] += other.unsent
            await house.idle()
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
        "refused_of_quiet": quiet.refused,
        "ok": ratio <= MAX_RATIO and not quiet.refused,
    }


async def tiers(house: FairnessServer, requests: int) -> Report:
    """Interactive requests over batch that always waits."""
    day, night = house.clients.heard[DAY], house.clients.heard[NIGHT]
    async with house.clients.beside(NIGHT, float("inf")):
        await asyncio.sleep(CALIBRATION_S / 4)
        before, had = await house.service(), len(night.ttfts_s)
        await house.clients.poisson(
            DAY, QUIET_SHARE * house.requests_per_s, count=TIERS_REQUESTS, most_open=10_000
        )
        after = await house.service()
    await house.idle()
    gained = {name: after[name] - before[name] for name in (DAY, NIGHT)}
    batch_p50_s = quantile(night.ttfts_s[had:], 0.5)
    day_p99_s = quantile(day.ttfts_s, 0.99)
    return {
        "interactive_requests": len(day.ttfts_s),
        "interactive_ttft_p50_s": round(quantile(day.ttfts_s, 0.5), 4),
        "interactive_ttft_p99_s": round(day_p99_s, 4),
        "batch_ttft_p50_s": round(batch_p50_s, 4),
        "batch_share_of_service": round(gained[NIGHT] / max(1, sum(gained.values())), 4),
        "places_taken": day.places_taken,
        "ok": day.places_taken > 0 and day_p99_s < batch_p50_s and not day.refused,
    }


async def reservations(house: FairnessServer, requests: int) -> Report:
    """What a standard tenant gets under an interactive flood, with what it reserved and without."""
    reserved = RESERVED_SHARE * house.cost_per_s
    found: dict[str, float] = {}
    for name, amount in (("served_of_reserved", reserved), ("without_reservation", 0.0)):
        await house.admin.update_tenant(ACTOR, PAID, TenantChange(reserved_tokens_per_s=amount))
        await asyncio.sleep(1.0)  # within which every gateway knows
        async with (
            house.clients.beside(RUSH, float("inf")),
            house.clients.beside(PAID, float("inf")),
        ):
            await asyncio.sleep(CALIBRATION_S / 4)
            before = await house.service()
            await asyncio.sleep(RESERVED_S)
            after = await house.service()
        found[name] = (after[PAID] - before[PAID]) / RESERVED_S / reserved
        await house.idle()
    return {
        "reserved_cost_per_s": round(reserved),
        **{name: round(share, 4) for name, share in found.items()},
        "least": LEAST_RESERVED,
        "ok": found["served_of_reserved"] >= LEAST_RESERVED and found["without_reservation"] < 0.5,
    }


_SCENARIOS = {"flood": flood, "tiers": tiers, "reservations": reservations}


def show(report: Report) -> None:
    """The tables for people."""
    cores = report["cores"]
    print(f"capacity: {report['requests_per_s']:g} requests/s, {report['cost_per_s']:,} cost tokens/s")
    if cores is not None:
        print(f"cores: {cores['engine']} the engine's own, {cores['others']} of gateway and clients")
    if part := report.get("flood"):
        rows = [
            (
                name,
                f"{row['other_share']:g}",
                f"{row['requests']:,}",
                f"{row['ttft_p50_s']:.3f}",
                f"{row['ttft_p99_s']:.3f}",
                f"{row['account_ttft_p99_s']:.3f}",
                f"{row['unsent']:,}",
            )
            for name, row in part["rows"].items()
        ]
        columns = (
            "the other",
            "its share",
            "requests",
            "TTFT p50, s",
            "p99",
            "of accounts, p99",
            "not sent",
        )
        table("flood: a tenant at 30 % of the capacity beside another (real time)", columns, rows)
        print(f"flood over equal half: {part['ratio']:.3f}, at most {MAX_RATIO:g}: {_verdict(part)}")
    if part := report.get("tiers"):
        print(
            f"tiers: {part['interactive_requests']} interactive requests, TTFT p50"
            f" {part['interactive_ttft_p50_s']:.3f} s, p99 {part['interactive_ttft_p99_s']:.3f} s over batch"
            f" with p50 {part['batch_ttft_p50_s']:.3f} s and {part['batch_share_of_service']:.1%} of the"
            f" service; {part['places_taken']} places taken: {_verdict(part)}"
        )
    if part := report.get("reservations"):
        print(
            f"reservations: {part['served_of_reserved']:.1%} of {part['reserved_cost_per_s']:,} cost tokens/s"
            f" (at least {LEAST_RESERVED:.0%}), without a reservation {part['without_reservation']:.1%}:"
            f" {_verdict(part)}"
        )


def _verdict(part: Report) -> str:
    return "ok" if part["ok"] else "NOT ok"
