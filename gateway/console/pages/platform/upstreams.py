"""The page of upstreams: replicas, health, aliases, tiers, drains."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response
from litestar.params import FromPath

from gateway.console.access import form, page, visit_of
from gateway.console.confirm import confirm_page
from gateway.console.form_errors import FORM_ERRORS, FormProblem, problem_of
from gateway.console.pages.platform.upstreams_view import (
    ReplicaRow,
    drain_effects,
    kv_by_minute,
    last_minutes,
    replica_row,
)
from gateway.console.pages.questions import asked_of
from gateway.console.rendering import page_response, redirect
from gateway.console.return_path import with_query
from gateway.routes.context import gateway_of
from gateway.routes.views.upstreams_view import (
    STATES,
    aliases_of,
    find_drain,
    find_replica,
    tiers_of,
    upstreams_of,
)
from gateway.upstream.base import Upstream
from tenants.admin.commands import ReplicaDrain
from tenants.admin.cursor import MAX_PAGE
from tenants.people.roles import Act

PATH = "/console/upstreams"
ONE = f"{PATH}/{{replica:str}}"
DONE = {
    "drain": "{} gets no new requests. What runs there ends by itself.",
    "resume": "{} is in rotation again.",
}


@page(PATH, act=Act.READ_PLATFORM)
async def upstreams_page(request: Request[Any, Any, Any]) -> Response[str]:
    return await _shown(request)


async def _shown(request: Request[Any, Any, Any], problem: FormProblem | None = None) -> Response[str]:
    gateway, visit = gateway_of(request), visit_of(request)
    shown = await upstreams_of(gateway)
    hour = (await gateway.deps.admin.page_engines(limit=MAX_PAGE)).rows
    minutes, live = last_minutes(hour), _live(request)
    pools = [
        pool
        | {
            "rows": [
                replica_row(
                    replica,
                    live.get((pool["pool"], replica["replica_id"])),
                    minutes.get((pool["pool"], replica["replica_id"])),
                )
                for replica in pool["replicas"]
            ]
        }
        for pool in shown["data"]
    ]
    names, kv = kv_by_minute(hour)
    asked = asked_of(request, "done", "replica", "late")
    return page_response(
        "platform/upstreams.html",
        visit,
        problem=problem,
        pools=pools,
        missing=shown["gateways_missing"],
        elsewhere=shown["drained_elsewhere"],
        states=STATES,
        kv_columns=["Minute", *((name, "number") for name in names)],
        kv=kv,
        aliases=aliases_of(gateway),
        tiers=tiers_of(gateway),
        may_change=visit.person.may(Act.CHANGE_PLATFORM),
        done=DONE[asked["done"]].format(asked["replica"]) if asked["done"] in DONE else "",
        late=asked["late"],
    )


def _live(request: Request[Any, Any, Any]) -> dict[tuple[str, str], float]:
    kv_shares: dict[tuple[str, str], float] = {}
    for pool in gateway_of(request).pools.values():
        for upstream in pool.spec.upstreams:
            if upstream.is_up and upstream.snapshot is not None and upstream.snapshot.num_blocks:
                kv_shares[pool.name, upstream.replica_id] = (
                    upstream.snapshot.referenced_blocks / upstream.snapshot.num_blocks
                )
    return kv_shares


async def _replica(
    request: Request[Any, Any, Any], name: str
) -> tuple[str, Upstream, ReplicaRow, list[ReplicaRow], int]:
    """A replica of this gateway, with the others of its model. Raises `NotFound`."""
    gateway = gateway_of(request)
    pool, upstream = find_replica(gateway, name)
    shown = await upstreams_of(gateway)
    rows = [
        replica_row(replica, None, None)
        for one in shown["data"]
        if one["pool"] == pool
        for replica in one["replicas"]
    ]
    [this] = [row for row in rows if row.replica == name]
    return pool, upstream, this, [row for row in rows if row is not this], shown["gateways_missing"]


@page(f"{ONE}/drain", act=Act.CHANGE_PLATFORM)
async def ask_drain(request: Request[Any, Any, Any], replica: FromPath[str]) -> Response[str]:
    return await _asked(request, replica)


async def _asked(
    request: Request[Any, Any, Any], replica: str, reason: str = "", problem: FormProblem | None = None
) -> Response[str]:
    pool, _, this, others, missing = await _replica(request, replica)
    return confirm_page(
        visit_of(request),
        title=f"Drain {replica}",
        effects=drain_effects(pool, this, others, missing),
        action=f"{this.path}/drain",
        button="Drain it",
        back=PATH,
        reason=reason,
        problem=problem,
    )


@form(f"{ONE}/drain", act=Act.CHANGE_PLATFORM)
async def drain(request: Request[Any, Any, Any], replica: FromPath[str]) -> Response[str]:
    gateway, visit = gateway_of(request), visit_of(request)
    pool, upstream = find_replica(gateway, replica)
    reason = visit.form.get("reason", "").strip()
    try:
        await gateway.deps.admin.drain_replica(
            visit.actor, pool, upstream.address, upstream.replica_id, ReplicaDrain(reason=reason)
        )
    except FORM_ERRORS as error:
        return await _asked(request, replica, reason, problem_of(error, fields=("reason",)))
    return await _done(request, "drain", replica)


@form(f"{ONE}/resume", act=Act.CHANGE_PLATFORM)
async def resume(request: Request[Any, Any, Any], replica: FromPath[str]) -> Response[str]:
    """Resumes a replica, also one that only other gateways have."""
    gateway = gateway_of(request)
    await gateway.directory.refresh()
    try:
        drain = find_drain(gateway, replica)
        await gateway.deps.admin.resume_replica(visit_of(request).actor, *drain.identity)
    except FORM_ERRORS as error:
        return await _shown(request, problem_of(error))
    return await _done(request, "resume", replica)


async def _done(request: Request[Any, Any, Any], act: str, replica: str) -> Response[str]:
    """Back to the list once the act is in force; names gateways that have not confirmed in time."""
    late = await gateway_of(request).directory.changed()
    return redirect(with_query(PATH, {"done": act, "replica": replica, "late": ", ".join(late)}))


HANDLERS = [upstreams_page, ask_drain, drain, resume]
