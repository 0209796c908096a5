"""Service of tenants against their fair shares, over about the last minute, for status pages.

Once a second each tier's service of a model is divided by weighted max-min between the tenants: one that
waits wants any amount, another what it had. Sums are halved every `HALF_LIFE_S`. Only this gateway's
requests. Pure; decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.explain.fluid_share import max_min
from gateway.flow.tenant_stats import TenantFlow
from gateway.flow.window import NUM_RANKS

HALF_LIFE_S = 30.0
FORGOTTEN = 0.5
"""Cost tokens: tenants with less, had and due, are left out."""

TenantTier = tuple[str, int]


@dataclass(slots=True)
class RecentService:
    """Of one tenant in one tier, weighted to the recent."""

    had: float = 0.0
    due: float = 0.0


class ShareMeter:
    """One model's service. One writer: the gateway's sampler."""

    def __init__(self) -> None:
        self.recent: dict[TenantTier, RecentService] = {}
        self._served: dict[str, list[int]] = {}
        self._at_s: float | None = None

    def sample(self, now_s: float, flows: Sequence[TenantFlow]) -> dict[TenantTier, int]:
        """Divides and returns what was served since the last sample; the first only begins to count."""
        wanting: list[list[tuple[TenantFlow, int]]] = [[] for _ in range(NUM_RANKS)]
        for flow in flows:
            before = self._served.get(flow.tenant_id)
            if before == flow.served and not any(flow.queued):
                continue  # as almost all of many tenants
            before = before or [0] * NUM_RANKS
            # What is taken off again (a cache had it) is taken off the service that follows.
            self._served[flow.tenant_id] = list(map(max, before, flow.served))
            for rank in range(NUM_RANKS):
                had = max(0, flow.served[rank] - before[rank])
                if had or flow.queued[rank]:
                    wanting[rank].append((flow, had))
        if len(self._served) > len(flows):
            known = {flow.tenant_id for flow in flows}
            self._served = {
                tenant_id: served for tenant_id, served in self._served.items() if tenant_id in known
            }
        if self._at_s is not None:
            self._forget(now_s - self._at_s)
            for rank, tenants in enumerate(wanting):
                self._divide(rank, tenants)
        self._at_s = now_s
        return {
            (flow.tenant_id, rank): had
            for rank, tenants in enumerate(wanting)
            for flow, had in tenants
            if had
        }

    def lags(self) -> dict[int, float]:
        """Cost tokens, by rank of a tier, of the tenant furthest behind what it was due."""
        found = dict.fromkeys(range(NUM_RANKS), 0.0)
        for (_, rank), share in self.recent.items():
            found[rank] = max(found[rank], share.due - share.had)
        return found

    def _divide(self, rank: int, tenants: Sequence[tuple[TenantFlow, int]]) -> None:
        total = sum(had for _, had in tenants)
        if not total:
            return
        demands = [math.inf if flow.queued[rank] else float(had) for flow, had in tenants]
        due = max_min(demands, [flow.weight for flow, _ in tenants], total)
        for (flow, had), part in zip(tenants, due, strict=True):
            share = self.recent.setdefault((flow.tenant_id, rank), RecentService())
            share.had += had
            share.due += part

    def _forget(self, elapsed_s: float) -> None:
        kept = 0.5 ** (elapsed_s / HALF_LIFE_S)
        for share in self.recent.values():
            share.had *= kept
            share.due *= kept
        self.recent = {
            whose: share for whose, share in self.recent.items() if share.had + share.due >= FORGOTTEN
        }


def recent_of(meters: Sequence[ShareMeter]) -> dict[TenantTier, RecentService]:
    """Over all models."""
    sums: dict[TenantTier, RecentService] = {}
    for meter in meters:
        for whose, share in meter.recent.items():
            whole = sums.setdefault(whose, RecentService())
            whole.had += share.had
            whole.due += share.due
    return sums


def shares_of(meters: Sequence[ShareMeter]) -> dict[TenantTier, tuple[float, float]]:
    """Each tenant's part of a tier's service, and the part it was due, over all models."""
    recent, totals = recent_of(meters), [0.0] * NUM_RANKS
    for (_, rank), share in recent.items():
        totals[rank] += share.had
    return {
        whose: (share.had / total, share.due / total)
        for whose, share in recent.items()
        if (total := totals[whose[1]]) > 0
    }
