"""A request is found by its own id and by that of its answer."""

from __future__ import annotations

import pytest

from gateway.domain.ids import new_request_id, request_id_of, session_id, shown_id


@pytest.mark.parametrize("prefix", ["chatcmpl-", "cmpl-", "resp_", "msg_"])
def test_the_id_of_an_answer_leads_to_its_request(prefix: str) -> None:
    request_id = new_request_id(1_790_000_000.0)
    shown = shown_id(request_id, prefix)
    assert shown.startswith(prefix)
    assert request_id_of(shown) == request_id


@pytest.mark.parametrize("text", ["req_01", "", "nonsense", "chatcmpl"])
def test_any_other_text_stays_as_it_is(text: str) -> None:
    assert request_id_of(text) == text


@pytest.mark.parametrize(
    ("named", "shown"),
    [
        (None, None),
        ("", None),
        ("019c2f6e-7a", "019c2f6e-7a"),
        ("a" * 64, "a" * 64),
        ("a" * 65, "sha256:635361c48bb9eab14198e76ea8ab7f1a"),
        ("my app", "sha256:"),
        ("..", "sha256:"),
        ("a/b", "sha256:"),
        ("\ud800\0", "sha256:"),
    ],
)
def test_a_session_keeps_its_name_where_that_fits_into_a_path(named: str | None, shown: str | None) -> None:
    found = session_id(named)
    assert found == shown or (found or "").startswith(shown or "?")
    assert session_id(found) == found
