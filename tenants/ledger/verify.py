"""Verifies ledger rows against each other and quota counters against rows (`fairgate ledger verify`).

Rows are checked in SQL on one snapshot. Counters are in another store and requests come and go: rows are read
before and after the counters, and only limits that are inconsistent in several looks are reported."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Select, and_, func, or_, select

from tenants.directory import queries
from tenants.directory.gateways import GatewayRegistry
from tenants.ledger import replay
from tenants.ledger.counter_sets import changed_sets
from tenants.ledger.ledger import Ledger
from tenants.ledger.replay import charged_sums, counted_columns
from tenants.ledger.rows import OpenRequest, as_list, in_doubt, is_settled, sum_of
from tenants.quota.store import LimitState, QuotaStore
from tenants.storage.database import Database
from tenants.storage.tables import ledger
from tenants.types import NOTHING, Amounts, Limit, Meter
from tenants.usage.verify import usage_problems

MAX_EXAMPLES = 20
"""Requests reported per check."""
LOOKS = 5
PAUSE_S = 0.2

_AMOUNTS = ("input_tokens", "output_tokens", "cost_nanousd", "requests", "gpu_ms")
_OWNERS = ("tenant_id", "project_id", "key_id")


@dataclass(frozen=True, slots=True)
class VerifyReport:
    reserves: int
    settles: int
    open_requests: int
    """Reserved and not settled."""
    limits: int
    """Limits whose counters were compared; 0 without a quota store."""
    problems: tuple[str, ...]
    in_doubt_tokens: int = 0
    """Input and output that limits count and that may not have been used (`fairgate ledger adjust`)."""
    in_doubt: tuple[str, ...] = ()
    """Requests with some of them, newest first, at most `MAX_EXAMPLES`."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "reserves": self.reserves,
            "settles": self.settles,
            "open_requests": self.open_requests,
            "limits": self.limits,
            "in_doubt_tokens": self.in_doubt_tokens,
            "in_doubt": list(self.in_doubt),
            "problems": list(self.problems),
        }


async def verify_ledger(
    database: Database,
    quota_store: QuotaStore | None,
    *,
    running: Collection[str] | Callable[[], Collection[str]] | None = None,
    gateway_id: str = "",
    stale_s: float = 0.0,
    pause_s: float = PAUSE_S,
    wall_clock: Callable[[], float] = time.time,
) -> VerifyReport:
    """Checks every row, the sums of usage and, with a quota store, every limit's counter against the rows.
    `running`: ids of the running requests (a server passes a function): other unsettled ones are a problem;
    None: not known, they are only counted. Requests of gateways other than `gateway_id` are not judged while
    their last heartbeat is no older than `stale_s`."""
    rows = await database.read(check_rows)
    limits: list[Limit] = []
    problems = list(rows.problems)

    def live() -> set[str]:
        return set() if running is None else set(running() if callable(running) else running)

    if running is not None:
        seen = await GatewayRegistry(database).seen()
        others = {gateway.gateway_id for gateway in seen if gateway.silent_s <= stale_s} - {gateway_id}
        problems += await _check_unsettled(database, live, others, pause_s)
    if quota_store is not None:
        limits = await _counted_limits(database, round(wall_clock() * 1e6))
        problems += await _check_counters(database, quota_store, limits, live, pause_s)
    problems += await usage_problems(database)
    return replace(rows, limits=len(limits), problems=tuple(problems))


# ---------------------------------------------------------------- rows


def check_rows(connection: Connection) -> VerifyReport:
    """Checks every row against the others, on one snapshot; no counters and no sums of usage."""
    problems: list[str] = []
    changed = ledger.c.counter_set.in_(changed_sets(connection)[: queries.CHUNK])
    checks = _row_checks() | {"what it is charged to was changed": select(ledger.c.request_id).where(changed)}
    for problem, query in checks.items():
        request_ids = [row[0] for row in connection.execute(query.limit(MAX_EXAMPLES + 1))]
        problems += [f"{request_id}: {problem}" for request_id in request_ids[:MAX_EXAMPLES]]
        if len(request_ids) > MAX_EXAMPLES:
            problems.append(f"and more requests: {problem}")
    problems += _check_adjusted(connection)
    doubtful = _in_doubt(connection)
    return VerifyReport(
        reserves=queries.count(connection, ledger, ledger.c.kind == "reserve"),
        settles=queries.count(connection, ledger, ledger.c.kind == "settle"),
        open_requests=queries.count(connection, ledger, ledger.c.kind == "reserve", ~is_settled(ledger)),
        limits=0,
        problems=tuple(problems),
        in_doubt_tokens=sum(doubtful.values()),
        in_doubt=tuple(doubtful)[:MAX_EXAMPLES],
    )


def _in_doubt(connection: Connection) -> dict[str, int]:
    """Tokens in doubt by request, newest first, without what was given back."""
    settle, adjust = ledger.alias("settle"), ledger.alias("adjust")
    was_given_back = select(adjust.c.id).where(
        adjust.c.request_id == settle.c.request_id, adjust.c.kind == "adjust"
    )
    query = (
        select(settle.c.request_id, settle.c.detail)
        .where(settle.c.kind == "settle", settle.c.outcome == "lost", ~was_given_back.exists())
        .order_by(settle.c.id.desc())
    )
    doubts = {request_id: in_doubt(detail) for request_id, detail in connection.execute(query)}
    tokens = {request_id: doubt.input_tokens + doubt.output_tokens for request_id, doubt in doubts.items()}
    return {request_id: number for request_id, number in tokens.items() if number}


def _check_adjusted(connection: Connection) -> list[str]:
    settle, adjust = ledger.alias("settle"), ledger.alias("adjust")
    both = and_(settle.c.request_id == adjust.c.request_id, settle.c.kind == "settle")
    query = (
        select(adjust.c.request_id, settle.c.detail, *counted_columns(adjust))
        .select_from(adjust.outerjoin(settle, both))
        .where(adjust.c.kind == "adjust")
        .order_by(adjust.c.id)
    )
    wrong = [
        request_id
        for request_id, detail, *given_back in connection.execute(query)
        if [-amount for amount in given_back] != as_list(in_doubt(detail or {}))
    ]
    return [f"{request_id}: given back is not what was in doubt" for request_id in wrong[:MAX_EXAMPLES]]


def _unsettled(connection: Connection, others: set[str]) -> list[str]:
    query = select(ledger.c.request_id, ledger.c.gateway_id)
    query = query.where(ledger.c.kind == "reserve", ~is_settled(ledger)).order_by(ledger.c.id)
    return [request_id for request_id, gateway_id in connection.execute(query) if gateway_id not in others]


async def _check_unsettled(
    database: Database, live: Callable[[], set[str]], others: set[str], pause_s: float
) -> list[str]:
    suspects: list[str] = []
    for look in range(LOOKS):
        if look:
            await asyncio.sleep(pause_s)
        before = live()
        unsettled = await database.read(lambda connection: _unsettled(connection, others))
        known = before | live()
        # A request that came and went during this look is settled at the next one.
        suspects = [
            request_id
            for request_id in unsettled
            if request_id not in known and (look == 0 or request_id in suspects)
        ]
        if not suspects:
            return []
    problem = "reserved, not running, and never settled"
    problems = [f"{request_id}: {problem}" for request_id in suspects[:MAX_EXAMPLES]]
    if len(suspects) > MAX_EXAMPLES:
        problems.append(f"and {len(suspects) - MAX_EXAMPLES} more requests: {problem}")
    return problems


def _row_checks() -> dict[str, Select[Any]]:
    """Problems of rows, each with the query for the affected requests."""
    reserve, settle = ledger.alias("reserve"), ledger.alias("settle")
    both = and_(
        reserve.c.request_id == settle.c.request_id, reserve.c.kind == "reserve", settle.c.kind == "settle"
    )
    pairs = select(settle.c.request_id).select_from(reserve.join(settle, both))
    topped_up = ledger.alias("topped_up")
    more = and_(topped_up.c.request_id == settle.c.request_id, topped_up.c.kind == "top_up")
    held = [
        before + func.coalesce(select(func.sum(column)).where(more).scalar_subquery(), 0)
        for before, column in zip(counted_columns(reserve), counted_columns(topped_up), strict=True)
    ]
    charged = zip(counted_columns(settle), held, _AMOUNTS, strict=True)
    was_reserved = select(reserve.c.id).where(reserve.c.kind == "reserve")
    return {
        "settled or topped up but never reserved": select(settle.c.request_id).where(
            settle.c.kind.in_(("top_up", "settle")),
            ~was_reserved.where(reserve.c.request_id == settle.c.request_id).exists(),
        ),
        "more than one row of one kind": select(ledger.c.request_id)
        .group_by(ledger.c.request_id, ledger.c.kind, ledger.c.number)
        .having(func.count() > 1),
        "a top-up is missing": select(ledger.c.request_id)
        .where(ledger.c.kind == "top_up")
        .group_by(ledger.c.request_id)
        .having(func.count() != func.max(ledger.c.number)),
        # GPU time is known only after a step, so it may exceed the hold.
        "more was charged than reserved and topped up": pairs.where(
            or_(*(one > other for one, other, name in charged if name != "gpu_ms"))
        ),
        "reserved for one tenant, project or key and settled or topped up for another": select(
            settle.c.request_id
        )
        .select_from(reserve.join(settle, reserve.c.request_id == settle.c.request_id))
        .where(
            reserve.c.kind == "reserve",
            settle.c.kind.in_(("settle", "top_up")),
            or_(*(settle.c[name] != reserve.c[name] for name in _OWNERS)),
        )
        .distinct(),
        "a negative amount": select(ledger.c.request_id).where(
            ledger.c.kind.in_(("reserve", "top_up", "settle")),
            or_(*(ledger.c[name] < 0 for name in _AMOUNTS)),
        ),
    }


# ---------------------------------------------------------------- counters

Held = dict[tuple[str, str], OpenRequest]


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Bounds of the counters, from the rows read before and after them.

    A request's steps are: hold, reserve row, (more of both,) …, settle row, counters. So a counter includes
    every settle row read before it, except those of requests that are still live, and none that is missing
    from the read after it. It holds what was unsettled in both reads: at least what the rows say (a bucket
    less, as used amounts flow back), at most the request's worst case."""

    charged_before: dict[str, Amounts]
    charged_after: dict[str, Amounts]
    charged_live: dict[str, Amounts]
    """Settle rows of live requests: already counted, or about to be."""
    held_for_sure: Held
    held_perhaps: Held
    has_unwritten: bool
    """Some live request has no row yet, so its hold is not known here."""


async def _counted_limits(database: Database, now_us: int) -> list[Limit]:
    """Every limit that has a counter: the defaults of end users as those of each of them."""
    open_requests = await Ledger(database).open_requests(most=None)
    return await database.read(
        lambda connection: replay.of_end_users(
            connection, queries.limits_where(connection), open_requests, now_us
        )
    )


async def _check_counters(
    database: Database,
    quota_store: QuotaStore,
    limits: list[Limit],
    live: Callable[[], set[str]],
    pause_s: float,
) -> list[str]:
    problems: list[str] = []
    suspects = limits
    for look in range(LOOKS):
        if look:
            await asyncio.sleep(pause_s)
        wrong = [
            (state.limit, problem)
            for state, bounds in await _look(database, quota_store, suspects, live)
            if (problem := _compare(state, bounds))
        ]
        if not wrong:
            return []
        suspects = [limit for limit, _ in wrong]
        problems = [f"{_describe(limit)}: {problem}" for limit, problem in wrong]
    return problems


async def _look(
    database: Database, quota_store: QuotaStore, limits: list[Limit], live: Callable[[], set[str]]
) -> list[tuple[LimitState, _Bounds]]:
    # In this order: the current windows, their rows, the counters, the rows again.
    ledger_ = Ledger(database)
    names = [state.counter for state in await quota_store.states(limits)]
    before = await database.read(lambda connection: charged_sums(connection, names))
    held_before = _by_counter(await ledger_.open_requests(most=None))
    live_ids = sorted(live())
    states = await quota_store.states(limits)
    held_after = _by_counter(await ledger_.open_requests(most=None))
    held_live = _by_counter(await ledger_.reserved(live_ids))
    after, charged_live, written = await database.read(
        lambda connection: (charged_sums(connection, names), *_of_live(connection, names, live_ids))
    )
    bounds = _Bounds(
        charged_before=before,
        charged_after=after,
        charged_live=charged_live,
        held_for_sure={key: request for key, request in held_before.items() if key in held_after},
        held_perhaps=held_before | held_live | held_after,
        has_unwritten=written < len(live_ids),
    )
    # A window that has turned meanwhile is compared at the next look.
    return [(state, bounds) for state, name in zip(states, names, strict=True) if state.counter == name]


def _by_counter(requests: list[OpenRequest]) -> Held:
    return {(name, request.request_id): request for request in requests for name in request.charged_to}


def _of_live(connection: Connection, names: list[str], live_ids: list[str]) -> tuple[dict[str, Amounts], int]:
    """Charges of the live requests by counter, and how many of them have a row."""
    charged: dict[str, Amounts] = {}
    written = 0
    for chunk in queries.chunks(live_ids):
        is_live = ledger.c.request_id.in_(chunk)
        for name, amounts in charged_sums(connection, names, condition=is_live).items():
            charged[name] = sum_of([charged.get(name, NOTHING), amounts])
        written += queries.count(connection, ledger, ledger.c.kind == "reserve", is_live)
    return charged, written


def _compare(state: LimitState, bounds: _Bounds) -> str:
    """The problem of one counter; empty: none. (A bucket's level depends on the exact time of each charge,
    which rows and counter take from different clocks: only its holds are compared.)"""
    limit, name = state.limit, state.counter
    if min(state.used, state.held, state.available) < 0:
        return f"a negative counter (used {state.used}, held {state.held}, available {state.available})"
    if limit.window is not None:
        least, most = (
            sums.get(name, NOTHING).of(limit.meter) for sums in (bounds.charged_before, bounds.charged_after)
        )
        if not least - bounds.charged_live.get(name, NOTHING).of(limit.meter) <= state.used <= most:
            return f"the ledger says {most} used, the counter says {state.used}"
    least = sum(
        0 if limit.is_bucket and request.top_ups else request.held.of(limit.meter)
        for (counter, _), request in bounds.held_for_sure.items()
        if counter == name
    )
    most = sum(
        request.worst.of(limit.meter)
        for (counter, _), request in bounds.held_perhaps.items()
        if counter == name
    )
    if state.held < least or (state.held > most and not bounds.has_unwritten):
        return f"unsettled requests hold {least}, the counter says {state.held}"
    return ""


def _describe(limit: Limit) -> str:
    shape = "concurrency"
    if limit.meter is not Meter.CONCURRENCY:
        shape = f"{limit.meter.value} per {limit.window.value if limit.window else 'second'}"
    tier = f", tier {limit.tier.value}" if limit.tier else ""
    model = f", model {limit.model}" if limit.model else ""
    return f"limit {limit.limit_id} ({shape} of {limit.kind.value} {limit.subject_id}{tier}{model})"
