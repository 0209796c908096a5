"""Routes of other dialects than chat completions, which run as those do."""

from __future__ import annotations

from litestar import Response, post
from litestar.types import ASGIApp

from gateway.http.asgi import Request
from gateway.http.authentication import principal_of
from gateway.http.direct_route import run_directly
from gateway.requests.dialects import messages, responses
from gateway.routes.context import gateway_of, json_response, reserved_memory
from gateway.routes.inference import COMPLETES, conversation, read_conversation
from gateway.routes.tokens import OPTIONS


@post(
    "/v1/responses",
    status_code=200,
    middleware=[run_directly],
    opt=COMPLETES | {"body": responses.ResponsesRequest},
    summary="Create a response",
    description="OpenAI's Responses, streamed or not. Nothing is stored: send the conversation so far in"
    " `input`. `fairgate` is as in a chat completion; its `left_out` names what was not passed on, and why.",
)
async def create_response(request: Request) -> ASGIApp:
    return await conversation(request, responses.read)


@post(
    "/v1/messages",
    status_code=200,
    middleware=[run_directly],
    opt=COMPLETES | {"body": messages.MessagesRequest},
    summary="Create a message",
    description="Anthropic's Messages, streamed or not; keys also by `x-api-key`. `fairgate` is as in a chat"
    " completion, in a stream in `message_delta`; its `left_out` names what was not passed on, and why.",
)
async def create_message(request: Request) -> ASGIApp:
    return await conversation(request, messages.read)


@post(
    "/v1/messages/count_tokens",
    status_code=200,
    opt=OPTIONS | {"body": messages.Conversation},
    summary="Count the input tokens of a message",
    description="What would be held for the prompt: exact for text where the model's tokenizer is here, else"
    " with a margin. Not charged.",
)
async def count_tokens(request: Request) -> Response[bytes]:
    gateway = gateway_of(request)
    await gateway.models.token_calls.take(principal_of(request).tenant_id)
    with reserved_memory(request) as reserved:
        _, call, _ = await read_conversation(request, reserved, messages.read_count, is_charged=False)
        return json_response({"input_tokens": call.input_tokens})


HANDLERS = [create_response, create_message, count_tokens]
