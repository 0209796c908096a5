"""The live page of waiting requests: what is ahead of each, for how long, and when it is due."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from litestar import Response
from litestar.types import ASGIApp

from gateway import errors
from gateway.console.access import own_tenants, page, tenant_shown, visit_of
from gateway.console.live.held_rows import held
from gateway.console.live.stream import LIVE, Texts, hub_of, live_region
from gateway.console.rendering import page_response, render
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.pools.fleet import WaitingRequests
from gateway.pools.waiting import WaitingNow
from gateway.routes.context import gateway_of
from gateway.routes.views.policy_view import tenant_names
from tenants.people.roles import Act
from tenants.types import Tier

PATH = "/console/waiting"
DONE = {"cancelled": "The request is cancelled.", "moved": "The request is moved."}


@dataclass(frozen=True, slots=True)
class WaitingView:
    at_us: int
    found: WaitingRequests
    names: Mapping[str, str]

    @property
    def answering(self) -> str:
        return f"{self.found.gateways} of {self.found.gateways + self.found.gateways_missing}"


@dataclass(frozen=True, slots=True)
class WaitingQuestion:
    tenant_ids: frozenset[str] | None
    """None: all tenants."""
    tier: str
    typed_tenant: str
    may_act: bool

    @property
    def topic(self) -> tuple[object, ...]:
        return "waiting", self.tenant_ids, self.tier

    @property
    def query(self) -> dict[str, str]:
        return {"tenant": self.typed_tenant, "tier": self.tier}


async def question_of(request: Request) -> WaitingQuestion:
    """Raises `ApiError` for an unknown tier, `NotFound` for a tenant that the person may not see."""
    person = visit_of(request).person
    typed, tier = (request.query_params.get(name, "") for name in ("tenant", "tier"))
    if tier not in ("", *Tier):
        raise errors.bad_request(f"Invalid 'tier': '{tier[:64]}' is not one of {', '.join(Tier)}.", "tier")
    tenants = own_tenants(person)
    if typed:
        tenants = frozenset({(await tenant_shown(request, typed)).tenant_id})
    return WaitingQuestion(tenants, tier, typed[:200], person.may_somewhere(Act.STEER_REQUEST))


async def view_of(request: Request, question: WaitingQuestion) -> WaitingView:
    gateway = gateway_of(request)
    waiting = await gateway.fleet.waiting(question.tenant_ids, question.tier)
    names = tenant_names(gateway, (row.tenant_id for row in waiting.data))
    return WaitingView(round(gateway.deps.wall_clock() * 1e6), waiting, names)


class WaitingWriter:
    """Renders the live part for one reader, whose rows hold still."""

    def __init__(self, question: WaitingQuestion) -> None:
        self._question = question
        self._first: tuple[WaitingNow, ...] | None = None
        self._ids: tuple[object, ...] = ()

    def shown(self, view: WaitingView) -> dict[str, Any]:
        if self._first is None:
            self._first = tuple(view.found.data)
            # Of one topic people differ in what they may do, and in how they named the tenant.
            ids = (row.request_id for row in self._first)
            self._ids = (self._question.may_act, self._question.typed_tenant, *ids)
        rows = held(self._first, view.found.data, lambda row: row.request_id)
        most = max((sum(row.tokens_ahead.values()) for row in view.found.data if row.tokens_ahead), default=1)
        more = max(0, view.found.total - len(view.found.data))
        return {
            "now": view,
            "rows": rows,
            "more": more,
            "most_ahead": most,
            "may_act": self._question.may_act,
            "again": with_query(PATH, self._question.query),
        }

    def text(self, view: WaitingView, texts: Texts) -> str:
        """Readers with the same rows share its text."""
        shown = self.shown(view)
        if self._ids not in texts:
            texts[self._ids] = render("live/waiting_now.html", None, **shown)
        return texts[self._ids]


@page(PATH, act=Act.READ_TENANT)
async def waiting_page(request: Request) -> Response[str]:
    hub, question = hub_of(request), await question_of(request)
    view = await hub.look(question.topic, lambda: view_of(request, question))
    return page_response(
        "live/waiting.html",
        visit_of(request),
        full=hub.refusal(visit_of(request).person),
        stream=with_query(f"{PATH}{LIVE}", question.query),
        typed=question.query,
        tiers=tuple(Tier),
        done=DONE.get(request.query_params.get("done", ""), ""),
        **WaitingWriter(question).shown(view),
    )


@page(f"{PATH}{LIVE}", act=Act.READ_TENANT)
async def waiting_live(request: Request) -> ASGIApp:
    question = await question_of(request)
    return await live_region(
        request,
        question.topic,
        lambda: view_of(request, question),
        WaitingWriter(question).text,
        with_query(PATH, question.query),
    )


HANDLERS = [waiting_page, waiting_live]
