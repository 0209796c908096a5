"""Inference routes: chat completions, text completions, models."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from litestar import Request, Response, get, post
from litestar.params import FromPath
from litestar.types import ASGIApp
from msgspec.structs import replace

from gateway import errors
from gateway.cluster import idempotency_keys
from gateway.dispatch.admission import COST_HEADER, WAIT_HEADER
from gateway.domain.call import Call, Chained, ServedModel
from gateway.domain.ids import trace_context
from gateway.domain.quote_token import MAX_TOKEN_CHARACTERS
from gateway.domain.tiers import tier_of
from gateway.http import estimate_bounds, request_timeout
from gateway.http.asgi import begin, headers_of
from gateway.http.authentication import principal_of
from gateway.http.completion_response import CompletionResponse
from gateway.http.idempotent_response import IdempotentResponse
from gateway.quotes import quotes
from gateway.requests import queue_progress
from gateway.requests.parse import RequestContext, parse_chat, parse_text
from gateway.requests.schemas import ChatCompletionRequest, CompletionRequest, Sampling, decode
from gateway.routes.context import body_of, gateway_of, in_thread_if_large, json_response, may_use
from tenants.directory.idempotency import MAX_KEY_CHARACTERS

MODEL_CREATED = int(time.time())
DEADLINE, SDK_DEADLINE = request_timeout.HEADER.lower(), request_timeout.SDK_HEADER.lower()
MAX_WAIT, MAX_COST = WAIT_HEADER.lower(), COST_HEADER.lower()
PROGRESS, IDEMPOTENCY, QUOTE = (each.HEADER.lower() for each in (queue_progress, idempotency_keys, quotes))
"""Headers as `headers_of` names them."""


COMPLETES: dict[str, Any] = {
    "scope": "inference",
    "streams": True,
    "headers": {
        request_timeout.HEADER: (
            "How long the request may wait for its turn, in seconds; in the batch tier up to a day, in the"
            " others no longer than their own limit.",
            {"type": "number", "exclusiveMinimum": 0},
        ),
        queue_progress.HEADER: (
            "`1`: a stream has its headers at once and hears in comments how its wait goes on; `0`: with its"
            " first token; left out: before that where the wait is long.",
            {"type": "string", "enum": ["0", "1"]},
        ),
        WAIT_HEADER: (
            "Refused (409) before anything is held where the expected wait (p90, seconds) is longer.",
            {"type": "number", "minimum": 0},
        ),
        COST_HEADER: (
            "Refused (409) before anything is held where it could cost more (dollars).",
            {"type": "number", "minimum": 0},
        ),
        quotes.HEADER: (
            "A quote of this very request: its prices and its p90 bind, see `POST /v1/quotes`.",
            {"type": "string", "minLength": 1, "maxLength": MAX_TOKEN_CHARACTERS},
        ),
        "Idempotency-Key": (
            "A repeat with the same key and body gets the first one's answer and is charged nothing.",
            {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARACTERS},
        ),
    },
    "answers": {
        404: "There is no such model, or the key may not use it.",
        409: "The `Idempotency-Key` is in use, or was used for something else; the quote has expired, or is"
        " redeemed; or the estimate is above what the request allows, with the quotes of its tiers.",
        429: "A limit refuses it, or too many of the tenant's requests wait; the headers say what to do.",
        499: "It was cancelled.",
        500: "The engine gave up on it.",
        502: "Another server that was to answer it failed.",
    },
}
"""`opt` of the completion routes, see `openapi.describe`."""


@post(
    "/v1/chat/completions",
    status_code=200,
    opt=COMPLETES | {"body": ChatCompletionRequest},
    summary="Create a chat completion",
    description="OpenAI's chat completions, streamed or not. The `fairgate` object of the answer holds the "
    "estimate made on arrival and what really happened.",
)
async def chat_completions(request: Request[Any, Any, Any]) -> ASGIApp:
    body = await body_of(request)
    asked = await in_thread_if_large(body, lambda: decode(body, ChatCompletionRequest))
    call = await _understood(request, asked, body, lambda context: parse_chat(asked, context))
    return await _answer(request, call, body)


@post(
    "/v1/completions",
    status_code=200,
    opt=COMPLETES | {"body": CompletionRequest},
    summary="Create a text completion",
    description="OpenAI's legacy completions: a prompt as text or token ids, or several of them.",
)
async def completions(request: Request[Any, Any, Any]) -> ASGIApp:
    body = await body_of(request)
    asked = await in_thread_if_large(body, lambda: decode(body, CompletionRequest))
    call = await _understood(request, asked, body, lambda context: parse_text(asked, context))
    return await _answer(request, call, body)


@get("/v1/models", opt={"scope": "inference"}, summary="List the models that this key may use")
async def models(request: Request[Any, Any, Any]) -> Response[bytes]:
    gateway = gateway_of(request)
    shown = [
        _model_object(name, context_tokens)
        for name in gateway.catalogue.names()
        if may_use(request, name) and (context_tokens := gateway.context_tokens(name)) is not None
    ]
    if not shown and not gateway.has_engine:
        raise errors.engine_unavailable()
    return json_response({"object": "list", "data": shown})


@get("/v1/models/{model_id:path}", opt={"scope": "inference"}, summary="Describe one model")
async def model(request: Request[Any, Any, Any], model_id: FromPath[str]) -> Response[bytes]:
    gateway = gateway_of(request)
    name = model_id.removeprefix("/")
    if name not in gateway.catalogue.names() or not may_use(request, name):
        raise errors.model_not_found(name)
    context_tokens = gateway.context_tokens(name)
    if context_tokens is None:
        raise errors.engine_unavailable()
    return json_response(_model_object(name, context_tokens))


async def _understood(
    request: Request[Any, Any, Any], asked: Sampling, body: bytes, parse: Callable[[RequestContext], Call]
) -> Call:
    """The call, for the model that is asked for, or the first of its chain that it fits. Raises `ApiError`,
    `NoEngineAvailable`, `NoneTook`."""
    gateway = gateway_of(request)

    async def parsed(model: ServedModel) -> Call:
        return await in_thread_if_large(body, lambda: parse(_context(request, model)))

    chain = gateway.catalogue.chain(asked.model)
    if chain is None:
        return await parsed(gateway.served(asked.model, begin(request.scope)))
    if not may_use(request, asked.model):
        raise errors.model_not_found(asked.model)

    async def parsed_in_chain(model: ServedModel) -> Call:
        call = await parsed(model)
        return replace(call, chained=Chained(walk.fallback, walk.prices, walk.onward))

    quote = headers_of(request.scope).get(QUOTE)
    walk = gateway.walk(
        asked.model,
        chain,
        (tier_of(asked.service_tier, principal_of(request)),),
        parsed_in_chain,
        only=None if quote is None else gateway.quotes.model_of(quote),
        on_passed=partial(gateway.metrics.passed_over, asked.model),
    )
    return await walk.first()


async def _answer(request: Request[Any, Any, Any], call: Call, body: bytes) -> ASGIApp:
    gateway, headers = gateway_of(request), headers_of(request.scope)
    key, quote = headers.get(IDEMPOTENCY), headers.get(QUOTE)
    if key is not None:
        return IdempotentResponse(gateway, call, key, request.url.path, body, quote)
    return CompletionResponse(gateway, await gateway.ready(call, quote))


def _context(request: Request[Any, Any, Any], model: ServedModel) -> RequestContext:
    gateway, headers = gateway_of(request), headers_of(request.scope)
    deps = gateway.deps
    return RequestContext(
        request_id=begin(request.scope),
        principal=principal_of(request),
        model=model,
        renderer=gateway.pools[model.pool].spec.renderer,
        config=deps.config,
        created=int(deps.wall_clock()),
        trace_context=trace_context(headers.get("traceparent")),
        timeout_s=request_timeout.timeout_s(headers.get(DEADLINE), headers.get(SDK_DEADLINE)),
        progress=queue_progress.wants_progress(headers.get(PROGRESS)),
        max_wait_s=estimate_bounds.max_wait_s(headers.get(MAX_WAIT)),
        max_cost_nanousd=estimate_bounds.max_cost_nanousd(headers.get(MAX_COST)),
        names_timeout=DEADLINE in headers,
    )


def _model_object(name: str, context_tokens: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": MODEL_CREATED,
        "owned_by": "fairgate",
        "context_tokens": context_tokens,
    }


HANDLERS = [chat_completions, completions, models, model]
