"""The route of quotes: predicted wait, latency and cost of a request, by tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from litestar import Response, post

from gateway import errors
from gateway.domain.call import ServedModel
from gateway.domain.tiers import tier_of
from gateway.http.asgi import Request, begin
from gateway.http.authentication import principal_of
from gateway.quotes.offered import offered
from gateway.quotes.quotes import Wanted
from gateway.requests.fields.servers import may_run_in_own_engine, require_servers
from gateway.requests.fields.tools import tool_field
from gateway.requests.inputs import media
from gateway.requests.parse import (
    DEFAULT_TEXT_TOKENS,
    Renderer,
    chat_messages,
    chat_prompt,
    context_left_of,
    fits_context,
    most_held,
    text_prompt,
)
from gateway.requests.schemas import QuoteRequest, decode
from gateway.routes.context import (
    gateway_of,
    json_response,
    large_body_of,
    may_use,
    note_asked,
    off_the_loop,
    reserved_memory,
)
from gateway.upstream.capabilities import Capability
from tenants.types import Tier


@post(
    "/v1/quotes",
    status_code=200,
    opt={
        "scope": "quote",
        "body": QuoteRequest,
        "answers": {
            403: "The key may not use this tier.",
            404: "There is no such model, or the key may not use it.",
            429: "Too many quotes.",
        },
    },
    summary="Quote a request in every tier that the key may use",
    description="Wait, time to first token, latency, output tokens and cost (p50, p90, most), the tokens "
    "that would go first, by cause, and those of others that would stand back. Nothing is reserved. Each "
    "tier has a token; whoever sends the same request with it in `X-Fairgate-Quote` while it is valid is "
    "served in that tier at these prices, and is credited where we do not keep the p90.",
)
async def quotes(request: Request) -> Response[bytes]:
    with reserved_memory(request) as reserved:
        body = await large_body_of(request, reserved)
        return await _quoted(request, body)


async def _quoted(request: Request, body: bytes) -> Response[bytes]:
    gateway = gateway_of(request)
    principal = principal_of(request)
    if not gateway.pools.first.estimates.is_enabled:
        raise errors.estimates_off(consequence="it has nothing to quote")
    await gateway.models.take_quote(principal.tenant_id)
    asked = await off_the_loop(gateway, principal, body, lambda: decode(body, QuoteRequest))
    note_asked(request, asked.model, asked.service_tier or "")
    if not may_use(request, asked.model):
        raise errors.model_not_found(name=asked.model)
    if asked.service_tier is None:
        tiers = [tier for tier in Tier if tier in principal.tiers]
    else:
        tiers = [tier_of(asked.service_tier, principal)]

    media_bytes = media.media_bytes(asked.messages or ())

    async def sized(served: ServedModel) -> _Sized:
        gateway.models.require_body(served.pool, len(body), media_bytes)
        renderer, config = gateway.pools[served.pool].spec.renderer, gateway.deps.config
        prompt = await off_the_loop(
            gateway, principal, body, lambda: _prompt(request, asked, renderer, served)
        )
        counted_there = asked.tools and not may_run_in_own_engine(served)
        is_estimated = served.is_estimated or media_bytes > 0 or bool(counted_there)
        sizes = _sizes(asked, served, len(prompt), config.max_choices, is_estimated=is_estimated)
        choices, max_tokens = sizes
        if is_estimated and asked.prompt_tokens is None:
            prompt = prompt[: most_held(max_tokens, served.context_tokens)]
        return _Sized(served, prompt, choices, max_tokens)

    chain, fallback = gateway.models.catalogue.chain(asked.model), None
    if chain is None:
        size = await sized(gateway.models.served(asked.model, begin(request.scope)))
        gateway.models.require_engine(size.served.pool)
    else:
        walk = gateway.models.walk(asked.model, chain, tiers, sized)
        size = await walk.first()
        if not gateway.pools[size.served.pool].has_engine:
            size = await walk.onward(gateway.pools[size.served.pool].dispatcher.no_engine())
        fallback = walk.fallback
    served, prompt, choices, max_tokens = size.served, size.prompt, size.choices, size.max_tokens
    pool = gateway.pools[served.pool]
    wanted = Wanted(served.name, served.pool, [prompt], asked.prompt_tokens is not None, choices, max_tokens)
    now_s = gateway.deps.clock()
    version = gateway.deps.prices().version
    made = offered(pool.estimates, gateway.quotes, principal, wanted, tiers, version, now_s)
    wall_s = gateway.deps.wall_clock()
    return json_response(
        {
            "object": "quote",
            "created": int(wall_s),
            "expires_at": round(wall_s + gateway.quotes.valid_s, 3),
            "valid_s": gateway.quotes.valid_s,
            "model": served.name,
            **({} if fallback is None else {"fallback": fallback.as_json()}),
            "price_version": version,
            "input_tokens": len(prompt),
            "max_tokens": max_tokens,
            "n": choices,
            "default_tier": principal.default_tier.value,
            "quotes": made,
        }
    )


@dataclass(frozen=True, slots=True)
class _Sized:
    served: ServedModel
    prompt: Sequence[int]
    choices: int
    max_tokens: int


def _sizes(
    asked: QuoteRequest, served: ServedModel, prompt_tokens: int, max_choices: int, *, is_estimated: bool
) -> tuple[int, int]:
    """Choices and `max_tokens`. Raises `ApiError`."""
    context_left = context_left_of(served.context_tokens, prompt_tokens, is_estimated=is_estimated)
    if context_left < 1:
        raise errors.context_too_long(served.context_tokens, prompt_tokens, None, "prompt_tokens")
    longest = context_left if asked.prompt is None else min(context_left, DEFAULT_TEXT_TOKENS)
    max_tokens = longest if asked.max_tokens is None else asked.max_tokens
    choices = 1 if asked.n is None else asked.n
    if not 1 <= choices <= max_choices:
        raise errors.bad_request(f"Invalid 'n': {choices} must be at least 1 and at most {max_choices}.", "n")
    if max_tokens < 1:
        raise errors.bad_request(f"Invalid 'max_tokens': {max_tokens} is less than 1.", "max_tokens")
    if max_tokens > context_left:
        raise errors.context_too_long(served.context_tokens, prompt_tokens, max_tokens, "max_tokens")
    return choices, max_tokens


def _prompt(request: Request, asked: QuoteRequest, renderer: Renderer, served: ServedModel) -> Sequence[int]:
    """The prompt's tokens, or as many placeholders as the given length."""
    given = [name for name in ("messages", "prompt", "prompt_tokens") if getattr(asked, name) is not None]
    if len(given) != 1:
        raise errors.bad_request(
            "A quote needs exactly one of 'messages', 'prompt' and 'prompt_tokens'.",
            given[0] if given else "messages",
        )
    deps = gateway_of(request).deps
    fields = tool_field(asked.tools, has_messages=asked.messages is not None)
    needs = media.needs_of(asked.messages or ()) | {Capability.TEXT: "model"}
    needs |= dict.fromkeys((Capability.TOOLS,) if fields else (), "tools")
    require_servers(served, needs)
    if asked.prompt_tokens is not None:
        if asked.prompt_tokens < 1:
            raise errors.bad_request(
                f"Invalid 'prompt_tokens': {asked.prompt_tokens} is less than 1.", "prompt_tokens"
            )
        left = context_left_of(served.context_tokens, asked.prompt_tokens, is_estimated=served.is_estimated)
        if left < 1:
            raise errors.context_too_long(served.context_tokens, asked.prompt_tokens, None, "prompt_tokens")
        return range(asked.prompt_tokens)
    if asked.messages is not None:
        messages = chat_messages(asked.messages, deps.config, served)
        is_own = may_run_in_own_engine(served, needs)
        return chat_prompt(
            renderer, messages, served, fits_context(served, "messages"), fields, is_own=is_own
        )
    return text_prompt(renderer, asked.prompt or "", fits_context(served, "prompt")) or [0]


HANDLERS = [quotes]
