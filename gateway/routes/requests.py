"""Routes of a tenant's own requests: list, show, cancel, move to another tier.

Ended requests are answered from the ledger, so cancelling twice, or too late, is no error. With Redis,
actions on another gateway's requests are passed on to it (`gateway/pools/peer_requests.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litestar import Response, delete, get, post
from litestar.params import FromPath

from gateway import errors
from gateway.domain.ids import request_id_of
from gateway.domain.tiers import tier_of
from gateway.errors import ApiError
from gateway.explain.explanation import explained
from gateway.http.asgi import Request
from gateway.http.authentication import principal_of
from gateway.pools.request_actions import (
    CANCEL,
    LIST,
    MAX_LISTED,
    MOVE,
    OFFER,
    SHOW,
    ActionResult,
    PeerAnswers,
    RequestAction,
    Unreachable,
    owner,
)
from gateway.requests.schemas import TierChangeBody
from gateway.routes.context import asked, gateway_of, json_response
from tenants.ledger.rows import LedgerRow

OWN: dict[str, Any] = {"scope": "inference"}
ELSEWHERE = {"answers": {409: "It is with another gateway, which does not answer."}}
MOVES = {
    "body": TierChangeBody,
    "answers": {
        409: "It does not stand in line, its tiers have limits of their own, or it is with another gateway,"
        " which does not answer.",
        429: "The budget does not cover the new tier's price; nothing has changed.",
    },
}
MAX_ID_CHARACTERS = 80
LISTED = (
    f"The oldest first, at most {MAX_LISTED} (`has_more`: there are others); those of all gateways that share"
    " a Redis. `gateways_missing` counts those that did not answer: theirs are not in the list."
)


@get("/v1/requests", opt=OWN, summary="List this tenant's requests that wait or run", description=LISTED)
async def list_requests(request: Request) -> Response[bytes]:
    ask = RequestAction(LIST, tenant_id=principal_of(request).tenant_id)
    return json_response(await listed_requests(request, ask))


@get(
    "/v1/requests/{request_id:str}",
    opt=OWN | ELSEWHERE,
    summary="Show a request: how it stands, or how it ended, and why it took so long",
    description="Of one that was refused before it held anything: `refusal`, with the limit, what was wanted"
    " and available, as far as it was kept (`GET /v1/refusals`). Of one that waits or runs: `lined_up`, the"
    " tokens that were ahead of it when it got in line. Of one that has ended: `explanation` in"
    " sentences, `waits` in seconds by cause, the `timeline` they were read off, and the targets that it"
    " missed, each with its cause. Timelines are kept for a while.",
)
async def show_request(request: Request, request_id: FromPath[str]) -> Response[bytes]:
    return json_response(
        await shown_request(request, about(SHOW, request_id, principal_of(request).tenant_id))
    )


@delete(
    "/v1/requests/{request_id:str}",
    status_code=200,
    opt=OWN | ELSEWHERE,
    summary="Cancel a request that waits or runs",
    description="What was emitted is charged. Repeating it changes nothing; of a request that has ended it "
    "says how.",
)
async def cancel_request(request: Request, request_id: FromPath[str]) -> Response[bytes]:
    return json_response(await acted(request, about(CANCEL, request_id, principal_of(request).tenant_id)))


@post(
    "/v1/requests/{request_id:str}/tier",
    status_code=200,
    opt=OWN | MOVES,
    summary="Move a waiting request to another tier",
    description="The answer states both prices, per token and for this request. With `preview` nothing moves,"
    " and it also states what is before the request in either tier (`tokens_ahead`) and how long it would"
    " still wait (`time_left_s`: p50 and p90); null: there is no estimate. The budget must"
    " cover the new price; otherwise nothing changes.",
)
async def move_request(request: Request, request_id: FromPath[str]) -> Response[bytes]:
    wanted = await asked(request, TierChangeBody)
    principal = principal_of(request)
    show = about(SHOW, request_id, principal.tenant_id)
    await live(request, show)
    tier = tier_of(wanted.service_tier, principal)
    ask = about(OFFER if wanted.preview else MOVE, request_id, principal.tenant_id, tier.value, "tenant")
    return json_response((await live(request, ask)).result())


# ---------------------------------------------------------------- shared


def about(
    act: str, request_id: str, tenant_id: str | None = None, tier: str = "", by: str = "tenant"
) -> RequestAction:
    """Accepts the completion's id, too."""
    return RequestAction(act, request_id_of(request_id), tenant_id, tier=tier, by=by)


async def listed_requests(request: Request, ask: RequestAction) -> dict[str, Any]:
    requests = await gateway_of(request).fleet.live_requests(ask)
    return {
        "object": "list",
        "data": requests.data,
        "has_more": requests.has_more,
        "gateways_missing": requests.gateways_missing,
    }


async def shown_request(request: Request, ask: RequestAction) -> dict[str, Any]:
    """Its state; of an ended request also its explanation."""
    try:
        shown = await acted(request, ask)
    except ApiError:
        # Also where another gateway does not answer: what was refused runs at none.
        if (refused := await _refused(request, ask)) is None:
            raise
        return refused
    if shown["status"] != "ended":
        return shown
    gateway = gateway_of(request)
    return shown | await explained(gateway.timelines.find, gateway.deps.admin, ask.request_id)


async def _refused(request: Request, ask: RequestAction) -> dict[str, Any] | None:
    """A request refused before it held anything, as the asker may see it. Raises `DatabaseUnavailable`."""
    if not _may_be_an_id(ask.request_id):
        return None
    refusal = await gateway_of(request).refusals.find(ask.request_id)
    if refusal is None or ask.tenant_id not in (None, refusal.tenant_id):
        return None
    shown = refusal.as_json() if ask.tenant_id is None else refusal.for_tenant().as_json()
    names = ("at", "code", "limit_id", "of_platform", "wanted", "available", "retry_after_s")
    whose = ("tenant_id", "key_id") if ask.tenant_id is None else ()
    return {
        "id": refusal.request_id,
        "object": "request",
        "status": "refused",
        "outcome": "refused",
        "tier": shown["tier"],
        "model": shown["model"],
        "refusal": {name: shown[name] for name in names},
        **{name: shown[name] for name in whose},
    }


async def acted(request: Request, ask: RequestAction) -> dict[str, Any]:
    """The action's result if the request is running, else how it ended. Raises `ApiError`."""
    running = await found_running(request, ask)
    if running is not None:
        value: dict[str, Any] = running.result()
        return value
    rows = await ended(request, ask)
    shown = ended_request(rows)
    return shown if ask.tenant_id is not None else shown | owner(rows[0])


async def live(request: Request, ask: RequestAction) -> ActionResult:
    """As `found_running`. Raises `ApiError` for a request that has ended."""
    running = await found_running(request, ask)
    if running is None:
        await ended(request, ask)
        raise errors.not_waiting(status="ended")
    return running


async def found_running(request: Request, ask: RequestAction) -> ActionResult | None:
    """The answer of the gateway that runs it; None: no gateway does. Raises `ApiError` if that is unknown."""
    gateway = gateway_of(request)
    answered = await gateway.request_actions.act(ask)
    if answered.is_found:
        return answered
    rows = await rows_of(request, ask)
    if gateway.deps.peer_requests is None or any(row.kind == "settle" for row in rows):
        return None
    try:
        peers = await gateway.deps.peer_requests.ask(ask)
    except Unreachable:
        peers = PeerAnswers(missing=1)
    if peers.found is None and peers.missing and not rows:
        raise errors.accounts_unavailable("quota_store")
    return peers.found


async def ended(request: Request, ask: RequestAction) -> list[LedgerRow]:
    """The rows of a request that no reachable gateway runs, its settlement among them. Raises `ApiError`."""
    rows = await rows_of(request, ask)
    if not rows:
        raise errors.request_not_found(ask.request_id, of_any_tenant=ask.tenant_id is None)
    if not any(row.kind == "settle" for row in rows):
        raise errors.request_elsewhere(gateway=rows[0].gateway_id)
    return rows


async def rows_of(request: Request, ask: RequestAction) -> list[LedgerRow]:
    """Raises `DatabaseUnavailable`."""
    request_id = ask.request_id
    if not _may_be_an_id(request_id):
        return []
    rows = await gateway_of(request).deps.ledger.find(request_id)
    return [row for row in rows if ask.tenant_id in (None, row.tenant_id)]


def _may_be_an_id(text: str) -> bool:
    # PostgreSQL takes no NUL; our ids are letters, digits and dashes.
    return len(text) <= MAX_ID_CHARACTERS and text.isascii() and text.isprintable()


def settled_of(rows: Sequence[LedgerRow]) -> LedgerRow:
    return next(row for row in rows if row.kind == "settle")


def ended_request(rows: Sequence[LedgerRow]) -> dict[str, Any]:
    row = settled_of(rows)
    # Said by the reservation, so also where the gateway died before it settled.
    fallback = next((row.detail["fallback"] for row in rows if "fallback" in row.detail), None)
    further = {} if fallback is None else {"fallback": fallback}
    further |= {name: said for name in ("incomplete", "closed") if (said := row.detail.get(name))}
    return further | {
        "id": row.request_id,
        "object": "request",
        "status": "ended",
        "outcome": row.outcome,
        "tier": row.tier,
        "model": row.model,
        "input_tokens": row.amounts.input_tokens,
        "output_tokens": row.amounts.output_tokens,
        "cost_nanousd": row.amounts.cost_nanousd,
        "labels": row.labels,
    }


HANDLERS = [list_requests, show_request, cancel_request, move_request]
