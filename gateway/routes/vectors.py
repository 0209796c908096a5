"""Routes of embeddings and rerank: passed to servers that have them, held and charged by input tokens."""

from __future__ import annotations

from typing import Any

from litestar import post
from litestar.types import ASGIApp

from gateway.http.asgi import Request
from gateway.http.direct_route import run_directly
from gateway.quotes.quotes import HEADER as QUOTE_HEADER
from gateway.requests.queue_progress import HEADER as PROGRESS_HEADER
from gateway.requests.schemas import decode
from gateway.requests.vectors.calls import EmbeddingRequest, RerankRequest, parse_embeddings, parse_rerank
from gateway.routes.context import body_of
from gateway.routes.inbound import Inbound
from gateway.routes.inference import COMPLETES, answer, understood

_OF_COMPLETIONS = frozenset({QUOTE_HEADER, PROGRESS_HEADER})
PASSES: dict[str, Any] = {
    name: value for name, value in COMPLETES.items() if name not in ("streams", "headers")
} | {"headers": {name: what for name, what in COMPLETES["headers"].items() if name not in _OF_COMPLETIONS}}
"""`opt` of these routes, see `openapi.describe`."""


@post(
    "/v1/embeddings",
    status_code=200,
    middleware=[run_directly],
    opt=PASSES | {"body": EmbeddingRequest},
    summary="Create embeddings",
    description="OpenAI's embeddings of one or several inputs, by a server that has them. They are held and "
    "charged as input tokens, queued as every other request, and the answer carries the `fairgate` object.",
)
async def embeddings(request: Request) -> ASGIApp:
    inbound = Inbound.of(request, await body_of(request))
    asked = await inbound.off_the_loop(lambda: decode(inbound.body, EmbeddingRequest))
    call = await understood(
        inbound, asked, lambda context: parse_embeddings(asked, context), least_output_tokens=0
    )
    return await answer(inbound, call)


@post(
    "/v1/rerank",
    status_code=200,
    middleware=[run_directly],
    opt=PASSES | {"body": RerankRequest},
    summary="Score documents by a query",
    description="Scores of documents by a query, as vLLM, llama.cpp and Jina have them, by a server that has "
    "a reranker. The query counts with each document. Held, charged and queued as embeddings are.",
)
async def rerank(request: Request) -> ASGIApp:
    inbound = Inbound.of(request, await body_of(request))
    asked = await inbound.off_the_loop(lambda: decode(inbound.body, RerankRequest))
    call = await understood(
        inbound, asked, lambda context: parse_rerank(asked, context), least_output_tokens=0
    )
    return await answer(inbound, call)


HANDLERS = [embeddings, rerank]
