"""Audit of a scenario from outside: SQL, Redis, the engine's own count, and the clients' answers.

`gather` reads (the edge), `judge` compares (pure). No figure comes from a gateway. The figures:

overshoot_tokens     by how much a hard limit was exceeded, summed over tenants: the most of what the ledger
                     charged, the engine emitted and clients received, less the limit
drift_tokens         difference of the ledger's charges from the counters in Redis, from the tokens emitted
                     by an engine that survived, and per request from the client's tokens and usage (at least
                     as many where the answer broke off); and one for each sum of usage that the admin API or
                     the console shows and the ledger does not
double_charges       settlements beyond the first of a request, and charged runs beyond the first of an
                     Idempotency-Key
leaked_holds         what is still held when everything has ended: reservations without a settlement, holds in
                     Redis (or counters that hold without one), sequences in the engine, unsettled outcomes
cancel_error_tokens  where a client left: charged less produced, or the opposite; each such client is a tenant
                     of its own, so that errors cannot cancel out

Where engine and gateway died together the last emitted tokens are unknown. Limits then count what was held;
`uncertain_tokens` is the bound on the error of the bill, and such a request's drift counts beyond that only;
`unseen_tokens` are tokens that clients received and that were not billed.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psycopg
import redis
import sqlalchemy

from engine.client.client import EngineClient, EngineUnavailable
from ops.bench.budgets.testbed import BudgetTenant, Testbed
from ops.bench.common.attempts import ClientAttempt
from ops.sandbox.page_check import PageSums, page_sums
from ops.sandbox.server import until
from ops.sandbox.usage_check import usage_differences
from tenants.errors import DatabaseUnavailable
from tenants.storage.database import open_database

KEYS = ("overshoot_tokens", "drift_tokens", "double_charges", "leaked_holds", "cancel_error_tokens")
AUDITOR = "contract-auditor"
IDLE_S = 25.0
MAX_EXAMPLES = 5
SNAPSHOT_S = 5.0
COUNTED = ("charged_tokens", "uncertain_tokens", "unseen_tokens")
COLUMNS = ("request_id", "tenant_id", "kind", "input_tokens", "output_tokens", "counted_input",
           "counted_output")  # fmt: skip


@dataclass(frozen=True, slots=True)
class AuditedRow:
    request_id: str
    tenant_id: str
    kind: str
    input_tokens: int
    output_tokens: int
    basis: str = ""
    uncertain_tokens: int = 0
    counted_input: int | None = None
    counted_output: int | None = None
    """As limits count them, where that is not what is billed: in doubt (the benchmark gives no weights)."""

    def of(self, meter: str) -> int:
        return self.output_tokens + (self.input_tokens if meter == "total_tokens" else 0)

    def counted(self, meter: str) -> int:
        inputs = self.input_tokens if self.counted_input is None else self.counted_input
        output = self.output_tokens if self.counted_output is None else self.counted_output
        return output + (inputs if meter == "total_tokens" else 0)


@dataclass(frozen=True, slots=True)
class StoredCounters:
    used: Mapping[str, int]
    """By the meter of each window."""
    held: Mapping[str, int]
    """Held or promised, by counter, where it is not 0."""
    holds: int


@dataclass(frozen=True, slots=True)
class AuditFacts:
    tenants: Sequence[BudgetTenant]
    rows: Sequence[AuditedRow]
    stored: Mapping[str, StoredCounters]
    emitted: Mapping[str, int] | None
    """Output tokens by tenant id, as the engine counts them; None: the engine died in the scenario."""
    left_in_engine: int
    answers: Sequence[ClientAttempt]
    usage: Sequence[str] = ()
    """Differences between the ledger and the sums of usage of the API and of pages."""
    pages: int = 0


@dataclass
class Findings:
    overshoot_tokens: int = 0
    drift_tokens: int = 0
    double_charges: int = 0
    leaked_holds: int = 0
    cancel_error_tokens: int = 0
    uncertain_tokens: int = 0
    unseen_tokens: int = 0
    charged_tokens: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, figure: str, amount: int, example: str) -> None:
        if amount:
            setattr(self, figure, getattr(self, figure) + amount)
            if len(self.examples) < MAX_EXAMPLES:
                self.examples.append(f"{figure} {amount}: {example}")


def judge(facts: AuditFacts) -> Findings:
    findings = Findings()
    settled: dict[str, AuditedRow] = {}
    for row in facts.rows:
        if row.kind == "settle":
            findings.add("double_charges", int(row.request_id in settled), f"{row.request_id} settled again")
            settled[row.request_id] = row
    for row in facts.rows:
        if row.kind == "reserve" and row.request_id not in settled:
            findings.add("leaked_holds", 1, f"{row.request_id} was reserved and never settled")
    findings.add("leaked_holds", facts.left_in_engine, "left in the engine")
    findings.charged_tokens = sum(row.of("total_tokens") for row in settled.values())
    for tenant in facts.tenants:
        rows = [row for row in settled.values() if row.tenant_id == tenant.tenant_id]
        _judge_tenant(findings, facts, tenant, rows)
    for answer in facts.answers:
        _judge_answer(findings, answer, settled.get(answer.request_id))
    _judge_keys(findings, facts.answers, settled)
    for difference in facts.usage:
        findings.add("drift_tokens", 1, difference)
    return findings


def _judge_tenant(
    findings: Findings, facts: AuditFacts, tenant: BudgetTenant, rows: Sequence[AuditedRow]
) -> None:
    answers = [answer for answer in facts.answers if answer.tenant_id == tenant.tenant_id]
    output = sum(row.output_tokens for row in rows)
    emitted = None if facts.emitted is None else facts.emitted.get(tenant.tenant_id, 0)
    if tenant.amount is not None and tenant.meter in ("total_tokens", "output_tokens"):
        spent = sum(row.of(tenant.meter) for row in rows)
        received = sum(answer.delivered_tokens for answer in answers if not answer.is_replay)
        counted = sum(row.counted(tenant.meter) for row in rows)
        most = max(counted, spent - output + max(received, emitted or 0))
        over = max(0, most - tenant.amount)
        findings.add("overshoot_tokens", over, f"{tenant.name}: {most} of {tenant.amount}")
    stored = facts.stored[tenant.tenant_id]
    for meter, used in stored.used.items():
        spent = sum(row.counted(meter) for row in rows)
        findings.add(
            "drift_tokens", abs(spent - used), f"{tenant.name}: ledger {spent}, counter {used} {meter}"
        )
    findings.add("leaked_holds", stored.holds, f"{tenant.name}: holds in Redis")
    if not stored.holds:
        findings.add("leaked_holds", len(stored.held), f"{tenant.name}: {dict(stored.held)}")
    if emitted is not None:
        off = abs(output - emitted)
        figure = "cancel_error_tokens" if any(answer.has_left for answer in answers) else "drift_tokens"
        findings.add(figure, off, f"{tenant.name}: charged {output}, the engine emitted {emitted}")


def _judge_answer(findings: Findings, answer: ClientAttempt, row: AuditedRow | None) -> None:
    charged = 0 if row is None else row.output_tokens
    if not answer.request_id or answer.is_replay:
        return
    unseen = max(0, answer.delivered_tokens - charged)
    if row is not None and row.basis == "last_report":
        findings.uncertain_tokens += row.uncertain_tokens
        findings.unseen_tokens += unseen
        unseen = max(0, unseen - row.uncertain_tokens)
    stated = answer.delivered_tokens if answer.usage_tokens is None else answer.usage_tokens
    off = abs(stated - charged) + unseen if answer.is_whole and not answer.has_left else unseen
    what = f"{answer.request_id}: charged {charged}, received {answer.delivered_tokens}, stated {stated}"
    findings.add("drift_tokens", off, what)


def _judge_keys(
    findings: Findings, answers: Sequence[ClientAttempt], settled: Mapping[str, AuditedRow]
) -> None:
    runs = {
        (answer.tenant_id, answer.idempotency_key, answer.request_id)
        for answer in answers
        if answer.idempotency_key and answer.request_id in settled
        and settled[answer.request_id].of("total_tokens")
    }  # fmt: skip
    of_tenants: Counter[str] = Counter(tenant_id for tenant_id, _, _ in runs)
    for tenant_id, count in of_tenants.items():
        keys = {key for tenant, key, _ in runs if tenant == tenant_id}
        findings.add("double_charges", count - len(keys), f"{count} runs under {len(keys)} keys")


class Witness:
    """The engine's own count of emitted tokens, read on a separate connection."""

    def __init__(self, address: str) -> None:
        self._client = EngineClient(address, AUDITOR)

    async def start(self) -> int:
        """Returns the engine's process id. Raises `EngineUnavailable`."""
        return (await self._client.connect(60.0)).pid

    async def close(self) -> None:
        await self._client.close()

    async def look(self, pid: int) -> tuple[Mapping[str, int] | None, int]:
        """Emitted tokens by tenant (None: another process than `pid`), sequences left, outcomes unsettled."""
        if (await self._client.connect(60.0)).pid != pid:
            return None, await self._left()
        left = await self._left()
        before = self._client.snapshot

        async def is_newer() -> bool:
            return self._client.snapshot is not None and self._client.snapshot is not before

        if not await until(is_newer, SNAPSHOT_S):
            raise EngineUnavailable("the engine sent no snapshot")
        assert self._client.snapshot is not None
        service = self._client.snapshot.service
        return {tenant_id: had.emitted_tokens for tenant_id, had in service.items()}, left

    async def _left(self) -> int:
        # An adopting gateway is shown what dead ones left: here they must have left nothing.
        inventory = await self._client.collect(adopt=True)
        return len(inventory.running) + len(inventory.outcomes)


async def gather(
    testbed: Testbed,
    witness: Witness,
    pid: int,
    tenants: Sequence[BudgetTenant],
    answers: Sequence[ClientAttempt],
) -> AuditFacts:
    """Waits at most `IDLE_S` until everything has ended, then reads the facts."""
    ids = [tenant.tenant_id for tenant in tenants]

    async def has_ended() -> bool:
        open_ = await asyncio.to_thread(_open_requests, testbed.postgres.url, ids)
        stored = await asyncio.to_thread(_stored, testbed.redis.url, ids)
        return not open_ and not any(counters.holds for counters in stored.values())

    await until(has_ended, IDLE_S)
    emitted, left = await witness.look(pid)
    rows = await ledger_rows(testbed.postgres.url, ids)
    stored = await asyncio.to_thread(_stored, testbed.redis.url, ids)
    try:
        async with testbed.living().operator() as client:
            usage = await usage_differences(client, testbed.postgres.url)
            async with httpx.AsyncClient(base_url=client.base_url, timeout=client.timeout) as visitor:
                names = [tenant.name for tenant in tenants]
                pages = await page_sums(client, visitor, testbed.postgres.url, names)
    except (httpx.HTTPError, DatabaseUnavailable) as error:
        usage, pages = [f"usage was not told: {error or type(error).__name__}"], PageSums(0, [])
    return AuditFacts(
        tenants, rows, stored, emitted, left, answers, [*usage, *pages.differences], pages.pages
    )


def _open_requests(url: str, tenant_ids: Collection[str]) -> int:
    query = """SELECT count(*) FROM ledger AS reserve WHERE kind = 'reserve' AND tenant_id = ANY(%s) AND NOT
        EXISTS (SELECT 1 FROM ledger WHERE request_id = reserve.request_id AND kind = 'settle')"""
    with psycopg.connect(url, connect_timeout=10) as connection:
        row = connection.execute(query, [list(tenant_ids)]).fetchone()
    assert row is not None
    return int(row[0])


async def ledger_rows(url: str, tenant_ids: Collection[str]) -> list[AuditedRow]:
    """Of any database. Raises `DatabaseUnavailable`."""
    database, query = open_database(url), sqlalchemy.text("SELECT * FROM ledger ORDER BY id")
    try:
        rows = await database.read(lambda connection: connection.execute(query).mappings().all())
    finally:
        await database.close()
    return [_row(dict(row)) for row in rows if row["tenant_id"] in tenant_ids]


def _row(row: Mapping[str, Any]) -> AuditedRow:
    detail = row["detail"]
    detail = json.loads(detail) if isinstance(detail, str) else detail
    columns = {name: row[name] for name in COLUMNS}
    basis, uncertain = str(detail.get("basis", "")), int(detail.get("uncertain_tokens", 0))
    return AuditedRow(**columns, basis=basis, uncertain_tokens=uncertain)


def _stored(url: str, tenant_ids: Collection[str]) -> dict[str, StoredCounters]:
    stored = {}
    with redis.Redis.from_url(url, decode_responses=True, socket_timeout=10) as client:
        for tenant_id in tenant_ids:
            counters = client.hgetall(f"fairgate:{{{tenant_id}}}:counters")
            holds = client.hlen(f"fairgate:{{{tenant_id}}}:holds")
            stored[tenant_id] = read_counters(counters, holds)
    return stored


def read_counters(counters: Mapping[str, str], holds: int) -> StoredCounters:
    """A tenant's hash in Redis. A counter's name is kind:subject:meter:shape:tier; the value of a window is
    "start end used held promised", of a bucket "level time held", of a concurrency "held"."""
    used, held = {}, {}
    for name, value in counters.items():
        if name.startswith("#"):
            continue
        numbers = [int(float(number)) for number in value.split()]
        if len(numbers) == 5:
            used[name.split(":")[2]] = numbers[2]
        still = sum(numbers[3:]) if len(numbers) == 5 else numbers[-1]
        if still:
            held[name] = still
    return StoredCounters(used, held, holds)
