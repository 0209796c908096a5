"""The page of upstreams: replicas, health, aliases, tiers, drains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from litestar import Response
from litestar.params import FromPath

from gateway.console.access import form, page, visit_of
from gateway.console.form_errors import FORM_ERRORS, FormProblem, problem_of
from gateway.console.formats import without_password
from gateway.console.pages.filters import asked_of
from gateway.console.rendering import confirm_page, page_response, redirect
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
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
from tenants.counts.minute_store import EngineMinute
from tenants.people.roles import Act
from tenants.resources.reading import read_page
from tenants.resources.records.minutes import ENGINES, EngineQuery, EngineRow

PATH = "/console/upstreams"
ONE = f"{PATH}/{{replica:str}}"
DONE = {
    "drain": "{} gets no new requests. What runs there ends by itself.",
    "resume": "{} is in rotation again.",
}


MOST_LINES = 8
"""Replicas in the chart of the last hour."""


Row = dict[str, Any]


def replica_row(shown: Mapping[str, Any], kv_share: float | None, minute: EngineMinute | None) -> Row:
    """`shown`: of `upstreams_of`. `step_s`, `batch`: means of its last whole minute; None: none reported."""
    saturation = shown.get("saturation") or {}
    steps = minute.steps if minute is not None else 0
    kind = "own engine" if shown["kind"] == "engine" else f"server ({shown.get('server') or 'OpenAI API'})"
    return {
        "breaker": "",
        "failures": None,
        **shown,
        "path": f"/console/upstreams/{quote(shown['replica_id'], safe='')}",
        "kind": kind,
        "url": without_password(shown["url"]),
        "why": "" if shown["state"] != "away" else (shown["refusal"] or "it does not answer"),
        "kv_share": saturation.get("kv_usage") if saturation else kv_share,
        "step_s": minute.step_us / steps / 1e6 if minute is not None and steps else None,
        "batch": minute.batch_sum / steps if minute is not None and steps else None,
    }


def last_minutes(rows: Iterable[EngineRow]) -> dict[tuple[str, str], EngineMinute]:
    """The newest minute by pool and replica; rows are in order of time."""
    return {(row.key.pool, row.key.replica): row.counts for row in rows}


def kv_by_minute(rows: Iterable[EngineRow]) -> tuple[list[str], list[tuple[int, list[float | None]]]]:
    """At most `MOST_LINES` replicas, and their KV use by minute; None: not seen."""
    names: list[tuple[str, str]] = []
    minutes: dict[int, dict[tuple[str, str], float]] = {}
    for row in rows:
        key = row.key.pool, row.key.replica
        if key not in names:
            if len(names) == MOST_LINES:
                continue
            names.append(key)
        minutes.setdefault(row.key.minute_us, {})[key] = row.counts.as_json()["kv_share"]
    shares = [(at_us, [minutes[at_us].get(name) for name in names]) for at_us in sorted(minutes)]
    return [replica for _, replica in names], shares


def drain_effects(pool: str, replica: Row, others: Sequence[Row], missing: int) -> list[str]:
    """What a drain will do, in sentences. `missing`: gateways that did not answer."""
    serving = sum(row["state"] == "serving" for row in others)
    one = replica["in_flight"] == 1
    running = (
        "No request runs there now."
        if not replica["in_flight"] and not missing
        else f"{replica['in_flight']} {'request runs' if one else 'requests run'} there now:"
        f" {'it ends' if one else 'they end'} by {'itself' if one else 'themselves'}, and no token is lost."
    )
    effects = [
        f"{replica['replica_id']} of {pool} gets no new requests, from any gateway, also after restarts,"
        " until you resume it.",
        running,
    ]
    if missing:
        effects.append(
            f"{missing} other {'gateway' if missing == 1 else 'gateways'} did not answer: what runs there"
            " from these is not counted here, and ends by itself as well."
        )
    effects.append(
        f"What waits goes to the {serving} other {'replica' if serving == 1 else 'replicas'} of {pool}."
        if serving
        else f"No other replica serves {pool}: what waits does so for a while longer, and is then refused, as"
        " new requests are, with 503 until one serves again."
    )
    return effects


@page(PATH, act=Act.READ_PLATFORM, of_one=True)
async def upstreams_page(request: Request) -> Response[str]:
    return await _shown(request)


async def _shown(request: Request, problem: FormProblem | None = None) -> Response[str]:
    gateway, visit = gateway_of(request), visit_of(request)
    shown = await upstreams_of(gateway)
    hour = (await read_page(gateway.deps.admin, ENGINES, EngineQuery(), limit=MAX_PAGE)).rows
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


def _live(request: Request) -> dict[tuple[str, str], float]:
    kv_shares: dict[tuple[str, str], float] = {}
    for pool in gateway_of(request).pools.values():
        for upstream in pool.spec.upstreams:
            if upstream.is_up and upstream.snapshot is not None and upstream.snapshot.num_blocks:
                kv_shares[pool.name, upstream.replica_id] = (
                    upstream.snapshot.referenced_blocks / upstream.snapshot.num_blocks
                )
    return kv_shares


async def _replica(request: Request, name: str) -> tuple[str, Upstream, Row, list[Row], int]:
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
    [this] = [row for row in rows if row["replica_id"] == name]
    return pool, upstream, this, [row for row in rows if row is not this], shown["gateways_missing"]


@page(f"{ONE}/drain", act=Act.CHANGE_PLATFORM)
async def ask_drain(request: Request, replica: FromPath[str]) -> Response[str]:
    return await _asked(request, replica)


async def _asked(
    request: Request, replica: str, reason: str = "", problem: FormProblem | None = None
) -> Response[str]:
    pool, _, this, others, missing = await _replica(request, replica)
    return confirm_page(
        visit_of(request),
        title=f"Drain {replica}",
        effects=drain_effects(pool, this, others, missing),
        action=f"{this['path']}/drain",
        button="Drain it",
        back=PATH,
        reason=reason,
        problem=problem,
    )


@form(f"{ONE}/drain", act=Act.CHANGE_PLATFORM)
async def drain(request: Request, replica: FromPath[str]) -> Response[str]:
    gateway, visit = gateway_of(request), visit_of(request)
    pool, upstream = find_replica(gateway, replica)
    reason = visit.form.get("reason", "").strip()
    try:
        await gateway.deps.admin.drains.drain(visit.actor, pool, upstream.name, ReplicaDrain(reason=reason))
    except FORM_ERRORS as error:
        return await _asked(request, replica, reason, problem_of(error, fields=("reason",)))
    return await _done(request, "drain", replica)


@form(f"{ONE}/resume", act=Act.CHANGE_PLATFORM)
async def resume(request: Request, replica: FromPath[str]) -> Response[str]:
    """Resumes a replica, also one that only other gateways have."""
    gateway = gateway_of(request)
    await gateway.directory.refresh()
    try:
        drain = find_drain(gateway, replica)
        await gateway.deps.admin.drains.resume(visit_of(request).actor, *drain.identity)
    except FORM_ERRORS as error:
        return await _shown(request, problem_of(error))
    return await _done(request, "resume", replica)


async def _done(request: Request, act: str, replica: str) -> Response[str]:
    """Back to the list once the act is in force; names gateways that have not confirmed in time."""
    late = await gateway_of(request).directory.changed()
    return redirect(with_query(PATH, {"done": act, "replica": replica, "late": ", ".join(late)}))


HANDLERS = [upstreams_page, ask_drain, drain, resume]
