"""Pages of the audit log: filters, order and cursors.

A cursor holds the filter of its list and the last row shown, so that a page of another list is refused
instead of silently skipping rows. Rows are only ever added: a list can be continued at any later time.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from sqlalchemy import Connection, Select, or_, select
from sqlalchemy.sql import ColumnElement

from tenants.admin import validation
from tenants.admin.audit import MAX_TEXT, AuditRow
from tenants.admin.transaction import AdminCommands
from tenants.directory import queries
from tenants.directory.records import from_us, to_us
from tenants.errors import Invalid, NotFound
from tenants.storage.tables import audit

MAX_PAGE = 1_000
MAX_CURSOR = 2_000
"""Characters; a filter with every field at its longest has fewer."""
KINDS = ("tenant", "project", "key", "limit", "price", "slo", "policy", "brake", "request")
"""What acts are about: the first word of each act."""

RowId = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class AuditQuery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which rows, in which order. None: any."""

    actor: str | None = None
    """`cli:root`, `key:fg_live_…`; or only the word before the colon."""
    subject: str | None = None
    """What the act was done to: an id, or a name of a tenant, project or key; `tenant:acme` is one kind."""
    act: str | None = None
    """`tenant.suspend`, or only the kind: `tenant`."""
    tenant: str | None = None
    """Name or id: rows of this tenant and of all that belongs to it."""
    since: str | None = None
    """ISO 8601 with a time zone, inclusive."""
    until: str | None = None
    """The same, exclusive."""
    order: Literal["newest", "oldest"] = "newest"


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Some rows of a list. `next_cursor` None: there are no more now."""

    rows: list[AuditRow]
    next_cursor: str | None


class AuditCommands(AdminCommands):
    """Reads of the audit log."""

    async def read_audit(
        self, wanted: AuditQuery | None = None, *, cursor: str | None = None, limit: int = 100
    ) -> AuditPage:
        """At most `limit` rows after those before `cursor`. Raises `Invalid`, `NotFound`."""
        query = AuditQuery() if wanted is None else wanted
        validation.whole(limit, MAX_PAGE, least=1, field="limit")
        after_id = None if cursor is None else position(cursor, query)
        rows = await self._database.read(lambda connection: _rows(connection, query, after_id, limit + 1))
        page = rows[:limit]
        return AuditPage(page, cursor_after(query, page[-1].audit_id) if len(rows) > limit else None)


def cursor_after(query: AuditQuery, audit_id: int) -> str:
    """The cursor that continues `query` after a row."""
    return base64.urlsafe_b64encode(msgspec.json.encode((query, audit_id))).rstrip(b"=").decode()


_cursors = msgspec.json.Decoder(tuple[AuditQuery, RowId])


def position(cursor: str, query: AuditQuery) -> int:
    """The last row that was shown. Raises `Invalid` for what is no cursor, or one of another list."""
    try:
        if len(cursor) > MAX_CURSOR:
            raise ValueError
        packed = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        made_for, audit_id = _cursors.decode(packed)
    except ValueError:  # of base64, of UTF-8, and of what is in it
        raise Invalid(
            "cursor",
            "is not one of this list: give next_cursor of the page before as it is, or leave it out to begin"
            " with the first page",
        ) from None
    if made_for != query:
        raise Invalid(
            "cursor",
            f"continues the list with {_described(made_for)}, and this one is asked with {_described(query)}:"
            " repeat the filter of the page before, or leave the cursor out to begin with the first page",
        )
    return audit_id


def _described(query: AuditQuery) -> str:
    given = msgspec.to_builtins(query)
    return ", ".join(f"{name}={value}" for name, value in given.items()) or "no filter"


def _rows(connection: Connection, query: AuditQuery, after_id: int | None, most: int) -> list[AuditRow]:
    statement: Select[Any] = select(audit).where(*_conditions(connection, query)).limit(most)
    if query.order == "newest":
        statement = statement.order_by(audit.c.id.desc())
        beyond = audit.c.id < (after_id or 0)
    else:
        statement = statement.order_by(audit.c.id)
        beyond = audit.c.id > (after_id or 0)
    if after_id is not None:
        statement = statement.where(beyond)
    return [
        AuditRow(
            audit_id=row["id"],
            at=from_us(row["at_us"]),
            actor=row["actor"],
            origin=row["origin"],
            action=row["action"],
            target=row["target"],
            tenant_id=row["tenant_id"],
            before=row["before"],
            after=row["after"],
        )
        for row in connection.execute(statement).mappings()
    ]


def _conditions(connection: Connection, query: AuditQuery) -> list[ColumnElement[bool]]:
    """Raises `Invalid` for a value that no row can have, `NotFound` for a tenant, project or key that there
    is not."""
    found: list[ColumnElement[bool]] = []
    tenant_id: str | None = None
    if query.tenant is not None:
        tenant_id = queries.find_tenant(connection, _text("tenant", query.tenant)).tenant_id
        found.append(audit.c.tenant_id == tenant_id)
    if query.actor is not None:
        actor = _text("actor", query.actor)
        found.append(or_(audit.c.actor == actor, audit.c.actor.startswith(f"{actor}:", autoescape=True)))
    if query.act is not None:
        act = _text("act", query.act)
        kind, dot, _ = act.partition(".")
        _kind("act", kind)
        found.append(audit.c.action == act if dot else _is_about(kind))
    if query.subject is not None:
        found += _subject(connection, _text("subject", query.subject), tenant_id)
    bounds = (("since", query.since), ("until", query.until))
    at_us = {name: to_us(validation.instant(name, text)) for name, text in bounds if text is not None}
    if "since" in at_us:
        found.append(audit.c.at_us >= at_us["since"])
    if "until" in at_us:
        found.append(audit.c.at_us < at_us["until"])
    if len(at_us) == 2 and at_us["since"] >= at_us["until"]:
        raise Invalid("since", "must lie before until: as it is, no row can match")
    return found


def _subject(connection: Connection, text: str, tenant_id: str | None) -> list[ColumnElement[bool]]:
    """Rows about the thing of this id or name, of the kind before the colon or of any."""
    kind, colon, reference = text.partition(":")
    if not colon:
        ids = queries.ids_of(connection, text, tenant_id=tenant_id)
        return [audit.c.target.in_([text, *ids])]
    _kind("subject", kind)
    ids = [reference]
    if kind in queries.NAMED:
        ids = queries.ids_of(connection, reference, kinds=(kind,), tenant_id=tenant_id)
        if not ids:
            raise NotFound(kind, reference)
    return [_is_about(kind), audit.c.target.in_(ids)]


def _is_about(kind: str) -> ColumnElement[bool]:
    return audit.c.action.startswith(f"{kind}.", autoescape=True)


def _kind(field: str, kind: str) -> None:
    if kind not in KINDS:
        raise Invalid(field, f"{kind!r} is not a kind of thing that acts are about: {', '.join(KINDS)}")


def _text(field: str, value: str) -> str:
    # PostgreSQL takes no NUL.
    if not value or len(value) > MAX_TEXT or not value.isprintable():
        raise Invalid(field, f"needs 1 to {MAX_TEXT} printable characters; leave it out for any")
    return value
