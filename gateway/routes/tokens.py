"""Uncharged routes from text to tokens and back, in vLLM's form, here or by a server of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from litestar import Response, post

from gateway import errors
from gateway.domain.call import ServedModel
from gateway.http.asgi import Request, begin
from gateway.http.authentication import principal_of
from gateway.requests.fields.own_answer import template_tools
from gateway.requests.fields.servers import may_run_in_own_engine
from gateway.requests.fields.tools import tool_field
from gateway.requests.inputs import media, uncounted
from gateway.requests.parse import chat_messages
from gateway.requests.prompt import PromptRefused, PromptRenderer
from gateway.requests.schemas import ChatMessage, decode
from gateway.routes.context import S, body_of, gateway_of, may_use, note_asked, off_the_loop
from gateway.upstream.base import CapabilityLost, takes_turns
from gateway.upstream.openai.response import NOT_JSON
from gateway.upstream.openai.upstream import OpenAIUpstream

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`."""

    model: str
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    """Those that the tokenizer puts around a prompt; None: yes. A chat's are written by its template."""
    add_generation_prompt: bool = True
    """The opening of an answer, after messages."""
    tools: list[dict[str, Any]] | None = None
    """With messages."""
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    model: str
    tokens: list[TokenId]


class Tokens(msgspec.Struct):
    """The answer to the first; of a server's, what is read. Raises ValueError."""

    count: int
    tokens: list[TokenId]
    token_strs: list[str] | None = None
    max_model_len: int = 0

    def __post_init__(self) -> None:
        if not self.count == len(self.tokens) == len(self.token_strs or self.tokens):
            raise ValueError("the count is not the number of its tokens")


class DetokenizedText(msgspec.Struct):
    """The answer to the second."""

    prompt: str


OPTIONS: dict[str, Any] = {
    "scope": "inference",
    "answers": {
        404: "There is no such model, or the key may not use it.",
        429: "Too many of these requests.",
        502: "The server that was asked failed.",
    },
}
OWN_FORM = (
    "Send either 'prompt' or 'messages'; 'add_special_tokens' is for prompts: a template writes a chat's."
)


@post(
    ["/tokenize", "/v1/tokenize"],
    status_code=200,
    opt=OPTIONS | {"body": TokenizeRequest},
    summary="Turn a prompt or messages into tokens",
    description="vLLM's form: `count`, `max_model_len`, `tokens` and `token_strs`. Not charged.",
)
async def tokenize(request: Request) -> Response[bytes]:
    body, asked, served = await _asked(request, TokenizeRequest)
    if (asked.prompt is None) == (asked.messages is None) or (asked.messages and asked.add_special_tokens):
        raise errors.bad_request(OWN_FORM, "prompt")
    fields = tool_field(asked.tools, has_messages=asked.messages is not None)
    fields["return_token_strs"] = asked.return_token_strs
    if asked.messages is None:
        fields |= {"prompt": asked.prompt, "add_special_tokens": asked.add_special_tokens is not False}
    else:
        messages = chat_messages(asked.messages, gateway_of(request).deps.config, served)
        fields |= {"messages": messages, "add_generation_prompt": asked.add_generation_prompt}

    def own(renderer: PromptRenderer) -> Tokens:
        if asked.messages is None:
            ids = renderer.text_tokens(fields["prompt"], has_frame=fields["add_special_tokens"])
        else:
            counted = uncounted.as_counted(fields["messages"])
            tools = template_tools(fields)
            ids = renderer.chat_tokens(counted, is_opened=asked.add_generation_prompt, tools=tools)
        return Tokens(len(ids), ids, renderer.token_texts(ids) if asked.return_token_strs else None)

    # What another server's template writes of these only that server knows.
    is_there = media.needs_of(asked.messages or ()) or (asked.tools and not may_run_in_own_engine(served))
    return await _answer(request, body, served, "/tokenize", fields, Tokens, None if is_there else own)


@post(
    ["/detokenize", "/v1/detokenize"],
    status_code=200,
    opt=OPTIONS | {"body": DetokenizeRequest},
    summary="Turn tokens into text",
    description="vLLM's form: `prompt`. Not charged.",
)
async def detokenize(request: Request) -> Response[bytes]:
    body, asked, served = await _asked(request, DetokenizeRequest)

    def own(renderer: PromptRenderer) -> DetokenizedText:
        if (highest := max(asked.tokens, default=0)) >= renderer.vocabulary:
            raise PromptRefused(f"token id {highest} is not in 0..{renderer.vocabulary - 1}", "tokens")
        return DetokenizedText(renderer.text_of(asked.tokens))

    return await _answer(request, body, served, "/detokenize", {"tokens": asked.tokens}, DetokenizedText, own)


async def _asked(request: Request, into: type[S]) -> tuple[bytes, S, ServedModel]:
    """The body, raw and decoded, and the model; of a chain the first one."""
    gateway, principal = gateway_of(request), principal_of(request)
    await gateway.models.token_calls.take(principal.tenant_id)
    body = await body_of(request)
    asked: Any = await off_the_loop(gateway, principal, body, lambda: decode(body, into))
    note_asked(request, asked.model, "")
    if not may_use(request, asked.model):
        raise errors.model_not_found(name=asked.model)
    chain = gateway.models.catalogue.chain(asked.model)
    return body, asked, gateway.models.served(chain.pools[0] if chain else asked.model, begin(request.scope))


async def _answer(
    request: Request,
    body: bytes,
    served: ServedModel,
    path: str,
    fields: dict[str, Any],
    form: type[Tokens] | type[DetokenizedText],
    own: Callable[[PromptRenderer], Tokens | DetokenizedText] | None,
) -> Response[bytes]:
    """By the model's tokenizer here (`own`; None: it cannot), or else by one of its servers."""
    gateway, principal = gateway_of(request), principal_of(request)
    spec = gateway.pools[served.pool].spec
    renderer = spec.renderer

    def told(found: Tokens | DetokenizedText) -> bytes:
        if isinstance(found, Tokens):
            found.max_model_len = served.context_tokens
        return msgspec.json.encode(found)

    try:
        if own is not None and isinstance(renderer, PromptRenderer):
            text = await off_the_loop(gateway, principal, body, lambda: told(own(renderer)))
        else:
            servers = [upstream for upstream in spec.upstreams if isinstance(upstream, OpenAIUpstream)]
            up = next((server for server in servers if takes_turns(server)), None)
            if servers and up is None:
                raise errors.engine_unavailable()
            answer = b"" if up is None else await up.ask(path, fields)
            text = await off_the_loop(
                gateway, principal, answer, lambda: told(msgspec.json.decode(answer, type=form))
            )
    except PromptRefused as refused:
        param = refused.field or ("messages" if "messages" in fields else "prompt")
        raise errors.bad_request(f"Invalid '{param}': {refused}.", param) from None
    except (CapabilityLost, *NOT_JSON):
        raise errors.no_server_can(
            "model",
            f"No server of the model '{served.name[:128]}' answers this at {path} in vLLM's form, and its"
            " tokenizer is not here: its operator can set tokenizer_dir in its [[upstreams]] table.",
        ) from None
    return Response(text, media_type="application/json")


HANDLERS = [tokenize, detokenize]
