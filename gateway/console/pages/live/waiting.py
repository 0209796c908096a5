"""The live page of waiting requests: what is ahead of each, for how long, and when it is due."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from litestar import Response
from litestar.types import ASGIApp

from gateway import errors
from gateway.console.access import own_tenants, page, tenant_shown, visit_of
from gateway.console.live.stream import LIVE, Texts, hub_of, live_region
from gateway.console.rendering import page_response, render
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.metrics.waits import MAX_KEPT, KeptWaits
from gateway.pools.fleet import WaitingRequests
from gateway.pools.waiting import WaitingNow
from gateway.routes.context import gateway_of
from gateway.routes.views.policy_view import tenant_names
from tenants.people.roles import Act
from tenants.types import Tier

PATH = "/console/waiting"
DONE = {"cancelled": "The request is cancelled.", "moved": "The request is moved."}


MOST_TOLD = 8
LEAST_TOLD_S = 0.5
FEW = 20
"""Waits of a tenant and tier under which no estimate is called wrong."""
HELD = 0.5
"""Part of the waits that stay within a p90 that can be relied on; it should be 0.9."""


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
    ids = [*(row.tenant_id for row in waiting.data), *(line.tenant_id for line in waiting.kept)]
    names = tenant_names(gateway, ids)
    return WaitingView(round(gateway.deps.wall_clock() * 1e6), waiting, names)


def is_off(kept: KeptWaits) -> bool:
    """Whether what this tenant is told in this tier does not hold now."""
    within = kept.within_told_p90
    return within is not None and within < HELD and kept.requests >= FEW


def told_lines(kept: Iterable[KeptWaits]) -> list[KeptWaits]:
    """The furthest off first; without those whose waits are too short to matter."""
    told = [
        (line.told_p50_s - line.had_p50_s, line)
        for line in kept
        if line.told_p50_s is not None and max(line.told_p50_s, line.had_p50_s) >= LEAST_TOLD_S
    ]
    return [line for _, line in sorted(told, key=lambda pair: pair[0])[:MOST_TOLD]]


def in_line(rows: Iterable[WaitingNow]) -> list[WaitingNow]:
    """By their turn, those without an estimate last, of these the oldest first."""
    return sorted(rows, key=lambda row: (row.left_p50_s is None, row.left_p50_s or 0.0, -row.elapsed_s))


def shown(view: WaitingView, question: WaitingQuestion) -> dict[str, Any]:
    rows = in_line(view.found.data)
    return {
        "now": view,
        "rows": rows,
        "several_models": len({row.model for row in rows}) > 1,
        "more": max(0, view.found.total - len(rows)),
        "most_ahead": max((sum(row.tokens_ahead.values()) for row in rows if row.tokens_ahead), default=1),
        "told": told_lines(view.found.kept),
        "off": {(line.tenant_id, line.tier) for line in view.found.kept if is_off(line)},
        "most_told": MAX_KEPT,
        "may_act": question.may_act,
        "again": with_query(PATH, question.query),
    }


def text_of(view: WaitingView, texts: Texts, question: WaitingQuestion) -> str:
    """Of one topic people differ in what they may do; those who may do the same share its text."""
    if question.may_act not in texts:
        texts[question.may_act] = render("live/waiting_now.html", None, **shown(view, question))
    return texts[question.may_act]


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
        **shown(view, question),
    )


@page(f"{PATH}{LIVE}", act=Act.READ_TENANT)
async def waiting_live(request: Request) -> ASGIApp:
    question = await question_of(request)
    return await live_region(
        request,
        question.topic,
        lambda: view_of(request, question),
        lambda view, texts: text_of(view, texts, question),
        with_query(PATH, question.query),
    )


HANDLERS = [waiting_page, waiting_live]
