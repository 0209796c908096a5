"""Rows of people, links and sessions, on the caller's connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, delete, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.sql import ColumnElement

from tenants.errors import AlreadyExists, NotFound
from tenants.people.person import Person, folded
from tenants.people.roles import Role
from tenants.people.sessions import Session, SessionRules, digest_of
from tenants.storage.tables import people, person_links, person_sessions


def person_of(row: Any) -> Person:
    return Person(
        person_id=row["id"],
        name=row["name"],
        role=Role(row["role"]),
        tenants=frozenset(row["tenants"]),
        status=row["status"],
        has_password=bool(row["password_hash"]),
        revision=row["revision"],
        created_us=row["created_us"],
    )


def people_where(
    connection: Connection, *conditions: ColumnElement[bool], limit: int | None = None
) -> list[Person]:
    """People by name."""
    query = select(people).where(*conditions).order_by(people.c.name).limit(limit)
    return [person_of(row) for row in connection.execute(query).mappings()]


def find_person(connection: Connection, reference: str) -> Person:
    """Raises `NotFound`."""
    # PostgreSQL takes no NUL.
    if reference.isprintable():
        rows = people_where(
            connection, or_(people.c.id == reference, people.c.name == folded(reference[:200]))
        )
        if rows:
            return rows[0]
    raise NotFound("person", reference[:80])


def is_as_it_was(connection: Connection, person_id: str, revision: int) -> bool:
    """Whether a person has been neither changed since that revision nor suspended."""
    query = select(people.c.id).where(
        people.c.id == person_id, people.c.revision == revision, people.c.status == "active"
    )
    return connection.execute(query).first() is not None


def needs_owner(connection: Connection) -> bool:
    """Whether no owner has ever set a password: then a set-up link makes the first one."""
    query = select(func.count()).where(people.c.role == Role.OWNER.value, people.c.password_us.is_not(None))
    return connection.execute(query).scalar_one() == 0


def valid_now(now_us: int, rules: SessionRules) -> tuple[ColumnElement[bool], ...]:
    """Conditions: sessions that have not ended."""
    return (
        person_sessions.c.person_revision == people.c.revision,
        people.c.status == "active",
        person_sessions.c.ends_us > now_us,
        person_sessions.c.seen_us > now_us - round(rules.idle_s * 1e6),
    )


def sessions_where(
    connection: Connection, *conditions: ColumnElement[bool], limit: int | None = None
) -> list[Session]:
    columns = [column.label(f"session_{column.name}") for column in person_sessions.c]
    query = (
        select(*columns, people)
        .join(people, people.c.id == person_sessions.c.person_id)
        .where(*conditions)
        .order_by(person_sessions.c.id)
        .limit(limit)
    )
    return [
        Session(
            session_id=row["session_id"],
            person=person_of(row),
            created_us=row["session_created_us"],
            seen_us=row["session_seen_us"],
            ends_us=row["session_ends_us"],
            address=row["session_address"],
            user_agent=row["session_user_agent"],
        )
        for row in connection.execute(query).mappings()
    ]


def insert_person(connection: Connection, made: Person, password_hash: str) -> None:
    """Raises `AlreadyExists`."""
    columns = {
        "id": made.person_id,
        "name": made.name,
        "role": made.role.value,
        "tenants": sorted(made.tenants),
        "status": made.status,
        "password_hash": password_hash,
        "password_us": made.created_us if password_hash else None,
        "revision": made.revision,
        "created_us": made.created_us,
    }
    try:
        with connection.begin_nested():
            connection.execute(insert(people).values(columns))
    except IntegrityError:
        raise AlreadyExists("person", made.name) from None


def update_person(connection: Connection, after: Person, columns: Mapping[str, Any]) -> None:
    """Stores a person, with further columns, and removes its sessions, which are void."""
    connection.execute(
        update(people)
        .where(people.c.id == after.person_id)
        .values(
            role=after.role.value,
            tenants=sorted(after.tenants),
            status=after.status,
            revision=after.revision,
            **columns,
        )
    )
    connection.execute(delete(person_sessions).where(person_sessions.c.person_id == after.person_id))


def delete_person(connection: Connection, person: Person) -> None:
    """Removes a person with its sessions and links."""
    for table in (person_sessions, person_links):
        connection.execute(delete(table).where(table.c.person_id == person.person_id))
    connection.execute(delete(people).where(people.c.id == person.person_id))


def of_person(connection: Connection, reference: str | None) -> tuple[ColumnElement[bool], ...]:
    """By id or name; None: any. Raises `NotFound`."""
    return () if reference is None else (people.c.id == find_person(connection, reference).person_id,)


def new_link(connection: Connection, token: str, person_id: str | None, expires_us: int, now_us: int) -> None:
    """Replaces the person's former links (None: former set-up links)."""
    # Where it is None, SQLAlchemy makes it IS NULL.
    former = person_links.c.person_id == person_id
    connection.execute(delete(person_links).where(or_(former, person_links.c.expires_us <= now_us)))
    connection.execute(
        insert(person_links).values(digest=digest_of(token), person_id=person_id, expires_us=expires_us)
    )
