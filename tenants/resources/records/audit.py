"""Rows of the audit log: every admin act, who did it, from where, and what it changed. Only ever added."""

from __future__ import annotations

from typing import Annotated, Any

from sqlalchemy import Connection, Select, or_, select
from sqlalchemy.sql import ColumnElement

from tenants.admin.audit import MAX_TEXT, AuditRow
from tenants.admin.cursor import PAGES, SHORT_PAGES, SortKey, beyond
from tenants.admin.lists.scans import end_of_scan
from tenants.audit import persons
from tenants.directory import queries
from tenants.errors import Invalid, NotFound
from tenants.instants import from_us, to_us
from tenants.nouns import checks
from tenants.people.person import folded
from tenants.people.roles import Act
from tenants.resources.query import Filter, Kind, ListQuery
from tenants.resources.resource import PageRequest, Resource
from tenants.resources.shown import Form, Shown
from tenants.storage.tables import audit

KINDS = (
    *("tenant", "project", "key", "limit", "price", "slo", "alias"),
    *("policy", "brake", "upstream", "request", "ledger", "usage"),
    *("person", "session", "audit", "access", "server", "webhook", "alert", "backup"),
)
"""What acts are about: the first word of each act."""

MOST_SKEW_US = 3_600_000_000
"""Most that instants, by several machines' clocks, are out of order; rows are numbered by transaction."""
MAX_SEQ = 2**63 - 1
READ = [column for column in audit.c if column.name != "entry"]
ORDER = (audit.c.seq,)
Conditions = list[ColumnElement[bool]]


class AuditQuery(ListQuery, frozen=True):
    """Which rows, in which order. None: any."""

    actor: Annotated[
        str | None,
        Filter(
            label="Who",
            help="`cli:root`, `key:fg_live_…`, `person:ada`; or only `cli`, `key`, `person`.",
            most=MAX_TEXT,
        ),
    ] = None
    subject: Annotated[
        str | None,
        Filter(
            label="Done to",
            help="What the act was done to: an id, or a name of a tenant, project or key (tenant:acme).",
            most=MAX_TEXT,
        ),
    ] = None
    act: Annotated[
        str | None,
        Filter(
            choices=KINDS,
            help="`tenant.suspend`, or only the kind: `tenant`.",
            most=MAX_TEXT,
            schema={"pattern": rf"^(({'|'.join(KINDS)})(\.[!-~]+)?)$", "maxLength": MAX_TEXT},
        ),
    ] = None
    tenant: Annotated[
        str | None, Filter(kind=Kind.TENANT, help="Rows of this tenant and of all that is its (name or id).")
    ] = None
    since: Annotated[str | None, Filter(kind=Kind.SINCE)] = None
    until: Annotated[str | None, Filter(kind=Kind.UNTIL)] = None
    seq: Annotated[
        str | None, Filter(label="Row", help="The row of this number.", schema={"pattern": "^[0-9]{1,18}$"})
    ] = None
    order: Annotated[str, Filter(kind=Kind.CHOICE, choices=("newest", "oldest"), help="Which first.")] = (
        "newest"
    )


def _read(connection: Connection, request: PageRequest) -> tuple[list[AuditRow], SortKey | None]:
    query, newest_first = request.query, request.query.order == "newest"
    along, rest = _conditions(connection, query)
    if request.after is not None:
        along.append(beyond(ORDER, request.after, newest_first=newest_first))
    end = end_of_scan(connection, ORDER, along, newest_first=newest_first)
    if end is not None:
        along.append(~beyond(ORDER, end, newest_first=newest_first))
    statement = select(*READ).where(*along, *rest).limit(request.most)
    statement = statement.order_by(audit.c.seq.desc() if newest_first else audit.c.seq)
    rows = connection.execute(statement).mappings().all()
    names = persons.ShownPersons(connection, rows)
    return [
        AuditRow(
            seq=row["seq"],
            at=from_us(row["at_us"]),
            actor=names.actor(row["actor"]),
            origin=names.origin(row["origin"]),
            action=row["action"],
            target=row["target"],
            tenant_id=row["tenant_id"],
            before=names.fields(row["action"], row["before"]),
            after=names.fields(row["action"], row["after"]),
            request_id=row["request_id"],
            trace_id=row["trace_id"],
        )
        for row in rows
    ], end


def _conditions(connection: Connection, query: AuditQuery) -> tuple[Conditions, Conditions]:
    """Conditions that an index serves, and the others. Raises `Invalid`, `NotFound`."""
    along: Conditions = []
    rest: Conditions = []
    tenant_id: str | None = None
    if query.tenant is not None:
        tenant_id = queries.find_tenant(connection, query.tenant).tenant_id
        along.append(audit.c.tenant_id == tenant_id)
    if query.actor is not None:
        by = [audit.c.actor == query.actor, audit.c.actor.startswith(f"{query.actor}:", autoescape=True)]
        if query.actor.startswith(persons.ACTOR):
            who = query.actor.removeprefix(persons.ACTOR)
            by.append(persons.acts_of(connection, folded(who), who))
        rest.append(or_(*by))
    if query.act is not None:
        kind, dot, _ = query.act.partition(".")
        _check_kind("act", kind)
        rest.append(audit.c.action == query.act if dot else _is_about(kind))
    if query.subject is not None:
        targets, kinds = _subject(connection, query.subject, tenant_id)
        (along if tenant_id is None else rest).append(targets)
        rest += kinds
    if query.seq is not None:
        if not (query.seq.isascii() and query.seq.isdigit() and len(query.seq) <= 18):
            raise Invalid("seq", f"{query.seq[:40]!r} is not the number of a row")
        along.append(audit.c.seq == int(query.seq))
    bounds = (("since", query.since), ("until", query.until))
    at_us = {name: to_us(checks.instant(name, text)) for name, text in bounds if text is not None}
    if len(at_us) == 2 and at_us["since"] >= at_us["until"]:
        raise Invalid("since", "must be before 'until'")
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
    seq = connection.execute(query.limit(1)).scalar()
    return otherwise if seq is None else int(seq)


def _subject(
    connection: Connection, text: str, tenant_id: str | None
) -> tuple[ColumnElement[bool], Conditions]:
    """Conditions on target and kind from `text`: an id or name, after a kind and colon if there is one."""
    kind, colon, reference = text.partition(":")
    if not colon:
        ids = queries.ids_of(connection, text, tenant_id=tenant_id)
        return audit.c.target.in_([text, *ids]), []
    _check_kind("subject", kind)
    ids = [reference]
    if kind in queries.NAMED:
        ids = queries.ids_of(connection, reference, kinds=(kind,), tenant_id=tenant_id)
        if not ids:
            raise NotFound(kind, reference)
    return audit.c.target.in_(ids), [_is_about(kind)]


def _is_about(kind: str) -> ColumnElement[bool]:
    return audit.c.action.startswith(f"{kind}.", autoescape=True)


def _check_kind(field: str, kind: str) -> None:
    if kind not in KINDS:
        raise Invalid(field, f"{kind!r} is not a kind of thing that acts are about: {', '.join(KINDS)}")


AUDIT = Resource(
    name="audit",
    plural="audit",
    title="Audit",
    query=AuditQuery,
    read=_read,
    order=ORDER,
    as_json=AuditRow.as_json,
    scope="admin:read",
    act=Act.READ_PLATFORM,
    summary="The audit log: every admin act, its actor, and what was there before and after",
    description="Filters: `actor` (`cli:root`, `person:ada`, or only `cli`), `subject` (an id, or a name of a"
    " tenant, project or key; `tenant:acme` is one kind), `act` (`tenant.suspend`, or only `tenant`),"
    " `tenant` (rows of all that is its), `since` and `until` (instants with a time zone; the second is"
    " exclusive), `seq` (one row)."
    f" `order`: newest (first) or oldest. {PAGES} {SHORT_PAGES} Kinds: {', '.join(KINDS)}. Rows"
    " hold no secret; of a person who was erased they show `erased person`. `request_id` and `trace_id` are"
    " those of the request that made the row.",
    shown=(
        Shown("at", "When", Form.INSTANT),
        Shown("actor", "Who"),
        Shown("origin", "from", below=True, missing=""),
        Shown("action", "Act", Form.CODE),
        Shown("target", "Done to"),
        Shown("target_name", "name", below=True, missing=""),
        Shown("tenant", "Tenant", Form.TENANT, missing=""),
        Shown("changed", "What changed", Form.CHANGES),
    ),
    file=(
        *("seq", "at", "actor", "origin", "action", "target", "target_name", "tenant_id", "tenant"),
        *("request_id", "trace_id", "before", "after"),
    ),
    empty=("No act matches here", "Leave out a filter, or look further back."),
    command_help="""Lists admin acts, newest first.

    \b
    --json answers:
      {"data": [{"seq": 17, "at": "2026-01-31T12:00:00+00:00", "actor": "cli:root", "origin": "cli",
       "action": "tenant.suspend", "target": "ten_…", "target_name": "acme", "tenant_id": "ten_…",
       "tenant": "acme", "before": {"status": "active", …}, "after": {"status": "suspended", …},
       "request_id": null, "trace_id": null}, …],
       "next_cursor": null}
    """,
)
