"""Pages of people, and of their sessions."""

from __future__ import annotations

from sqlalchemy import Connection

from tenants.admin.cursor import (
    DEFAULT_PAGE,
    Page,
    Text,
    beyond,
    checked_limit,
    decode_cursor,
    page_of,
)
from tenants.admin.transaction import AdminCommands
from tenants.people import rows
from tenants.people.person import Person
from tenants.people.sessions import DEFAULT_RULES, Session, SessionRules
from tenants.storage.tables import people, person_sessions


class PeopleLists(AdminCommands):
    async def show_person(self, person: str) -> Person:
        return await self._database.read(lambda connection: rows.find_person(connection, person))

    async def list_people(self) -> list[Person]:
        return await self._database.read(rows.people_where)

    async def page_people(self, *, cursor: str | None = None, limit: int = DEFAULT_PAGE) -> Page[Person]:
        """Raises `Invalid`."""
        most = checked_limit(limit)
        last = None if cursor is None else decode_cursor("people", {}, cursor, tuple[Text])

        def look(connection: Connection) -> list[Person]:
            after = () if last is None else (beyond([people.c.name], last),)
            return rows.people_where(connection, *after, limit=most + 1)

        persons = await self._database.read(look)
        return page_of(persons, most, "people", {}, lambda row: (row.name,))

    async def list_sessions(
        self, person: str | None = None, rules: SessionRules = DEFAULT_RULES
    ) -> list[Session]:
        """Sessions that are valid now, of one person or of all."""
        valid = rows.valid_now(round(self._clock() * 1e6), rules)
        return await self._database.read(
            lambda connection: rows.sessions_where(connection, *rows.of_person(connection, person), *valid)
        )

    async def page_sessions(
        self,
        *,
        person: str | None = None,
        rules: SessionRules = DEFAULT_RULES,
        cursor: str | None = None,
        limit: int = DEFAULT_PAGE,
    ) -> Page[Session]:
        """Raises `Invalid`, `NotFound`."""
        most, filters = checked_limit(limit), {"person": person}
        last = None if cursor is None else decode_cursor("sessions", filters, cursor, tuple[Text])
        valid = rows.valid_now(round(self._clock() * 1e6), rules)

        def look(connection: Connection) -> list[Session]:
            after = () if last is None else (beyond([person_sessions.c.id], last),)
            whose = rows.of_person(connection, person)
            return rows.sessions_where(connection, *whose, *after, *valid, limit=most + 1)

        sessions = await self._database.read(look)
        return page_of(sessions, most, "sessions", filters, lambda session: (session.session_id,))
