"""Which servers of a model can take a request, and what is said where none can."""

from __future__ import annotations

import pytest

from gateway.domain.call import ServedModel
from gateway.errors import ApiError, ServerLacks
from gateway.requests.fields.servers import endpoint_needs, require_servers
from gateway.upstream.capabilities import PLAIN_TEXT, Capabilities, Endpoint, ServerOffer
from gateway.upstream.openai.server_kinds import COUNTED_FIELDS

TOOLS = {"tools": "tools", "text": "model"}
ABLE = Capabilities(frozenset({"text", "tools"}), kind="vllm")
PLAIN = Capabilities(frozenset({"text"}), kind="vllm")
UNTRIED = Capabilities(frozenset({"text"}), untried=frozenset({"tools", "extra_fields"}), kind="vllm")


def model(*servers: tuple[str, Capabilities, bool]) -> ServedModel:
    offers = tuple(ServerOffer(*each) for each in servers)
    return ServedModel("m", context_tokens=100, vocabulary=1000, servers=offers)


def refusal(found: ServedModel, needs: dict[str, str]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        require_servers(found, needs)
    return caught.value


def test_one_server_that_serves_and_can_is_enough() -> None:
    require_servers(model(("a", PLAIN, True), ("b", ABLE, True)), TOOLS)
    require_servers(model(), {"text": "model"})


def test_where_all_are_down_what_comes_back_decides() -> None:
    require_servers(model(("a", ABLE, False), ("b", PLAIN, False)), TOOLS)
    require_servers(model(("a", UNTRIED, False)), TOOLS)
    assert isinstance(refusal(model(("a", PLAIN, False)), TOOLS), ServerLacks)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (model(("a", PLAIN, True), ("b", ABLE, False)), "b can, and is away"),
        (model(("a", PLAIN, True), ("c", UNTRIED, True)), "c is being asked whether it can"),
    ],
)
def test_what_may_be_possible_soon_is_refused_for_now(found: ServedModel, said: str) -> None:
    error = refusal(found, TOOLS)
    assert (error.status, error.code, error.param) == (503, "capability_unavailable", "tools")
    assert error.should_retry
    assert error.retry_after_s is not None
    assert said in error.message


def test_untried_fields_of_a_kind_may_turn_out_to_pass() -> None:
    needs = {"field:min_tokens": "min_tokens", "text": "model"}
    assert refusal(model(("a", UNTRIED, True)), needs).code == "capability_unavailable"
    assert refusal(model(("a", PLAIN, True)), needs).code == "unsupported_parameter"


def test_the_message_names_each_server_what_it_lacks_and_the_way_out() -> None:
    other = Capabilities(
        frozenset({"text", "tools"}), kind="llama.cpp", reasons={"images": "500 no mmproj", "rerank": "404"}
    )
    plain = Capabilities(PLAIN.words, kind="vllm", reasons={"images": "400 not a multimodal model"})
    error = refusal(
        model(("vllm-a", plain, True), ("llama-b", other, True)),
        {"tools": "tools", "json_schema": "response_format", "images": "messages[0].content[0]"},
    )
    assert error.param == "response_format"
    assert error.message == (
        "No server of the model 'm' takes this request: vllm-a does not take 'tools' (start it with"
        " --enable-auto-tool-choice and --tool-call-parser) and 'response_format' and images (it says: 400"
        " not a multimodal model); llama-b does not take 'response_format' and images (start it with --mmproj"
        "; it says: 500 no mmproj). Where a server does take it, its operator can say so with capabilities or"
        " fields in its [[upstreams]] table."
    )
    many = model(*((f"s{index}", PLAIN, True) for index in range(5)))
    assert "s2 does not" in refusal(many, TOOLS).message
    assert "2 more lack it too" in refusal(many, TOOLS).message


def test_a_model_of_our_own_engine_says_what_it_lacks_and_what_to_do_instead() -> None:
    for found in (model(), model(("engine-0", PLAIN_TEXT, True))):
        assert "template has no place for tools" in refusal(found, TOOLS).message
        assert "by 'response_format'" in refusal(found, {"forced_tools": "tool_choice"}).message
    assert "only generates text" in refusal(model(), {"embeddings": "model"}).message
    image = refusal(model(), {"images": "messages[3].content[1]", "text": "model"})
    assert image.message.startswith("Images cannot be taken: our own engine, which runs this model,")
    assert image.param == "messages[3].content[1]"
    vectors = Capabilities(frozenset({"embeddings"}), kind="vllm")
    assert "a does not generate text" in refusal(model(("a", vectors, True)), {"text": "model"}).message


def test_an_endpoint_is_needed_where_a_server_refuses_it_and_the_message_names_the_other() -> None:
    chats = Capabilities(PLAIN.words, refused=frozenset({Endpoint.TEXT}), kind="vllm")
    texts = Capabilities(PLAIN.words, refused=frozenset({Endpoint.CHAT}), kind="vllm")
    found = model(("a", chats, True), ("b", texts, True))
    needs = endpoint_needs(found, Endpoint.TEXT, "prompt")
    assert needs == {Endpoint.TEXT: "prompt"}
    require_servers(found, needs)
    assert [each.capabilities.lacks(needs) for each in found.servers] == [Endpoint.TEXT, None]
    for only, endpoint, way_out in (
        (chats, Endpoint.TEXT, "chat/completions"),
        (texts, Endpoint.CHAT, "completions"),
    ):
        error = refusal(model(("a", only, True)), {endpoint: "prompt", "text": "model"})
        assert (error.status, error.code, error.param) == (400, "unsupported_parameter", "prompt")
        assert f"send it to /v1/{way_out}." in error.message
    assert endpoint_needs(model(("a", chats, True)), Endpoint.CHAT, "messages") == {}
    assert endpoint_needs(model(), Endpoint.TEXT, "prompt") == {}


def test_fields_that_hide_output_or_change_the_prompt_need_the_servers_own_count() -> None:
    """Without a usage nothing tells how much a server generated and left out."""
    fields = frozenset({"include_reasoning", "documents", "min_tokens"})
    found = Capabilities(frozenset({"text", "extra_fields"}), fields, kind="vllm").without_usage(
        COUNTED_FIELDS
    )
    assert found.fields == {"min_tokens"}
    for name in ("include_reasoning", "documents"):
        error = refusal(model(("a", found, True)), {f"field:{name}": name, "text": "model"})
        assert (error.status, error.param) == (400, name)
        assert "have no usage" in error.message
    require_servers(model(("a", found, True)), {"field:min_tokens": "min_tokens", "text": "model"})
