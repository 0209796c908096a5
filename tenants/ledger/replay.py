"""What must every counter say, and what must be held, by the ledger's rows alone?

Pure reading on one connection, so that one snapshot answers both: what was settled, and who still holds.
`Ledger.standing` is its caller, verification another.
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
        # In the words of the index: see `RESERVES`.
        _reserve.c.kind == literal_column("'reserve'"),
    ),
).join(ledger, and_(ledger.c.request_id == _reserve.c.request_id, ledger.c.kind == "settle"))
"""Each settle row (`ledger`) once for each counter that its request was reserved on."""


def usage(connection: Connection, limits: Sequence[Limit], now_us: int) -> list[tuple[Limit, int]]:
    """What each limit's counter must say at `now_us`, from settled rows alone.

    Windows: the sum of what was charged to the window that `now_us` lies in. Buckets: what has not flowed
    back, replayed from the charges of twice the time a full refill takes; where older charges could matter
    as well this errs to the tenant's disadvantage by less than one burst. Concurrency: 0.
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
    """Per counter, the sum of the settle rows of the requests that are charged to it."""
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
    """Replays the charges of a bucket, by the time they were settled.

    Started empty, which is never more than the true level, a bucket's level is exact after any moment at
    which it was full; so the replay never shows more than there is.
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
    """What limits count of rows of the ledger (or an alias), in the order of the fields of `Amounts`."""
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
    """The same usage, with the buckets of running streams empty: what these have used so far is in no settle
    row yet, and nobody gains by a rebuild. Pure."""
    streaming = {name for each in open_requests if each.top_ups for name in each.reserve.charged_to}
    return [
        (limit, limit.amount if limit.is_bucket and limit.identity in streaming else amount)
        for limit, amount in used
    ]
