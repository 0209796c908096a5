"""Computes every quota counter from ledger rows, on one connection: charges and holds of one snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    and_,
    func,
    literal_column,
    or_,
    select,
    text,
    true,
)

from tenants.directory import queries
from tenants.quota import rules
from tenants.storage.tables import CHARGES, counter_sets, ledger
from tenants.types import NOTHING, Amounts, Limit, SubjectKind

if TYPE_CHECKING:
    from tenants.ledger.rows import OpenRequest

CLOCKS_APART_US = 600_000_000
"""Most that clocks of gateways and stores may differ: windows turn by one, rows are dated by another."""

_names = ledger.alias("names")
_SETTLED_BY_COUNTER = counter_sets.join(
    _names,
    and_(
        _names.c.gateway_id == counter_sets.c.gateway_id,
        _names.c.counter_set == counter_sets.c.set_id,
        # Verbatim the partial index's condition: see `NAME_COUNTERS`.
        or_(_names.c.kind == literal_column("'reserve'"), _names.c.counter_set.is_not(None)),
    ),
).join(ledger, and_(ledger.c.request_id == _names.c.request_id, ledger.c.kind.in_(("settle", "adjust"))))
"""Settle and adjust rows, each joined with every counter that its request was held on."""


def of_end_users(
    connection: Connection, limits: Sequence[Limit], open_requests: Iterable[OpenRequest], now_us: int
) -> list[Limit]:
    """The limits, defaults of end users replaced by those of each whose use or holds may still count."""
    defaults: dict[str, list[Limit]] = {}
    for limit in limits:
        if limit.is_default:
            defaults.setdefault(limit.tenant_id, []).append(limit)
    by_identity = {limit.identity: limit for limit in limits if not limit.is_default}
    names: dict[str, set[str]] = {
        tenant_id: _settled_counters(connection, mine, now_us) for tenant_id, mine in defaults.items()
    }
    for request in open_requests:
        if request.reserve.tenant_id in names:
            names[request.reserve.tenant_id].update(request.charged_to)
    for tenant_id, mine in defaults.items():
        users = sorted({rules.end_user_in(name) for name in names[tenant_id]} - {""})
        for limit in (default.of_end_user(user) for default in mine for user in users):
            # One that an end user has of its own is in the default's place.
            by_identity.setdefault(limit.identity, limit)
    return list(by_identity.values())


def _settled_counters(connection: Connection, defaults: Sequence[Limit], now_us: int) -> set[str]:
    """Counters of end users with settlements since a tenant's first window or refill began."""
    query = (
        select(counter_sets.c.counter)
        .select_from(_SETTLED_BY_COUNTER)
        .where(
            # Of the rows joined it is the condition of the index by tenant and time.
            text(f"ledger.{CHARGES.text}"),
            ledger.c.tenant_id == defaults[0].tenant_id,
            ledger.c.at_us >= min(_counts_since_us(limit, now_us) for limit in defaults) - CLOCKS_APART_US,
            counter_sets.c.counter.startswith(f"{SubjectKind.END_USER.value}:"),
        )
        .distinct()
    )
    return set(connection.execute(query).scalars())


def _counts_since_us(limit: Limit, now_us: int) -> int:
    """Settlements before it no longer count."""
    if limit.window is not None:
        return rules.window_bounds_us(limit.window, limit.time_zone, now_us)[0]
    return _replayed_since_us(limit, now_us) if limit.is_bucket else now_us


def usage(connection: Connection, limits: Sequence[Limit], now_us: int) -> list[tuple[Limit, int]]:
    """The value of each limit's counter at `now_us`, from settle rows alone. Windows: the sum of the charges
    to the window that contains `now_us`. Buckets: what has not flowed back, replayed from the charges of
    twice the time of a full refill (ignoring older ones costs less than one burst). Concurrency: 0."""
    names: dict[str, Limit] = {}
    for limit in limits:
        if limit.window is not None:
            names[rules.charge_name(limit, rules.advance(limit, None, now_us))] = limit
    sums = charged_sums(connection, list(names))
    used = {limit.identity: sums.get(name, NOTHING).of(limit.meter) for name, limit in names.items()}
    buckets: dict[tuple[int, float | None], list[Limit]] = {}
    for limit in limits:
        if limit.is_bucket:
            buckets.setdefault((limit.amount, limit.rate_per_s), []).append(limit)
    for alike in buckets.values():
        used |= _buckets_used(connection, alike, now_us)
    return [(limit, used.get(limit.identity, 0)) for limit in limits]


def charged_sums(
    connection: Connection,
    names: list[str],
    condition: ColumnElement[bool] | None = None,
) -> dict[str, Amounts]:
    """By counter, the sum of the settle rows of the requests charged to it, less what was given back."""
    sums: dict[str, Amounts] = {}
    for chunk in queries.chunks(names):
        query = (
            select(counter_sets.c.counter, *(func.sum(column) for column in counted_columns(ledger)))
            .select_from(_SETTLED_BY_COUNTER)
            .where(counter_sets.c.counter.in_(chunk), true() if condition is None else condition)
            .group_by(counter_sets.c.counter)
        )
        for name, *amounts in connection.execute(query):
            sums[name] = Amounts(*(int(amount) for amount in amounts))
    return sums


def _replayed_since_us(limit: Limit, now_us: int) -> int:
    assert limit.rate_per_s is not None
    return now_us - 2 * (int(limit.amount / limit.rate_per_s * 1e6) + 1_000)


def _buckets_used(connection: Connection, alike: Sequence[Limit], now_us: int) -> dict[str, int]:
    """Replays the charges of buckets of one size and rate in the order of settlement. Starting empty, the
    replayed level is never above the true one, and exact from any moment at which a bucket is full."""
    start_us = _replayed_since_us(alike[0], now_us)
    by_name = {limit.identity: limit for limit in alike}
    counters: dict[str, rules.Counter] = dict.fromkeys(by_name, rules.BucketCounter(0, start_us // 1_000, 0))
    for chunk in queries.chunks(list(by_name)):
        charges = (
            select(counter_sets.c.counter, ledger.c.at_us, *counted_columns(ledger))
            .select_from(_SETTLED_BY_COUNTER)
            .where(
                counter_sets.c.counter.in_(chunk),
                # What was given back flows back by itself.
                ledger.c.kind == "settle",
                ledger.c.at_us > start_us,
                ledger.c.at_us <= now_us,
            )
            .order_by(ledger.c.at_us)
        )
        for name, at_us, *amounts in connection.execute(charges):
            limit = by_name[name]
            counter = rules.advance(limit, counters[name], at_us)
            counters[name] = rules.charge(limit, counter, Amounts(*amounts).of(limit.meter))
    return {
        name: rules.view(limit, rules.advance(limit, counters[name], now_us), now_us).used
        for name, limit in by_name.items()
    }


def counted_columns(rows: FromClause) -> tuple[ColumnElement[int], ...]:
    """Columns of the ledger (or an alias) as limits count them, in the order of the fields of `Amounts`."""
    return (
        func.coalesce(rows.c.counted_input, rows.c.input_tokens),
        func.coalesce(rows.c.counted_output, rows.c.output_tokens),
        func.coalesce(rows.c.counted_cost, rows.c.cost_nanousd),
        rows.c.requests,
        rows.c.gpu_ms,
    )


def emptied(
    used: Iterable[tuple[Limit, int]], open_requests: Iterable[OpenRequest]
) -> list[tuple[Limit, int]]:
    """The usage with running streams' buckets empty: no row has their use, which rebuilds must keep. Pure."""
    streaming = {name for request in open_requests if request.top_ups for name in request.charged_to}
    return [
        (limit, limit.amount if limit.is_bucket and limit.identity in streaming else amount)
        for limit, amount in used
    ]


def without_rested(
    used: Iterable[tuple[Limit, int]], open_requests: Iterable[OpenRequest]
) -> list[tuple[Limit, int]]:
    """Without the limits of end users of whom nothing counts any more. Pure."""
    holding = {rules.end_user_in(name) for request in open_requests for name in request.charged_to}
    return [
        (limit, amount)
        for limit, amount in used
        if amount or limit.kind is not SubjectKind.END_USER or limit.subject_id in holding
    ]
