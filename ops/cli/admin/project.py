"""`fairgate project`: the projects of tenants, which keys belong to."""

from __future__ import annotations

import click

from ops.cli.administer import NOW, actor, named_list, named_one
from ops.cli.base import answer, group
from ops.reporting import table
from tenants.admin.commands import ProjectCreate
from tenants.directory.records import Project

PROJECT = click.argument("project", metavar="PROJECT")
OF_TENANT = click.option("--tenant", help="Whose project it is (name or id); needed where PROJECT is a name.")


@group()
def project() -> None:
    """Projects: parts of a tenant with keys and limits of their own.

    \b
      fairgate project create chatbot --tenant acme
      fairgate project list --tenant acme
      fairgate project suspend chatbot --tenant acme
      fairgate project resume prj_…
    """


@project.command()
@click.argument("name")
@click.option("--tenant", required=True, help="Whose project it is (name or id).")
def create(name: str, tenant: str) -> None:
    """Creates a project.

    \b
    --json answers:
      {"id": "prj_…", "tenant_id": "ten_…", "tenant": "acme", "name": "chatbot", "status": "active",
       "created_at": "2026-01-31T12:00:00+00:00"}
    """
    wanted = ProjectCreate(tenant=tenant, name=name)
    _, made = named_one(lambda admin: admin.projects.create(actor(), wanted), Project.as_json)
    answer(made, f"project {name} of {made['tenant']} created ({made['id']})")


@project.command(name="list")
@click.option("--tenant", help="Only this tenant's (name or id).")
def list_(tenant: str | None) -> None:
    """Lists projects.

    \b
    --json answers a list of what `project create` answers:
      [{"id": "prj_…", "tenant_id": "ten_…", "tenant": "acme", "name": "default", "status": "active", …}]
    """
    _, found = named_list(lambda admin: admin.projects.all(tenant), Project.as_json)
    rows = [(row["tenant"], row["name"], row["status"], row["id"]) for row in found]
    answer(found, lambda: table("projects", ("tenant", "name", "status", "id"), rows))


@project.command()
@PROJECT
@OF_TENANT
@NOW
def suspend(project: str, tenant: str | None, now: bool) -> None:
    """Suspends a project, in every gateway when this returns: its keys open nothing any more, and what waits
    ends, refunded. What runs goes on to its end, or with --now ends as well.

    \b
    PROJECT is its id, or with --tenant its name.
    --json answers what `project create` answers, with "status": "suspended" and, with --now, "now": true.
    Exit code 3: a gateway has not confirmed it ("not_in_force_on").
    """
    _, suspended = named_one(
        lambda admin: admin.projects.suspend(actor(), project, tenant, now=now), Project.as_json
    )
    running = "what runs ends as well" if now else "requests that run go on to their end"
    answer(
        suspended,
        f"project {suspended['name']} of {suspended['tenant']} suspended: its keys open nothing any more;"
        f" {running}",
    )


@project.command()
@PROJECT
@OF_TENANT
def resume(project: str, tenant: str | None) -> None:
    """Undoes a suspension.

    \b
    PROJECT is its id, or with --tenant its name.
    --json answers what `project create` answers, with "status": "active".
    """
    _, resumed = named_one(lambda admin: admin.projects.resume(actor(), project, tenant), Project.as_json)
    answer(resumed, f"project {resumed['name']} of {resumed['tenant']} is active again")
