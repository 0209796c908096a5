"""The page of one request: waiting, running, ended or refused."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from litestar import Response
from litestar.params import FromPath

from gateway.console.access import page, visit_of
from gateway.console.pages.requests import ended
from gateway.console.pages.requests.misses_shown import miss_shown
from gateway.console.pages.requests.request_shown import (
    STATUS,
    ahead_words,
    events_shown,
    is_binding,
    ledger_lines,
    stages_shown,
    target_lines,
    told_and_happened,
    why_words,
)
from gateway.console.pages.requests.ways_out import way_out
from gateway.console.rendering import page_response
from gateway.errors import ApiError
from gateway.explain.explanation import sat_out_for
from gateway.http.asgi import Request
from gateway.pools.request_actions import SHOW
from gateway.routes.context import admin_of, gateway_of
from gateway.routes.requests import about, rows_of, settled_of, shown_request
from tenants.errors import NotFound
from tenants.instants import to_us
from tenants.people.person import Person
from tenants.people.roles import Act

PATH = f"{ended.PATH}/{{request_id:str}}"
ID = "{request_id}"
"""In the setting `gateway.trace_url`."""
ABSENT: dict[str, Any] = {
    "tenant_id": None,
    "project_id": None,
    "key_id": None,
    "labels": {},
    "session": None,
    "lined_up": None,
    "explanation": [],
    "stages": [],
    "timeline": None,
    "misses": [],
}
"""Defaults for keys that only some of waiting, ended and refused requests have."""


@page(PATH, act=Act.READ_TENANT)
async def request_page(request: Request, request_id: FromPath[str]) -> Response[str]:
    visit, deps = visit_of(request), gateway_of(request).deps
    sees_all = visit.person.may(Act.READ_PLATFORM)
    shown = await found_request(request, visit.person, request_id)
    rows = await rows_of(request, about(SHOW, request_id))
    took = []
    if sees_all and shown["status"] == "ended":
        took = await sat_out_for(deps.admin, settled_of(rows))
    timeline = shown["timeline"] or []
    stages, end_s = stages_shown(shown["stages"])
    lined_up = shown["lined_up"]
    return page_response(
        "requests/request.html",
        visit,
        shown=shown,
        status_words=STATUS.get(shown["status"], ""),
        ahead=ahead_words(lined_up) if lined_up else [],
        stages=stages,
        end_s=end_s,
        came_at=shown["refusal"]["at"] if "refusal" in shown else to_us(rows[0].at) if rows else None,
        why=why_words(end_s),
        targets=target_lines(shown["misses"], end_s),
        told=told_and_happened(timeline),
        is_binding=is_binding(timeline),
        events=events_shown(timeline),
        lines=ledger_lines(rows, with_detail=sees_all),
        misses=[miss_shown(miss) for miss in shown["misses"]],
        way_out=way_out(shown["refusal"]["code"]) if "refusal" in shown else "",
        sat_out_for=took,
        trace=trace_address(deps.config.trace_url, shown["id"]) if sees_all else "",
        sees_all=sees_all,
    )


async def found_request(request: Request, person: Person, request_id: str) -> dict[str, Any]:
    """As operators or its tenant see it, with names. Raises `NotFound`, also if hidden from the person."""
    ask = about(SHOW, request_id)
    rows = await rows_of(request, ask)
    if rows:
        _check_may_see(person, rows[0].tenant_id, request_id)
    try:
        shown = await shown_request(request, ask)
        tenant_id: str | None = shown["tenant_id"]
        _check_may_see(person, tenant_id, request_id)
        if not person.may(Act.READ_PLATFORM):
            owned = {name: shown.get(name) for name in ("tenant_id", "project_id", "key_id")}
            shown = owned | await shown_request(request, about(SHOW, request_id, tenant_id))
    except ApiError as error:
        if error.status != 404:
            raise
        raise NotFound("request", request_id) from None
    return (await admin_of(request).with_names([ABSENT | shown]))[0]


def _check_may_see(person: Person, tenant_id: str | None, request_id: str) -> None:
    if not person.may(Act.READ_TENANT, tenant_id):
        raise NotFound("request", request_id)


def trace_address(pattern: str, request_id: str) -> str:
    """The address of the request's trace; empty: none is configured."""
    return pattern.replace(ID, quote(request_id, safe=""))


HANDLERS = [request_page]
