"""Cancels one request or moves it to another tier, after a page that says what that does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from litestar import Response
from litestar.params import FromPath

from gateway.console.access import NotForThisRole, form, page, visit_of
from gateway.console.form_errors import WHOLE_FORM, FormProblem
from gateway.console.pages.live.move_shown import most_ahead, move_shown
from gateway.console.pages.live.waiting import PATH
from gateway.console.rendering import confirm_page, page_response, redirect
from gateway.console.return_path import with_query
from gateway.errors import ApiError
from gateway.http.asgi import Request
from gateway.pools.request_actions import CANCEL, MOVE, OFFER, SHOW, ActionResult
from gateway.routes.admin.common import named
from gateway.routes.admin.requests import cancelled_by, moved_by
from gateway.routes.context import gateway_of
from gateway.routes.requests import about, found_running, live, rows_of
from tenants.ledger.rows import LedgerRow
from tenants.people.roles import Act
from tenants.types import Tier

ONE = f"{PATH}/{{request_id:str}}"
STATUS = {
    "limited": "which its tenant’s own limits hold back, stops.",
    "waiting": "which is waiting, stops.",
    "running": "which is running, stops.",
}


@dataclass(frozen=True, slots=True)
class Steered:
    """A running request that the person may act on."""

    found: ActionResult
    tenant_name: str
    of_tenant: str | None
    """A member acts only as this tenant could; None: as an operator."""
    tiers: tuple[str, ...]

    @property
    def shown(self) -> dict[str, Any]:
        value: dict[str, Any] = self.found.result()
        return value


async def steered(request: Request, request_id: str) -> Steered | None:
    """None: ended, unknown, or hidden from the person. Raises `NotForThisRole`, `ApiError` (no answer)."""
    person = visit_of(request).person
    running = await found_running(request, about(SHOW, request_id))
    if running is None or not person.may(Act.READ_TENANT, running.tenant_id):
        return None
    if running.refused is None and running.value["status"] == "ended":
        return None  # it is only being settled
    if not person.may(Act.STEER_REQUEST, running.tenant_id):
        raise NotForThisRole
    tenant = gateway_of(request).deps.directory.tenant(running.tenant_id)
    name = running.tenant_id if tenant is None else tenant.name
    if person.may(Act.CHANGE_PLATFORM):
        return Steered(running, name, None, tuple(Tier))
    return Steered(running, name, running.tenant_id, running.tiers)


@page(f"{ONE}/cancel", act=Act.STEER_REQUEST)
async def cancel_page(request: Request, request_id: FromPath[str]) -> Response[str]:
    visit = visit_of(request)
    what = await steered(request, request_id)
    if what is None:
        return await _over(request, request_id)
    shown = what.shown
    effects = [
        f"The request …{shown['id'][-8:]} of {what.tenant_name}, {STATUS.get(shown['status'], 'stops')}",
        "Its client gets the error request_cancelled (499).",
        f"{shown['output_tokens']:,} output tokens were sent. What was computed is charged; the rest of its"
        " hold is released.",
    ]
    return confirm_page(
        visit,
        title="Cancel this request?",
        effects=effects,
        action=f"{PATH}/{shown['id']}/cancel",
        button="Cancel the request",
        back=PATH,
    )


@form(f"{ONE}/cancel", act=Act.STEER_REQUEST)
async def cancel(request: Request, request_id: FromPath[str]) -> Response[str]:
    visit = visit_of(request)
    what = await steered(request, request_id)
    if what is None:
        return await _over(request, request_id)
    await cancelled_by(visit.actor, request, about(CANCEL, request_id, what.of_tenant))
    return redirect(with_query(PATH, {"done": "cancelled"}))


@page(f"{ONE}/move", act=Act.STEER_REQUEST)
async def move_page(request: Request, request_id: FromPath[str]) -> Response[str]:
    """What each other tier costs, and whom a move would pass."""
    what = await steered(request, request_id)
    return await _over(request, request_id) if what is None else await _offers(request, what)


@form(f"{ONE}/move", act=Act.STEER_REQUEST)
async def move(request: Request, request_id: FromPath[str]) -> Response[str]:
    visit = visit_of(request)
    what = await steered(request, request_id)
    if what is None:
        return await _over(request, request_id)
    tier = visit.form.get("tier", "")
    if tier not in what.tiers:
        return await _offers(
            request, what, FormProblem(422, {WHOLE_FORM: "The request cannot go to this tier."})
        )
    by = "operator" if what.of_tenant is None else "tenant"
    ask = about(MOVE, request_id, what.of_tenant, tier, by)
    try:
        await moved_by(visit.actor, request, ask, what.found.tenant_id)
    except ApiError as error:
        return await _offers(request, what, FormProblem(error.status, {WHOLE_FORM: error.message}))
    return redirect(with_query(PATH, {"done": "moved"}))


async def _offers(request: Request, what: Steered, problem: FormProblem | None = None) -> Response[str]:
    offers: list[dict[str, Any]] = []
    why = ""
    for tier in what.tiers:
        if tier == what.shown["tier"]:
            continue
        try:
            offer = await live(request, about(OFFER, what.shown["id"], what.of_tenant, tier))
            offers.append(move_shown(await named(request, offer.result())))
        except ApiError as error:
            why = error.message
    return page_response(
        "live/move.html",
        visit_of(request),
        problem=problem,
        shown=what.shown,
        tenant=what.tenant_name,
        offers=offers,
        most_ahead=most_ahead(offers),
        why=why,
        back=PATH,
    )


async def _over(request: Request, request_id: str) -> Response[str]:
    """No error: the request may have finished while its page was read."""
    visit = visit_of(request)
    rows = await rows_of(request, about(SHOW, request_id))
    is_shown = bool(rows) and visit.person.may(Act.READ_TENANT, rows[0].tenant_id)
    return page_response(
        "live/gone.html",
        visit,
        title=_title(rows) if is_shown else "No such request",
        href=f"/console/requests/{rows[0].request_id}" if is_shown else "",
        back=PATH,
    )


def _title(rows: Sequence[LedgerRow]) -> str:
    if any(row.kind == "settle" for row in rows):
        return "This request has already finished"
    return "This request is just finishing, or its gateway does not answer"


HANDLERS = [cancel_page, cancel, move_page, move]
