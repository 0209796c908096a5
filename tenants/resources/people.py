"""People who may log in to the console."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from sqlalchemy import Connection

from tenants.admin.admin import Admin
from tenants.admin.audit import Actor
from tenants.admin.cursor import PAGES, SortKey, beyond
from tenants.admin.people import PeopleActs
from tenants.admin.transaction import IfMatch
from tenants.people import rows
from tenants.people.person import Person, PersonChange, PersonInvite, link_path
from tenants.people.roles import Act
from tenants.resources.query import ListQuery
from tenants.resources.resource import ActCall, ActDone, PageRequest, Resource, ResourceAct
from tenants.resources.shown import Form, Shown
from tenants.storage.tables import people

ENDS = "Ends the person's sessions, in every gateway."
LINK = (
    "`link`, opened in a browser, sets the password: once, within a day. Without the setting"
    " `gateway.console_url` it is a path of this gateway."
)
ANSWERS = "what `person invite` answers, without `link`."


class PersonQuery(ListQuery, frozen=True):
    """All of them."""


def _read(connection: Connection, request: PageRequest) -> tuple[list[Person], SortKey | None]:
    after = () if request.after is None else (beyond([people.c.name], request.after),)
    return rows.people_where(connection, *after, limit=request.most), None


def _done(admin: Admin, person: Person, token: str | None = None) -> ActDone:
    link = {} if token is None else {"link": admin.transactions.console_url + link_path(token)}
    return ActDone(person.as_json() | link, person.as_json())


def _changing(
    act: Callable[[PeopleActs, Actor, str, IfMatch], Awaitable[Person]],
) -> Callable[[Admin, ActCall], Awaitable[ActDone]]:
    async def run(admin: Admin, call: ActCall) -> ActDone:
        return _done(admin, await act(admin.people, call.actor, call.reference, call.if_match))

    return run


async def _invite(admin: Admin, call: ActCall) -> ActDone:
    return _done(admin, *await admin.people.invite(call.actor, call.command))


async def _update(admin: Admin, call: ActCall) -> ActDone:
    acts = admin.people
    return _done(admin, await acts.change(call.actor, call.reference, call.command, call.if_match))


async def _reset(admin: Admin, call: ActCall) -> ActDone:
    return _done(admin, *await admin.people.reset(call.actor, call.reference, call.if_match))


async def _erase(admin: Admin, call: ActCall) -> ActDone:
    erased = await admin.people.erase(call.actor, call.reference, call.if_match)
    return ActDone({"id": erased.person_id, "status": "erased"}, None)


def _with_link(said: str, shown: Mapping[str, Any]) -> str:
    link = str(shown["link"])
    where = "" if "://" in link else ", below the gateway's address"
    return f"{said}:\n  {link}\nThe link works once, within a day, and is shown this once{where}."


_ACT = partial(ResourceAct, scope="admin:write", act=Act.CHANGE_PEOPLE)
PEOPLE = Resource(
    name="person",
    plural="people",
    title="People",
    query=PersonQuery,
    read=_read,
    order=(people.c.name,),
    as_json=Person.as_json,
    find=lambda connection, reference, tenant, now_us: rows.find_person(connection, reference),
    scope="admin:read",
    act=Act.READ_PEOPLE,
    summary="List people who may log in to the console",
    description=PAGES,
    one_description="By id or name.",
    answers="what `person invite` answers, without `link`, in a list.",
    has_page=False,
    is_whole=True,
    shown=(
        Shown("id", "Id"),
        Shown("name", "Name"),
        Shown("role", "Role"),
        Shown("tenants", "Tenants", Form.TENANT),
        Shown("status", "Status"),
        Shown("has_password", "Has a password"),
    ),
    acts=(
        _ACT(
            "person.invite",
            _invite,
            command=PersonInvite,
            status=201,
            takes_condition=False,
            summary="Invite a person",
            description="`name`: an e-mail address or a plain name; no mail is sent. owner: everything;"
            " operator: all but people and the secrets of keys; auditor: reads everything, changes nothing;"
            " member: sees its `tenants` alone, has their keys and the limits below theirs in hand."
            f" {LINK}",
            answers="""(`link` is a path where no server runs on this data directory either):
      {"id": "psn_…", "name": "bo@example.org", "role": "member",
       "tenants": [{"tenant_id": "ten_…", "tenant": "acme"}], "status": "active", "has_password": false,
       "created_at": "2026-01-31T18:30:00+00:00", "link": "http://127.0.0.1:8000/console/set-up?token=…"}
    """,
            words=lambda who: _with_link(
                f"{who['name']} may log in as {who['role']} once a password is set", who
            ),
        ),
        _ACT(
            "person.update",
            _update,
            command=PersonChange,
            method="PATCH",
            path="/{reference}",
            summary="Change a person's role, or a member's tenants",
            description=f"{ENDS} The last owner who can log in stays one.",
            command_verb="role",
            answers=ANSWERS,
            words=lambda who: f"{who['name']} is {who['role']}",
        ),
        _ACT(
            "person.suspend",
            _changing(PeopleActs.suspend),
            path="/{reference}/suspend",
            summary="Suspend a person",
            description=f"{ENDS} It cannot log in until it is resumed. The last owner who can log in stays.",
            answers=ANSWERS,
            words=lambda who: f"{who['name']} is suspended and logged out",
        ),
        _ACT(
            "person.resume",
            _changing(PeopleActs.resume),
            path="/{reference}/resume",
            summary="Let a suspended person log in again",
            answers=ANSWERS,
            words=lambda who: f"{who['name']} may log in again",
        ),
        _ACT(
            "person.reset",
            _reset,
            path="/{reference}/reset",
            summary="Take a person's password away, and make a link to set a new one",
            description=f"{ENDS} {LINK} It also lets in where log-ins under this name are slowed down.",
            answers="what `person invite` answers.",
            words=lambda who: _with_link(f"{who['name']} has no password until it sets a new one", who),
        ),
        _ACT(
            "person.erase",
            _erase,
            method="DELETE",
            path="/{reference}",
            summary="Erase a person",
            description="Removes the person, its sessions and links, and its name and addresses from the"
            " audit, whose rows and proofs stay as they are: they show `erased person`. Rows written before"
            " this version had the name in clear, and keep it, as do logs and backups. The last owner who can"
            " log in stays.",
            answers='{"id": "psn_…", "status": "erased"}',
            words=lambda who: f"{who['id']} is erased",
        ),
        _ACT(
            "person.end_sessions",
            _changing(PeopleActs.end_sessions),
            method="DELETE",
            path="/{reference}/sessions",
            summary="Log a person out everywhere",
            has_command=False,
        ),
    ),
    group_help="""People who may log in to the console.

    Owners, operators, auditors, and members of tenants.

    \b
      fairgate person invite ada@example.org --role owner
      fairgate person invite bo@example.org --role member --tenant acme
      fairgate person list
      fairgate person role bo@example.org auditor
      fairgate person suspend bo@example.org
      fairgate person reset ada@example.org          a lost password
      fairgate person erase bo@example.org           also from the audit
      fairgate person sessions ada@example.org
      fairgate person end-session ses_…
    """,
)
