"""Parsing of embedding requests into calls."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from gateway.domain.call import Call, ServedModel
from gateway.errors import ApiError
from gateway.requests.schemas import decode
from gateway.requests.vectors.calls import MARGIN_TOKENS, EmbeddingRequest, parse_embeddings
from gateway.upstream.capabilities import Capabilities, ServerOffer
from tests.unit.gateway.requests.test_parse import context

SERVER = ServerOffer("a", Capabilities(frozenset({"embeddings"}), kind="vllm"), is_up=True)
MODEL = ServedModel("m", context_tokens=8_192, vocabulary=1000, servers=(SERVER,))


def embeddings(given: object) -> Call:
    body = json.dumps({"model": "m", "input": given}).encode()
    return parse_embeddings(decode(body, EmbeddingRequest), replace(context(), model=MODEL))


def test_one_input_of_token_ids_is_bounded_by_the_context_and_not_by_the_number_of_inputs() -> None:
    call = embeddings([7] * 3_000)
    assert call.input_tokens == 3_000 + MARGIN_TOKENS
    assert call.wording_of(0).fields["input"] == [[7] * 3_000]
    with pytest.raises(ApiError, match="context is 8192"):
        embeddings([7] * 8_193)
    with pytest.raises(ApiError, match="1 to 2048"):
        embeddings(["a"] * 2_049)
    with pytest.raises(ApiError, match="1 to 2048"):
        embeddings([])
