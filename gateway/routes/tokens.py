"""Routes that turn text into tokens and back by the model's own tokenizer, in vLLM's form: uncharged.

Where the tokenizer is known here, the gateway answers; else a server of the model is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from litestar import Request, Response, post

from gateway import errors
from gateway.domain.call import ServedModel
from gateway.http.asgi import begin
from gateway.http.authentication import principal_of
from gateway.requests.inputs import images, uncounted
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
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    model: str
    tokens: list[TokenId]


class Tokens(msgspec.Struct):
    """What is answered to the first, beside the model's context; also what is read of a server's answer."""

    count: int
    tokens: list[TokenId]
    token_strs: list[str] | None = None

    def __post_init__(self) -> None:
        if self.count != len(self.tokens) or len(self.token_strs or self.tokens) != self.count:
            raise ValueError("the count is not the number of its tokens")


class Text(msgspec.Struct):
    """What is answered to the second."""

    prompt: str


OPTIONS: dict[str, Any] = {
    "scope": "inference",
    "answers": {
        404: "There is no such model, or the key may not use it.",
        429: "Too many of these requests.",
        502: "The server that was asked failed.",
    },
}


@post(
    ["/tokenize", "/v1/tokenize"],
    status_code=200,
    opt=OPTIONS | {"body": TokenizeRequest},
    summary="Turn a prompt or messages into tokens",
    description="vLLM's form: `count`, `max_model_len`, `tokens` and `token_strs`. Not charged.",
)
async def tokenize(request: Request[Any, Any, Any]) -> Response[bytes]:
    body, asked, served = await _asked(request, TokenizeRequest)
    if (asked.prompt is None) == (asked.messages is None):
        raise errors.bad_request("Send exactly one of 'prompt' and 'messages'.", "prompt")
    if asked.messages is not None and asked.add_special_tokens:
        raise errors.unsupported_parameter(
            "add_special_tokens", "A chat's special tokens are written by its template: leave it out."
        )
    text, has_frame, is_opened = asked.prompt or "", asked.add_special_tokens is not False, True
    fields: dict[str, Any] = {"prompt": text, "add_special_tokens": has_frame}
    messages: list[dict[str, Any]] = []
    if asked.messages is not None:
        is_opened = asked.add_generation_prompt
        messages = chat_messages(asked.messages, gateway_of(request).deps.config, served)
        fields = {"messages": messages, "add_generation_prompt": is_opened}

    def own(renderer: PromptRenderer) -> Tokens:
        if messages:
            ids = renderer.chat_tokens(uncounted.as_counted(messages), is_opened=is_opened)
        else:
            ids = renderer.text_tokens(text, has_frame=has_frame)
        return Tokens(len(ids), ids, renderer.token_texts(ids) if asked.return_token_strs else None)

    has_images = images.first_image(asked.messages or ()) is not None
    fields["return_token_strs"] = asked.return_token_strs
    return await _answer(request, body, served, "/tokenize", fields, Tokens, None if has_images else own)


@post(
    ["/detokenize", "/v1/detokenize"],
    status_code=200,
    opt=OPTIONS | {"body": DetokenizeRequest},
    summary="Turn tokens into text",
    description="vLLM's form: `prompt`. Not charged.",
)
async def detokenize(request: Request[Any, Any, Any]) -> Response[bytes]:
    body, asked, served = await _asked(request, DetokenizeRequest)

    def own(renderer: PromptRenderer) -> Text:
        if wrong := [each for each in asked.tokens if each >= renderer.vocabulary]:
            message = f"Invalid 'tokens': {wrong[0]} is not in 0..{renderer.vocabulary - 1}."
            raise errors.bad_request(message, "tokens")
        return Text(renderer.text_of(asked.tokens))

    return await _answer(request, body, served, "/detokenize", {"tokens": asked.tokens}, Text, own)


async def _asked(request: Request[Any, Any, Any], into: type[S]) -> tuple[bytes, S, ServedModel]:
    """The body, as it came and decoded, and the model; of a chain of models the first one."""
    gateway = gateway_of(request)
    gateway.take_token_call(principal_of(request).tenant_id)
    body = await body_of(request)
    asked: Any = await off_the_loop(request, body, lambda: decode(body, into))
    note_asked(request, asked.model, "")
    if not may_use(request, asked.model):
        raise errors.model_not_found(asked.model)
    chain = gateway.catalogue.chain(asked.model)
    name = asked.model if chain is None else chain.pools[0]
    return body, asked, gateway.served(name, begin(request.scope))


async def _answer(
    request: Request[Any, Any, Any],
    body: bytes,
    served: ServedModel,
    path: str,
    fields: dict[str, Any],
    form: type[Tokens] | type[Text],
    own: Callable[[PromptRenderer], Tokens | Text] | None,
) -> Response[bytes]:
    """What the model's tokenizer here says (`own`; None: it cannot), or else a server of the model."""
    spec = gateway_of(request).pools[served.pool].spec
    renderer = spec.renderer

    def told(found: Tokens | Text) -> bytes:
        context = {"max_model_len": served.context_tokens} if isinstance(found, Tokens) else {}
        return msgspec.json.encode(msgspec.structs.asdict(found) | context)

    if own is not None and isinstance(renderer, PromptRenderer):
        try:
            text = await off_the_loop(request, body, lambda: told(own(renderer)))
        except PromptRefused as refused:
            param = refused.field or next(iter(fields))
            raise errors.bad_request(f"Invalid '{param}': {refused}.", param) from None
        return Response(text, media_type="application/json")
    servers = [each for each in spec.upstreams if isinstance(each, OpenAIUpstream)]
    up = [each for each in servers if takes_turns(each)]
    if servers and not up:
        raise errors.engine_unavailable()
    try:
        if not up:
            raise CapabilityLost(path)
        answer = await up[0].ask(path, fields)
        text = await off_the_loop(request, answer, lambda: told(msgspec.json.decode(answer, type=form)))
    except (CapabilityLost, *NOT_JSON):
        raise errors.no_server_can(
            "model",
            f"No server of the model '{served.name[:128]}' answers this at {path} in vLLM's form, and its"
            " tokenizer is not here: its operator can set tokenizer_dir in its [[upstreams]] table.",
        ) from None
    return Response(text, media_type="application/json")


HANDLERS = [tokenize, detokenize]
