"""Service by minute: counts of tenants and of engines, and their storage.

Several gateways count one minute. Tenants' counts are summed; of an engine, which all of them see, the
account of the gateway that saw it longest counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Subquery, delete, func, select

from tenants.storage.database import Database
from tenants.storage.flushes import Flush, is_new
from tenants.storage.tables import engine_minutes, flow_minutes
from tenants.storage.upserts import add_counts

MINUTE_US = 60_000_000
HOUR_US = 60 * MINUTE_US
KEPT_US = 14 * 24 * HOUR_US
"""Older minutes are deleted."""
PURGED_AT_ONCE_US = 60 * MINUTE_US
"""One purge deletes an hour of the oldest minutes, which is more than an hour brings."""


class FlowKey(NamedTuple):
    """One tenant in one tier of a pool, in one minute (its begin, microseconds since 1970)."""

    minute_us: int
    pool: str
    tier: str
    tenant_id: str


class EngineKey(NamedTuple):
    """One replica in one minute."""

    minute_us: int
    pool: str
    replica: str


@dataclass(slots=True)
class FlowMinute:
    """Counts of one key; service in cost tokens (input + 2 x output)."""

    served_tokens: int = 0
    fair_tokens: int = 0
    """What it would have had under the ideal fair share."""
    waiting_token_s: int = 0
    """Cost tokens that waited in line, each as often as it waited seconds."""
    arrivals: int = 0
    """Requests that lined up."""
    before_line_us: int = 0
    """Their time from the first byte until they lined up, without their tenant's limits."""

    def as_json(self, window_s: int) -> dict[str, Any]:
        """Of a window of `window_s` seconds."""
        mean_us = self.before_line_us / self.arrivals if self.arrivals else 0.0
        return {
            "served_tokens": self.served_tokens,
            "fair_tokens": self.fair_tokens,
            "mean_waiting_tokens": round(self.waiting_token_s / window_s, 1),
            "arrivals": self.arrivals,
            "mean_before_line_s": round(mean_us / 1e6, 6),
        }


@dataclass(slots=True)
class EngineMinute:
    state: str = "down"
    """When it was last looked at: `up` or `down`."""
    seen_us: int = 0
    """For how long the gateway looked at it."""
    up_us: int = 0
    idle_us: int = 0
    """Up, and no step ran."""
    steps: int = 0
    step_us: int = 0
    batch_sum: int = 0
    """Sequences of each step, added up."""
    computed_tokens: int = 0
    """Prompt tokens, recomputed ones not among them."""
    emitted_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    kv_permille_s: int = 0
    """Share of the KV cache in use (thousandths), times seconds."""

    def as_json(self) -> dict[str, Any]:
        steps, seen_s = max(1, self.steps), max(1e-6, self.seen_us / 1e6)
        return {
            "state": self.state,
            "seen_s": round(self.seen_us / 1e6, 3),
            "up_s": round(self.up_us / 1e6, 3),
            "idle_s": round(self.idle_us / 1e6, 3),
            "steps": self.steps,
            "mean_step_s": round(self.step_us / steps / 1e6, 6),
            "mean_batch": round(self.batch_sum / steps, 2),
            "computed_tokens": self.computed_tokens,
            "emitted_tokens": self.emitted_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "preemptions": self.preemptions,
            "kv_share": round(self.kv_permille_s / 1000 / seen_s, 4),
        }


@dataclass(slots=True)
class MinutesCounted:
    """What one gateway counted since it last wrote."""

    flow: dict[FlowKey, FlowMinute] = field(default_factory=dict)
    engines: dict[EngineKey, EngineMinute] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.flow) + len(self.engines)


FLOW_COUNTS = tuple(flow_minutes.c[name] for name in FlowMinute.__dataclass_fields__)
ENGINE_COUNTS = tuple(engine_minutes.c[name] for name in EngineMinute.__dataclass_fields__)


async def add(
    database: Database, gateway_id: str, counted: MinutesCounted, flush: Flush, now_us: int
) -> None:
    """Adds each flush once. Raises `DatabaseUnavailable`: it may have been added, and is to be repeated."""
    flow = [
        {**key._asdict(), "gateway_id": gateway_id, **asdict(counts)} for key, counts in counted.flow.items()
    ]
    engines = [
        {**key._asdict(), "gateway_id": gateway_id, **asdict(counts)}
        for key, counts in counted.engines.items()
    ]

    def work(connection: Connection) -> None:
        # A restart continues a minute that was begun.
        if is_new(connection, flush, now_us):
            add_counts(connection, flow_minutes, flow)
            add_counts(connection, engine_minutes, engines, replaced=["state"])

    await database.write(work)


async def purge(database: Database, now_us: int) -> None:
    """Deletes at most an hour of the minutes beyond their time. Raises `DatabaseUnavailable`."""

    def work(connection: Connection) -> None:
        for table in (flow_minutes, engine_minutes):
            oldest = connection.execute(select(func.min(table.c.minute_us))).scalar()
            if oldest is not None:
                until_us = min(now_us - KEPT_US, oldest + PURGED_AT_ONCE_US)
                connection.execute(delete(table).where(table.c.minute_us < until_us))

    await database.write(work)


def flow_by_window(
    connection: Connection, window_us: int, conditions: Sequence[ColumnElement[bool]], most: int
) -> list[tuple[FlowKey, FlowMinute]]:
    """Non-empty windows of all gateways, in key order. Conditions must bound the minutes (the index)."""
    table = flow_minutes
    start = window_of(window_us)
    keys = (start, table.c.pool, table.c.tier, table.c.tenant_id)
    query = (
        select(*keys, *(func.sum(column).label(column.name) for column in FLOW_COUNTS))
        .where(*conditions)
        .group_by(*keys)
        .order_by(*keys)
        .limit(most)
    )
    return [
        (FlowKey(*row[: len(keys)]), FlowMinute(*(int(count) for count in row[len(keys) :])))
        for row in connection.execute(query)
    ]


def window_of(window_us: int) -> ColumnElement[Any]:
    """The start of a minute's window."""
    minute_us = flow_minutes.c.minute_us
    # Of minutes the column itself: in the key's order a page reads no more than it has.
    return minute_us if window_us == MINUTE_US else minute_us - minute_us % window_us


def served_tokens(connection: Connection, from_us: int, to_us: int) -> int:
    """Service of all tenants in the minutes that begin in that time, in cost tokens."""
    minute_us = flow_minutes.c.minute_us
    query = select(func.sum(flow_minutes.c.served_tokens)).where(minute_us >= from_us, minute_us < to_us)
    return int(connection.execute(query).scalar() or 0)


def served_by_hour(
    connection: Connection, from_us: int, to_us: int, tenant_ids: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Service of these tenants by hour, in cost tokens."""
    table, hour = flow_minutes, window_of(HOUR_US)
    query = (
        select(table.c.tenant_id, hour, func.sum(table.c.served_tokens))
        .where(table.c.minute_us >= from_us, table.c.minute_us < to_us, table.c.tenant_id.in_(tenant_ids))
        .group_by(table.c.tenant_id, hour)
    )
    tokens_by_tenant: dict[str, tuple[int, ...]] = dict.fromkeys(tenant_ids, ())
    for tenant_id, _, tokens in connection.execute(query):
        tokens_by_tenant[tenant_id] = (*tokens_by_tenant[tenant_id], int(tokens))
    return tokens_by_tenant


def engine_sums(connection: Connection, from_us: int, to_us: int) -> list[tuple[str, str, EngineMinute]]:
    """Sums by pool and replica of the minutes that begin in that time, from `engines_by_minute`."""
    minute_us = engine_minutes.c.minute_us
    ranked = _ranked([minute_us >= from_us, minute_us < to_us])
    keys = (ranked.c.pool, ranked.c.replica)
    sums = [func.sum(ranked.c[column.name]) for column in ENGINE_COUNTS if column.name != "state"]
    query = select(*keys, *sums).where(ranked.c.place == 1).group_by(*keys).order_by(*keys)
    return [
        (pool, replica, EngineMinute("", *map(int, sums_of)))
        for pool, replica, *sums_of in connection.execute(query)
    ]


def _ranked(conditions: Sequence[ColumnElement[bool]]) -> Subquery:
    """Minutes of replicas, with the rank of each gateway's account: the first saw the replica longest."""
    table = engine_minutes
    keys = (table.c.minute_us, table.c.pool, table.c.replica)
    rank = func.row_number().over(partition_by=keys, order_by=(table.c.seen_us.desc(), table.c.gateway_id))
    return select(*keys, *ENGINE_COUNTS, rank.label("place")).where(*conditions).subquery()


def engines_by_minute(
    connection: Connection, conditions: Sequence[ColumnElement[bool]], most: int
) -> list[tuple[EngineKey, EngineMinute]]:
    """In the order of keys; of several gateways the account that saw the replica longest."""
    ranked = _ranked(conditions)
    order = (ranked.c.minute_us, ranked.c.pool, ranked.c.replica)
    query = select(*ranked.c).where(ranked.c.place == 1).order_by(*order).limit(most)
    return [(EngineKey(*row[:3]), EngineMinute(*row[3:-1])) for row in connection.execute(query)]
