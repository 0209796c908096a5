"""Admin routes: the scheduling policy in force."""

from __future__ import annotations

from typing import TYPE_CHECKING

from litestar import Response, get, post
from litestar.params import FromQuery

from engine.scheduling.policy import UnknownPolicy
from gateway import errors
from gateway.http.asgi import Request
from gateway.requests.schemas import PolicyChange
from gateway.routes.admin.common import (
    CHANGE,
    READ,
    actor,
    changed,
    if_match,
    tagged,
)
from gateway.routes.context import asked, gateway_of, json_response
from gateway.routes.openapi_fields import between
from gateway.routes.views.policy_view import MAX_DECISIONS, MAX_STEPS, change_policy, policy_of

if TYPE_CHECKING:
    from gateway.gateway import Gateway


@get(
    "/admin/v1/policy",
    opt=READ | {"parameters": {"decisions": between(0, MAX_DECISIONS), "steps": between(0, MAX_STEPS)}},
    summary="The scheduling policy in force, and the last decisions",
    description="For every admission and eviction: the rule, the rank in the order, and who was displaced."
    " With `steps`: the tokens of as many of the last steps, by tenant; `tenants` has their names by id.",
)
async def policy(
    request: Request, decisions: FromQuery[int] = 20, steps: FromQuery[int] = 0
) -> Response[bytes]:
    if not 0 <= decisions <= MAX_DECISIONS:
        raise errors.bad_request(
            f"Invalid 'decisions': {decisions} must be at least 0 and at most {MAX_DECISIONS}.", "decisions"
        )
    if not 0 <= steps <= MAX_STEPS:
        raise errors.bad_request(
            f"Invalid 'steps': {steps} must be at least 0 and at most {MAX_STEPS}.", "steps"
        )
    gateway = gateway_of(request)
    return tagged(json_response(await policy_of(gateway, decisions, steps)), await _stored(gateway))


@post(
    "/admin/v1/policy",
    status_code=200,
    opt=CHANGE | {"body": PolicyChange},
    summary="Change the scheduling policy",
    description="Takes effect with the next step, in all gateways of the database; nothing that runs or waits"
    " is lost. It is kept, and goes before the settings, until `from_settings` gives it up.",
)
async def set_policy(request: Request) -> Response[bytes]:
    wanted = await asked(request, PolicyChange)
    gateway = gateway_of(request)
    if not wanted.policy and not wanted.from_settings:
        raise errors.bad_request(
            "Missing required parameter: 'policy'. Name one (GET /admin/v1/policy lists them), or send"
            " 'from_settings': true.",
            "policy",
            code="missing_required_parameter",
        )
    try:
        await change_policy(gateway, actor(request), wanted, if_match(request))
    except UnknownPolicy as error:
        raise errors.bad_request(f"Invalid 'policy': {error}.", "policy") from None
    except ValueError as error:
        raise errors.bad_request(f"Invalid 'options': {error}.", "options") from None
    return await changed(request, await policy_of(gateway, 0), stored=await _stored(gateway))


async def _stored(gateway: Gateway) -> dict[str, object]:
    stored = await gateway.deps.admin.policy.stored()
    return (stored or gateway.policy.settings).as_json()


HANDLERS = [policy, set_policy]
