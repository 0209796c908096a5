"""Pages of the audit log: filters and order. Rows are only ever added."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from sqlalchemy import Connection, Select, or_, select
from sqlalchemy.sql import ColumnElement

from tenants.admin import validation
from tenants.admin.audit import MAX_TEXT, AuditRow
from tenants.admin.cursor import DEFAULT_PAGE, Number, Page, beyond, checked_limit, decode_cursor, page_of
from tenants.admin.lists.scans import end_of_scan
from tenants.admin.transaction import AdminActs
from tenants.audit import persons
from tenants.audit.log import AuditLog
from tenants.audit.note import SigningKey
from tenants.directory import queries
from tenants.directory.records import from_us, to_us
from tenants.errors import Invalid, NotFound
from tenants.people.person import folded
from tenants.storage.tables import audit

KINDS = (
    *("tenant", "project", "key", "limit", "price", "slo"),
    *("policy", "brake", "upstream", "request", "ledger", "usage"),
    *("person", "session", "audit", "access", "server", "webhook"),
)
"""What acts are about: the first word of each act."""

MOST_SKEW_US = 3_600_000_000
"""Most that instants, by several machines' clocks, are out of order; rows are numbered by transaction."""
MAX_SEQ = 2**63 - 1
SHOWN = [column for column in audit.c if column.name != "entry"]


class AuditQuery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which rows, in which order. None: any."""

    actor: str | None = None
    """`cli:root`, `key:fg_live_…`, `person:` with name or id; or only the word before the colon."""
    subject: str | None = None
    """What the act was done to: an id, or a name of a tenant, project or key; `tenant:acme` is one kind."""
    act: str | None = None
    """`tenant.suspend`, or only the kind: `tenant`."""
    tenant: str | None = None
    """Name or id: rows of this tenant and of all that belongs to it."""
    since: str | None = None
    """ISO 8601 with a time zone, inclusive."""
    until: str | None = None
    order: Literal["newest", "oldest"] = "newest"


class AuditReads(AdminActs):
    def log(self, key: SigningKey | None = None) -> AuditLog:
        """The same rows as a signed log; `key`: what it is signed with here."""
        return AuditLog(self._transactions.database, key, self._transactions.clock)

    async def read(
        self, wanted: AuditQuery | None = None, *, cursor: str | None = None, limit: int = DEFAULT_PAGE
    ) -> Page[AuditRow]:
        """A page may be shorter than `limit` before the list ends. Raises `Invalid`, `NotFound`."""
        query = AuditQuery() if wanted is None else wanted
        most, filters = checked_limit(limit), msgspec.to_builtins(query)
        last = None if cursor is None else decode_cursor("audit", filters, cursor, tuple[Number])
        rows, end = await self._transactions.read(lambda one: _rows(one, query, last, most + 1))
        return page_of(rows, most, "audit", filters, lambda row: (row.seq,), scanned_to=end)


def _rows(
    connection: Connection, query: AuditQuery, last: tuple[int] | None, most: int
) -> tuple[list[AuditRow], tuple[int | str, ...] | None]:
    along, rest = _conditions(connection, query)
    order, newest_first = (audit.c.seq,), query.order == "newest"
    if last is not None:
        along.append(beyond(order, last, newest_first=newest_first))
    end = end_of_scan(connection, order, along, newest_first=newest_first)
    if end is not None:
        along.append(~beyond(order, end, newest_first=newest_first))
    statement = select(*SHOWN).where(*along, *rest).limit(most)
    statement = statement.order_by(audit.c.seq.desc() if newest_first else audit.c.seq)
    rows = connection.execute(statement).mappings().all()
    shown = persons.ShownPersons(connection, rows)
    return [
        AuditRow(
            seq=row["seq"],
            at=from_us(row["at_us"]),
            actor=shown.actor(row["actor"]),
            origin=shown.origin(row["origin"]),
            action=row["action"],
            target=row["target"],
            tenant_id=row["tenant_id"],
            before=shown.fields(row["action"], row["before"]),
            after=shown.fields(row["action"], row["after"]),
            request_id=row["request_id"],
            trace_id=row["trace_id"],
        )
        for row in rows
    ], end


def _conditions(
    connection: Connection, query: AuditQuery
) -> tuple[list[ColumnElement[bool]], list[ColumnElement[bool]]]:
    """Conditions that an index serves, and the others. Raises `Invalid`, `NotFound`."""
    along: list[ColumnElement[bool]] = []
    rest: list[ColumnElement[bool]] = []
    tenant_id: str | None = None
    if query.tenant is not None:
        tenant_id = queries.find_tenant(connection, query.tenant).tenant_id
        along.append(audit.c.tenant_id == tenant_id)
    if query.actor is not None:
        actor = validation.plain_text("actor", query.actor, MAX_TEXT)
        found = [audit.c.actor == actor, audit.c.actor.startswith(f"{actor}:", autoescape=True)]
        if actor.startswith(persons.ACTOR):
            who = actor.removeprefix(persons.ACTOR)
            found.append(persons.acts_of(connection, folded(who), who))
        rest.append(or_(*found))
    if query.act is not None:
        act = validation.plain_text("act", query.act, MAX_TEXT)
        kind, dot, _ = act.partition(".")
        _kind("act", kind)
        rest.append(audit.c.action == act if dot else _is_about(kind))
    if query.subject is not None:
        subject = validation.plain_text("subject", query.subject, MAX_TEXT)
        targets, kinds = _subject(connection, subject, tenant_id)
        (along if tenant_id is None else rest).append(targets)
        rest += kinds
    bounds = (("since", query.since), ("until", query.until))
    at_us = {name: to_us(validation.instant(name, text)) for name, text in bounds if text is not None}
    if len(at_us) == 2 and at_us["since"] >= at_us["until"]:
        raise Invalid("since", "must lie before until: as it is, no row can match")
    if "since" in at_us:
        rest.append(audit.c.at_us >= at_us["since"])
        before = select(audit.c.seq).where(audit.c.at_us < at_us["since"] - MOST_SKEW_US)
        along.append(audit.c.seq > _first(connection, before.order_by(audit.c.at_us.desc()), -1))
    if "until" in at_us:
        rest.append(audit.c.at_us < at_us["until"])
        after = select(audit.c.seq).where(audit.c.at_us >= at_us["until"] + MOST_SKEW_US)
        along.append(audit.c.seq <= _first(connection, after.order_by(audit.c.at_us), MAX_SEQ))
    return along, rest


def _first(connection: Connection, query: Select[Any], otherwise: int) -> int:
    found = connection.execute(query.limit(1)).scalar()
    return otherwise if found is None else int(found)


def _subject(
    connection: Connection, text: str, tenant_id: str | None
) -> tuple[ColumnElement[bool], list[ColumnElement[bool]]]:
    """Conditions on target and kind from `text`: an id or name, after a kind and colon if there is one."""
    kind, colon, reference = text.partition(":")
    if not colon:
        ids = queries.ids_of(connection, text, tenant_id=tenant_id)
        return audit.c.target.in_([text, *ids]), []
    _kind("subject", kind)
    ids = [reference]
    if kind in queries.NAMED:
        ids = queries.ids_of(connection, reference, kinds=(kind,), tenant_id=tenant_id)
        if not ids:
            raise NotFound(kind, reference)
    return audit.c.target.in_(ids), [_is_about(kind)]


def _is_about(kind: str) -> ColumnElement[bool]:
    return audit.c.action.startswith(f"{kind}.", autoescape=True)


def _kind(field: str, kind: str) -> None:
    if kind not in KINDS:
        raise Invalid(field, f"{kind!r} is not a kind of thing that acts are about: {', '.join(KINDS)}")
