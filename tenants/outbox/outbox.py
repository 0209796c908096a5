"""The outbox: one row for each event and webhook, from the transaction that makes it until it is delivered.

Rows are numbered under the lock of the head row, so they become visible in order. One webhook gets the events
of a tenant in that order: only the oldest pending one may be claimed. A claim is a lease: another sender
repeats what a dead one had claimed, with the same id, by which receivers recognise it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, exists, insert, select, update
from sqlalchemy.sql import ColumnElement

from tenants.directory.keys import new_id
from tenants.instants import from_us
from tenants.storage.tables import outbox, outbox_head, webhooks

MAX_PENDING = 1_000
"""Events that wait for one webhook; a further one is not sent, but becomes a dead letter."""
MAX_BODY_BYTES = 16 * 1024
MAX_ERROR_CHARS = 300
GIVE_UP_S = 24 * 3_600
"""After that an undelivered event becomes a dead letter."""
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 3_600.0
MOST_OF_A_WEBHOOK = 4
"""Sent to one webhook at the same time, of different tenants."""
MAX_LOOKED_AT = 500
"""Rows of one search for work."""
KEPT_S: Mapping[str, int] = {"delivered": 7 * 86_400, "dead": 30 * 86_400}
KEPT_ROWS = 2_000
"""Of one webhook, whatever became of them."""


@dataclass(frozen=True, slots=True)
class OutboxEvent:
    subject: str
    tenant_id: str
    """Whose; empty: the platform's."""
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Delivery:
    seq: int
    event_id: str
    webhook_id: str
    tenant_id: str
    subject: str
    body: str
    made_us: int
    state: str
    attempts: int
    next_us: int
    until_us: int
    error: str
    ended_us: int | None

    def as_json(self) -> dict[str, Any]:
        return {
            "seq": self.seq,
            "event": self.event_id,
            "webhook": self.webhook_id,
            "tenant_id": self.tenant_id or None,
            "subject": self.subject,
            "state": self.state,
            "attempts": self.attempts,
            "error": self.error,
            "made_at": from_us(self.made_us).isoformat(),
            "next_at": from_us(self.next_us).isoformat() if self.state == "pending" else None,
            "ended_at": None if self.ended_us is None else from_us(self.ended_us).isoformat(),
        }


_COLUMNS = [outbox.c[name] for name in Delivery.__dataclass_fields__]


def retry_after_s(attempts: int) -> float:
    """The delay after that many failed attempts. Pure."""
    return min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(attempts - 1, 30))


def put(
    connection: Connection, events: Iterable[OutboxEvent], now_us: int, *, only: str | None = None
) -> list[Delivery]:
    """Adds events for each subscribed webhook, or for `only` one, in the transaction of what they report."""
    made: list[dict[str, Any]] = []
    rows = list(connection.execute(select(webhooks.c.id, webhooks.c.tenant_id, webhooks.c.subjects)))
    for event in events:
        body, event_id = _body(event, now_us), new_id("evt")
        for webhook_id, tenant_id, subjects in rows:
            told = tenant_id in ("", event.tenant_id) and (not subjects or event.subject in subjects)
            if told if only is None else webhook_id == only:
                made.append(
                    {
                        "event_id": event_id,
                        "webhook_id": webhook_id,
                        "tenant_id": event.tenant_id,
                        "subject": event.subject,
                        "body": body,
                    }
                )
    if not made:
        return []
    last = connection.execute(
        update(outbox_head).values(seq=outbox_head.c.seq + len(made)).returning(outbox_head.c.seq)
    ).scalar_one()
    waiting = _pending(connection, {row["webhook_id"] for row in made})
    for seq, row in enumerate(made, last - len(made) + 1):
        waiting[row["webhook_id"]] += 1
        is_full = waiting[row["webhook_id"]] > MAX_PENDING
        row |= {
            "seq": seq,
            "made_us": now_us,
            "state": "dead" if is_full else "pending",
            "attempts": 0,
            "next_us": now_us,
            "until_us": now_us + GIVE_UP_S * 1_000_000,
            "sender": "",
            "claimed_until_us": 0,
            "error": f"{MAX_PENDING} events are waiting, the limit" if is_full else "",
            "ended_us": now_us if is_full else None,
        }
    connection.execute(insert(outbox), made)
    return [Delivery(**{name: row[name] for name in Delivery.__dataclass_fields__}) for row in made]


def _body(event: OutboxEvent, now_us: int) -> str:
    """As it is signed and sent; without its evidence if it would be too long."""
    said = {"type": event.subject, "timestamp": from_us(now_us).isoformat(), "data": dict(event.data)}
    text = json.dumps(said, separators=(",", ":"))
    if len(text) > MAX_BODY_BYTES:
        said["data"] = {**event.data, "evidence": {}}
        text = json.dumps(said, separators=(",", ":"))
    return text


def _pending(connection: Connection, ids: Iterable[str]) -> Counter[str]:
    waiting: Counter[str] = Counter()
    for webhook_id in ids:
        query = select(outbox.c.seq).where(outbox.c.webhook_id == webhook_id, outbox.c.state == "pending")
        waiting[webhook_id] = len(connection.execute(query.limit(MAX_PENDING)).all())
    return waiting


def _is_due(now_us: int) -> list[ColumnElement[bool]]:
    """Pending, not claimed, and the oldest of its tenant for its webhook."""
    older = outbox.alias("older")
    is_behind = exists().where(
        older.c.webhook_id == outbox.c.webhook_id,
        older.c.tenant_id == outbox.c.tenant_id,
        older.c.state == "pending",
        older.c.seq < outbox.c.seq,
    )
    return [
        outbox.c.state == "pending",
        outbox.c.next_us <= now_us,
        outbox.c.claimed_until_us <= now_us,
        ~is_behind,
    ]


def is_any_due(connection: Connection, now_us: int) -> bool:
    return connection.execute(select(outbox.c.seq).where(*_is_due(now_us)).limit(1)).scalar() is not None


def claim(connection: Connection, sender: str, now_us: int, lease_us: int, most: int) -> list[Delivery]:
    """Takes up to `most` due rows for this sender. Senders skip rows that another one locks."""
    query = select(*_COLUMNS).where(*_is_due(now_us)).order_by(outbox.c.next_us, outbox.c.seq)
    rows = connection.execute(query.limit(MAX_LOOKED_AT).with_for_update(skip_locked=True, of=outbox))
    of_webhook: Counter[str] = Counter()
    taken: list[Delivery] = []
    for row in rows.mappings().all():
        of_webhook[row["webhook_id"]] += 1
        if of_webhook[row["webhook_id"]] <= MOST_OF_A_WEBHOOK and len(taken) < most:
            taken.append(Delivery(**row))
    if taken:
        connection.execute(
            update(outbox)
            .where(outbox.c.seq.in_([delivery.seq for delivery in taken]))
            .values(sender=sender, claimed_until_us=now_us + lease_us)
        )
    return taken


def release(connection: Connection, sender: str) -> None:
    """Gives up what an earlier process of this sender had claimed."""
    connection.execute(
        update(outbox)
        .where(outbox.c.state == "pending", outbox.c.sender == sender)
        .values(sender="", claimed_until_us=0)
    )


def ended(connection: Connection, sent: Delivery, sender: str, error: str, now_us: int) -> str:
    """Records an attempt (`error` empty: delivered); returns the state; empty: another sender claimed it."""
    attempts = sent.attempts + 1
    if not error:
        state = "delivered"
    else:
        state = "dead" if now_us >= sent.until_us else "pending"
    values: dict[str, Any] = {
        "state": state,
        "attempts": attempts,
        "error": error[:MAX_ERROR_CHARS],
        "sender": "",
        "claimed_until_us": 0,
        "ended_us": None if state == "pending" else now_us,
    }
    if state == "pending":
        values["next_us"] = now_us + round(retry_after_s(attempts) * 1e6)
    is_mine = (outbox.c.seq == sent.seq, outbox.c.sender == sender, outbox.c.state == "pending")
    if not connection.execute(update(outbox).where(*is_mine).values(**values)).rowcount:
        return ""
    if state == "pending":
        _hold_back(connection, sent, values["next_us"])
    return state


def _hold_back(connection: Connection, failed: Delivery, until_us: int) -> None:
    """Delays what waits behind a failed event, so that a search for work does not pass over it each time."""
    connection.execute(
        update(outbox)
        .where(
            outbox.c.webhook_id == failed.webhook_id,
            outbox.c.tenant_id == failed.tenant_id,
            outbox.c.state == "pending",
            outbox.c.seq > failed.seq,
            outbox.c.next_us < until_us,
        )
        .values(next_us=until_us)
    )


def send_again(connection: Connection, seq: int, now_us: int) -> None:
    connection.execute(
        update(outbox)
        .where(outbox.c.seq == seq, outbox.c.state == "dead")
        .values(
            state="pending",
            attempts=0,
            next_us=now_us,
            until_us=now_us + GIVE_UP_S * 1_000_000,
            ended_us=None,
        )
    )


def try_now(connection: Connection, webhook_id: str, now_us: int) -> None:
    """Retries waiting events now: the receiver may be back."""
    waits = (outbox.c.webhook_id == webhook_id, outbox.c.state == "pending", outbox.c.next_us > now_us)
    connection.execute(update(outbox).where(*waits).values(next_us=now_us))


def deliveries(connection: Connection, *conditions: ColumnElement[bool], most: int) -> list[Delivery]:
    query = select(*_COLUMNS).where(*conditions).order_by(outbox.c.seq.desc()).limit(most)
    return [Delivery(**row) for row in connection.execute(query).mappings()]


def purge(connection: Connection, now_us: int) -> None:
    """Deletes what ended long ago, and of each webhook the oldest finished ones beyond `KEPT_ROWS`."""
    for state, kept_s in KEPT_S.items():
        too_old = outbox.c.ended_us < now_us - kept_s * 1_000_000
        connection.execute(delete(outbox).where(outbox.c.state == state, too_old))
    for webhook_id in connection.execute(select(webhooks.c.id)).scalars().all():
        of_it = select(outbox.c.seq).where(outbox.c.webhook_id == webhook_id)
        edge = connection.execute(of_it.order_by(outbox.c.seq.desc()).offset(KEPT_ROWS).limit(1)).scalar()
        if edge is not None:
            connection.execute(
                delete(outbox).where(
                    outbox.c.webhook_id == webhook_id, outbox.c.seq <= edge, outbox.c.state != "pending"
                )
            )
