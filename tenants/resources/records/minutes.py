"""Service by minute: what tenants had of each pool and were due, and what engines did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from sqlalchemy import ColumnElement, Connection, Table

from tenants.admin.cursor import PAGES, SortKey, beyond
from tenants.counts import minute_store
from tenants.counts.minute_store import HOUR_US, MINUTE_US, EngineKey, EngineMinute, FlowKey, FlowMinute
from tenants.instants import from_us
from tenants.people.roles import Act
from tenants.resources.query import Filter, Kind, ListQuery
from tenants.resources.reading import TIMES, conditions_of, span_of
from tenants.resources.resource import PageRequest, Resource
from tenants.resources.shown import Form, Json, Shown
from tenants.storage.tables import engine_minutes, flow_minutes
from tenants.types import Tier

WINDOWS_US = {"minute": MINUTE_US, "hour": HOUR_US}
USUAL_US = {"minute": HOUR_US, "hour": 24 * HOUR_US}
"""How far back an answer goes where `from` is not given, by window."""
LONGEST_US = {"minute": 24 * HOUR_US, "hour": 14 * 24 * HOUR_US}
"""Of one answer."""
_flow, _engines = flow_minutes.c, engine_minutes.c


class FlowQuery(ListQuery, frozen=True, rename=TIMES):
    """Which service of tenants, by which windows. None: any."""

    window: Annotated[str, Filter(kind=Kind.CHOICE, choices=tuple(WINDOWS_US))] = "minute"
    pool: Annotated[str | None, Filter(_flow.pool, help="Only of this model.")] = None
    tier: Annotated[
        str | None, Filter(_flow.tier, Kind.CHOICE, choices=tuple(Tier), help="Only this tier.")
    ] = None
    tenant: Annotated[
        str | None, Filter(_flow.tenant_id, Kind.TENANT, help="Only this tenant's (name or id).")
    ] = None
    since: Annotated[str | None, Filter(kind=Kind.SINCE)] = None
    until: Annotated[str | None, Filter(kind=Kind.UNTIL)] = None


class EngineQuery(ListQuery, frozen=True, rename=TIMES):
    """Which minutes of engines. None: any."""

    pool: Annotated[str | None, Filter(_engines.pool, help="Only of this model.")] = None
    replica: Annotated[str | None, Filter(_engines.replica, help="Only this replica.")] = None
    since: Annotated[str | None, Filter(kind=Kind.SINCE)] = None
    until: Annotated[str | None, Filter(kind=Kind.UNTIL)] = None


@dataclass(frozen=True, slots=True)
class FlowRow:
    key: FlowKey
    counts: FlowMinute
    window_us: int

    def as_json(self) -> Json:
        return _keyed(self.key._asdict()) | self.counts.as_json(self.window_us // 1_000_000)


@dataclass(frozen=True, slots=True)
class EngineRow:
    key: EngineKey
    counts: EngineMinute

    def as_json(self) -> Json:
        return _keyed(self.key._asdict()) | self.counts.as_json()


def _keyed(key: dict[str, Any]) -> Json:
    return {"start": from_us(key.pop("minute_us")).isoformat()} | key


def _read_flow(connection: Connection, request: PageRequest) -> tuple[list[FlowRow], SortKey | None]:
    window_us = WINDOWS_US[request.query.window]
    keys = (minute_store.window_of(window_us), _flow.pool, _flow.tier, _flow.tenant_id)
    where = _where(connection, request, flow_minutes, request.query.window, keys)
    rows = minute_store.flow_by_window(connection, window_us, where, request.most)
    return [FlowRow(key, counts, window_us) for key, counts in rows], None


def _read_engines(connection: Connection, request: PageRequest) -> tuple[list[EngineRow], SortKey | None]:
    keys = (_engines.minute_us, _engines.pool, _engines.replica)
    where = _where(connection, request, engine_minutes, "minute", keys)
    rows = minute_store.engines_by_minute(connection, where, request.most)
    return [EngineRow(key, counts) for key, counts in rows], None


def _where(
    connection: Connection,
    request: PageRequest,
    table: Table,
    window: str,
    keys: tuple[ColumnElement[Any], ...],
) -> list[ColumnElement[bool]]:
    """Whole windows of the time, after the last page, by the filters. Raises `Invalid`, `NotFound`."""
    since_us, until_us = span_of(request, USUAL_US[window], LONGEST_US[window])
    window_us, after = WINDOWS_US[window], request.after
    since_us = since_us // window_us * window_us
    if after is not None:
        since_us = max(since_us, int(after[0]))
    minute_us = table.c.minute_us
    where = [minute_us >= since_us, minute_us < -(-until_us // window_us) * window_us]
    where += [] if after is None else [beyond(keys, after)]
    return [*where, *conditions_of(connection, request).values()]


SPAN = (
    "`from` and `to`: instants with a time zone, the second exclusive, widened to whole windows; at most"
    f" {LONGEST_US['minute'] // HOUR_US} hours of minutes"
)
_COMMON: Mapping[str, Any] = {
    "name": "flow",
    "title": "Windows",
    "scope": "admin:read",
    "act": Act.READ_PLATFORM,
    "has_page": False,
    "rows": 100,
}
FLOW = Resource(
    **_COMMON,
    plural="flow",
    query=FlowQuery,
    read=_read_flow,
    order=lambda query: (int, str, str, str),
    key_of=lambda row: row.key,
    as_json=FlowRow.as_json,
    summary="What tenants had of each pool against their fair shares, by minute or hour",
    description="Of each window, pool, tier and tenant with something in it: `served_tokens` (cost tokens:"
    " input + 2 x output), `fair_tokens` (what it would have had of the same service under the ideal fair"
    " share),"
    " `mean_waiting_tokens` (cost tokens in line, mean), `arrivals` (requests that lined up) and"
    " `mean_before_line_s` (from a request's first byte until it lined up, without its tenant's limits). Of a"
    f" window and pool both sums are equal. {SPAN}, {LONGEST_US['hour'] // HOUR_US} of hours; left out: the"
    f" last hour, or day. {PAGES} The oldest first.",
    shown=(
        Shown("start", "From", Form.INSTANT),
        Shown("pool", "Pool"),
        Shown("tier", "Tier"),
        Shown("tenant", "Tenant", Form.TENANT),
        Shown("served_tokens", "Served", Form.NUMBER),
        Shown("fair_tokens", "Fair share", Form.NUMBER),
        Shown("mean_waiting_tokens", "Waiting", Form.NUMBER),
        Shown("arrivals", "Arrivals", Form.NUMBER),
        Shown("mean_before_line_s", "Before line", Form.SECONDS),
    ),
    group_help="""Service by minute, kept for 14 days.

    \b
      fairgate flow show --tenant acme --since 3h
      fairgate flow show --window hour --since 7d
      fairgate flow engines --since 30m
    """,
    command="show",
    command_help="""Shows the service that tenants had against their fair shares, oldest first.

    In cost tokens (input + 2 x output). At most 24 hours by minute, or 14 days by hour, at once; without
    --since the last hour, or the last day by hour.

    \b
    --json answers:
      {"data": [{"start": "2026-01-31T12:00:00+00:00", "pool": "llama", "tier": "standard",
       "tenant_id": "ten_…", "tenant": "acme", "served_tokens": 5120, "fair_tokens": 4800,
       "mean_waiting_tokens": 210.5, "arrivals": 12, "mean_before_line_s": 0.004}, …],
       "next_cursor": null}
    """,
)
ENGINES = Resource(
    **_COMMON,
    plural="engines",
    query=EngineQuery,
    read=_read_engines,
    order=lambda query: (int, str, str),
    key_of=lambda row: row.key,
    as_json=EngineRow.as_json,
    summary="What engines did, by minute and replica",
    description="As seen by the gateway that saw the replica longest in that minute: `state` at its end"
    " (`up`, `down`), `seen_s`, `up_s`, `idle_s` (up, and no step ran), `steps`, `mean_step_s`, `mean_batch`"
    " (sequences of a step), `computed_tokens` (prompts), `emitted_tokens`, `recomputed_tokens` (after a"
    " preemption), `preemptions`, `kv_share` (of the KV cache in use, mean). Of other servers, which report"
    f" no steps, the counts of steps and tokens are 0. {SPAN}; left out: the last hour. {PAGES} The oldest"
    " first.",
    shown=(
        Shown("start", "From", Form.INSTANT),
        Shown("pool", "Pool"),
        Shown("replica", "Replica"),
        Shown("state", "State"),
        Shown("idle_s", "Idle", Form.SECONDS),
        Shown("steps", "Steps", Form.NUMBER),
        Shown("mean_step_s", "A step", Form.SECONDS),
        Shown("mean_batch", "Batch", Form.NUMBER),
        Shown("computed_tokens", "Prompts", Form.NUMBER),
        Shown("emitted_tokens", "Answers", Form.NUMBER),
        Shown("kv_share", "KV cache", Form.SHARE),
    ),
    command="engines",
    command_help="""Shows what engines did by minute, oldest first; without --since the last hour.

    Servers that are no engine of ours report no steps: their counts of steps and tokens are 0.

    \b
    --json answers:
      {"data": [{"start": "2026-01-31T12:00:00+00:00", "pool": "llama", "replica": "llama-a", "state": "up",
       "seen_s": 60.0, "up_s": 60.0, "idle_s": 12.5, "steps": 1800, "mean_step_s": 0.026,
       "mean_batch": 6.2, "computed_tokens": 40210, "emitted_tokens": 11160, "recomputed_tokens": 0,
       "preemptions": 0, "kv_share": 0.41}, …], "next_cursor": null}
    """,
)
