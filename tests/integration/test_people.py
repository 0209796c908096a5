"""People and their sessions on both databases: links, log-ins, and what ends a session in every gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import func, select, update

from tenants.admin.admin import Admin
from tenants.admin.audit import LINK, Actor
from tenants.admin.transaction import Transactions
from tenants.errors import AlreadyExists, DatabaseUnavailable, Invalid, LogInRefused, NotFound, TooManyLogIns
from tenants.nouns.tenant import TenantCreate
from tenants.people.hashing_gate import AT_ONCE
from tenants.people.passwords import NO_PASSWORD
from tenants.people.person import LINK_S, Person, PersonChange, PersonInvite
from tenants.people.roles import Role
from tenants.people.sessions import OpenedSession, SessionRules, csrf_token_of
from tenants.people.store import People
from tenants.people.throttle import FREE_BY_NAME
from tenants.people.way_in import WayIn
from tenants.resources.people import PEOPLE, PersonQuery
from tenants.resources.reading import read_page
from tenants.storage.database import Database, open_database
from tenants.storage.tables import people, person_links, person_sessions
from tests.support.audited import audited
from tests.support.console import HASH, PASSWORD
from tests.support.quota import Clock

ACTOR = Actor("cli:tester", "cli")
ADDRESS = "192.0.2.1"


@dataclass
class Site:
    """Two gateways on one database."""

    database: Database
    clock: Clock
    admin: Admin
    here: People
    there: People
    way_in: WayIn

    async def person(self, name: str = "ada", role: Role = Role.OWNER) -> Person:
        """Invited, and with a password."""
        _, token = await self.admin.people.invite(ACTOR, PersonInvite(name=name, role=role.value))
        return await self.admin.people.redeem_link(Actor(LINK, ADDRESS), token, HASH)

    async def log_in(self, name: str = "ada", password: str = PASSWORD) -> OpenedSession:
        return await self.way_in.log_in(name, password, address=ADDRESS, user_agent="Mozilla/5.0")

    async def is_in(self, opened: OpenedSession) -> bool:
        """Asked at the other gateway."""
        return await self.there.session(opened.cookie_value) is not None

    async def count(self, table: Any) -> int:
        return await self.database.read(
            lambda connection: connection.execute(select(func.count()).select_from(table)).scalar_one()
        )


@pytest.fixture
async def site(database: Database, pepper: bytes) -> AsyncIterator[Site]:
    clock = Clock()
    other = open_database(database.url)
    here = People(database, clock)
    made = Site(
        database,
        clock,
        Admin(Transactions(database, pepper, clock)),
        here,
        People(other, clock),
        WayIn(here, clock),
    )
    yield made
    made.way_in.close()
    await other.close()


async def test_the_first_owner_is_made_by_a_link_that_works_once(site: Site) -> None:
    token = await site.admin.people.make_set_up_link(ACTOR)
    assert token is not None
    link = await site.there.link(token)
    assert link is not None
    assert link.is_set_up
    assert link.role is Role.OWNER
    owner = await site.admin.people.redeem_link(Actor(LINK, ADDRESS), token, HASH, "Ada@Example.org")
    assert (owner.name, owner.role, owner.status) == ("ada@example.org", Role.OWNER, "active")
    assert await site.there.link(token) is None
    with pytest.raises(NotFound, match="link"):
        await site.admin.people.redeem_link(Actor(LINK, ADDRESS), token, HASH, "mallory")
    assert await site.admin.people.make_set_up_link(ACTOR) is None, "there is an owner"
    opened = await site.log_in("ADA@example.org")
    found = await site.there.session(opened.cookie_value)
    assert found is not None
    assert found.person == owner
    assert found.csrf_token == csrf_token_of(opened.cookie_value) == opened.session.csrf_token


async def test_a_newer_set_up_link_replaces_the_older_and_none_works_beside_an_owner(site: Site) -> None:
    old, new = (
        await site.admin.people.make_set_up_link(ACTOR),
        await site.admin.people.make_set_up_link(ACTOR),
    )
    assert old is not None
    assert new is not None
    assert await site.here.link(old) is None
    await site.person()
    assert await site.here.link(new) is None
    with pytest.raises(NotFound):
        await site.admin.people.redeem_link(Actor(LINK, ADDRESS), new, HASH, "mallory")
    assert [each.name for each in (await read_page(site.admin, PEOPLE, PersonQuery())).rows] == ["ada"]


async def test_a_link_ends_after_a_day_and_two_who_open_it_at_once_make_one_password(site: Site) -> None:
    invited, token = await site.admin.people.invite(ACTOR, PersonInvite(name="ada", role="operator"))
    assert not invited.has_password
    site.clock.advance(LINK_S - 1)
    assert await site.there.link(token) is not None
    tries = [site.admin.people.redeem_link(Actor(LINK, ADDRESS), token, HASH) for _ in range(4)]
    done = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(each, Person) for each in done) == 1
    assert sum(isinstance(each, NotFound) for each in done) == 3
    _, late = await site.admin.people.reset(ACTOR, "ada")
    site.clock.advance(LINK_S)
    assert await site.there.link(late) is None
    with pytest.raises(NotFound):
        await site.admin.people.redeem_link(Actor(LINK, ADDRESS), late, HASH)


@pytest.mark.parametrize("token", ["", "x", "'; --", "\0", "x" * 43, "x" * 100_000])
async def test_what_is_no_token_opens_nothing(site: Site, token: str) -> None:
    assert await site.here.link(token) is None
    assert await site.here.session(token) is None
    with pytest.raises(NotFound):
        await site.admin.people.redeem_link(Actor(LINK, ADDRESS), token, HASH)


async def test_only_digests_are_stored_and_the_audit_holds_no_secret(site: Site) -> None:
    _, token = await site.admin.people.invite(ACTOR, PersonInvite(name="ada", role="owner"))
    await site.admin.people.redeem_link(Actor(LINK, ADDRESS), token, HASH)
    opened = await site.log_in()
    _, again = await site.admin.people.reset(ACTOR, "ada")
    told = repr(await audited(site.admin))
    assert "person.invite" in told
    for secret in (token, again, opened.cookie_value, opened.session.csrf_token, HASH, PASSWORD):
        assert secret not in told

    def stored(connection: Any) -> str:
        return repr([list(connection.execute(select(each))) for each in (person_links, person_sessions)])

    everything = await site.database.read(stored)
    assert again not in everything
    assert opened.cookie_value not in everything


End = Callable[[Site, OpenedSession], Awaitable[Any]]
ENDS: dict[str, End] = {
    "log-out": lambda site, opened: site.here.log_out(opened.session),
    "password": lambda site, opened: site.admin.people.set_password(ACTOR, opened.session.person, HASH),
    "role": lambda site, _: site.admin.people.change(ACTOR, "ada", PersonChange(role="auditor")),
    "suspension": lambda site, _: site.admin.people.suspend(ACTOR, "ada"),
    "reset": lambda site, _: site.admin.people.reset(ACTOR, "ada"),
    "an owner ends it": lambda site, opened: site.admin.person_sessions.end(ACTOR, opened.session.session_id),
    "an owner ends all": lambda site, _: site.admin.people.end_sessions(ACTOR, "ada"),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
async def test_a_session_that_ended_is_refused_by_the_other_gateway_at_once(site: Site, end: End) -> None:
    await site.person("root")
    await site.person()
    opened, roots = await site.log_in(), await site.log_in("root")
    assert await site.is_in(opened)
    await end(site, opened)
    assert not await site.is_in(opened)
    assert await site.is_in(roots), "another person stays"
    await site.admin.people.resume(ACTOR, "ada")
    assert not await site.is_in(opened), "and it does not come back"


async def test_a_change_of_the_person_while_a_log_in_is_under_way_wins(site: Site) -> None:
    await site.person("root")
    await site.person()
    found = await site.here.find_for_login("ada")
    assert found is not None
    late = await site.here.open_session(found.person)
    await site.admin.people.suspend(ACTOR, "ada")
    await site.admin.people.resume(ACTOR, "ada")
    with pytest.raises(LogInRefused):
        await site.here.open_session(found.person)
    assert not await site.is_in(late)
    with pytest.raises(LogInRefused):
        await site.admin.people.set_password(ACTOR, found.person, HASH)


async def test_a_change_made_elsewhere_beside_a_log_in_ends_its_session(site: Site) -> None:
    """The session is stored after the other gateway removed what there was, by what it read before."""
    await site.person("root")
    person = await site.person()
    opened = await site.here.open_session(person)
    raised = update(people).where(people.c.name == "ada").values(revision=person.revision + 1)
    await site.database.write(lambda connection: connection.execute(raised).rowcount)
    assert not await site.is_in(opened)
    assert await site.here.sessions_of(person) == []


async def test_a_suspended_person_is_refused_by_the_way_in_itself(site: Site) -> None:
    await site.person("root")
    person = await site.person()
    await site.admin.people.suspend(ACTOR, "ada")
    with pytest.raises(LogInRefused):
        await site.way_in.confirm(person, PASSWORD, address=ADDRESS)


async def test_sessions_end_idle_and_absolutely(site: Site) -> None:
    await site.person()
    opened, left = await site.log_in(), await site.log_in()
    rules = SessionRules()
    for _ in range(int(rules.max_s / rules.idle_s * 2) - 1):
        site.clock.advance(rules.idle_s / 2)
        assert await site.is_in(opened), "it is used"
    assert not await site.is_in(left), "it was not"
    site.clock.advance(rules.idle_s / 2 + 1)
    assert not await site.is_in(opened), "its week is over"
    await site.log_in()
    assert await site.count(person_sessions) == 1, "those that ended are removed"


async def test_a_look_does_not_keep_a_session_from_ending(site: Site) -> None:
    await site.person()
    opened = await site.log_in()
    for _ in range(3):
        site.clock.advance(SessionRules().idle_s / 4)
        assert await site.here.session(opened.cookie_value, is_use=False) is not None
    site.clock.advance(SessionRules().idle_s / 4 + 1)
    assert await site.here.session(opened.cookie_value, is_use=False) is None


async def test_a_page_writes_at_most_once_a_minute(site: Site) -> None:
    await site.person()
    opened = await site.log_in()
    before = site.database.commits
    for _ in range(20):
        assert await site.here.session(opened.cookie_value) is not None
    assert site.database.commits == before
    site.clock.advance(61)
    for _ in range(20):
        assert await site.here.session(opened.cookie_value) is not None
    assert site.database.commits == before + 1


async def test_a_short_idle_time_ends_no_session_that_is_used(site: Site) -> None:
    await site.person()
    opened = await site.log_in()
    here = People(site.database, site.clock, SessionRules(idle_s=60.0))
    for _ in range(6):
        site.clock.advance(50)
        assert await here.session(opened.cookie_value) is not None
    site.clock.advance(60)
    assert await here.session(opened.cookie_value) is None


async def test_one_more_than_the_most_ends_the_oldest(site: Site) -> None:
    person, few = await site.person(), People(site.database, site.clock, SessionRules(most=3))
    opened = []
    for _ in range(5):
        opened.append(await few.open_session(person))
        site.clock.advance(1)
    assert [await site.is_in(each) for each in opened] == [False, False, True, True, True]
    assert await site.count(person_sessions) == 3


async def test_a_hundred_wrong_log_ins_at_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenants.people.way_in.NO_PASSWORD", NO_PASSWORD)  # one that takes its time
    await site.person()
    names = [f"name-{each}" for each in range(99)]
    tries = [site.way_in.log_in(name, PASSWORD, address=f"10.0.0.{at}") for at, name in enumerate(names)]
    done = await asyncio.gather(site.log_in(password="wrong " * 3), *tries, return_exceptions=True)
    gate = site.way_in.gate
    refused = [each for each in done if isinstance(each, LogInRefused)]
    waiting = [each for each in done if isinstance(each, TooManyLogIns)]
    assert len(refused) + len(waiting) == 100
    assert len(refused) == gate.hashed <= 20
    assert gate.most_at_once == AT_ONCE
    assert gate.on_event_loop == 0
    assert "try again in" in str(waiting[0])
    assert (await site.log_in()).session.person.name == "ada", "the right password opens afterwards"


async def test_a_name_is_slowed_and_a_good_password_too(site: Site) -> None:
    await site.person()
    for _ in range(FREE_BY_NAME):
        with pytest.raises(LogInRefused):
            await site.log_in(password="not this one, no")
    for _ in range(95):
        with pytest.raises(TooManyLogIns):
            await site.log_in()
    assert site.way_in.gate.hashed == FREE_BY_NAME
    site.clock.advance(1.0)
    await site.log_in()


async def test_unknown_suspended_invited_and_wrong_are_told_apart_by_nothing(site: Site) -> None:
    await site.person("root")
    await site.person()
    await site.person("gone", Role.AUDITOR)
    await site.admin.people.suspend(ACTOR, "gone")
    await site.admin.people.invite(ACTOR, PersonInvite(name="invited", role="operator"))
    told = set[str]()
    cases = [("ada", "wrong words, but enough"), ("unknown", PASSWORD), ("gone", PASSWORD)]
    cases += [("invited", PASSWORD), ("invited", ""), ("", ""), ("a\0b", PASSWORD), ("\ud800", "\ud800" * 12)]
    cases += [("x" * 100_000, PASSWORD), ("ada", PASSWORD + "x" * 1_000_000)]
    for done, (name, password) in enumerate(cases, start=1):
        with pytest.raises(LogInRefused) as refused:
            await site.way_in.log_in(name, password, address=f"10.0.0.{done}")
        told.add(str(refused.value))
        assert site.way_in.gate.hashed == done, "the same work"
    assert told == {"wrong name or password"}
    for slowed in ("ada", "unknown"):
        tries = [site.way_in.log_in(slowed, "wrong", address=f"10.1.0.{at}") for at in range(9)]
        done_at_once = await asyncio.gather(*tries, return_exceptions=True)
        assert sum(isinstance(each, TooManyLogIns) for each in done_at_once) >= 9 - FREE_BY_NAME


async def test_the_password_is_asked_again_and_strangers_do_not_slow_that(site: Site) -> None:
    person = await site.person()
    for at in range(FREE_BY_NAME + 1):
        with pytest.raises((LogInRefused, TooManyLogIns)):
            await site.way_in.log_in("ada", "a guess of a stranger", address=f"10.0.0.{at}")
    await site.way_in.confirm(person, PASSWORD, address=ADDRESS)
    for _ in range(FREE_BY_NAME):
        with pytest.raises(LogInRefused):
            await site.way_in.confirm(person, "a guess at a stolen browser", address=ADDRESS)
    with pytest.raises(TooManyLogIns):
        await site.way_in.confirm(person, PASSWORD, address=ADDRESS)


async def test_the_last_owner_stays(site: Site) -> None:
    await site.person()
    _, unused = await site.admin.people.invite(ACTOR, PersonInvite(name="bo", role="owner"))
    for act in (
        site.admin.people.suspend(ACTOR, "ada"),
        site.admin.people.change(ACTOR, "ada", PersonChange(role="operator")),
    ):
        with pytest.raises(Invalid, match="last owner"):
            await act
    await site.admin.people.suspend(ACTOR, "bo")
    await site.admin.people.resume(ACTOR, "bo")
    await site.admin.people.redeem_link(Actor(LINK, ADDRESS), unused, HASH)
    done = await asyncio.gather(
        site.admin.people.suspend(ACTOR, "ada"),
        site.admin.people.suspend(ACTOR, "bo"),
        return_exceptions=True,
    )
    assert sum(isinstance(each, Invalid) for each in done) == 1, "not both at once"


async def test_a_member_has_tenants_and_no_other_role_does(site: Site) -> None:
    acme = await site.admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    for wanted, says in [
        (PersonInvite(name="m", role="member"), "needs 1 to 100 tenants"),
        (PersonInvite(name="m", role="member", tenants=[]), "needs 1 to 100 tenants"),
        (PersonInvite(name="m", role="auditor", tenants=["acme"]), "only a member has tenants"),
        (PersonInvite(name="m", role="root"), "role"),
        (PersonInvite(name="two words", role="owner"), "as in an e-mail address"),
    ]:
        with pytest.raises(Invalid, match=says):
            await site.admin.people.invite(ACTOR, wanted)
    with pytest.raises(NotFound, match="tenant"):
        await site.admin.people.invite(ACTOR, PersonInvite(name="m", role="member", tenants=["nope"]))
    member, _ = await site.admin.people.invite(
        ACTOR, PersonInvite(name="m", role="member", tenants=["acme", acme.tenant_id])
    )
    assert member.tenants == {acme.tenant_id}
    with pytest.raises(AlreadyExists):
        await site.admin.people.invite(ACTOR, PersonInvite(name="M", role="owner"))
    with pytest.raises(Invalid, match="give a role, tenants, or both"):
        await site.admin.people.change(ACTOR, "m", PersonChange())
    auditor = await site.admin.people.change(ACTOR, "m", PersonChange(role="auditor"))
    assert auditor.tenants == frozenset()
    [shown] = await site.admin.with_names([member.as_json()])
    assert shown["tenants"] == [{"tenant_id": acme.tenant_id, "tenant": "acme"}]
    for reference in ("unknown", "psn_none", "a\0b", ""):
        with pytest.raises(NotFound):
            await site.admin.people.show(reference)


async def test_every_act_on_people_is_in_the_audit(site: Site) -> None:
    await site.person("root")
    await site.person()
    opened = await site.log_in()
    await site.admin.person_sessions.end(ACTOR, opened.session.session_id)
    await site.admin.people.suspend(ACTOR, "ada")
    rows = await audited(site.admin)
    assert [(row.action, row.actor) for row in rows[-4:]] == [
        ("person.invite", "cli:tester"),
        ("person.redeem", "link"),
        ("session.end", "cli:tester"),
        ("person.suspend", "cli:tester"),
    ]
    assert rows[-1].before is not None
    assert rows[-1].after is not None
    assert (rows[-1].before["status"], rows[-1].after["status"]) == ("active", "suspended")
    assert [each.person.name for each in await site.admin.person_sessions.all()] == []


async def test_with_the_database_lost_no_log_in_is_accepted_and_none_counts(site: Site) -> None:
    await site.person()
    opened = await site.log_in()
    before = site.way_in.throttle.entries
    await site.database.close()
    for _ in range(2 * FREE_BY_NAME):
        with pytest.raises(DatabaseUnavailable):
            await site.log_in()
    with pytest.raises(DatabaseUnavailable):
        await site.here.session(opened.cookie_value)
    assert site.way_in.throttle.entries == before
    assert await site.is_in(opened), "the other gateway has its database"
