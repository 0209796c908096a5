"""Projects: parts of a tenant with their own keys and limits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from sqlalchemy import Connection

from tenants.admin.cursor import PAGES, SortKey, beyond
from tenants.admin.tenants import find_project
from tenants.directory import queries
from tenants.nouns.project import Project, ProjectCreate
from tenants.nouns.tenant import Withdrawal
from tenants.people.roles import Act
from tenants.resources.query import Filter, Kind, ListQuery
from tenants.resources.reading import conditions_of
from tenants.resources.resource import PageRequest, Resource, ResourceAct
from tenants.resources.shown import Form, Shown
from tenants.resources.table_acts import answering
from tenants.storage.tables import projects

ORDER = (projects.c.tenant_id, projects.c.name)


class ProjectQuery(ListQuery, frozen=True):
    """Which projects. None: all."""

    tenant: Annotated[str | None, Filter(projects.c.tenant_id, Kind.TENANT)] = None


def _read(connection: Connection, request: PageRequest) -> tuple[list[Project], SortKey | None]:
    wanted = [] if request.after is None else [beyond(ORDER, request.after)]
    wanted += conditions_of(connection, request).values()
    return queries.projects_where(connection, *wanted, most=request.most), None


def _suspended(project: Mapping[str, Any]) -> str:
    running = "what runs ends as well" if project.get("now") else "requests that run go on to their end"
    name = f"project {project['name']} of {project['tenant']}"
    return f"{name} suspended: its keys open nothing any more; {running}"


_act = partial(ResourceAct, scope="admin:write", act=Act.CHANGE_TENANT)
REFERENCE = "`project` is its id, or with `tenant` its name."
PROJECTS = Resource(
    name="project",
    plural="projects",
    title="Projects",
    query=ProjectQuery,
    read=_read,
    order=ORDER,
    as_json=Project.as_json,
    find=lambda connection, reference, tenant, now_us: find_project(connection, reference, tenant),
    one_description=REFERENCE,
    is_named_in_tenant=True,
    scope="admin:read",
    act=Act.READ_TENANT,
    summary="List projects, of one tenant or of all",
    description=PAGES,
    has_page=False,
    is_whole=True,
    shown=(
        Shown("tenant", "Tenant", Form.TENANT),
        Shown("name", "Name"),
        Shown("status", "Status"),
        Shown("id", "Id"),
    ),
    acts=(
        _act(
            "project.create",
            answering(lambda admin, call: admin.projects.create(call.actor, call.command)),
            command=ProjectCreate,
            status=201,
            takes_condition=False,
            summary="Create a project",
            command_help="""Creates a project.

    \b
    --json answers:
      {"id": "prj_…", "tenant_id": "ten_…", "tenant": "acme", "name": "chatbot", "status": "active",
       "created_at": "2026-01-31T12:00:00+00:00"}
    """,
            words=lambda made: f"project {made['name']} of {made['tenant']} created ({made['id']})",
        ),
        _act(
            "project.suspend",
            answering(
                lambda admin, call: admin.projects.suspend(
                    call.actor, call.reference, call.tenant, now=call.command.now, if_match=call.if_match
                )
            ),
            command=Withdrawal,
            is_body_optional=True,
            path="/{reference}/suspend",
            summary="Suspend a project",
            description=f"{REFERENCE} Its keys are refused with 403 `project_suspended`; waiting and running"
            " requests as of a tenant.",
            command_help="""Suspends a project, in every gateway when this returns.

    Its keys are refused. Waiting requests end and are refunded; running ones finish, or end with --now.

    \b
    PROJECT is its id, or with --tenant its name.
    --json answers what `project create` answers, with "status": "suspended" and, with --now, "now": true.
    Exit code 3: a gateway has not confirmed it ("not_in_force_on").
    """,
            words=_suspended,
        ),
        _act(
            "project.resume",
            answering(
                lambda admin, call: admin.projects.resume(
                    call.actor, call.reference, call.tenant, if_match=call.if_match
                )
            ),
            path="/{reference}/resume",
            summary="Undo a project's suspension",
            description=REFERENCE,
            command_help="""Resumes a suspended project.

    \b
    PROJECT is its id, or with --tenant its name.
    --json answers what `project create` answers, with "status": "active".
    """,
            words=lambda resumed: f"project {resumed['name']} of {resumed['tenant']} is active again",
        ),
    ),
    group_help="""Projects: parts of a tenant with their own keys and limits.

    \b
      fairgate project create chatbot --tenant acme
      fairgate project list --tenant acme
      fairgate project suspend chatbot --tenant acme
      fairgate project resume prj_…
    """,
    command_help="""Lists projects.

    \b
    --json answers a list of what `project create` answers:
      [{"id": "prj_…", "tenant_id": "ten_…", "tenant": "acme", "name": "default", "status": "active", …}]
    """,
)
