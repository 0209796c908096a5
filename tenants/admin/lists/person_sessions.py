"""Admin acts on the sessions of people who are logged in, and their pages."""

from __future__ import annotations

from sqlalchemy import Connection, delete

from tenants.admin.audit import Actor
from tenants.admin.cursor import DEFAULT_PAGE, Page, Text, beyond, checked_limit, decode_cursor, page_of
from tenants.admin.transaction import AdminActs, Change
from tenants.errors import NotFound
from tenants.people import rows
from tenants.people.sessions import DEFAULT_RULES, Session, SessionRules
from tenants.storage.tables import person_sessions


class PersonSessionActs(AdminActs):
    async def all(self, person: str | None = None, rules: SessionRules = DEFAULT_RULES) -> list[Session]:
        """Sessions that are valid now, of one person or of all."""
        valid = rows.valid_now(self._transactions.now_us(), rules)
        return await self._transactions.read(
            lambda connection: rows.sessions_where(connection, *rows.of_person(connection, person), *valid)
        )

    async def page(
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
        valid = rows.valid_now(self._transactions.now_us(), rules)

        def look(connection: Connection) -> list[Session]:
            after = () if last is None else (beyond([person_sessions.c.id], last),)
            whose = rows.of_person(connection, person)
            return rows.sessions_where(connection, *whose, *after, *valid, limit=most + 1)

        sessions = await self._transactions.read(look)
        return page_of(sessions, most, "sessions", filters, lambda session: (session.session_id,))

    async def end(self, actor: Actor | str, session: str, *, of: str | None = None) -> Session:
        """Logs one browser out, in every gateway; `of`: only one of this person (id). Raises `NotFound`."""
        # PostgreSQL takes no NUL.
        wanted = session if session.isprintable() else ""

        def change(connection: Connection, now_us: int) -> Change[Session]:
            found = rows.sessions_where(connection, person_sessions.c.id == wanted)
            if not found or of not in (None, found[0].person.person_id):
                raise NotFound("session", session[:80])
            connection.execute(delete(person_sessions).where(person_sessions.c.id == wanted))
            return Change(found[0], session, None, before=found[0].as_json())

        return await self._transactions.act(actor, "session.end", change)
