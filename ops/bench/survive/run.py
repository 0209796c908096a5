"""Kills and drains engines under streams of every kind, and compares with the undisturbed ones and the books.

Each instant runs all kinds side by side and disturbs them at a moment drawn from a seeded generator. Then:
streams that broke, streams other than undisturbed, and what `ops/bench/budgets/audit.py` finds in the ledger.
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
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import sqlalchemy

from ops.bench.budgets.audit import AuditedRow, AuditFacts, StoredCounters, audited_row, judge
from ops.bench.budgets.testbed import BudgetTenant, Gateways, ScenarioFailed, shared_stores
from ops.bench.common.attempts import TIMEOUT_S, ClientAttempt
from ops.bench.common.http_client import LoadHttpClient
from ops.bench.common.load import admin_call, server_status
from ops.bench.survive.streams import BUDGET_TOKENS, KINDS, RATE_BURST, RATE_PER_S, Received, receive
from ops.reporting import Report, cell
from ops.sandbox.server import ServerFailed, until
from ops.sandbox.services import start_postgres, start_redis
from ops.settings.settings import Settings
from tenants.storage.database import open_database

ENGINES = 2
SEED = 51
REST_S = 90.0
BETWEEN_KILLS_S = 1.0
BEFORE_GATEWAY_S = 0.3
"""Most between the death of an engine and that of its gateway: it is then in the middle of the moves."""
FIGURES = ("broken_streams", "other_streams", "double_charges", "overshoot_tokens", "drift_tokens",
           "leaked_holds")  # fmt: skip
"""All of them must be 0."""
MAX_EXAMPLES = 5

Progress = Callable[[str, int, int], None]
After = Callable[[], Awaitable[None]]


@dataclass
class Bed:
    """Gateways that each supervise engines of their own, and one client of all of them."""

    gateways: Gateways
    client: LoadHttpClient
    random: random.Random
    dead: set[int]
    """Process ids of the killed engines."""

    async def pids(self, number: int) -> list[int]:
        """Of the gateway's engines, once all serve and nothing waits or runs. Raises `ScenarioFailed`."""
        found: list[int] = []

        async def rests() -> bool:
            status = await server_status(operator)
            found[:] = [engine.get("pid", 0) for engine in status["engines"] if engine["is_up"]]
            has_work = status["running"] or status["settlements_pending"] or any(status["queued"].values())
            return len(found) == ENGINES and not has_work and self.dead.isdisjoint(found)

        async with self.gateways.servers[number].operator() as operator:
            if not await until(rests, REST_S):
                raise ScenarioFailed(f"gateway {number} did not come to rest within {REST_S:g} s")
        return found

    def kill(self, pid: int) -> None:
        self.dead.add(pid)
        os.kill(pid, signal.SIGKILL)

    async def streams(
        self, first: int, tenants: Sequence[BudgetTenant], budget: BudgetTenant
    ) -> list[Received]:
        """All kinds at once, over the gateways in turn. `tenants`: for the kind `rate`, and for others."""
        await asyncio.sleep(RATE_BURST / RATE_PER_S)  # the rate's bucket is full again
        rated, plain = tenants
        of = {"rate": rated, "budget": budget}
        servers = self.gateways.servers
        return await asyncio.gather(
            *(
                receive(
                    self.client,
                    servers[(first + place) % len(servers)].url,
                    servers[0].model,
                    of.get(kind.name, plain),
                    kind,
                )
                for place, kind in enumerate(KINDS)
            )
        )


async def kill_one(bed: Bed, number: int, pids: Sequence[int]) -> After | None:
    bed.kill(bed.random.choice(pids))
    return None


async def kill_both(bed: Bed, number: int, pids: Sequence[int]) -> After | None:
    for pid in bed.random.sample(pids, len(pids)):
        bed.kill(pid)
        await asyncio.sleep(bed.random.uniform(0, BETWEEN_KILLS_S))
    return None


async def drain_one(bed: Bed, number: int, pids: Sequence[int]) -> After | None:
    replica = f"engine-{bed.random.randrange(ENGINES)}"
    server = bed.gateways.servers[number]

    async def act(verb: str) -> None:
        async with server.operator() as operator:
            await admin_call(operator, "POST", f"upstreams/{replica}/{verb}", {})

    await act("drain")
    return lambda: act("resume")


async def kill_gateway(bed: Bed, number: int, pids: Sequence[int]) -> After | None:
    bed.kill(bed.random.choice(pids))
    await asyncio.sleep(bed.random.uniform(0, BEFORE_GATEWAY_S))
    await bed.gateways.kill_gateway(number)

    async def restart() -> None:
        await bed.gateways.restart_gateway(number)
        await bed.gateways.ready([number])

    return restart


@dataclass(frozen=True, slots=True)
class SurviveScenario:
    name: str
    disturb: Callable[[Bed, int, Sequence[int]], Awaitable[After | None]]
    share: float = 1.0
    """Of the wanted instants."""
    gateways: int = 1
    """More than one share PostgreSQL and Redis; one has SQLite and counters in the process."""
    loses_gateway: bool = False
    """Its streams end with it: only the books are compared."""


SCENARIOS = (
    SurviveScenario("survive-kill", kill_one),
    SurviveScenario("survive-drain", drain_one),
    SurviveScenario("survive-two-kills", kill_both, 0.25),
    SurviveScenario("survive-gateway", kill_gateway, 0.1, loses_gateway=True),
    SurviveScenario("survive-two-gateways", kill_one, 0.25, gateways=2),
)


def chosen(names: Sequence[str]) -> list[SurviveScenario]:
    """Those that fit one of the shell patterns."""
    return [scenario for scenario in SCENARIOS if any(fnmatch(scenario.name, name) for name in names)]


async def run(
    scenarios: Sequence[SurviveScenario], instants: int, progress: Progress, arguments: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """A row of the report for each. `arguments`: further ones of `serve`. Raises `NoServer`."""
    rows = []
    for scenario in scenarios:
        count = max(1, round(instants * scenario.share))
        begun_s = time.monotonic()
        row: dict[str, Any] = {"scenario": scenario.name, "gateways": scenario.gateways, "instants": count}
        try:
            async with _bed(scenario.gateways, arguments) as (bed, database_url):
                row |= await _one(bed, database_url, scenario, count, progress)
        except (ScenarioFailed, ServerFailed, OSError) as error:
            row |= {"broken": [str(error) or type(error).__name__], "ok": False}
        rows.append(row | {"took_s": round(time.monotonic() - begun_s, 1)})
    return rows


@contextlib.asynccontextmanager
async def _bed(count: int, arguments: Sequence[str]) -> AsyncIterator[tuple[Bed, str]]:
    directory = Path(tempfile.mkdtemp(prefix="fairgate-bench-"))
    given = ["--engines", str(ENGINES), "--engine-device", "cpu", *arguments]
    client = LoadHttpClient(timeout_s=TIMEOUT_S)
    with contextlib.ExitStack() as closing:
        closing.callback(shutil.rmtree, directory, ignore_errors=True)
        closing.callback(client.close)
        url = ""
        if count > 1:
            postgres, redis = start_postgres(is_durable=True), start_redis()
            closing.callback(redis.stop)
            closing.callback(postgres.stop)
            url = postgres.url
            given += shared_stores(postgres, redis)
        gateways = Gateways(directory, given)
        try:
            await gateways.start_gateways(count)
            settings = Settings(data_dir=gateways.servers[0].data_dir, database_url=url)
            yield Bed(gateways, client, random.Random(SEED), set()), settings.resolved_database_url
        finally:
            await gateways.close()


async def _one(
    bed: Bed, database_url: str, scenario: SurviveScenario, count: int, progress: Progress
) -> dict[str, Any]:
    gateways = bed.gateways
    rated = await gateways.tenant("rated", meter="output_tokens", amount=RATE_BURST, rate_per_s=RATE_PER_S)
    plain = await gateways.tenant("plain")
    budgets = [
        await gateways.tenant(
            f"budget-{number}", meter="output_tokens", amount=BUDGET_TOKENS, window="lifetime"
        )
        for number in range(count + 2)
    ]
    tenants = [rated, plain]
    await gateways.known(*tenants, *budgets)
    for number in range(len(gateways.servers)):
        await bed.pids(number)
    # Once for nothing: what is learned and compiled then takes no part in the times.
    await bed.streams(0, tenants, budgets[-1])
    begun_s = time.monotonic()
    undisturbed = await bed.streams(0, tenants, budgets[-2])
    span_s = time.monotonic() - begun_s
    if failed := [f"{each.kind.name}: {each.failure}" for each in undisturbed if each.failure]:
        raise ScenarioFailed(f"undisturbed streams broke: {failed}")
    answers: list[Received] = []
    for instant in range(count):
        progress(scenario.name, instant, count)
        number = instant % len(gateways.servers)
        pids = await bed.pids(number)
        streams = asyncio.create_task(bed.streams(instant, tenants, budgets[instant]))
        await asyncio.sleep(bed.random.uniform(0, span_s))
        after = await scenario.disturb(bed, number, pids)
        answers += await streams
        if after is not None:
            await after()
    for number in range(len(gateways.servers)):
        await bed.pids(number)
    async with gateways.living().operator() as operator:
        problems = (await admin_call(operator, "POST", "ledger/verify"))["problems"]
    facts = AuditFacts(
        [*tenants, *budgets],
        await _ledger(database_url),
        {tenant.tenant_id: StoredCounters({}, {}, 0) for tenant in (*tenants, *budgets)},
        None,
        0,
        [_attempt(answer) for answer in answers],
        problems,
    )
    return judged(answers, undisturbed, facts, is_compared=not scenario.loses_gateway)


async def _ledger(url: str) -> list[AuditedRow]:
    database = open_database(url)
    try:
        query = sqlalchemy.text("SELECT * FROM ledger ORDER BY id")
        return await database.read(
            lambda connection: [audited_row(dict(row)) for row in connection.execute(query).mappings()]
        )
    finally:
        await database.close()


def _attempt(answer: Received) -> ClientAttempt:
    tokens = answer.output_tokens
    return ClientAttempt(
        answer.tenant_id,
        answer.status,
        answer.request_id,
        delivered_tokens=tokens,
        usage_tokens=tokens,
        is_whole=not answer.failure,
    )


def judged(
    answers: Sequence[Received], undisturbed: Sequence[Received], facts: AuditFacts, *, is_compared: bool
) -> dict[str, Any]:
    """The figures of a scenario; `is_compared`: also of its streams, not only of the books."""
    findings = judge(facts)
    by_kind = {each.kind.name: each for each in undisturbed}
    broken, other = [], []
    for answer in answers if is_compared else ():
        name = f"{answer.kind.name} {answer.request_id}"
        if answer.failure:
            broken.append(f"{name} broke: {answer.failure}")
        elif difference := answer.differs(by_kind[answer.kind.name]):
            other.append(f"{name}: {difference}")
    moved = [answer for answer in answers if answer.moves]
    pauses_s = sorted(answer.longest_pause_s for answer in moved)
    row: dict[str, Any] = {
        "streams": len(answers),
        "moves": sum(answer.moves for answer in moved),
        "broken_streams": len(broken),
        "other_streams": len(other),
        **{name: getattr(findings, name) for name in FIGURES[2:]},
        "pause_p50_s": round(statistics.median(pauses_s), 3) if pauses_s else None,
        "pause_max_s": round(pauses_s[-1], 3) if pauses_s else None,
        "charged_tokens": findings.charged_tokens,
        "broken": [*broken[:MAX_EXAMPLES], *other[:MAX_EXAMPLES], *findings.examples],
    }
    if is_compared and not moved:
        row["broken"].append("no stream moved")
    return row | {"ok": not row["broken"]}


def show(rows: Sequence[dict[str, Any]]) -> None:
    cells = [
        {
            "scenario": row["scenario"],
            **{name: row.get(name) for name in ("instants", "streams", "moves")},
            **{name.split("_")[0]: row.get(name) for name in FIGURES},
            "pause p50 s": cell(row.get("pause_p50_s"), ".2f"),
            "max s": cell(row.get("pause_max_s"), ".2f"),
            "s": f"{row['took_s']:.0f}",
            "": "ok" if row["ok"] else "BROKEN",
        }
        for row in rows
    ]
    Report("Streams that outlive their engine", [(name, name) for name in cells[0]], cells).show()
