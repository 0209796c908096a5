"""Personal data in the audit: a keyed hash in the row, and beside the log a record that can be erased.

Rows hold `~` and a hash of a person's name, address or browser under a random salt; the record holds salt and
text, which lists show while it exists and matches. Erasing deletes the records: rows and hashes stay and
reveal nothing. Records are written under the lock of the log's head, so that none comes back."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, func, insert, select
from sqlalchemy.sql import ColumnElement

from tenants.storage.tables import audit, audit_persons, people

MARK = "~"
ACTOR = "person:"
"""Before the name of an actor who is a person."""
ERASED_PERSON = "erased person"
ERASED = "erased"
"""Shown for what has no record (any more)."""
ALTERED = "altered record"
"""Shown where the record is not what was hashed."""
MAX_RECORDS = 10_000
"""Of one person. What comes beyond is hashed, and not shown."""
_HASH = re.compile(f"{MARK}([0-9a-f]{{32}})")
_PERSONAL = {"person": ("name",), "session": ("person", "address", "user_agent")}
"""Fields with personal data, by the kind of act."""
_NAMED_BY = "by"
"""The field of an actor, in what acts of any kind are about."""


def hash_of(salt: bytes, text: str) -> str:
    return hmac.digest(salt, text.encode(), hashlib.sha256).hex()[:32]


def hidden(connection: Connection, person_id: str, text: str) -> str:
    """What a row holds for a person's text: the same for the same text while its record exists. Of a person
    who does not exist (any more) nothing is recorded. The log's head must be locked."""
    table = audit_persons.c
    query = select(table.digest).where(table.person_id == person_id, table.text == text)
    known = connection.execute(query).scalar()
    if known is not None:
        return MARK + str(known)
    salt = secrets.token_bytes(16)
    digest = hash_of(salt, text)
    is_there = connection.execute(select(people.c.id).where(people.c.id == person_id)).first() is not None
    if is_there and _records(connection, person_id) < MAX_RECORDS:
        values = {"digest": digest, "person_id": person_id, "salt": salt, "text": text}
        connection.execute(insert(audit_persons).values(values))
    return MARK + digest


def hidden_actor(connection: Connection, actor: str) -> str:
    if not actor.startswith(ACTOR):
        return actor
    name = actor.removeprefix(ACTOR)
    query = select(people.c.id).where(people.c.name == name)
    person_id = connection.execute(query).scalar()
    return ACTOR + hidden(connection, "" if person_id is None else person_id, name)


def hidden_fields(
    connection: Connection, action: str, fields: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    if fields is None:
        return None
    kept, kind = dict(fields), action.partition(".")[0]
    person_id = str(kept.get("id" if kind == "person" else "person_id") or "")
    for name in _PERSONAL.get(kind, ()):
        if isinstance(text := kept.get(name), str) and text:
            kept[name] = hidden(connection, person_id, text)
    if isinstance(by := kept.get(_NAMED_BY), str):
        kept[_NAMED_BY] = hidden_actor(connection, by)
    return kept


def person_of(action: str, *fields: Mapping[str, Any] | None) -> str | None:
    """The id of the person that an act was about; None: of none."""
    kind = action.partition(".")[0]
    name = {"person": "id", "session": "person_id"}.get(kind)
    return next((str(part[name]) for part in fields if name is not None and part and name in part), None)


def erase(connection: Connection, person_id: str) -> None:
    connection.execute(delete(audit_persons).where(audit_persons.c.person_id == person_id))


def acts_of(connection: Connection, name: str, person_id: str) -> ColumnElement[bool]:
    """Condition: rows of the acts of the person of this name or id, while recorded."""
    table = audit_persons.c
    query = (
        select(table.digest).where((table.text == name) | (table.person_id == person_id)).limit(MAX_RECORDS)
    )
    return audit.c.actor.in_([f"{ACTOR}{MARK}{digest}" for digest in connection.execute(query).scalars()])


class ShownPersons:
    def __init__(self, connection: Connection, rows: Iterable[RowMapping]) -> None:
        self._texts = _texts(connection, {found for row in rows for found in _hashes(row)})

    def actor(self, actor: str) -> str:
        """`person:ada`, or that it was a person who is erased."""
        if not actor.startswith(ACTOR + MARK):
            return actor
        text = self._text(actor.removeprefix(ACTOR), ERASED_PERSON)
        return text if text == ERASED_PERSON else ACTOR + text

    def origin(self, origin: str) -> str:
        return self._text(origin, ERASED)

    def fields(self, action: str, fields: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if fields is None:
            return None
        shown = dict(fields)
        for name in _PERSONAL.get(action.partition(".")[0], ()):
            if isinstance(text := shown.get(name), str):
                shown[name] = self._text(text, ERASED_PERSON if name in ("name", "person") else ERASED)
        if isinstance(by := shown.get(_NAMED_BY), str):
            shown[_NAMED_BY] = self.actor(by)
        return shown

    def _text(self, text: str, erased: str) -> str:
        match = _HASH.fullmatch(text)
        return text if match is None else self._texts.get(match[1], erased)


def _records(connection: Connection, person_id: str) -> int:
    query = select(func.count()).where(audit_persons.c.person_id == person_id)
    return connection.execute(query).scalar_one()


def _hashes(row: RowMapping) -> Iterable[str]:
    values = [row["actor"], row["origin"]]
    for fields in (row["before"], row["after"]):
        values += [value for value in (fields or {}).values() if isinstance(value, str)]
    for value in values:
        if match := _HASH.fullmatch(value.removeprefix(ACTOR)):
            yield match[1]


def _texts(connection: Connection, hashes: Iterable[str]) -> dict[str, str]:
    table = audit_persons.c
    query = select(table.digest, table.salt, table.text).where(table.digest.in_(sorted(hashes)))
    return {
        digest: text if hash_of(salt, text) == digest else ALTERED
        for digest, salt, text in connection.execute(query)
    }
