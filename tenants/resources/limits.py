"""Limits: as set and as in force, with what they noticed in their newest window; set, overridden, removed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from sqlalchemy import Connection

from tenants.admin.admin import Admin
from tenants.admin.cursor import PAGES, SortKey, beyond
from tenants.admin.limits import LimitActs, LimitView, views_of
from tenants.directory import queries
from tenants.fields import fields_of
from tenants.nouns.limit import LimitOverride, LimitSet, limit_as_json
from tenants.people.roles import Act
from tenants.resources.query import Filter, Kind, ListQuery
from tenants.resources.reading import conditions_of
from tenants.resources.resource import ActCall, ActDone, PageRequest, Resource, ResourceAct
from tenants.resources.shown import Shown
from tenants.storage.tables import limits
from tenants.types import MAX_END_USER_CHARS, Limit

ORDER = (limits.c.created_us, limits.c.id)


class LimitQuery(ListQuery, frozen=True):
    """Which limits, and whose use of them."""

    tenant: Annotated[str | None, Filter(limits.c.tenant_id, Kind.TENANT)] = None
    end_user: Annotated[
        str | None,
        Filter(
            help="How much this one has used of its tenant's default for end users.", most=MAX_END_USER_CHARS
        ),
    ] = None


def _read(connection: Connection, request: PageRequest) -> tuple[list[LimitView], SortKey | None]:
    wanted = [*conditions_of(connection, request).values()]
    if request.after is not None:
        wanted.append(beyond(ORDER, request.after))
    found = queries.limits_where(connection, *wanted, most=request.most)
    return views_of(connection, found, request.now_us / 1e6), None


def _act(
    verb: str, change: Callable[[LimitActs, ActCall], Awaitable[Limit]], summary: str, **more: Any
) -> ResourceAct:
    async def run(admin: Admin, call: ActCall) -> ActDone:
        shown = limit_as_json(await change(admin.limits, call))
        return ActDone(shown, None if verb == "remove" else shown)

    scope, act = "admin:write", Act.LIMIT_BELOW_TENANT
    return ResourceAct(name=f"limit.{verb}", run=run, scope=scope, act=act, summary=summary, **more)


LIMITS = Resource(
    name="limit",
    plural="limits",
    title="Limits",
    query=LimitQuery,
    read=_read,
    order=ORDER,
    key_of=lambda view: (view.limit.created_us, view.limit.limit_id),
    as_json=LimitView.as_json,
    scope="admin:read",
    act=Act.READ_TENANT,
    summary="List limits, of one tenant or of all",
    description="With what overrides them now, how much is used (`usage`; null: not known at the moment),"
    " which one of a tenant binds first, and what soft and shadow ones noticed in their newest window."
    f" `tenant`: those of one; `end_user`: the use of a tenant's default by that one. {PAGES}",
    shown=tuple(Shown(one.name, one.label) for one in fields_of(LimitSet)),
    has_page=False,
    acts=(
        _act(
            "set",
            lambda acts, call: acts.set(call.actor, call.command, if_match=call.if_match),
            "Set a limit",
            command=LimitSet,
            status=201,
            description="Its subject: `platform` (all tenants together), `tenant`, or of a tenant one"
            " `project`, `key` or `end_user`, or `each_end_user`. `tier`, `model` and `above_tokens` (prompt"
            " and `max_tokens` together) narrow it. The same subject, meter, shape, tier, model and size are"
            " replaced; what was used stays used. A first limit begins at zero: it counts what is under way"
            " and what comes, not what had ended before (`counts_since`). It is in force in every gateway"
            " when this is answered; `not_in_force_on` names those that have not confirmed it within"
            " 5 seconds.",
        ),
        _act(
            "override",
            lambda acts, call: acts.override(
                call.actor, call.reference, call.command, if_match=call.if_match
            ),
            "Put another amount in force for a time",
            command=LimitOverride,
            path="/{reference}/override",
            description="Up to `until` (an instant with a time zone), or for `for_s` seconds. A new one"
            " replaces it.",
        ),
        _act(
            "clear_override",
            lambda acts, call: acts.clear_override(call.actor, call.reference, if_match=call.if_match),
            "End an override before its time",
            method="DELETE",
            path="/{reference}/override",
        ),
        _act(
            "remove",
            lambda acts, call: acts.remove(call.actor, call.reference, if_match=call.if_match),
            "Remove a limit",
            method="DELETE",
            path="/{reference}",
        ),
    ),
)
