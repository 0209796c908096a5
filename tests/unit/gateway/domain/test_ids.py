"""A request is found by its own id and by that of its completion."""

from __future__ import annotations

import pytest

from gateway.domain.ids import completion_id, new_request_id, request_id_of


@pytest.mark.parametrize("is_chat", [True, False])
def test_the_id_of_a_completion_leads_to_its_request(is_chat: bool) -> None:
    request_id = new_request_id(1_790_000_000.0)
    shown = completion_id(request_id, is_chat=is_chat)
    assert shown.startswith("chatcmpl-" if is_chat else "cmpl-")
    assert request_id_of(shown) == request_id


@pytest.mark.parametrize("text", ["req_01", "", "nonsense", "chatcmpl"])
def test_any_other_text_stays_as_it_is(text: str) -> None:
    assert request_id_of(text) == text
