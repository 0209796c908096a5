"""`fairgate person`: people who may log in to the console, their roles and sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ops.cli.administer import actor, administer, named_list, named_one
from ops.cli.base import answer, group, settings_now
from ops.cli.live import running_server
from ops.reporting import table
from tenants.people.person import Person, PersonChange, PersonInvite, link_path
from tenants.people.roles import Role
from tenants.people.sessions import Session, SessionRules

ROLES = click.Choice([role.value for role in Role])
TENANTS = click.option(
    "--tenant", "tenants", multiple=True, help="Tenant of a member (repeat; names or ids)."
)


@group()
def person() -> None:
    """People who may log in to the console: owners, operators, auditors, and members of tenants.

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
    """


@person.command()
@click.argument("name")
@click.option("--role", type=ROLES, required=True, help="What the person may do.")
@TENANTS
def invite(name: str, role: str, tenants: tuple[str, ...]) -> None:
    """Adds a person and shows the link by which it sets its password: once, within a day.

    NAME is an e-mail address or a plain name; no mail is sent. owner: everything; operator: all but people
    and the secrets of keys; auditor: reads everything, changes nothing; member: sees its tenants alone, has
    their keys and the limits below theirs in hand.

    \b
    --json answers ("link" is a path where no server runs on this data directory, and gateway.console_url is
    not set):
      {"id": "psn_…", "name": "bo@example.org", "role": "member",
       "tenants": [{"tenant_id": "ten_…", "tenant": "acme"}], "status": "active", "has_password": false,
       "created_at": "2026-01-31T18:30:00+00:00", "link": "http://127.0.0.1:8000/console/set-up?token=…"}
    """
    wanted = PersonInvite(name=name, role=role, tenants=list(tenants) or None)
    (made, _), shown = named_one(lambda admin: admin.people.invite(actor(), wanted), _with_link)
    answer(shown, f"{made.name} may log in as {made.role.value} once a password is set:\n{_told(shown)}")


@person.command(name="list")
def list_() -> None:
    """Lists people by name.

    \b
    --json answers what `person invite` answers, without "link", in a list.
    """
    people, shown = named_list(lambda admin: admin.people.all(), Person.as_json)
    rows = [
        (
            who.person_id,
            who.name,
            who.role.value,
            ", ".join(str(tenant["tenant"]) for tenant in named["tenants"]),
            who.status if who.has_password else f"{who.status}, no password",
        )
        for who, named in zip(people, shown, strict=True)
    ]
    answer(shown, lambda: table("people", ("id", "name", "role", "tenants", "status"), rows))


@person.command()
@click.argument("name")
@click.argument("role", type=ROLES)
@TENANTS
def role(name: str, role: str, tenants: tuple[str, ...]) -> None:
    """Gives a person (name or id) another role, and ends its sessions in every gateway.

    \b
    --json answers what `person invite` answers, without "link".
    """
    wanted = PersonChange(role=role, tenants=list(tenants) or None)
    changed, shown = named_one(lambda admin: admin.people.change(actor(), name, wanted), Person.as_json)
    answer(shown, f"{changed.name} is {changed.role.value}")


@person.command()
@click.argument("name")
def suspend(name: str) -> None:
    """Logs a person (name or id) out in every gateway; it cannot log in until `person resume`. One owner who
    can log in always stays.

    \b
    --json answers what `person invite` answers, without "link".
    """
    changed, shown = named_one(lambda admin: admin.people.suspend(actor(), name), Person.as_json)
    answer(shown, f"{changed.name} is suspended and logged out")


@person.command()
@click.argument("name")
def resume(name: str) -> None:
    """Lets a suspended person (name or id) log in again.

    \b
    --json answers what `person invite` answers, without "link".
    """
    changed, shown = named_one(lambda admin: admin.people.resume(actor(), name), Person.as_json)
    answer(shown, f"{changed.name} may log in again")


@person.command()
@click.argument("name")
def reset(name: str) -> None:
    """Takes a person's password away, logs it out, and shows a link to set a new one: once, within a day. The
    link also lets in where log-ins under this name are slowed down.

    \b
    --json answers what `person invite` answers.
    """
    (changed, _), shown = named_one(lambda admin: admin.people.reset(actor(), name), _with_link)
    answer(shown, f"{changed.name} has no password until it sets a new one:\n{_told(shown)}")


@person.command()
@click.argument("name")
def erase(name: str) -> None:
    """Removes a person (name or id) for good, its sessions and links, and its name and addresses from the
    audit. There its acts are those of an "erased person"; rows and proofs stay as they are. Rows that were
    written before this version had the name in clear, and keep it, as do logs and backups.

    \b
    --json answers:
      {"id": "psn_…", "status": "erased"}
    """
    erased = administer(lambda admin: admin.people.erase(actor(), name))
    answer({"id": erased.person_id, "status": "erased"}, f"{erased.name} ({erased.person_id}) is erased")


@person.command()
@click.argument("name", required=False)
def sessions(name: str | None) -> None:
    """Lists sessions in the console that are valid now, of one person (name or id) or of all.

    \b
    --json answers:
      [{"id": "ses_…", "person_id": "psn_…", "person": "ada@example.org", "created_at": "2026-01-31T…",
        "seen_at": "2026-01-31T…", "ends_at": "2026-02-07T…", "address": "192.0.2.1",
        "user_agent": "Mozilla/5.0 …"}, …]
    """
    settings = settings_now().gateway
    rules = SessionRules(settings.session_idle_s, settings.session_max_s)
    valid = administer(lambda admin: admin.person_sessions.all(name, rules))
    answer([session.as_json() for session in valid], lambda: _show(valid))


@person.command(name="end-session")
@click.argument("session_id", required=False)
@click.option("--all-of", "person_name", help="End every session of this person (name or id).")
def end_session(session_id: str | None, person_name: str | None) -> None:
    """Logs one browser out in every gateway, or with --all-of a person everywhere.

    \b
    --json answers what `person sessions` lists, or with --all-of what `person list` does, of the one.
    """
    if (session_id is None) == (person_name is None):
        raise click.UsageError("give a SESSION_ID, or --all-of PERSON, one of them")
    if person_name is not None:
        name = person_name
        whose = administer(lambda admin: admin.people.end_sessions(actor(), name))
        answer(whose.as_json(), f"{whose.name} is logged out everywhere")
        return
    wanted = session_id or ""
    ended = administer(lambda admin: admin.person_sessions.end(actor(), wanted))
    answer(ended.as_json(), f"session {ended.session_id} of {ended.person.name} has ended")


def _with_link(made: tuple[Person, str]) -> dict[str, Any]:
    who, token = made
    where, server = settings_now().gateway.console_url, running_server()
    if not where and server is not None:
        where = server.url_of_admin  # the console answers where the admin API does
    return who.as_json() | {"link": where + link_path(token)}


def _told(shown: dict[str, Any]) -> str:
    link = str(shown["link"])
    where = "" if "://" in link else ", below the gateway's address"
    return f"  {link}\nThe link works once, within a day, and is shown this once{where}."


def _show(held: Sequence[Session]) -> None:
    rows = [session.as_json() for session in held]
    columns = ("id", "person", "created_at", "seen_at", "ends_at", "address")
    table("sessions", columns, [tuple(str(row[name]) for name in columns) for row in rows])
