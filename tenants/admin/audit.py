"""The audit log: actor, origin, action and target of every change, with its before and after.

A row is written in the transaction of its change: neither exists alone. Rows of accesses (log-ins, refused
attempts, reads) are merged and written apart. No row holds personal data (`tenants/audit/persons.py`)."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from tenants.audit import persons, store
from tenants.audit.accesses import OTHERS, SEVERAL, MergedAccess
from tenants.errors import Invalid, NotFound
from tenants.instants import from_us
from tenants.people.rows import find_person

MAX_TEXT = 128
LINK = "link"
"""The actor who uses a one-time link: a person, who has not logged in."""


@dataclass(frozen=True, slots=True)
class Actor:
    """An actor (`cli:root`, `key:fg_live_…`, `system`) and its origin (`cli`, an IP address)."""

    name: str
    origin: str = ""
    person: tuple[str, int] | None = None
    """Of a person in the console: id, and the revision that its session is valid for."""
    request_id: str = ""
    trace_id: str = ""
    """Of the causing request; empty: none."""

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > MAX_TEXT:
            raise Invalid("actor", f"needs 1 to {MAX_TEXT} characters")
        if len(self.origin) > MAX_TEXT:
            raise Invalid("origin", f"has more than {MAX_TEXT} characters")


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One admin act or key event. `before` and `after` are None where nothing was or is there."""

    seq: int
    """Its number in the log: dense, from 0."""
    at: datetime
    actor: str
    origin: str
    action: str
    target: str
    tenant_id: str | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    request_id: str | None = None
    trace_id: str | None = None
    """Of the request that made it; None: it was made by none, or by an older version."""

    @property
    def target_name(self) -> str:
        return str((self.after or self.before or {}).get("name") or "")

    def as_json(self) -> dict[str, Any]:
        return {
            "seq": self.seq,
            "at": self.at.isoformat(),
            "actor": self.actor,
            "origin": self.origin,
            "action": self.action,
            "target": self.target,
            "target_name": self.target_name,
            "tenant_id": self.tenant_id,
            "before": self.before,
            "after": self.after,
            "request_id": self.request_id,
            "trace_id": self.trace_id,
        }


def record(
    connection: Connection,
    actor: Actor,
    action: str,
    target: str,
    *,
    at_us: int,
    tenant_id: str | None = None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Adds one row. `action` is `<thing>.<verb>`, `target` the id of the thing."""
    store.head(connection, is_locked=True)
    origin_of = persons.person_of(action, after, before) if actor.name == LINK else None
    if actor.person is not None:
        origin_of = actor.person[0]
    store.append(
        connection,
        store.LogEntry(
            at_us=at_us,
            actor=persons.hidden_actor(connection, actor.name),
            origin=_origin(connection, origin_of, actor.origin),
            action=action,
            target=target,
            tenant_id=tenant_id,
            before=persons.hidden_fields(connection, action, before),
            after=persons.hidden_fields(connection, action, after),
            request_id=actor.request_id or None,
            trace_id=actor.trace_id or None,
        ),
    )


def record_accesses(
    connection: Connection, rows: Iterable[MergedAccess], *, at_us: int, name_key: bytes
) -> None:
    """`name_key` hashes names of unknown persons: one may be a password typed into the wrong field."""
    for row in rows:
        store.head(connection, is_locked=True)
        access = row.access
        actor, person_id = _who(connection, access.actor, name_key)
        counted: dict[str, Any] = {"count": row.count}
        if row.last_us > row.first_us:
            counted |= {"first": from_us(row.first_us).isoformat(), "last": from_us(row.last_us).isoformat()}
        if row.reasons:
            counted["why"] = row.reasons
        store.append(
            connection,
            store.LogEntry(
                at_us=at_us,
                actor=actor,
                origin=_origin(connection, person_id, access.origin),
                action=access.action,
                target=access.target,
                after=counted,
                request_id=access.request_id or None,
                trace_id=access.trace_id or None,
            ),
        )


def _who(connection: Connection, actor: str, name_key: bytes) -> tuple[str, str | None]:
    """The actor as stored in a row, and the person's id."""
    if not actor.startswith(persons.ACTOR):
        return actor, None
    name = actor.removeprefix(persons.ACTOR)
    try:
        person = find_person(connection, name)
    except NotFound:
        keyed = hmac.digest(
            name_key, b"a name of no person\0" + name.encode(errors="surrogatepass"), hashlib.sha256
        )
        return f"unknown:{keyed.hex()[:16]}", None
    return persons.hidden_actor(connection, person.actor_name), person.person_id


def _origin(connection: Connection, person_id: str | None, origin: str) -> str:
    if person_id is None or not origin or origin in (OTHERS, SEVERAL):
        return origin
    return persons.hidden(connection, person_id, origin)
