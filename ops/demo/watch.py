"""Samples the status page while the demo runs, and makes the live view of it."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST
from ops.demo.cast import CastTenant
from ops.demo.replay import Board
from ops.demo.report import Sample, ideal_by_tier
from ops.demo.shares import TenantArrival
from ops.demo.table import TenantRow, View
from ops.reporting import plain, quantile
from ops.sandbox.server import LogReader

EVERY_S = 0.5
RATE_WINDOW_S = 5.0
LOG_EVERY = 4


class DemoSampler:
    """Reads the server while the replay runs. `names` maps tenant ids to names."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        board: Board,
        cast: Sequence[CastTenant],
        names: Mapping[str, str],
        log: LogReader,
    ) -> None:
        self.samples: list[Sample] = []
        self.status: dict[str, Any] = {}
        self.bound_after: dict[str, int] = {}
        """By tier whose quotes bind: its answers until then."""
        self._client = client
        self._board = board
        self._cast = cast
        self._names = names
        self._log = log
        self._rates: deque[tuple[float, dict[str, int]]] = deque()

    async def run(self) -> None:
        """Samples until it is cancelled; a failed reading is skipped."""
        number = 0
        while True:
            try:
                await self.sample()
                if number % LOG_EVERY == 0:
                    await self._log.read()
            except httpx.HTTPError:
                pass
            number += 1
            await asyncio.sleep(EVERY_S)

    async def sample(self) -> None:
        """Takes one reading. Raises `httpx.HTTPError`."""
        response = await self._client.get("/admin/v1/status")
        response.raise_for_status()
        self.status = response.json()
        for tier in next(iter(self.status["models"]["pools"].values()))["quotes_bind"]:
            answered = sum(sent.ok and sent.tier == tier for sent in self._board.sent)
            self.bound_after.setdefault(tier, answered)
        now_s = self._board.now_s()
        emitted: dict[str, int] = {}
        service: dict[str, float] = {}
        for tenant_id, (computed, output) in self.status["engines"][0].get("service", {}).items():
            name = self._names.get(tenant_id)
            if name is not None:
                service[name] = computed * INPUT_TOKEN_COST + output * OUTPUT_TOKEN_COST
                emitted[name] = output
        if service or not self.samples:
            self.samples.append(Sample(now_s, service))
            self._rates.append((now_s, emitted))
            while now_s - self._rates[0][0] > RATE_WINDOW_S:
                self._rates.popleft()

    def view(self, phase: str) -> View:
        tenants = {item["name"]: item for item in self.status.get("tenants", [])}
        by_tenant = self._board.by_tenant()
        fair = self._fair_service()
        latest = self.samples[-1].service if self.samples else {}
        shares, fair_shares = self._shares(latest), self._shares(fair)
        rows = []
        for item in self._cast:
            times = [sent.ttft_s for sent in by_tenant.get(item.name, []) if sent.ttft_s is not None]
            tenant = tenants.get(item.name, {})
            rows.append(
                TenantRow(
                    tenant=item.name,
                    tier=item.tier.value,
                    weight=item.weight,
                    queued=sum(tenant.get("queued", {}).values()),
                    running=tenant.get("running", 0),
                    tokens_per_s=self._rate(item.name),
                    share=shares[item.name],
                    fair_share=fair_shares[item.name],
                    ttft_p50_s=plain(quantile(times, 0.5)),
                    ttft_p99_s=plain(quantile(times, 0.99)),
                    budget_left=_budget_left(tenant),
                    refused=sum(sent.refusal is not None for sent in by_tenant.get(item.name, [])),
                )
            )
        sent = self._board.sent
        return View(
            elapsed_s=self._board.now_s(),
            sent=len(sent),
            planned=self._board.planned,
            answered=sum(item.ok for item in sent),
            refused=sum(item.refusal is not None for item in sent),
            queued=sum(row.queued for row in rows),
            running=sum(row.running for row in rows),
            tokens_per_s=sum(row.tokens_per_s for row in rows),
            phase=phase,
            rows=rows,
        )

    def _fair_service(self) -> dict[str, float]:
        arrivals = [
            TenantArrival(
                sent.sent_s,
                sent.tenant,
                sent.planned.input_tokens * INPUT_TOKEN_COST + sent.planned.output_tokens * OUTPUT_TOKEN_COST,
            )
            for sent in self._board.sent
            if sent.refusal is None and sent.planned is not None
        ]
        return {
            name: amount
            for ideal in ideal_by_tier(self._cast, arrivals, self.samples).values()
            for name, amount in ideal.service.items()
        }

    def _shares(self, service: Mapping[str, float]) -> dict[str, float | None]:
        totals: dict[str, float] = defaultdict(float)
        for item in self._cast:
            totals[item.tier] += service.get(item.name, 0.0)
        return {
            item.name: service.get(item.name, 0.0) / totals[item.tier] if totals[item.tier] else None
            for item in self._cast
        }

    def _rate(self, name: str) -> float:
        if len(self._rates) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._rates[0], self._rates[-1]
        return (last.get(name, 0) - first.get(name, 0)) / max(1e-3, last_s - first_s)


def _budget_left(tenant: Mapping[str, Any]) -> float | None:
    parts = [limit["available"] / limit["amount"] for limit in tenant.get("limits", []) if limit["amount"]]
    return min(parts, default=None)
