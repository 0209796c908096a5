"""Kills and drains engines under streams of every kind; compares with the undisturbed ones, and the books.

Each instant runs all kinds side by side and disturbs them at a moment drawn from a seeded generator.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from ops.bench.budgets.audit import COUNTED, KEYS, AuditFacts, StoredCounters, judge, ledger_rows
from ops.bench.budgets.streams import BUDGET, KINDS, RATE, ReceivedStream, body_of
from ops.bench.budgets.testbed import BudgetTenant, Gateways, ScenarioFailed, shared_stores
from ops.bench.common.attempts import TIMEOUT_S, ClientRequest, ask_once
from ops.bench.common.http_client import LoadHttpClient
from ops.bench.common.load import admin_call, server_status
from ops.sandbox.server import ServerFailed, until
from ops.sandbox.services import start_postgres, start_redis

ENGINES = 2
SEED = 51
REST_S = 90.0
BUDGET_TOKENS = 70
RATE_PER_S = 120.0
RATE_BURST = 20
LATEST = 0.9
"""Part of the undisturbed streams' time after which nothing is disturbed: most have ended."""
BETWEEN_KILLS_S = 1.0
BEFORE_GATEWAY_S = 0.3
"""Most between the death of an engine and that of its gateway: what ran is then about to move."""
MAX_EXAMPLES = 5

After = Callable[[], Awaitable[None]]


@dataclass
class Bed:
    """Gateways that each supervise engines of their own, and a client of all of them."""

    gateways: Gateways
    database_url: str
    client: LoadHttpClient
    random: random.Random = field(default_factory=lambda: random.Random(SEED))
    dead: set[int] = field(default_factory=set)
    """Process ids of the killed engines."""

    async def rested(self) -> list[list[int]]:
        """Process ids of each gateway's engines, once all serve and nothing waits, runs or settles. Raises
        `ScenarioFailed`."""
        found = []
        for server in self.gateways.servers:
            pids: list[int] = []
            async with server.operator() as operator:
                if not await until(partial(self._rests, operator, pids), REST_S):
                    raise ScenarioFailed(f"a gateway was not at rest within {REST_S:g} s")
            found.append(pids)
        await asyncio.sleep(RATE_BURST / RATE_PER_S)  # the rate's bucket is full again
        return found

    async def _rests(self, operator: httpx.AsyncClient, pids: list[int]) -> bool:
        status = await server_status(operator)
        pids[:] = [engine["pid"] for engine in status["engines"] if engine["is_up"]]
        has_work = status["running"] or status["settlements_pending"] or any(status["queued"].values())
        return len(pids) == ENGINES and not has_work and self.dead.isdisjoint(pids)

    def kill(self, pid: int) -> None:
        self.dead.add(pid)
        os.kill(pid, signal.SIGKILL)

    async def serve_all(self, operator: httpx.AsyncClient) -> bool:
        """Whether all engines of a gateway serve, none of them one that was killed."""
        engines = (await server_status(operator))["engines"]
        return all(engine["is_up"] and engine["pid"] not in self.dead for engine in engines)

    async def streams(
        self, plain: BudgetTenant, rated: BudgetTenant, budget: BudgetTenant | None, first: int = 0
    ) -> list[ReceivedStream]:
        """All kinds at once, over the gateways in turn; without `budget` those that no limit holds up."""

        async def one(kind: str, place: int) -> ReceivedStream:
            stream, servers = ReceivedStream(kind), self.gateways.servers
            tenant = {RATE: rated, BUDGET: budget}.get(kind) or plain
            ask = ClientRequest(tenant.tenant_id, tenant.key, body_of(kind, self.gateways.model))
            url = servers[place % len(servers)].url
            stream.attempt = await ask_once(self.client, url, ask, on_chunk=stream.take)
            return stream

        kinds = [kind for kind in KINDS if budget is not None or kind not in (RATE, BUDGET)]
        return await asyncio.gather(*(one(kind, first + place) for place, kind in enumerate(kinds)))


async def kill_one(bed: Bed, number: int, pids: Sequence[int]) -> After | None:
    """One on which something runs, if any."""
    async with bed.gateways.servers[number].operator() as operator:
        engines = (await server_status(operator))["engines"]
    busy = [engine["pid"] for engine in engines if engine.get("running")]
    bed.kill(bed.random.choice(busy or pids))
    return None


async def kill_all(bed: Bed, number: int, pids: Sequence[int]) -> After | None:
    for pid in bed.random.sample(pids, len(pids)):
        bed.kill(pid)
        await asyncio.sleep(bed.random.uniform(0, BETWEEN_KILLS_S))
    return None


async def drain_one(bed: Bed, number: int, pids: Sequence[int]) -> After | None:
    replica = f"engine-{bed.random.randrange(ENGINES)}"

    async def act(verb: str) -> None:
        async with bed.gateways.servers[number].operator() as operator:
            await admin_call(operator, "POST", f"upstreams/{replica}/{verb}", {})

    await act("drain")
    return lambda: act("resume")


async def replace_all(bed: Bed, number: int, pids: Sequence[int]) -> After | None:
    """One engine after the other is drained, ended once it is empty, and back in rotation as a new one."""
    async with bed.gateways.servers[number].operator() as operator:
        for engine in (await server_status(operator))["engines"]:
            replica = engine["replica_id"]
            await admin_call(operator, "POST", f"upstreams/{replica}/drain", {})
            if not await until(partial(_is_empty, operator, replica), REST_S):
                raise ScenarioFailed(f"{replica} was not empty within {REST_S:g} s")
            bed.kill(engine["pid"])
            if not await until(partial(bed.serve_all, operator), REST_S):
                raise ScenarioFailed(f"{replica} did not come back within {REST_S:g} s")
            await admin_call(operator, "POST", f"upstreams/{replica}/resume", {})
    return None


async def _is_empty(operator: httpx.AsyncClient, replica: str) -> bool:
    pools = (await admin_call(operator, "GET", "upstreams"))["data"]
    found = [each["state"] for pool in pools for each in pool["replicas"] if each["replica_id"] == replica]
    return found == ["drained"]


async def kill_gateway(bed: Bed, number: int, pids: Sequence[int]) -> After | None:
    bed.kill(bed.random.choice(pids))
    await asyncio.sleep(bed.random.uniform(0, BEFORE_GATEWAY_S))
    await bed.gateways.kill_gateway(number)

    async def restart() -> None:
        await bed.gateways.restart_gateway(number)
        await bed.gateways.ready([number])

    return restart


class SurviveScenario(NamedTuple):
    name: str
    disturb: Callable[[Bed, int, Sequence[int]], Awaitable[After | None]]
    share: float = 1.0
    """Of the wanted instants."""
    gateways: int = 1
    """Several share PostgreSQL and Redis; one has SQLite and counters in the process."""


SCENARIOS = (
    SurviveScenario("survive-kill", kill_one),
    SurviveScenario("survive-drain", drain_one),
    SurviveScenario("survive-replacement", replace_all, 0.02),
    SurviveScenario("survive-two-kills", kill_all, 0.25),
    SurviveScenario("survive-gateway", kill_gateway, 0.1),
    SurviveScenario("survive-two-gateways", kill_one, 0.25, gateways=2),
)


def chosen(names: Sequence[str]) -> list[SurviveScenario]:
    """Those that fit one of the shell patterns."""
    return [scenario for scenario in SCENARIOS if any(fnmatch(scenario.name, name) for name in names)]


async def run(
    scenarios: Sequence[SurviveScenario], instants: int, progress: Callable[[str, int, int], None]
) -> list[dict[str, Any]]:
    """A row of the report for each. Raises `NoServer`."""
    rows = []
    for scenario in scenarios:
        count = max(1, round(instants * scenario.share))
        begun_s = time.monotonic()
        row: dict[str, Any] = {"scenario": scenario.name, "gateways": scenario.gateways, "instants": count}
        try:
            async with _bed(scenario.gateways) as bed:
                row |= await survived(bed, scenario, count, progress)
        except (ScenarioFailed, ServerFailed, OSError) as error:
            row |= {"broken": [str(error) or type(error).__name__], "ok": False}
        rows.append(row | {"took_s": round(time.monotonic() - begun_s, 1)})
    return rows


@contextlib.asynccontextmanager
async def _bed(count: int) -> AsyncIterator[Bed]:
    async with contextlib.AsyncExitStack() as closing:
        directory = Path(tempfile.mkdtemp(prefix="fairgate-bench-"))
        closing.callback(shutil.rmtree, directory, ignore_errors=True)
        url, arguments = f"sqlite:///{directory}/gateway-0/fairgate.db", ["--engine-device", "cpu"]
        if count > 1:
            postgres, redis = start_postgres(is_durable=True), start_redis()
            closing.callback(redis.stop)
            closing.callback(postgres.stop)
            url, arguments = postgres.url, [*arguments, *shared_stores(postgres, redis)]
        gateways = Gateways(directory, [*arguments, "--engines", str(ENGINES)])
        closing.push_async_callback(gateways.close)
        await gateways.start_gateways(count)
        client = LoadHttpClient(timeout_s=TIMEOUT_S)
        closing.callback(client.close)
        yield Bed(gateways, url, client)


async def survived(
    bed: Bed, scenario: SurviveScenario, count: int, progress: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """The figures of one scenario. Raises `ScenarioFailed`, `ServerFailed`."""
    gateways, name, of_output = bed.gateways, scenario.name, {"meter": "output_tokens"}
    plain = await gateways.tenant(f"{name}-plain")
    rated = await gateways.tenant(f"{name}-rated", **of_output, amount=RATE_BURST, rate_per_s=RATE_PER_S)
    budgets = [
        await gateways.tenant(f"{name}-{number}", **of_output, amount=BUDGET_TOKENS, window="lifetime")
        for number in range(count + 2)
    ]
    await gateways.known(plain, rated, *budgets)
    await bed.rested()
    await bed.streams(plain, rated, budgets[-1])  # for nothing: it compiles the grammars
    await bed.rested()
    begun_s = time.monotonic()
    undisturbed = await bed.streams(plain, rated, budgets[-2])
    span_s = time.monotonic() - begun_s
    if broken := [f"{stream.kind}: {stream.failure}" for stream in undisturbed if stream.failure]:
        raise ScenarioFailed(f"undisturbed streams broke: {', '.join(broken)}")
    streams: list[ReceivedStream] = []
    for instant in range(count):
        progress(scenario.name, instant, count)
        number = instant % scenario.gateways
        pids = (await bed.rested())[number]
        running = asyncio.create_task(bed.streams(plain, rated, budgets[instant], instant))
        await asyncio.sleep(bed.random.uniform(0, LATEST * span_s))
        disturbing = asyncio.ensure_future(scenario.disturb(bed, number, pids))
        streams += await running
        while not disturbing.done():
            streams += await bed.streams(plain, rated, None, instant)
        if (after := await disturbing) is not None:
            await after()
    await bed.rested()
    async with gateways.servers[0].operator() as operator:
        problems = (await admin_call(operator, "POST", "ledger/verify"))["problems"]
    tenants = [plain, rated, *budgets]
    counters = {tenant.tenant_id: StoredCounters({}, {}, 0) for tenant in tenants}  # compared by `verify`
    rows = await ledger_rows(bed.database_url, counters)
    facts = AuditFacts(tenants, rows, counters, None, 0, [each.attempt for each in streams], problems)
    return judged(streams, undisturbed, facts, is_compared=scenario.disturb is not kill_gateway)


def judged(
    streams: Sequence[ReceivedStream],
    undisturbed: Sequence[ReceivedStream],
    facts: AuditFacts,
    *,
    is_compared: bool,
) -> dict[str, Any]:
    """The figures of a scenario; not `is_compared`: of its books alone, as its gateway was killed, too."""
    findings, by_kind = judge(facts), {stream.kind: stream for stream in undisturbed}
    broken, other = [], []
    for stream in streams if is_compared else ():
        name = f"{stream.kind} {stream.attempt.request_id}"
        if stream.failure:
            broken.append(f"{name} broke: {stream.failure}")
        elif difference := stream.differs(by_kind[stream.kind]):
            other.append(f"{name}: {difference}")
    pauses_s = [stream.longest_pause_s for stream in streams if stream.moves]
    examples = [*broken[:MAX_EXAMPLES], *other[:MAX_EXAMPLES], *findings.examples]
    if is_compared and not pauses_s:
        examples.append("no stream moved")
    return {
        "streams": len(streams),
        "moves": sum(stream.moves for stream in streams),
        "broken_streams": len(broken),
        "other_streams": len(other),
        **{name: getattr(findings, name) for name in (*KEYS, *COUNTED)},
        "pause_p50_s": round(statistics.median(pauses_s), 3) if pauses_s else None,
        "pause_max_s": round(max(pauses_s), 3) if pauses_s else None,
        "broken": examples,
        "ok": not examples,
    }
