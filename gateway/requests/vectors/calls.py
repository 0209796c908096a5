"""Embedding and rerank requests: their bodies, and the `Call` that each becomes.

A request is one sequence without output: its prompt is all its inputs, its `max_tokens` is 0. What a server
adds to an input is unknown, so each is held with a margin, and the server's usage decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.messages import SamplingParams
from gateway import errors
from gateway.domain.call import Call
from gateway.domain.ids import session_id
from gateway.domain.tiers import tier_of
from gateway.requests.fields.servers import require_servers
from gateway.requests.parse import RequestContext, check_model, end_user_of, labels_of, text_prompt
from gateway.upstream.base import RequestTask, Wording
from gateway.upstream.capabilities import Capability

MARGIN_TOKENS = 8
"""Held for each input, or pair of query and document, beyond its text: special tokens and a template."""
MAX_HELD_TOKENS = 2**20
"""All inputs together: a long query counts with each of its documents."""
MAX_DIMENSIONS = 65_536
ENCODINGS = ("float", "base64")


class _OfVectors(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of both."""

    model: str
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    """The end user, before `user`."""
    metadata: dict[str, str] | None = None
    truncate_prompt_tokens: int | None = None
    """Vendor extra of vLLM: the server cuts each input to so many tokens; -1: to the model's context."""


class EmbeddingRequest(_OfVectors, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/embeddings`."""

    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None


class RerankRequest(_OfVectors, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/rerank`, as vLLM, llama.cpp and Jina have it."""

    query: str
    documents: list[str]
    top_n: int | None = None
    return_documents: bool | None = None


def parse_embeddings(request: EmbeddingRequest, context: RequestContext) -> Call:
    check_model(request.model, context)
    require_servers(context.model, {Capability.EMBEDDINGS: "model"})
    items: Sequence[str | list[int]] = _inputs(request.input, context.config.max_inputs)
    fields: dict[str, Any] = {"input": items}
    if request.encoding_format is not None:
        if request.encoding_format not in ENCODINGS:
            raise errors.bad_request(
                f"Invalid 'encoding_format': '{request.encoding_format[:32]}' is not one of"
                f" {', '.join(ENCODINGS)}.",
                "encoding_format",
            )
        fields["encoding_format"] = request.encoding_format
    if request.dimensions is not None:
        fields["dimensions"] = _within("dimensions", request.dimensions, 1, MAX_DIMENSIONS)
    prompt = _Prompt(context, is_cut=request.truncate_prompt_tokens is not None)
    for index, item in enumerate(items):
        prompt.add(item, "input" if len(items) == 1 else f"input[{index}]")
    return _call(request, RequestTask.EMBED, Capability.EMBEDDINGS, prompt, fields, context)


def parse_rerank(request: RerankRequest, context: RequestContext) -> Call:
    check_model(request.model, context)
    require_servers(context.model, {Capability.RERANK: "model"})
    documents = request.documents
    _require_number("documents", len(documents), context.config.max_inputs)
    fields: dict[str, Any] = {"query": request.query, "documents": documents}
    if request.top_n is not None:
        fields["top_n"] = _within("top_n", request.top_n, 1, len(documents))
    if request.return_documents is not None:
        fields["return_documents"] = request.return_documents
    prompt = _Prompt(context, is_cut=request.truncate_prompt_tokens is not None)
    query = prompt.tokens_of(request.query, "query")
    for index, document in enumerate(documents):
        prompt.add(document, f"documents[{index}]", query)
    return _call(request, RequestTask.RERANK, Capability.RERANK, prompt, fields, context)


class _Prompt:
    """The tokens of a request's inputs, as held."""

    def __init__(self, context: RequestContext, *, is_cut: bool) -> None:
        """`is_cut`: the server shortens inputs that are longer than its context."""
        self.tokens: list[int] = []
        self._context = context
        self._is_cut = is_cut

    def add(self, item: str | list[int], param: str, beside: Sequence[int] = ()) -> None:
        """Adds an input, and what the model reads `beside` it. Raises `ApiError`, `BudgetDenied`."""
        found = [*beside, *self.tokens_of(item, param, len(beside))][: self._context.model.context_tokens]
        held = len(self.tokens) + len(found) + MARGIN_TOKENS
        if held > MAX_HELD_TOKENS:
            raise errors.bad_request(
                f"The inputs up to '{param}' have {held} tokens together; the most in one request is"
                f" {MAX_HELD_TOKENS}: send fewer of them at a time.",
                param,
            )
        self.tokens += found
        self.tokens += [0] * MARGIN_TOKENS

    def tokens_of(self, item: str | list[int], param: str, beside: int = 0) -> list[int]:
        """One input's tokens, which with `beside` more fit into the context. Raises as `add`."""
        model, before = self._context.model, len(self.tokens) + beside

        def fits(tokens: int, is_exact: bool) -> None:
            # Of an estimate only what is the least is certain.
            known = beside + tokens if not model.is_estimated else 0 if is_exact else tokens
            if known > model.context_tokens and not self._is_cut:
                raise errors.input_too_long(context_tokens=model.context_tokens, tokens=known, param=param)
            if self._context.require_budget is not None:
                self._context.require_budget(before + tokens)

        if not item:
            raise errors.bad_request(f"'{param}' must not be empty.", param)
        if isinstance(item, str):
            return text_prompt(self._context.renderer, item, fits, param)
        fits(len(item), True)
        wrong = next((token_id for token_id in item if not 0 <= token_id < model.vocabulary), None)
        if wrong is not None:
            raise errors.bad_request(
                f"Invalid '{param}': token id {wrong} is not in 0..{model.vocabulary - 1}.", param
            )
        return item


def _inputs(given: str | list[str | int | list[int]], most: int) -> Sequence[str | list[int]]:
    """Texts, or lists of token ids. Raises `ApiError`."""
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(item, int) for item in given):
        return [[item for item in given if isinstance(item, int)]]
    _require_number("input", len(given), most)
    texts = [item for item in given if isinstance(item, str)]
    if len(texts) == len(given):
        return texts
    ids = [item for item in given if isinstance(item, list)]
    if len(ids) == len(given):
        return ids
    raise errors.bad_request(
        "'input' must be a string, a list of strings, a list of token ids, or a list of such lists.",
        "input",
        code="invalid_type",
    )


def _call(
    request: EmbeddingRequest | RerankRequest,
    task: RequestTask,
    need: Capability,
    prompt: _Prompt,
    fields: dict[str, Any],
    context: RequestContext,
) -> Call:
    if request.truncate_prompt_tokens is not None:
        most = context.model.context_tokens
        fields["truncate_prompt_tokens"] = _within(
            "truncate_prompt_tokens", request.truncate_prompt_tokens, -1, most
        )
    principal, needs = context.principal, frozenset({need})
    return Call(
        request_id=context.request_id,
        chat=False,
        model=context.model.name,
        principal=principal,
        tier=tier_of(request.service_tier, principal),
        prompts=(prompt.tokens,),
        choices=1,
        max_tokens=0,
        sampling=SamplingParams(),
        stream=False,
        include_usage=False,
        created=context.created,
        trace=context.trace,
        timeout_s=context.timeout_s,
        max_wait_s=context.max_wait_s,
        max_cost_nanousd=context.max_cost_nanousd,
        names_timeout=context.names_timeout,
        wordings=(Wording(task=task, fields=fields, needs=needs, is_uncountable=True),),
        pool=context.model.pool,
        end_user=end_user_of(request),
        session=session_id(context.session),
        names_tier=request.service_tier not in (None, "auto"),
        labels=labels_of(request.metadata, principal.labels),
        first_byte_s=context.first_byte_s,
        route=context.route,
        task=task,
        needs=needs,
    )


def _require_number(param: str, found: int, most: int) -> None:
    if not 1 <= found <= most:
        raise errors.bad_request(f"'{param}' has {found} entries; it must have 1 to {most}.", param)


def _within(name: str, value: int, lowest: int, highest: int) -> int:
    if not lowest <= value <= highest:
        raise errors.bad_request(
            f"Invalid '{name}': {value} must be at least {lowest} and at most {highest}.", name
        )
    return value
