"""Admin acts on people: invite, change, suspend, reset, set a password; their sessions.

Each change of a person raises its revision, which ends its sessions in every gateway. One owner who can log
in always stays. Audit rows hold neither passwords nor tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, delete, update

from tenants.admin.audit import Actor
from tenants.admin.transaction import AdminActs, Change, IfMatch
from tenants.audit import persons, store
from tenants.directory import queries
from tenants.directory.keys import new_id
from tenants.errors import Invalid, LogInRefused, NotFound
from tenants.nouns import checks
from tenants.people import rows
from tenants.people.person import (
    LINK_S,
    MAX_PEOPLE,
    MAX_TENANTS_OF_A_MEMBER,
    Person,
    PersonChange,
    PersonInvite,
    person_name,
)
from tenants.people.roles import Role
from tenants.people.sessions import digest_of, is_secret, new_secret
from tenants.storage.tables import drains, people, person_links, settings

Edit = Callable[[Connection, Person], Person]


class PeopleActs(AdminActs):
    async def make_set_up_link(self, actor: Actor | str) -> str | None:
        """The token of a link that makes the first owner, in place of former ones; None once there is one."""
        if not await self._transactions.read(rows.needs_owner):
            return None
        token = new_secret()

        def change(connection: Connection, now_us: int) -> Change[None]:
            rows.new_link(connection, token, None, now_us + LINK_S * 1_000_000, now_us)
            return Change(None, "set-up", None)

        await self._transactions.act(actor, "person.set_up_link", change)
        return token

    async def invite(self, actor: Actor | str, wanted: PersonInvite) -> tuple[Person, str]:
        """Returns the person with the token of a link to set a password."""
        name, role = person_name(wanted.name), checks.choice("role", Role, wanted.role)
        token = new_secret()

        def change(connection: Connection, now_us: int) -> Change[Person]:
            made = _add(connection, name, role, _tenants(connection, role, wanted.tenants), "", now_us)
            rows.new_link(connection, token, made.person_id, now_us + LINK_S * 1_000_000, now_us)
            return Change(made, made.person_id, None, after=made.as_json())

        return await self._transactions.act(actor, "person.invite", change), token

    async def change(
        self, actor: Actor | str, person: str, wanted: PersonChange, if_match: IfMatch = None
    ) -> Person:
        """Changes the role, or a member's tenants, by id or name. Without a difference no session ends."""

        def edit(connection: Connection, before: Person) -> Person:
            role = before.role if wanted.role is None else checks.choice("role", Role, wanted.role)
            if wanted.role is None and wanted.tenants is None:
                raise Invalid("role", "give a role, tenants, or both")
            wanted_tenants: Iterable[str] | None = wanted.tenants
            if wanted_tenants is None and role is Role.MEMBER:
                wanted_tenants = before.tenants
            return replace(before, role=role, tenants=_tenants(connection, role, wanted_tenants))

        return await self._edit(actor, "person.update", person, edit, if_match=if_match, only_if_changed=True)

    async def suspend(self, actor: Actor | str, person: str, if_match: IfMatch = None) -> Person:
        """It is logged out everywhere and cannot log in until `resume`."""
        return await self._edit(
            actor,
            "person.suspend",
            person,
            lambda _, before: replace(before, status="suspended"),
            if_match=if_match,
        )

    async def resume(self, actor: Actor | str, person: str, if_match: IfMatch = None) -> Person:
        return await self._edit(
            actor,
            "person.resume",
            person,
            lambda _, before: replace(before, status="active"),
            if_match=if_match,
        )

    async def reset(self, actor: Actor | str, person: str, if_match: IfMatch = None) -> tuple[Person, str]:
        """Takes the password away; returns the token of a link to set a new one."""
        token = new_secret()

        def link(connection: Connection, after: Person, now_us: int) -> None:
            rows.new_link(connection, token, after.person_id, now_us + LINK_S * 1_000_000, now_us)

        return await self._edit(
            actor,
            "person.reset",
            person,
            lambda _, before: replace(before, has_password=False),
            {"password_hash": ""},
            link,
            if_match,
        ), token

    async def set_password(self, actor: Actor | str, person: Person, password_hash: str) -> Person:
        """A person's own change. Raises `LogInRefused` where the person was changed since it was read."""

        def edit(_: Connection, before: Person) -> Person:
            if before != person:
                raise LogInRefused
            return replace(before, has_password=True)

        return await self._edit(
            actor, "person.set_password", person.person_id, edit, {"password_hash": password_hash}
        )

    async def redeem_link(
        self, actor: Actor, token: str, password_hash: str, name: str | None = None
    ) -> Person:
        """Sets the password that a link is for, once; a set-up link makes the first owner, called `name`.
        `actor`: `LINK` and its origin. Raises `NotFound` for a link that does not work (any more)."""
        if not is_secret(token):
            raise NotFound("link", "this one")

        def change(connection: Connection, now_us: int) -> Change[Person]:
            table = person_links
            used = connection.execute(
                delete(table)
                .where(table.c.digest == digest_of(token), table.c.expires_us > now_us)
                .returning(table.c.person_id)
            ).first()
            if used is None:
                raise NotFound("link", "this one was used or is too old")
            if used.person_id is None:
                return _first_owner(connection, name, password_hash, now_us)
            before = rows.find_person(connection, used.person_id)
            if before.status != "active":
                raise NotFound("link", "its person is suspended")
            after = replace(before, has_password=True, revision=before.revision + 1)
            rows.update_person(connection, after, {"password_hash": password_hash, "password_us": now_us})
            return Change(after, after.person_id, None, before.as_json(), after.as_json())

        return await self._transactions.act(actor, "person.redeem", change)

    async def erase(self, actor: Actor | str, person: str, if_match: IfMatch = None) -> Person:
        """Removes a person, sessions, links and personal data in the audit, whose rows and proofs stay."""

        def change(connection: Connection, now_us: int) -> Change[Person]:
            store.head(connection, is_locked=True)  # no row is added that records the person again
            before = rows.find_person(connection, person)
            _keep_an_owner(connection, before, replace(before, status="suspended"))
            persons.erase(connection, before.person_id)
            rows.delete_person(connection, before)
            _erase_setter(connection, before.actor_name)
            return Change(before, before.person_id, None, before.as_json())

        return await self._transactions.act(actor, "person.erase", change, if_match)

    async def show(self, person: str) -> Person:
        return await self._transactions.read(lambda connection: rows.find_person(connection, person))

    async def end_sessions(self, actor: Actor | str, person: str, if_match: IfMatch = None) -> Person:
        """Logs a person out everywhere, also where a log-in is under way."""
        return await self._edit(
            actor, "person.end_sessions", person, lambda _, before: before, if_match=if_match
        )

    async def _edit(
        self,
        actor: Actor | str,
        action: str,
        person: str,
        edit: Edit,
        columns: dict[str, Any] | None = None,
        then: Callable[[Connection, Person, int], None] | None = None,
        if_match: IfMatch = None,
        *,
        only_if_changed: bool = False,
    ) -> Person:
        """Applies `edit` and `columns`, and ends the sessions; `only_if_changed`: only if it differs."""

        def change(connection: Connection, now_us: int) -> Change[Person]:
            before = rows.find_person(connection, person)
            edited = edit(connection, before)
            if only_if_changed and edited == before:
                return Change(before, before.person_id, None, before.as_json(), before.as_json())
            after = replace(edited, revision=before.revision + 1)
            _keep_an_owner(connection, before, after)
            rows.update_person(connection, after, columns or {})
            if then is not None:
                then(connection, after, now_us)
            return Change(after, after.person_id, None, before.as_json(), after.as_json())

        return await self._transactions.act(actor, action, change, if_match)


def _first_owner(connection: Connection, name: str | None, password_hash: str, now_us: int) -> Change[Person]:
    if not rows.needs_owner(connection):
        raise NotFound("link", "there is an owner already")
    wanted = person_name(name or "")
    made = _add(connection, wanted, Role.OWNER, frozenset(), password_hash, now_us)
    return Change(made, made.person_id, None, after=made.as_json())


def _add(
    connection: Connection,
    name: str,
    role: Role,
    tenants: frozenset[str],
    password_hash: str,
    now_us: int,
) -> Person:
    if queries.count(connection, people) >= MAX_PEOPLE:
        raise Invalid("name", f"the limit of {MAX_PEOPLE} people is reached: remove one")
    made = Person(new_id("psn"), name, role, tenants, "active", bool(password_hash), 1, now_us)
    rows.insert_person(connection, made, password_hash)
    return made


def _erase_setter(connection: Connection, actor_name: str) -> None:
    """Takes a person's name from drains and brakes in force."""
    connection.execute(update(drains).where(drains.c.by == actor_name).values(by=persons.ERASED_PERSON))
    is_setter = settings.c.name.like("brake.%.by")
    connection.execute(
        update(settings).where(is_setter, settings.c.value == actor_name).values(value=persons.ERASED_PERSON)
    )


def _tenants(connection: Connection, role: Role, references: Iterable[str] | None) -> frozenset[str]:
    """The ids of a member's tenants. Raises `Invalid` where role and tenants do not go together."""
    wanted = set(references or ())
    if role is not Role.MEMBER:
        if wanted:
            raise Invalid("tenants", f"only a member has tenants; the role {role.value} sees all")
        return frozenset()
    if not 1 <= len(wanted) <= MAX_TENANTS_OF_A_MEMBER:
        raise Invalid("tenants", f"a member needs 1 to {MAX_TENANTS_OF_A_MEMBER} tenants")
    return frozenset(queries.find_tenant(connection, reference).tenant_id for reference in wanted)


def _keep_an_owner(connection: Connection, before: Person, after: Person) -> None:
    """Refuses to remove the last owner: only the command line could make another one."""
    if before.role is not Role.OWNER or before.status != "active":
        return
    if after.role is Role.OWNER and after.status == "active":
        return
    others = [
        owner
        for owner in rows.people_where(
            connection, people.c.role == Role.OWNER.value, people.c.status == "active"
        )
        if owner.person_id != before.person_id and (owner.has_password or not before.has_password)
    ]
    if not others:
        raise Invalid(
            "person",
            f"{before.name} is the last owner who can log in: add another one first"
            " (`fairgate person invite NAME --role owner`, and its link must be used)",
        )
