"""Digests of the ledger in the audit: spans of rows are closed in order, and checked against the rows.

Spans follow each other without a gap from id 1, so that a row which is added, removed or changed later shows
in the span of its id. A span is closed only where every id in it is final (`tenants/usage/fold.py`), so
spans end at or before the fold's position. The ledger is never purged: a missing row was removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import JSON, Connection, Text, cast, func, select

from tenants.audit import store
from tenants.errors import Invalid
from tenants.ledger.spans import FIELDS, MAX_SPAN_ROWS, SpanDigest, differences, digest_of, span_from
from tenants.storage.database import Database
from tenants.storage.tables import audit, ledger
from tenants.usage.fold import position

ACTION = "ledger.digest"
TARGET = "ledger"
PAGE = 1_000
MORE_ROWS = 1_000
"""A span is not read further than this many rows beyond those digested."""
_COLUMNS = [
    cast(ledger.c[name], Text) if isinstance(ledger.c[name].type, JSON) else ledger.c[name] for name in FIELDS
]


@dataclass(frozen=True, slots=True)
class NotedSpan:
    """A digest and the audit row that holds it."""

    seq: int
    span: SpanDigest


@dataclass(frozen=True, slots=True)
class LedgerFinding:
    """The first span whose rows are not those that were digested."""

    seq: int | None
    """The audit row with the digest; None: there is none for these rows."""
    first_id: int
    last_id: int
    kinds: tuple[str, ...]
    """Kinds of rows that differ; empty: the digest itself is wrong."""
    detail: str

    def __str__(self) -> str:
        of = "" if self.seq is None else f" (digest in row {self.seq} of the audit)"
        return f"ledger rows {self.first_id} to {self.last_id}{of}: {self.detail}"


@dataclass(frozen=True, slots=True)
class LedgerVerdict:
    spans: int
    rows: int
    """Rows in the spans that were right."""
    open_rows: int
    """Newer rows, which no span has yet."""
    finding: LedgerFinding | None


class LedgerDigests:
    """Closes spans. `after_s`: how long a row waits at most, unless a span is full before."""

    def __init__(self, database: Database, clock: Callable[[], float], after_s: float) -> None:
        self._database = database
        self._clock = clock
        self._after_us = round(after_s * 1e6)

    async def close_due(self, most: int = MAX_SPAN_ROWS) -> SpanDigest | None:
        """Closes the next span, of at most `most` rows, where one is due (None: not). Rows are read outside
        of the transaction that stores the digest, so settlements do not wait."""
        now_us = round(self._clock() * 1e6)
        span = await self._database.read(lambda one: next_span(one, now_us, self._after_us, most))
        if span is None:
            return None
        is_noted = await self._database.write(partial(_note, span, now_us))
        return span if is_noted else None


def next_span(connection: Connection, now_us: int, after_us: int, most: int) -> SpanDigest | None:
    """The span that is due; None: none is."""
    fold = position(connection)
    if fold is None:
        return None
    first_id, final_id = _next_id(connection), fold.folded_id
    new = (ledger.c.id >= first_id, ledger.c.id <= final_id)
    oldest_us = connection.execute(select(ledger.c.at_us).where(*new).order_by(ledger.c.id).limit(1)).scalar()
    if oldest_us is None:
        return None
    full = select(ledger.c.id).where(*new).order_by(ledger.c.id).offset(most - 1).limit(1)
    last_id: int | None = connection.execute(full).scalar()
    if last_id is None:
        if now_us - oldest_us < after_us:
            return None
        last_id = final_id
    return digest_of(first_id, last_id, rows_between(connection, first_id, last_id, most))


def rows_between(connection: Connection, first_id: int, last_id: int, most: int) -> Iterator[Any]:
    """By id, at most `most`, a page at a time."""
    while most > 0:
        query = select(*_COLUMNS).where(ledger.c.id >= first_id, ledger.c.id <= last_id)
        page = connection.execute(query.order_by(ledger.c.id).limit(min(PAGE, most))).all()
        yield from page
        if len(page) < min(PAGE, most):
            return
        first_id, most = page[-1][0] + 1, most - len(page)


async def verify_digests(database: Database) -> LedgerVerdict:
    """Checks closed spans against the rows, up to the first mismatch; the audit proves the digests."""
    spans, rows, next_id, seq = 0, 0, 1, -1
    if before := await database.read(lambda one: _count(one, ledger.c.id < 1)):
        detail = f"{before} rows have ids below those that the ledger gives"
        return LedgerVerdict(0, 0, 0, LedgerFinding(None, 0, 0, (), detail))
    while notes := await database.read(partial(_noted_after, seq)):
        for noted_seq, said in notes:
            finding, span = await database.read(partial(_check, noted_seq, said, next_id))
            if finding is not None or span is None:
                return LedgerVerdict(spans, rows, 0, finding)
            spans, rows, next_id, seq = spans + 1, rows + span.rows, span.last_id + 1, noted_seq
    still_open = await database.read(lambda one: _count(one, ledger.c.id >= next_id))
    return LedgerVerdict(spans, rows, still_open, None)


def _check(
    seq: int, said: Any, next_id: int, connection: Connection
) -> tuple[LedgerFinding | None, SpanDigest | None]:
    try:
        span = span_from(said)
    except Invalid as error:
        return LedgerFinding(seq, next_id, next_id, (), str(error)), None
    if span.first_id != next_id or span.last_id < span.first_id:
        detail = f"it is of the rows {span.first_id} to {span.last_id}, and the next one begins at {next_id}"
        return LedgerFinding(seq, next_id, max(next_id, span.last_id), (), detail), None
    rows = rows_between(connection, span.first_id, span.last_id, span.rows + MORE_ROWS)
    changed = differences(span, digest_of(span.first_id, span.last_id, rows))
    if not changed:
        return None, span
    detail = "; ".join(f"{difference.kind}: {difference.detail}" for difference in changed)
    kinds = tuple(difference.kind for difference in changed)
    return LedgerFinding(seq, span.first_id, span.last_id, kinds, detail), span


def newest(connection: Connection) -> NotedSpan | None:
    """The last closed span. Raises `Invalid` for an unreadable one."""
    query = select(audit.c.seq, audit.c.after).where(audit.c.target == TARGET, audit.c.action == ACTION)
    row = connection.execute(query.order_by(audit.c.seq.desc()).limit(1)).first()
    return None if row is None else NotedSpan(row.seq, span_from(row.after))


def _next_id(connection: Connection) -> int:
    last = newest(connection)
    return 1 if last is None else last.span.last_id + 1


def _noted_after(seq: int, connection: Connection) -> list[tuple[int, Any]]:
    is_digest = (audit.c.target == TARGET, audit.c.action == ACTION, audit.c.seq > seq)
    query = select(audit.c.seq, audit.c.after).where(*is_digest).order_by(audit.c.seq).limit(PAGE)
    return [(row.seq, row.after) for row in connection.execute(query)]


def _note(span: SpanDigest, now_us: int, connection: Connection) -> bool:
    """Adds the digest to the audit; False where another gateway was first."""
    store.head(connection, is_locked=True)
    if _next_id(connection) != span.first_id:
        return False
    row = store.LogEntry(now_us, "system", "ledger digest", ACTION, TARGET, after=span.as_json())
    store.append(connection, row)
    return True


def _count(connection: Connection, condition: Any) -> int:
    return int(connection.execute(select(func.count()).select_from(ledger).where(condition)).scalar_one())
