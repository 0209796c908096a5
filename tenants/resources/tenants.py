"""Tenants: who shares the engines, and with which weight."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from sqlalchemy import Connection, func

from tenants.admin.cursor import PAGES, SortKey, beyond
from tenants.admin.tenants import TenantView, view
from tenants.directory import queries
from tenants.nouns.tenant import Tenant, TenantChange, TenantCreate, Withdrawal
from tenants.people.roles import Act
from tenants.resources.query import Filter, ListQuery
from tenants.resources.resource import PageRequest, Resource, ResourceAct
from tenants.resources.shown import Form, Shown
from tenants.resources.table_acts import answering
from tenants.storage.tables import tenants


class TenantQuery(ListQuery, frozen=True):
    """Which tenants. None: all."""

    search: Annotated[str | None, Filter(help="Part of the name; case does not matter.")] = None


def _read(connection: Connection, request: PageRequest) -> tuple[list[Tenant], SortKey | None]:
    name, search = tenants.c.name, request.query.search
    wanted = [] if request.after is None else [beyond([name], request.after)]
    if search is not None:
        wanted.append(func.lower(name).contains(search.lower(), autoescape=True))
    if request.only is not None:
        wanted.append(tenants.c.id.in_(sorted(request.only)))
    return queries.tenants_where(connection, *wanted, most=request.most), None


_act = partial(ResourceAct, scope="admin:write", act=Act.CHANGE_TENANT)
TENANTS = Resource[Any](
    name="tenant",
    plural="tenants",
    title="Tenants",
    query=TenantQuery,
    read=_read,
    order=(tenants.c.name,),
    as_json=lambda shown: shown.as_json(),
    find=lambda connection, reference, tenant, now_us: view(connection, reference),
    stored=lambda shown: shown.tenant.as_json() if isinstance(shown, TenantView) else shown.as_json(),
    scope="admin:read",
    act=Act.READ_TENANT,
    summary="List tenants, by name",
    description=PAGES,
    has_page=False,
    is_whole=True,
    shown=(
        Shown("name", "Name"),
        Shown("status", "Status"),
        Shown("weight", "Weight", Form.FACTOR),
        Shown("default_tier", "Tier"),
        Shown("id", "Id"),
    ),
    file=(
        *("id", "name", "status", "weight", "default_tier", "tiers", "models", "on_low_budget"),
        *("reserved_tokens_per_s", "reserved_tier", "labels", "created_at", "display_name"),
    ),
    acts=(
        _act(
            "tenant.create",
            answering(lambda admin, call: admin.tenants.create(call.actor, call.command)),
            command=TenantCreate,
            status=201,
            takes_condition=False,
            summary="Create a tenant",
            command_help="""Creates a tenant.

    \b
    When tenants wait in the same tier, weight 2 gets twice as much as weight 1.
    --json answers:
      {"id": "ten_…", "name": "acme", "status": "active", "weight": 2.0, "reserved_tokens_per_s": 0.0,
       "reserved_tier": null, "on_low_budget": "refuse", "default_tier": "interactive",
       "tiers": ["interactive", "standard", "batch"], "models": null, "labels": {},
       "display_name": null,
       "created_at": "2026-01-31T12:00:00+00:00"}
    """,
            words=lambda tenant: f"tenant {tenant['name']} created ({tenant['id']})",
        ),
        _act(
            "tenant.update",
            answering(
                lambda admin, call: admin.tenants.update(
                    call.actor, call.reference, call.command, if_match=call.if_match
                )
            ),
            command=TenantChange,
            method="PATCH",
            path="/{reference}",
            summary="Change a tenant",
            description="Fields that are not given stay as they are.",
            command_verb="set",
            command_help="""Changes a tenant; options that are not given stay. TENANT is a name or id.

    \b
    A new --tier without --may-use also allows the tiers served after it.
    Labels are keys of a request's `metadata` that are stored in the ledger.
    --json answers what `tenant create` answers.
    """,
            words=lambda tenant: f"tenant {tenant['name']} changed",
        ),
        _act(
            "tenant.suspend",
            answering(
                lambda admin, call: admin.tenants.suspend(
                    call.actor, call.reference, now=call.command.now, if_match=call.if_match
                )
            ),
            command=Withdrawal,
            is_body_optional=True,
            path="/{reference}/suspend",
            summary="Suspend a tenant",
            description="Its keys are refused with 403 `tenant_suspended`, and its waiting requests end with"
            " 401 and are refunded. Running ones finish, or with `now` end as well, charged for the"
            " tokens that they emitted.",
            command_help="""Suspends a tenant, in every gateway when this returns.

    Its keys are refused. Waiting requests end and are refunded; running ones finish, or end with --now.

    \b
    --json answers what `tenant create` answers, with "status": "suspended" and, with --now, "now": true.
    Exit code 3: a gateway has not confirmed it ("not_in_force_on").
    """,
            words=lambda tenant: f"tenant {tenant['name']} suspended",
        ),
        _act(
            "tenant.resume",
            answering(
                lambda admin, call: admin.tenants.resume(call.actor, call.reference, if_match=call.if_match)
            ),
            path="/{reference}/resume",
            summary="Resume a suspended tenant",
            command_help="""Resumes a suspended tenant.

    \b
    --json answers what `tenant create` answers, with "status": "active".
    """,
            words=lambda tenant: f"tenant {tenant['name']} is active again",
        ),
    ),
    group_help="""Tenants: who shares the engines, and their weights.

    \b
      fairgate tenant create acme --weight 2 --tier interactive
      fairgate tenant list
      fairgate tenant show acme
      fairgate tenant set acme --on-low-budget truncate
      fairgate tenant set acme --reserve 2000 --reserve-tier interactive
      fairgate tenant set acme --label team=search --label team=ads
      fairgate tenant suspend acme --now
      fairgate tenant resume acme
    """,
    command_help="""Lists all tenants.

    \b
    --json answers a list of what `tenant create` answers:
      [{"id": "ten_…", "name": "acme", "status": "active", "weight": 2.0, …}]
    """,
)
