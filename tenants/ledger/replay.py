"""Computes the value of every quota counter from ledger rows.

Reads on one connection only, so that charges and open holds come from one snapshot. Used by
`Ledger.standing` and by verification.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sqlalchemy import ColumnElement, Connection, FromClause, and_, func, literal_column, select, true

from tenants.directory import queries
from tenants.quota import rules
from tenants.storage.tables import counter_sets, ledger
from tenants.types import NOTHING, Amounts, Limit

if TYPE_CHECKING:
    from tenants.ledger.rows import OpenRequest

_reserve = ledger.alias("reserve")
_SETTLED_BY_COUNTER = counter_sets.join(
    _reserve,
    and_(
        _reserve.c.gateway_id == counter_sets.c.gateway_id,
        _reserve.c.counter_set == counter_sets.c.set_id,
        # Verbatim the partial index's condition: see `RESERVES`.
        _reserve.c.kind == literal_column("'reserve'"),
    ),
).join(ledger, and_(ledger.c.request_id == _reserve.c.request_id, ledger.c.kind == "settle"))
"""Settle rows (`ledger`), each joined with every counter that its request was reserved on."""


def usage(connection: Connection, limits: Sequence[Limit], now_us: int) -> list[tuple[Limit, int]]:
    """The value of each limit's counter at `now_us`, from settle rows alone.

    Windows: the sum of the charges to the window that contains `now_us`. Buckets: what has not flowed back,
    replayed from the charges of twice the time of a full refill; ignoring older charges errs to the tenant's
    disadvantage by less than one burst. Concurrency: 0.
    """
    names: dict[str, Limit] = {}
    for limit in limits:
        if limit.window is not None:
            names[rules.charge_name(limit, rules.advance(limit, None, now_us))] = limit
    sums = charged_sums(connection, list(names))
    used = {limit.identity: sums.get(name, NOTHING).of(limit.meter) for name, limit in names.items()}
    for limit in limits:
        if limit.is_bucket:
            used[limit.identity] = _bucket_used(connection, limit, now_us)
    return [(limit, used.get(limit.identity, 0)) for limit in limits]


def charged_sums(
    connection: Connection,
    names: list[str],
    condition: ColumnElement[bool] | None = None,
) -> dict[str, Amounts]:
    """By counter, the sum of the settle rows of the requests charged to it."""
    found: dict[str, Amounts] = {}
    for chunk in queries.chunks(names):
        query = (
            select(counter_sets.c.counter, *(func.sum(column) for column in counted_columns(ledger)))
            .select_from(_SETTLED_BY_COUNTER)
            .where(counter_sets.c.counter.in_(chunk), true() if condition is None else condition)
            .group_by(counter_sets.c.counter)
        )
        for name, *amounts in connection.execute(query):
            found[name] = Amounts(*(int(amount) for amount in amounts))
    return found


def _bucket_used(connection: Connection, limit: Limit, now_us: int) -> int:
    """Replays the charges of a bucket in the order of their settlement.

    Starts with an empty bucket, which is never above the true level; from any moment at which the bucket is
    full the replayed level is exact. So the replay never overstates the level.
    """
    assert limit.rate_per_s is not None
    fill_us = int(limit.amount / limit.rate_per_s * 1e6) + 1_000
    start_us = now_us - 2 * fill_us
    charges = (
        select(ledger.c.at_us, *counted_columns(ledger))
        .select_from(_SETTLED_BY_COUNTER)
        .where(
            counter_sets.c.counter == limit.identity,
            ledger.c.at_us > start_us,
            ledger.c.at_us <= now_us,
        )
        .order_by(ledger.c.at_us)
    )
    counter: rules.Counter = rules.BucketCounter(0, start_us // 1_000, 0)
    for at_us, *amounts in connection.execute(charges):
        counter = rules.advance(limit, counter, at_us)
        counter = rules.charge(limit, counter, Amounts(*amounts).of(limit.meter))
    counter = rules.advance(limit, counter, now_us)
    return rules.view(limit, counter, now_us).used


def counted_columns(rows: FromClause) -> tuple[ColumnElement[int], ...]:
    """Columns of the ledger (or an alias) as limits count them, in the order of the fields of `Amounts`."""
    return (
        func.coalesce(rows.c.counted_input, rows.c.input_tokens),
        func.coalesce(rows.c.counted_output, rows.c.output_tokens),
        rows.c.cost_nanousd,
        rows.c.requests,
        rows.c.gpu_ms,
    )


def emptied(
    used: Iterable[tuple[Limit, int]], open_requests: Iterable[OpenRequest]
) -> list[tuple[Limit, int]]:
    """The same usage, with the buckets of running streams empty: their use so far is in no settle row yet,
    and a rebuild must not give it back. Pure."""
    streaming = {name for each in open_requests if each.top_ups for name in each.reserve.charged_to}
    return [
        (limit, limit.amount if limit.is_bucket and limit.identity in streaming else amount)
        for limit, amount in used
    ]
