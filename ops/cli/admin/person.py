"""`fairgate person`: people who may log in to the console, their roles and sessions."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ops.cli.administer import actor, administer
from ops.cli.base import answer, settings_now
from ops.cli.resource_commands import groups
from ops.reporting import table
from tenants.people.sessions import Session, SessionRules
from tenants.resources.people import PEOPLE

person = groups((PEOPLE,))["person"]


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


def _show(held: Sequence[Session]) -> None:
    rows = [session.as_json() for session in held]
    columns = ("id", "person", "created_at", "seen_at", "ends_at", "address")
    table("sessions", columns, [tuple(str(row[name]) for name in columns) for row in rows])
