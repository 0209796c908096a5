"""Valid idempotency keys, and the part of an answer that a recorder keeps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.cluster.idempotency_keys import check_key, fingerprint
from gateway.errors import ApiError
from gateway.http.idempotent_response import ResponseRecorder
from tenants.directory.idempotency import StoredAnswer

START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/plain"), (b"content-length", b"4")],
}


def piece(body: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


@pytest.mark.parametrize("key", ["", "a" * 256, "k" * 10_000, "schlüssel", "two\nlines"])
def test_a_key_that_cannot_be_used_names_the_limit(key: str) -> None:
    with pytest.raises(ApiError) as refused:
        check_key(key, 60.0)
    assert refused.value.status == 400
    assert refused.value.param == "Idempotency-Key"
    assert "1 to 255 printable ASCII" in refused.value.message


def test_switched_off_a_key_is_refused_and_never_ignored() -> None:
    check_key("a" * 255, 60.0)
    with pytest.raises(ApiError) as refused:
        check_key("fine", 0.0)
    assert refused.value.code == "idempotency_off"


def test_route_and_body_make_a_request_the_same() -> None:
    prints = {fingerprint(route, body) for route in ("/a", "/b") for body in (b"{}", b"{ }")}
    assert len(prints) == 4
    assert fingerprint("/a", b"{}") == fingerprint("/a", b"{}")


class Sent:
    """A client that reads `reads` messages, and then `fails`."""

    def __init__(self, reads: int = 100, fails: bool = True) -> None:
        self.messages: list[Any] = []
        self.calls = 0
        self._reads = reads
        self._fails = fails

    async def __call__(self, message: Any) -> None:
        self.calls += 1
        if len(self.messages) < self._reads:
            self.messages.append(message)
        elif self._fails:
            raise OSError("gone")
        else:
            await asyncio.Event().wait()


@pytest.mark.parametrize("fails", [True, False])
def test_a_client_that_left_or_does_not_read_stops_nothing(fails: bool) -> None:
    sent, kept = Sent(reads=1, fails=fails), []

    async def main() -> None:
        recorder = ResponseRecorder(sent, 0.01, 100, last)
        for message in (START, piece(b"ab", more=True), piece(b"cd", more=True), piece(b"", more=False)):
            await recorder(message)

    async def last(answer: StoredAnswer) -> None:
        kept.append(answer)

    asyncio.run(main())
    assert kept == [StoredAnswer(200, {"content-type": "text/plain"}, [b"ab", b"cd"])]
    assert sent.messages == [START]
    assert sent.calls == 2, "asked once more, then left alone"


def test_all_is_kept_before_the_last_piece_goes_out() -> None:
    sent, kept = Sent(), []

    async def main() -> None:
        async def last(answer: StoredAnswer) -> None:
            kept.append((answer, len(sent.messages)))

        recorder = ResponseRecorder(sent, 1.0, 100, last)
        for message in (START, piece(b"ab", more=True), piece(b"cd", more=False)):
            await recorder(message)

    asyncio.run(main())
    assert kept == [(StoredAnswer(200, {"content-type": "text/plain"}, [b"ab", b"cd"]), 2)]


def test_an_answer_that_is_too_large_is_sent_and_not_kept() -> None:
    sent, kept = Sent(), []

    async def main() -> None:
        async def last(answer: StoredAnswer) -> None:
            kept.append(answer.pieces)

        recorder = ResponseRecorder(sent, 1.0, 3, last)
        for message in (START, piece(b"ab", more=True), piece(b"cd", more=True), piece(b"e", more=False)):
            await recorder(message)

    asyncio.run(main())
    assert len(sent.messages) == 4
    assert kept == [None]
