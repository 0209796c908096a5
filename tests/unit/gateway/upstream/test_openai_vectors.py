"""Answers of embedding and rerank endpoints, as a server sends them and as it must not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.upstream.answer_parts import Garbage
from gateway.upstream.base import RequestTask, Wording
from gateway.upstream.openai.response import StreamError
from gateway.upstream.openai.vectors import VectorsResponse

EMBED = Wording(task=RequestTask.EMBED, fields={"input": ["a", "b"]})
RERANK = Wording(task=RequestTask.RERANK, fields={"query": "q", "documents": ["a", "b"]})


def of(index: int, embedding: Any = (1.5, -2e-3)) -> dict[str, Any]:
    return {"object": "embedding", "index": index, "embedding": embedding}


def read(wording: Wording, body: Any) -> tuple[VectorsResponse, str]:
    """Fed in small pieces."""
    answer = VectorsResponse(wording)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    for start in range(0, len(data), 7):
        assert not answer.feed(data[start : start + 7])
        assert answer.has_begun
    pieces = answer.close()
    return answer, "".join(piece.text for piece in pieces)


def test_numbers_are_passed_on_as_they_are_written() -> None:
    body = (
        b'{"data":[{"index":0,"embedding":[1.50,-2e-3]},{"index":1,"embedding":"AAA="}],'
        b'"usage":{"prompt_tokens":3}}'
    )
    answer, text = read(EMBED, body)
    assert (answer.fault, answer.finish, answer.is_complete) == (None, "stop", True)
    assert '"embedding":[1.50,-2e-3]' in text
    assert json.loads(text)[1] == {"object": "embedding", "index": 1, "embedding": "AAA="}
    assert answer.count.usage is not None
    assert answer.count.usage.prompt_tokens == 3
    assert answer.count.final() == (0, "upstream")


def test_without_usage_nothing_is_counted() -> None:
    answer, _ = read(EMBED, {"data": [of(0), of(1)]})
    assert answer.fault is None
    assert answer.count.usage is None


@pytest.mark.parametrize(
    "data",
    [
        [of(0)],
        [of(0), of(0)],
        [of(0), of(2)],
        [of(0), of(1), of(2)],
        [of(0), of(1, [])],
        [of(0), of(1, [1, [2]])],
        [of(0), of(1, [None])],
        [of(0), of(1, [True])],
        [of(0), of(1, "no base64!")],
        [of(0), of(1, "")],
        [of(0), of(1, {"a": 1})],
        [of(0), of(1, 3)],
        None,
        "text",
    ],
)
def test_what_are_no_embeddings_of_the_inputs_is_garbage(data: Any) -> None:
    answer, text = read(EMBED, {"data": data})
    assert isinstance(answer.fault, Garbage)
    assert not text
    assert not answer.is_complete


@pytest.mark.parametrize("tokens", [-1, 2**40])
def test_a_count_that_no_request_has_is_garbage(tokens: int) -> None:
    answer, _ = read(EMBED, {"data": [of(0), of(1)], "usage": {"prompt_tokens": tokens}})
    assert isinstance(answer.fault, Garbage)


@pytest.mark.parametrize("wording", [EMBED, RERANK])
def test_an_error_in_an_answer_is_one(wording: Wording) -> None:
    answer, _ = read(wording, {"error": {"message": "out of memory"}})
    assert isinstance(answer.fault, StreamError)


def test_scores_are_passed_on_in_their_order_with_what_the_server_echoes() -> None:
    results = [
        {"index": 1, "relevance_score": 0.9, "document": {"text": "b"}},
        {"index": 0, "relevance_score": -3, "extra": 1},
    ]
    answer, text = read(RERANK, {"results": results, "usage": {"total_tokens": 5}})
    assert answer.fault is None
    assert json.loads(text) == [results[0], {"index": 0, "relevance_score": -3.0}]
    assert answer.count.usage is not None
    assert answer.count.usage.prompt_tokens == 5


@pytest.mark.parametrize(
    "results",
    [
        [{"index": 2, "relevance_score": 1}],
        [{"index": -1, "relevance_score": 1}],
        [{"index": 0, "relevance_score": 1}] * 2,
        [{"index": 0}],
        [{"index": 0, "relevance_score": "high"}],
        None,
    ],
)
def test_what_are_no_scores_of_the_documents_is_garbage(results: Any) -> None:
    answer, _ = read(RERANK, {"results": results})
    assert isinstance(answer.fault, Garbage)


def test_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VectorsResponse, "max_bytes", 100)
    answer = VectorsResponse(EMBED)
    answer.feed(b"x" * 101)
    assert isinstance(answer.fault, Garbage)


def test_a_body_that_is_nested_deeply_ends_nothing() -> None:
    answer, _ = read(RERANK, b'{"results":[{"index":0,"relevance_score":1,"document":' + b"[" * 5000)
    assert isinstance(answer.fault, Garbage)
