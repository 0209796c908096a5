"""A request to run a model, as the guard let it in: what the routes of inference read of it, read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from litestar import Request

from gateway.cluster import idempotency_keys
from gateway.dispatch.admission import COST_HEADER, WAIT_HEADER
from gateway.domain.call import ServedModel
from gateway.fair_threads import INLINE_BYTES
from gateway.http import estimate_bounds, request_timeout
from gateway.http.asgi import FIRST_BYTE, TRACE, begin, headers_of
from gateway.http.authentication import principal_of
from gateway.quotes import quotes
from gateway.requests import queue_progress
from gateway.requests.parse import RequestContext
from gateway.routes.context import gateway_of, off_the_loop
from tenants.types import Principal

if TYPE_CHECKING:
    from gateway.gateway import Gateway

T = TypeVar("T")

DEADLINE, SDK_DEADLINE = request_timeout.HEADER.lower(), request_timeout.SDK_HEADER.lower()
MAX_WAIT, MAX_COST = WAIT_HEADER.lower(), COST_HEADER.lower()
PROGRESS, IDEMPOTENCY, QUOTE = (
    module.HEADER.lower() for module in (queue_progress, idempotency_keys, quotes)
)
"""Headers as `headers_of` names them."""
SESSION = "session-id"
"""The run of an agent that a request is a call of; with an underline from clients of before."""


class Inbound(msgspec.Struct, frozen=True):
    """One request with its body."""

    gateway: Gateway
    principal: Principal
    headers: Mapping[str, str]
    state: dict[str, Any]
    request_id: str
    path: str
    body: bytes

    @classmethod
    def of(cls, request: Request[Any, Any, Any], body: bytes) -> Inbound:
        scope = request.scope
        return cls(
            gateway_of(request),
            principal_of(request),
            headers_of(scope),
            scope["state"],
            begin(scope),
            scope["path"],
            body,
        )

    def may_use(self, model: str) -> bool:
        allowed = self.principal.models
        return allowed is None or model in allowed

    async def off_the_loop(self, work: Callable[[], T]) -> T:
        return await off_the_loop(self.gateway, self.principal, self.body, work)

    def note_asked(self, model: str, service_tier: str) -> None:
        self.state["asked"] = model, service_tier

    def context(self, model: ServedModel) -> RequestContext:
        """What its call takes from elsewhere than its body, where `model` is to run it. Raises `ApiError`."""
        deps, headers = self.gateway.deps, self.headers
        return RequestContext(
            request_id=self.request_id,
            principal=self.principal,
            model=model,
            renderer=self.gateway.pools[model.pool].spec.renderer,
            config=deps.config,
            created=int(deps.wall_clock()),
            trace=self.state.get(TRACE),
            timeout_s=request_timeout.timeout_s(headers.get(DEADLINE), headers.get(SDK_DEADLINE)),
            progress=queue_progress.wants_progress(headers.get(PROGRESS)),
            max_wait_s=estimate_bounds.max_wait_s(headers.get(MAX_WAIT)),
            max_cost_nanousd=estimate_bounds.max_cost_nanousd(headers.get(MAX_COST)),
            names_timeout=DEADLINE in headers,
            first_byte_s=self.state.get(FIRST_BYTE),
            route=self.path,
            answers=deps.answers,
            is_on_loop=len(self.body) <= INLINE_BYTES,
            session=headers.get(SESSION) or headers.get("session_id"),
        )
