"""Log-ins, sessions and links of people in the database.

Every look-up asks the database, so that a session that ended is refused by every gateway at once. Changes of
people are in `tenants/admin/people.py`, with their audit row."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from sqlalchemy import Connection, delete, insert, or_, select, update

from tenants.directory.keys import new_id
from tenants.errors import DatabaseUnavailable, LogInRefused
from tenants.people import rows
from tenants.people.person import MAX_NAME_CHARS, Person, PersonLink, folded
from tenants.people.roles import Role
from tenants.people.sessions import (
    DEFAULT_RULES,
    MAX_ADDRESS_CHARS,
    MAX_USER_AGENT_CHARS,
    OpenedSession,
    Session,
    SessionRules,
    csrf_token_of,
    digest_of,
    is_secret,
    new_secret,
    plain,
)
from tenants.storage.database import Database
from tenants.storage.tables import people, person_links, person_sessions


@dataclass(frozen=True, slots=True)
class Credentials:
    """A person and what the password is checked against; '': there is none."""

    person: Person
    password_hash: str


class People:
    """Methods raise `DatabaseUnavailable`."""

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float] = time.time,
        rules: SessionRules = DEFAULT_RULES,
    ) -> None:
        """`clock` gives seconds since 1970."""
        self.rules = rules
        self._database = database
        self._clock = clock

    async def find_for_login(self, name: str) -> Credentials | None:
        wanted = folded(name)  # stored names may be older than the rules for new ones
        if len(wanted) > MAX_NAME_CHARS or not wanted.isprintable():
            return None

        def look(connection: Connection) -> Credentials | None:
            row = connection.execute(select(people).where(people.c.name == wanted)).mappings().first()
            return None if row is None else Credentials(rows.person_of(row), row["password_hash"])

        return await self._database.read(look)

    async def open_session(self, person: Person, *, address: str = "", user_agent: str = "") -> OpenedSession:
        """Replaces the oldest of too many. Raises `LogInRefused` if the person has changed since the read."""
        secret, session_id, now_us = new_secret(), new_id("ses"), self._now_us()
        made = Session(
            session_id=session_id,
            person=person,
            created_us=now_us,
            seen_us=now_us,
            ends_us=now_us + round(self.rules.max_s * 1e6),
            address=plain(address, MAX_ADDRESS_CHARS),
            user_agent=plain(user_agent, MAX_USER_AGENT_CHARS),
            csrf_token=csrf_token_of(secret),
        )

        def insert_session(connection: Connection) -> None:
            now = rows.people_where(connection, people.c.id == person.person_id)
            if not now or now[0] != person or person.status != "active":
                raise LogInRefused
            self._make_room(connection, person, now_us)
            connection.execute(
                insert(person_sessions).values(
                    digest=digest_of(secret),
                    id=session_id,
                    person_id=person.person_id,
                    person_revision=person.revision,
                    created_us=now_us,
                    seen_us=now_us,
                    ends_us=made.ends_us,
                    address=made.address,
                    user_agent=made.user_agent,
                )
            )

        await self._database.write(insert_session)
        return OpenedSession(secret, made)

    def _make_room(self, connection: Connection, person: Person, now_us: int) -> None:
        """Removes ended sessions, and the person's oldest beyond the bound."""
        table = person_sessions
        theirs = table.c.person_id == person.person_id
        kept = (
            select(table.c.id)
            .where(theirs, table.c.person_revision == person.revision)
            .order_by(table.c.created_us.desc(), table.c.id)
            .limit(self.rules.most - 1)
        )
        ids = list(connection.execute(kept).scalars())
        surplus = theirs & table.c.id.not_in(ids)
        connection.execute(delete(table).where(or_(table.c.ends_us <= now_us, surplus)))

    async def session(self, cookie_value: str, *, is_use: bool = True) -> Session | None:
        """The session of a cookie; None: none, or it has ended. `is_use` prolongs it."""
        if not is_secret(cookie_value):
            return None
        now_us, digest = self._now_us(), digest_of(cookie_value)
        sessions = await self._database.read(
            lambda connection: rows.sessions_where(
                connection, person_sessions.c.digest == digest, *rows.valid_now(now_us, self.rules)
            )
        )
        if not sessions:
            return None
        if is_use and now_us - sessions[0].seen_us >= round(self.rules.seen_every_s * 1e6):
            used = update(person_sessions).where(person_sessions.c.digest == digest).values(seen_us=now_us)
            # Reading goes on where nothing can be written: this is what the console is needed for then.
            with contextlib.suppress(DatabaseUnavailable):
                await self._database.write(lambda connection: connection.execute(used).rowcount)
        return replace(sessions[0], csrf_token=csrf_token_of(cookie_value))

    async def log_out(self, session: Session) -> None:
        ended = delete(person_sessions).where(person_sessions.c.id == session.session_id)
        await self._database.write(lambda connection: connection.execute(ended).rowcount)

    async def sessions_of(self, person: Person) -> list[Session]:
        conditions = (
            person_sessions.c.person_id == person.person_id,
            *rows.valid_now(self._now_us(), self.rules),
        )
        sessions = await self._database.read(lambda connection: rows.sessions_where(connection, *conditions))
        return sorted(sessions, key=lambda session: session.seen_us, reverse=True)

    async def link(self, token: str) -> PersonLink | None:
        """The link of a token; None: unknown, used or too old."""
        if not is_secret(token):
            return None

        def look(connection: Connection) -> PersonLink | None:
            query = select(person_links).where(
                person_links.c.digest == digest_of(token), person_links.c.expires_us > self._now_us()
            )
            row = connection.execute(query).mappings().first()
            if row is None:
                return None
            if row["person_id"] is None:
                return PersonLink(token, None, Role.OWNER) if rows.needs_owner(connection) else None
            [person] = rows.people_where(connection, people.c.id == row["person_id"])
            return PersonLink(token, person.name, person.role) if person.status == "active" else None

        return await self._database.read(look)

    def _now_us(self) -> int:
        return round(self._clock() * 1e6)
