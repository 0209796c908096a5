"""The last hour by minute and this hour's service by tenant, from what all gateways wrote."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tenants.admin.admin import Admin
from tenants.admin.cursor import MAX_PAGE
from tenants.counts.minute_store import HOUR_US, MINUTE_US
from tenants.directory.directory import Directory
from tenants.instants import from_us
from tenants.resources.reading import read_page
from tenants.resources.records.minutes import ENGINES, FLOW, EngineQuery, EngineRow, FlowQuery, FlowRow

MOST_TENANTS = 50


@dataclass(frozen=True, slots=True)
class EngineMinuteRow:
    minute_us: int
    output_tokens_s: float
    prompt_tokens_s: float
    mean_batch: float
    kv_share: float
    """Mean over the replicas."""


@dataclass(frozen=True, slots=True)
class HourRow:
    tenant_id: str
    name: str
    tier: str
    served_tokens: int
    fair_tokens: int
    arrivals: int
    before_line_s: float | None

    @property
    def lag_tokens(self) -> int:
        return self.fair_tokens - self.served_tokens


def engine_minutes_of(rows: Iterable[EngineRow]) -> tuple[EngineMinuteRow, ...]:
    by_minute: defaultdict[int, list[EngineRow]] = defaultdict(list)
    for row in rows:
        by_minute[row.key.minute_us].append(row)
    made = []
    for minute_us, replicas in sorted(by_minute.items()):
        counts = [replica.counts for replica in replicas]
        steps = sum(count.steps for count in counts)
        shares = [count.kv_permille_s * 1000 / count.seen_us for count in counts if count.seen_us]
        made.append(
            EngineMinuteRow(
                minute_us,
                sum(count.emitted_tokens for count in counts) * 1e6 / MINUTE_US,
                sum(count.computed_tokens for count in counts) * 1e6 / MINUTE_US,
                sum(count.batch_sum for count in counts) / steps if steps else 0.0,
                sum(shares) / len(shares) if shares else 0.0,
            )
        )
    return tuple(made)


def hour_rows(rows: Iterable[FlowRow], names: Mapping[str, str]) -> tuple[HourRow, ...]:
    """Over all models, most service first."""
    sums: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for row in rows:
        counts = row.counts
        more = (counts.served_tokens, counts.fair_tokens, counts.arrivals, counts.before_line_us)
        whose = (row.key.tenant_id, row.key.tier)
        sums[whose] = [mine + other for mine, other in zip(sums[whose], more, strict=True)]
    made = [
        HourRow(
            tenant_id,
            names.get(tenant_id, tenant_id),
            tier,
            served,
            fair,
            arrivals,
            before_us / arrivals / 1e6 if arrivals else None,
        )
        for (tenant_id, tier), (served, fair, arrivals, before_us) in sums.items()
    ]
    return tuple(sorted(made, key=lambda row: (-row.served_tokens, row.name, row.tier)))


async def read_past_hour(admin: Admin, directory: Directory, now_us: int) -> dict[str, Any]:
    engines = await read_page(admin, ENGINES, EngineQuery(), limit=MAX_PAGE)
    since = from_us(now_us // HOUR_US * HOUR_US).isoformat()
    flow = await read_page(admin, FLOW, FlowQuery(window="hour", since=since), limit=MAX_PAGE)
    ids = {row.key.tenant_id for row in flow.rows}
    names = {
        tenant_id: tenant.name for tenant_id in ids if (tenant := directory.tenant(tenant_id)) is not None
    }
    rows = hour_rows(flow.rows, names)
    return {
        "minutes": engine_minutes_of(engines.rows),
        "tenants": rows[:MOST_TENANTS],
        "more_tenants": max(0, len(rows) - MOST_TENANTS),
        # The latest minutes are left out when there are very many replicas.
        "has_more_minutes": engines.next_cursor is not None,
    }
