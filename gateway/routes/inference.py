"""Inference routes: chat completions, text completions, models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from litestar import Request, Response, get, post
from litestar.params import FromPath
from litestar.types import ASGIApp
from msgspec.structs import replace

from gateway import errors
from gateway.budget.holds import BudgetDenied
from gateway.dispatch.admission import COST_HEADER, WAIT_HEADER
from gateway.domain.call import Call, Chained, ServedModel
from gateway.domain.quote_token import MAX_TOKEN_CHARACTERS
from gateway.domain.tiers import tier_of
from gateway.error_mapping import budget_denied
from gateway.fair_threads import INLINE_BYTES
from gateway.http import request_timeout
from gateway.http.completion_response import CompletionResponse
from gateway.http.direct_route import run_directly
from gateway.http.estimate_bounds import HIGHEST_USD
from gateway.http.idempotent_response import IdempotentResponse
from gateway.quotes import quotes
from gateway.requests import queue_progress
from gateway.requests.dialects.chat import COMPLETIONS
from gateway.requests.dialects.dialect import Asked, Dialect
from gateway.requests.fields.checked_answers import NeedsThread
from gateway.requests.inputs import media
from gateway.requests.inputs.large_bodies import LargeBody
from gateway.requests.parse import FromEndUser, RequestContext, end_user_of, parse_chat, parse_text
from gateway.requests.schemas import ChatCompletionRequest, CompletionRequest, decode, decode_listed
from gateway.response_headers import contract_headers
from gateway.routes.context import (
    body_of,
    gateway_of,
    json_response,
    large_body_of,
    may_use,
    reserved_memory,
    then_closing,
)
from gateway.routes.inbound import IDEMPOTENCY, QUOTE, SESSION, Inbound
from gateway.routes.openapi_fields import between
from tenants.directory.idempotency import MAX_KEY_CHARACTERS

MODEL_CREATED = int(time.time())
COMPLETES: dict[str, Any] = {
    "scope": "inference",
    "streams": True,
    "headers": {
        request_timeout.HEADER: (
            "How long the request may wait for its turn, in seconds; in the batch tier up to a day, in the"
            " others no longer than their own limit.",
            {"type": "number", "exclusiveMinimum": 0, "maximum": request_timeout.LONGEST_S},
        ),
        queue_progress.HEADER: (
            "`1`: a stream has its headers at once and hears in comments how its wait goes on; `0`: with its"
            " first token; left out: before that where the wait is long.",
            {"type": "string", "enum": ["0", "1"]},
        ),
        WAIT_HEADER: (
            "Refused (409) before anything is held where the expected wait (p90, seconds) is longer. While no"
            " step of its servers was timed it is taken, and refused (503) once it has waited so long.",
            {"type": "number"} | between(0, request_timeout.LONGEST_S),
        ),
        COST_HEADER: (
            "Refused (409) before anything is held where it could cost more (dollars).",
            {"type": "number"} | between(0, HIGHEST_USD),
        ),
        quotes.HEADER: (
            "A quote of this very request: its prices and its p90 bind, see `POST /v1/quotes`.",
            {"type": "string", "minLength": 1, "maxLength": MAX_TOKEN_CHARACTERS},
        ),
        SESSION: (
            "The run of an agent that this is a call of, before `prompt_cache_key`: see `GET /v1/sessions`.",
            {"type": "string"},
        ),
        "Idempotency-Key": (
            "A repeat with the same key and body gets the first one's answer and is charged nothing.",
            {"type": "string", "maxLength": MAX_KEY_CHARACTERS, "pattern": "^[!-~]([ -~]*[!-~])?$"},
        ),
    },
    "answers": {
        404: "There is no such model, or the key may not use it.",
        409: "The `Idempotency-Key` is in use, or was used for something else; the quote has expired, or is"
        " redeemed; or the estimate is above what the request allows, with the quotes of its tiers.",
        429: "A limit refuses it, or too many of the tenant's requests wait; the headers say what to do.",
        499: "It was cancelled.",
        500: "The server that runs the model gave up on it.",
        502: "Another server that was to answer it failed.",
    },
}
"""`opt` of the completion routes, see `openapi.describe`."""


@post(
    "/v1/chat/completions",
    status_code=200,
    middleware=[run_directly],
    opt=COMPLETES | {"body": ChatCompletionRequest},
    summary="Create a chat completion",
    description="OpenAI's chat completions, streamed or not. The `fairgate` object of the answer holds the "
    "estimate made on arrival and what really happened.",
)
async def chat_completions(request: Request[Any, Any, Any]) -> ASGIApp:
    def read(body: bytes, most_messages: int) -> Asked:
        asked = decode_listed(body, ChatCompletionRequest, "messages", most_messages)
        return Asked(asked, lambda context: parse_chat(asked, context), COMPLETIONS)

    return await conversation(request, read)


@post(
    "/v1/completions",
    status_code=200,
    middleware=[run_directly],
    opt=COMPLETES | {"body": CompletionRequest},
    summary="Create a text completion",
    description="OpenAI's legacy completions: a prompt as text or token ids, or several of them.",
)
async def completions(request: Request[Any, Any, Any]) -> ASGIApp:
    inbound = Inbound.of(request, await body_of(request))
    asked = await inbound.off_the_loop(lambda: decode(inbound.body, CompletionRequest))
    return await answer(inbound, await understood(inbound, asked, lambda context: parse_text(asked, context)))


@get("/v1/models", opt={"scope": "inference"}, summary="List the models that this key may use")
async def models(request: Request[Any, Any, Any]) -> Response[bytes]:
    gateway = gateway_of(request)
    shown = [
        _model_object(name, context_tokens, gateway.models.capabilities(name))
        for name in gateway.models.catalogue.names()
        if may_use(request, name) and (context_tokens := gateway.models.context_tokens(name)) is not None
    ]
    if not shown and not gateway.pools.has_engine:
        raise errors.engine_unavailable()
    return json_response({"object": "list", "data": shown})


@get("/v1/models/{model_id:path}", opt={"scope": "inference"}, summary="Describe one model")
async def model(request: Request[Any, Any, Any], model_id: FromPath[str]) -> Response[bytes]:
    gateway = gateway_of(request)
    name = model_id.removeprefix("/")
    if name not in gateway.models.catalogue.names() or not may_use(request, name):
        raise errors.model_not_found(name=name)
    context_tokens = gateway.models.context_tokens(name)
    if context_tokens is None:
        raise errors.engine_unavailable()
    return json_response(_model_object(name, context_tokens, gateway.models.capabilities(name)))


async def conversation(request: Request[Any, Any, Any], read: Callable[[bytes, int], Asked]) -> ASGIApp:
    """The answer to a conversation in any dialect. Raises as `read_conversation`."""
    reserved = reserved_memory(request)
    try:
        inbound, call, dialect = await read_conversation(request, reserved, read)
        return then_closing(await answer(inbound, call, dialect), reserved)
    except BaseException:
        reserved.close()
        raise


async def read_conversation(
    request: Request[Any, Any, Any],
    reserved: LargeBody,
    read: Callable[[bytes, int], Asked],
    *,
    is_charged: bool = True,
) -> tuple[Inbound, Call, Dialect]:
    """`read` is called with the body and the most messages. Raises as `understood`."""
    body = await large_body_of(request, reserved)
    inbound = Inbound.of(request, body)
    most = inbound.gateway.deps.config.max_messages
    chat, parse, dialect = await inbound.off_the_loop(lambda: read(body, most))
    media_bytes = media.media_bytes(chat.messages)
    call = await understood(inbound, chat, parse, media_bytes=media_bytes, is_charged=is_charged)
    return inbound, call, dialect


class AskedBody(FromEndUser, Protocol):
    """What is read of a body before its model is known."""

    model: str
    service_tier: str | None


async def understood(
    inbound: Inbound,
    asked: AskedBody,
    parse: Callable[[RequestContext], Call],
    *,
    least_output_tokens: int = 1,
    media_bytes: int = 0,
    is_charged: bool = True,
) -> Call:
    """The call, for the model that is asked for, or the first of its chain that it fits. Raises `ApiError`,
    `NoEngineAvailable`, `NoneTook`, `TooManyWaiting`, `DatabaseUnavailable`."""
    gateway, headers, principal = inbound.gateway, inbound.headers, inbound.principal
    inbound.note_asked(asked.model, asked.service_tier or "auto")
    # What is answered from memory needs no budget, and a quote may decide the tier.
    is_looked_at = is_charged and len(inbound.body) > INLINE_BYTES and QUOTE not in headers
    if is_looked_at and (key := headers.get(IDEMPOTENCY)) is not None:
        is_looked_at = not await gateway.idempotency.is_known(principal.key_id, key)

    async def parsed(model: ServedModel) -> Call:
        gateway.models.require_body(model.pool, len(inbound.body), media_bytes)
        context = inbound.context(model)
        if is_looked_at and inbound.may_use(asked.model):
            lifecycle = gateway.pools[model.pool].lifecycle
            tier = tier_of(asked.service_tier, principal)
            require = await lifecycle.budget_check(
                principal, model.name, tier, end_user_of(asked), least_output_tokens
            )
            context = replace(context, require_budget=require)
        try:
            return await inbound.off_the_loop(lambda: parse(context))
        except NeedsThread:
            in_thread = replace(context, is_on_loop=False)
            return await gateway.deps.threads.run(principal.tenant_id, lambda: parse(in_thread))

    chain = gateway.models.catalogue.chain(asked.model)
    if chain is None:
        try:
            return await parsed(gateway.models.served(asked.model, inbound.request_id))
        except BudgetDenied as refused:
            error = budget_denied(refused.denied)
            error.headers.update(contract_headers(principal, tier_of(asked.service_tier, principal)))
            raise error from None
    if not inbound.may_use(asked.model):
        raise errors.model_not_found(name=asked.model)

    async def parsed_in_chain(model: ServedModel) -> Call:
        call = await parsed(model)
        return replace(call, chained=Chained(walk.fallback, walk.prices, walk.onward))

    quote = headers.get(QUOTE)
    walk = gateway.models.walk(
        asked.model,
        chain,
        (tier_of(asked.service_tier, principal),),
        parsed_in_chain,
        only=None if quote is None else gateway.quotes.model_of(quote),
        on_passed=partial(gateway.metrics.passed_over, asked.model),
    )
    return await walk.first()


async def answer(inbound: Inbound, call: Call, dialect: Dialect = COMPLETIONS) -> ASGIApp:
    """Runs the call, or repeats its answer. Raises `ApiError`, `NoEngineAvailable`, `NoneTook`."""
    gateway, key, quote = inbound.gateway, inbound.headers.get(IDEMPOTENCY), inbound.headers.get(QUOTE)
    if key is not None:
        return IdempotentResponse(gateway, call, key, inbound.path, inbound.body, quote, dialect)
    return CompletionResponse(gateway, await gateway.models.ready(call, quote), dialect)


def _model_object(name: str, context_tokens: int, capabilities: Sequence[str]) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": MODEL_CREATED,
        "owned_by": "fairgate",
        "context_tokens": context_tokens,
        "max_model_len": context_tokens,  # as vLLM has it, which clients read
        "capabilities": capabilities,
    }


HANDLERS = [chat_completions, completions, models, model]
