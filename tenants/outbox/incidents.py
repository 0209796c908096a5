"""Storage of incidents, in one transaction with the events about them.

One gateway evaluates: the holder of a lease in the head row. Each transaction checks it again, so a gateway
that stood still meanwhile changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Select, delete, insert, select, update
from sqlalchemy.sql import ColumnElement

from tenants.directory import queries
from tenants.directory.keys import new_id
from tenants.instants import from_us
from tenants.outbox.kinds import CHECKPOINT, runbook_path
from tenants.outbox.outbox import OutboxEvent, put
from tenants.outbox.transitions import (
    MAX_PAGE_CHARS,
    MAX_SUMMARY_CHARS,
    ActiveSilence,
    Condition,
    Incident,
    transitions,
)
from tenants.storage.tables import alert_silences, audit_checkpoints, incidents, outbox_head

MAX_FIRING = 1_000
"""Further alerts wait until one of these is resolved."""
KEPT_US = 30 * 86_400 * 1_000_000
KEPT_RESOLVED = 10_000
MOST_CHECKPOINTS = 100
"""Announced in one transaction."""
_COLUMNS = [column.label("incident_id" if column.name == "id" else column.name) for column in incidents.c]


@dataclass(frozen=True, slots=True)
class Evaluated:
    fired: list[Incident]
    resolved: list[Incident]
    left_out: int
    """Conditions beyond `MAX_FIRING`."""


def take_lease(connection: Connection, gateway_id: str, now_us: int, lease_us: int) -> bool:
    """Whether this gateway evaluates for `lease_us` from now on."""
    is_free = (outbox_head.c.evaluator == gateway_id) | (outbox_head.c.leased_until_us <= now_us)
    taken = update(outbox_head).where(is_free)
    return bool(
        connection.execute(taken.values(evaluator=gateway_id, leased_until_us=now_us + lease_us)).rowcount
    )


def give_up_lease(connection: Connection, gateway_id: str) -> None:
    mine = update(outbox_head).where(outbox_head.c.evaluator == gateway_id)
    connection.execute(mine.values(evaluator="", leased_until_us=0))


def evaluate(
    connection: Connection,
    gateway_id: str,
    conditions: Iterable[Condition],
    looked_at: Collection[str],
    now_us: int,
    lease_us: int,
    base_url: str = "",
) -> Evaluated | None:
    """Stores changes, and their events; None: another gateway evaluates. `conditions`: all of `looked_at`."""
    if not take_lease(connection, gateway_id, now_us, lease_us):
        return None
    open_ = firing(connection)
    changes = transitions(open_, conditions, looked_at, now_us)
    room = max(0, MAX_FIRING - len(open_) + len(changes.resolved))
    fired = [_begun(condition, now_us) for condition in changes.fired[:room]]
    if fired:
        connection.execute(insert(incidents), [_row(incident) for incident in fired])
    for some, values in (
        (changes.resolved, {"resolved_us": now_us}),
        (changes.quiet, {"quiet_us": now_us}),
        (changes.back, {"quiet_us": None}),
    ):
        for chunk in queries.chunks([incident.incident_id for incident in some]):
            connection.execute(update(incidents).where(incidents.c.id.in_(chunk)).values(**values))
    for incident, condition in changes.renewed:
        said = {"summary": condition.summary[:MAX_SUMMARY_CHARS], "evidence": dict(condition.evidence)}
        connection.execute(update(incidents).where(incidents.c.id == incident.incident_id).values(**said))
    told: list[tuple[Incident, int | None]] = [(incident, None) for incident in fired]
    told += [(incident, now_us) for incident in changes.resolved]
    known, over = silences(connection), _end_silences(connection, now_us)
    told = [(incident, at_us) for incident, at_us in told if incident.problem not in known]
    # What still fires at the end of its silence is news to those who did not hear of it.
    ended = {incident.incident_id for incident in changes.resolved}
    told += [
        (incident, None)
        for incident in (*open_, *fired)
        if incident.problem in over and incident.incident_id not in ended
    ]
    names = queries.names_of(
        connection, "tenant", {incident.tenant_id for incident, _ in told if incident.tenant_id}
    )
    events = [
        OutboxEvent(incident.subject, incident.tenant_id, data_of(incident, resolved_us, names, base_url))
        for incident, resolved_us in told
    ]
    put(connection, events, now_us)
    return Evaluated(fired, changes.resolved, len(changes.fired) - len(fired))


def data_of(
    incident: Incident, resolved_us: int | None, names: Mapping[str, str], base_url: str
) -> dict[str, Any]:
    """The data of an incident's event. Pure."""
    return {
        "incident": incident.incident_id,
        "state": "firing" if resolved_us is None else "resolved",
        "severity": incident.severity,
        "tenant_id": incident.tenant_id or None,
        "tenant": names.get(incident.tenant_id),
        "summary": incident.summary,
        "evidence": dict(incident.evidence),
        "fired_at": from_us(incident.fired_us).isoformat(),
        "resolved_at": None if resolved_us is None else from_us(resolved_us).isoformat(),
        "link": base_url + incident.page,
        "runbook": base_url + runbook_path(incident.subject),
    }


def announce_checkpoints(connection: Connection, now_us: int) -> int:
    """Puts new checkpoints, whoever signed them, into the outbox; returns how many. Needs the lease."""
    last = connection.execute(select(outbox_head.c.checkpoint)).scalar_one()
    columns = audit_checkpoints.c
    query = select(audit_checkpoints).where(columns.size > last).order_by(columns.size)
    rows = connection.execute(query.limit(MOST_CHECKPOINTS)).mappings().all()
    if not rows:
        return 0
    said = [
        {"size": row["size"], "checkpoint": row["note"], "made_at": from_us(row["at_us"]).isoformat()}
        for row in rows
    ]
    put(connection, [OutboxEvent(CHECKPOINT, "", data) for data in said], now_us)
    connection.execute(update(outbox_head).values(checkpoint=rows[-1]["size"]))
    return len(rows)


def silences(connection: Connection) -> dict[str, ActiveSilence]:
    """By problem; also one whose end is not noticed yet."""
    rows = connection.execute(select(alert_silences)).mappings()
    return {row["problem"]: ActiveSilence(row["until_us"], row["by"], row["reason"]) for row in rows}


def end_silence(connection: Connection, problem: str) -> None:
    connection.execute(delete(alert_silences).where(alert_silences.c.problem == problem))


def _end_silences(connection: Connection, now_us: int) -> set[str]:
    """Removes those that are over; returns their problems."""
    is_over = alert_silences.c.until_us <= now_us
    return set(
        connection.execute(
            delete(alert_silences).where(is_over).returning(alert_silences.c.problem)
        ).scalars()
    )


def acknowledge(connection: Connection, problem: str, by: str, now_us: int) -> None:
    """All alerts of it that fire."""
    ids = [incident.incident_id for incident in firing(connection) if incident.problem == problem]
    is_it = incidents.c.id.in_(ids)
    connection.execute(update(incidents).where(is_it).values(acknowledged_us=now_us, acknowledged_by=by))


def firing(connection: Connection, *conditions: ColumnElement[bool]) -> list[Incident]:
    query = select(*_COLUMNS).where(incidents.c.resolved_us.is_(None), *conditions)
    query = query.order_by(incidents.c.fired_us, incidents.c.id).limit(MAX_FIRING)
    return _read(connection, query)


def _read(connection: Connection, query: Select[Any]) -> list[Incident]:
    known = silences(connection)
    found = [Incident(**row) for row in connection.execute(query).mappings()]
    return [replace(incident, silence=known.get(incident.problem)) for incident in found]


def latest(connection: Connection, *conditions: ColumnElement[bool], most: int) -> list[Incident]:
    query = select(*_COLUMNS).where(*conditions)
    query = query.order_by(incidents.c.fired_us.desc(), incidents.c.id.desc()).limit(most)
    return _read(connection, query)


def purge(connection: Connection, now_us: int) -> None:
    """Deletes incidents that were resolved long ago, and the oldest beyond `KEPT_RESOLVED`."""
    resolved = incidents.c.resolved_us
    edge = connection.execute(
        select(resolved).where(resolved.is_not(None)).order_by(resolved.desc()).offset(KEPT_RESOLVED).limit(1)
    ).scalar()
    before_us = max(now_us - KEPT_US, 0 if edge is None else edge + 1)
    connection.execute(delete(incidents).where(resolved < before_us))


def _begun(condition: Condition, now_us: int) -> Incident:
    return Incident(
        new_id("inc"),
        condition.key,
        condition.kind.subject,
        condition.tenant_id,
        condition.severity or condition.kind.severity,
        condition.summary[:MAX_SUMMARY_CHARS],
        condition.evidence,
        condition.page[:MAX_PAGE_CHARS],
        now_us,
    )


def _row(incident: Incident) -> dict[str, Any]:
    names = ("key", "subject", "tenant_id", "severity", "summary", "page", "fired_us")
    return {name: getattr(incident, name) for name in names} | {
        "id": incident.incident_id,
        "evidence": dict(incident.evidence),
    }
