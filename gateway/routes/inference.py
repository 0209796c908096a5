"""The routes that generate: chat completions, text completions, models, quotes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from litestar import Request, Response, get, post
from litestar.types import ASGIApp

from gateway import errors, idempotency
from gateway.answer import Answer
from gateway.authentication import principal_of
from gateway.body import read_json_body
from gateway.estimates import Size
from gateway.idempotency import IdempotentAnswer
from gateway.ids import trace_context
from gateway.prompt import PromptRefused
from gateway.routes.context import gateway_of, json_response
from gateway.schemas import ChatCompletionRequest, CompletionRequest, QuoteRequest, decode
from gateway.understand import (
    TIER_NAMES,
    Call,
    ServedModel,
    chat_messages,
    understand_chat,
    understand_text,
)
from gateway.wire import begin
from tenants.types import Principal, Tier

T = TypeVar("T")
LARGE_BODY_BYTES = 32 * 1024
"""A larger body is parsed and tokenised in a thread, so that it does not stop everybody's streams."""
MODEL_CREATED = int(time.time())


@post(
    "/v1/chat/completions",
    status_code=200,
    opt={"scope": "inference", "body": ChatCompletionRequest},
    summary="Create a chat completion",
    description="OpenAI's chat completions, streamed or not. The `fairgate` object of the answer holds the "
    "estimate made on arrival and what really happened.",
    tags=["inference"],
)
async def chat_completions(request: Request[Any, Any, Any]) -> ASGIApp:
    gateway = gateway_of(request)
    body = await _body(request)
    principal, model = principal_of(request), gateway.model()

    def understand() -> Any:
        return understand_chat(decode(body, ChatCompletionRequest), **_context(request, principal, model))

    call = await _in_thread_if_large(body, understand)
    return _answer(request, call, body)


@post(
    "/v1/completions",
    status_code=200,
    opt={"scope": "inference", "body": CompletionRequest},
    summary="Create a text completion",
    description="OpenAI's legacy completions: a prompt as text or token ids, or several of them.",
    tags=["inference"],
)
async def completions(request: Request[Any, Any, Any]) -> ASGIApp:
    gateway = gateway_of(request)
    body = await _body(request)
    principal, model = principal_of(request), gateway.model()

    def understand() -> Any:
        return understand_text(decode(body, CompletionRequest), **_context(request, principal, model))

    call = await _in_thread_if_large(body, understand)
    return _answer(request, call, body)


@get(
    "/v1/models",
    opt={"scope": "inference"},
    summary="List the models that this key may use",
    tags=["inference"],
)
async def models(request: Request[Any, Any, Any]) -> Response[bytes]:
    gateway = gateway_of(request)
    shown = [_model_object(gateway.model())] if _may_use(request, gateway.deps.model_name) else []
    return json_response({"object": "list", "data": shown})


@get(
    "/v1/models/{model_id:path}",
    opt={"scope": "inference"},
    summary="Describe one model",
    tags=["inference"],
)
async def model(request: Request[Any, Any, Any], model_id: str) -> Response[bytes]:
    gateway = gateway_of(request)
    name = model_id.removeprefix("/")
    if name != gateway.deps.model_name or not _may_use(request, name):
        raise errors.model_not_found(name)
    return json_response(_model_object(gateway.model()))


@post(
    "/v1/quotes",
    status_code=200,
    opt={"scope": "quote", "body": QuoteRequest},
    summary="Quote a request in every tier that the key may use",
    description="Wait, time to first token, latency, output tokens and cost (p50, p90, most), and the tokens "
    "that would go first, by cause. Nothing is reserved.",
    tags=["inference"],
)
async def quotes(request: Request[Any, Any, Any]) -> Response[bytes]:
    gateway = gateway_of(request)
    body = await _body(request)
    principal, served = principal_of(request), gateway.model()
    gateway.take_quote(principal.key_id)
    asked = await _in_thread_if_large(body, lambda: decode(body, QuoteRequest))
    if asked.model != served.name or not _may_use(request, asked.model):
        raise errors.model_not_found(asked.model)
    prompt_tokens = await _in_thread_if_large(body, lambda: _prompt_tokens(request, asked))
    context_left = served.context_tokens - prompt_tokens
    if context_left < 1:
        raise errors.context_too_long(served.context_tokens, prompt_tokens, None, "prompt_tokens")
    max_tokens = context_left if asked.max_tokens is None else asked.max_tokens
    choices = 1 if asked.n is None else asked.n
    if not 1 <= choices <= gateway.deps.config.max_choices:
        raise errors.bad_request(
            f"Invalid 'n': {choices} must be at least 1 and at most {gateway.deps.config.max_choices}.", "n"
        )
    if max_tokens < 1:
        raise errors.bad_request(f"Invalid 'max_tokens': {max_tokens} is less than 1.", "max_tokens")
    if max_tokens > context_left:
        raise errors.context_too_long(served.context_tokens, prompt_tokens, max_tokens, "max_tokens")
    gateway.require_engine()
    size = Size(prompt_tokens, 1, choices, max_tokens, is_exact=False)
    now_s = gateway.deps.clock()
    offers: list[dict[str, Any]] = []
    for tier in Tier:
        if tier in principal.tiers:
            estimate = gateway.estimates.estimate(
                served.name, principal.tenant_id, principal.weight, tier, size, now_s, fresh=True
            )
            offers.append({"tier": tier.value, "service_tier": TIER_NAMES[tier], **estimate.as_json()})
    return json_response(
        {
            "object": "quote",
            "created": int(gateway.deps.wall_clock()),
            "model": served.name,
            "input_tokens": prompt_tokens,
            "max_tokens": max_tokens,
            "n": choices,
            "default_tier": principal.default_tier.value,
            "quotes": offers,
        }
    )


def _prompt_tokens(request: Request[Any, Any, Any], asked: QuoteRequest) -> int:
    given = [name for name in ("messages", "prompt", "prompt_tokens") if getattr(asked, name) is not None]
    if len(given) != 1:
        raise errors.bad_request(
            "A quote needs exactly one of 'messages', 'prompt' and 'prompt_tokens'.",
            given[0] if given else "messages",
        )
    deps = gateway_of(request).deps
    if asked.prompt_tokens is not None:
        if asked.prompt_tokens < 1:
            raise errors.bad_request(
                f"Invalid 'prompt_tokens': {asked.prompt_tokens} is less than 1.", "prompt_tokens"
            )
        return asked.prompt_tokens
    if asked.messages is not None:
        try:
            return len(deps.renderer.chat_tokens(chat_messages(asked.messages, deps.config)))
        except PromptRefused as refused:
            raise errors.bad_request(f"Invalid 'messages': {refused}.", "messages") from None
    return max(1, len(deps.renderer.text_tokens(asked.prompt or "")))


def _answer(request: Request[Any, Any, Any], call: Call, body: bytes) -> ASGIApp:
    gateway = gateway_of(request)
    key = request.headers.get(idempotency.HEADER)
    if key is not None:
        return IdempotentAnswer(gateway, call, key, request.url.path, body)
    gateway.require_engine()
    return Answer(gateway, call)


async def _body(request: Request[Any, Any, Any]) -> bytes:
    config = gateway_of(request).deps.config
    return await read_json_body(request, config.max_body_bytes, config.body_timeout_s)


async def _in_thread_if_large(body: bytes, work: Callable[[], T]) -> T:
    if len(body) > LARGE_BODY_BYTES:
        return await asyncio.to_thread(work)
    return work()


def _context(request: Request[Any, Any, Any], principal: Principal, served: ServedModel) -> dict[str, Any]:
    deps = gateway_of(request).deps
    return {
        "request_id": begin(request.scope),
        "principal": principal,
        "model": served,
        "renderer": deps.renderer,
        "config": deps.config,
        "created": int(deps.wall_clock()),
        "trace_context": trace_context(request.headers.get("traceparent")),
    }


def _may_use(request: Request[Any, Any, Any], name: str) -> bool:
    allowed = principal_of(request).models
    return allowed is None or name in allowed


def _model_object(served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": MODEL_CREATED,
        "owned_by": "fairgate",
        "context_tokens": served.context_tokens,
    }


HANDLERS = [chat_completions, completions, models, model, quotes]
