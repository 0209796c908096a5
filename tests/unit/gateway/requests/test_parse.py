"""Parsing of requests into calls. (Refusals: `tests/e2e/test_bad_input.py`.)"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.config import GatewayConfig
from gateway.domain.call import Call, ServedModel
from gateway.errors import ApiError
from gateway.requests.fields.own_answer import PLAIN_FORM
from gateway.requests.inputs.uncounted import OTHER_TOKENS
from gateway.requests.parse import RequestContext, parse_chat, parse_text
from gateway.requests.prompt import EstimatedRenderer, Fits
from gateway.requests.schemas import ChatCompletionRequest, CompletionRequest, decode, decode_listed
from gateway.upstream.capabilities import Capabilities, ServerOffer
from tenants.types import Limit, Meter, Principal, SubjectKind, Tier, Window, end_user_id
from tests.support.builders import principal


class Letters:
    """One token a letter."""

    vocabulary = 1000
    own_form = PLAIN_FORM

    def chat_tokens(
        self, messages: Sequence[dict[str, Any]], fits: Fits | None = None, **_: Any
    ) -> list[int]:
        self.messages = list(messages)
        return [ord(letter) % 1000 for message in messages for letter in message["content"] or ""]

    def text_tokens(self, text: str, fits: Fits | None = None) -> list[int]:
        if fits is not None:
            fits(len(text) // 2, False)
        return [ord(letter) % 1000 for letter in text]

    def text_of(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


MODEL = ServedModel("m", context_tokens=100, vocabulary=1000)


def context(renderer: Letters | None = None, who: Principal | None = None) -> RequestContext:
    return RequestContext(
        "req_1", who or principal(), MODEL, renderer or Letters(), GatewayConfig(), created=1
    )


def chat(renderer: Letters | None = None, who: Principal | None = None, **fields: Any) -> Call:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]} | fields
    return parse_chat(decode(json.dumps(body).encode(), ChatCompletionRequest), context(renderer, who))


def text(**fields: Any) -> Call:
    return parse_text(
        decode(json.dumps({"model": "m", "prompt": "hello"} | fields).encode(), CompletionRequest), context()
    )


@pytest.mark.parametrize(("letters", "is_refused"), [(128 * 100, True), (128 * 100 - 1, False)])
def test_a_text_that_no_vocabulary_makes_short_is_refused_before_any_work_and_no_other(
    letters: int, is_refused: bool
) -> None:
    """Of a model whose tokenizer is not known: 128 bytes a token at the most, held up to the context."""
    model = replace(MODEL, is_estimated=True, vocabulary=EstimatedRenderer.vocabulary)
    served = replace(context(), model=model, renderer=EstimatedRenderer())
    asked = CompletionRequest(model="m", prompt=" " * letters)
    if is_refused:
        with pytest.raises(ApiError, match="100 tokens") as refused:
            parse_text(asked, served)
        assert refused.value.code == "context_length_exceeded"
    else:
        assert parse_text(asked, served).input_tokens == 100 - 12


def test_a_chat_of_too_many_messages_is_refused_before_one_is_decoded() -> None:
    body = b'{"model": "m", "messages": [' + b'{"role":"nonsense","x":1},' * 20_000 + b"0]}"
    body = body.replace(b"]}", b'], "input": 5}')  # the list of another dialect
    with pytest.raises(ApiError, match="'messages' holds 20001 messages; the most is 2048"):
        decode_listed(body, ChatCompletionRequest, "messages", 2048)
    for broken in (body.replace(b"]", b""), b'{"messages": 5}' + b" " * 2**16):
        with pytest.raises(ApiError) as refused:  # by what is wrong with it
            decode_listed(broken, ChatCompletionRequest, "messages", 2048)
        assert "the most is" not in refused.value.message


def test_without_max_tokens_the_whole_rest_of_the_context_is_reserved() -> None:
    call = chat()
    assert call.max_tokens == 95
    held = call.largest(7)
    assert (held.input_tokens, held.output_tokens, held.requests, held.cost_nanousd) == (5, 95, 1, 7)


def test_several_choices_reserve_output_for_each_and_the_prompt_once() -> None:
    call = chat(n=3, max_completion_tokens=10)
    assert call.largest(0).input_tokens == 5
    assert call.largest(0).output_tokens == 30


def test_the_longest_of_several_prompts_decides_what_is_left() -> None:
    with pytest.raises(ApiError, match="at most 94"):
        text(prompt=["ab", "abcdef"], n=2, max_tokens=95)
    call = text(prompt=["ab", "abcdef"], n=2, max_tokens=94)
    assert call.sequences == 4
    assert [len(call.prompt_of(index)) for index in range(4)] == [2, 2, 6, 6]
    assert call.input_tokens == 8


@pytest.mark.parametrize("fields", [{"max_tokens": 95}, {"max_completion_tokens": 95}])
def test_the_context_is_exactly_as_long_as_it_says(fields: dict[str, int]) -> None:
    assert chat(**fields).max_tokens == 95
    name, value = next(iter(fields.items()))
    with pytest.raises(ApiError) as refused:
        chat(**{name: value + 1})
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", name)
    assert "100 tokens" in refused.value.message
    assert "at most 95" in refused.value.message


@pytest.mark.parametrize(
    ("asked", "default", "tier"),
    [
        (None, Tier.BATCH, Tier.BATCH),
        ("auto", Tier.INTERACTIVE, Tier.INTERACTIVE),
        ("default", Tier.STANDARD, Tier.STANDARD),
        ("priority", Tier.BATCH, Tier.INTERACTIVE),
        ("flex", Tier.STANDARD, Tier.BATCH),
        ("interactive", Tier.BATCH, Tier.INTERACTIVE),
    ],
)
def test_service_tier_is_a_tier(asked: str | None, default: Tier, tier: Tier) -> None:
    fields = {} if asked is None else {"service_tier": asked}
    assert chat(who=principal(default_tier=default), **fields).tier is tier


def test_roles_parts_and_missing_content_reach_the_template_as_it_knows_them() -> None:
    renderer = Letters()
    chat(
        renderer,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "tool", "content": "42", "tool_call_id": "x"},
            {"role": "user", "content": "c", "name": "kim"},
        ],
    )
    assert renderer.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "42", "tool_call_id": "x"},
        {"role": "user", "content": "c", "name": "kim"},
    ]


def test_a_text_completion_without_a_length_has_openais_sixteen_tokens_or_what_is_left() -> None:
    assert (text().max_tokens, text(prompt="x" * 90).max_tokens) == (16, 10)
    assert not text().asked_max_tokens


CALLED = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_tool_calls_of_the_past_reach_the_template_and_other_servers_as_they_are() -> None:
    renderer = Letters()
    call = chat(
        renderer,
        messages=[
            {
                "role": "assistant", "content": None, "tool_calls": [CALLED], "refusal": None,
                "annotations": [],
            },
            {"role": "tool", "content": "2", "tool_call_id": "call_1"},
        ],
    )  # fmt: skip
    assert renderer.messages[0] == {"role": "assistant", "content": None, "tool_calls": [CALLED]}
    assert call.wording_of(0).messages == renderer.messages


HINT = {"cache_control": {"type": "ephemeral"}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "x"}
ECHOED = {
    "parsed": {}, "reasoning_details": [{"type": "reasoning.text", "text": "hm"}], "prefix": False, **HINT
}  # fmt: skip
"""What is taken of an assistant's message and left out for any server."""


def test_what_sdks_send_back_of_an_answer_is_taken_and_left_out() -> None:
    called = CALLED | {"index": 0, "function": CALLED["function"] | {"parsed_arguments": {"a": 1}}}
    parts = [
        THOUGHT, {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "x", **HINT},
        {"type": "refusal", "refusal": "no"},
    ]  # fmt: skip
    for said in ({}, {"refusal": "no", "annotations": [{}], "reasoning": "a", "reasoning_content": "b"}):
        message = {"role": "assistant", "content": parts, **ECHOED, **said, "tool_calls": [called]}
        call = chat(Letters(), messages=[message, {"role": "user", "content": "y", **HINT}], **HINT)
        assert call.wording_of(0).messages == [
            {"role": "assistant", "content": "x", "tool_calls": [CALLED]},
            {"role": "user", "content": "y"},
        ]
    only_thoughts = [{"role": "assistant", "content": [THOUGHT]}, {"role": "user", "content": "y"}]
    assert chat(Letters(), messages=only_thoughts).wording_of(0).messages[0]["content"] == ""  # type: ignore[index]


def test_a_tool_calls_id_may_hold_a_signature() -> None:
    called = CALLED | {"id": "i" * 4096}
    answer = {"role": "tool", "content": "2", "tool_call_id": "i" * 4096}
    messages = [{"role": "assistant", "content": None, "tool_calls": [called]}, answer]
    assert chat(Letters(), messages=messages).wording_of(0).messages == messages
    with pytest.raises(ApiError, match="1 to 4096"):
        chat(messages=[answer | {"tool_call_id": "i" * 4097}])


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ({"role": "assistant", "content": "x", "thoughts": "y"}, "unknown_parameter", ".thoughts"),
        ({"role": "user", "content": [THOUGHT]}, "invalid_value", ".content[0].type"),
        ({"role": "user", "content": "x", "reasoning": "y"}, "invalid_value", ".reasoning"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "unsupported_parameter", ".function_call"),
        ({"role": "user", "content": "x", "tool_calls": [CALLED]}, "invalid_value", ".tool_calls"),
        ({"role": "user", "content": "x", "tool_call_id": "y"}, "invalid_value", ".tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": ""}, "invalid_value", ".tool_call_id"),
        ({"role": "user", "content": "x", "name": "system>"}, "invalid_value", ".name"),
        ({"role": "user", "content": "x", "name": "n\n"}, "invalid_value", ".name"),
        ({"role": "user", "content": "x", "name": "n" * 65}, "invalid_value", ".name"),
        (
            {"role": "assistant", "tool_calls": [CALLED | {"function": {"name": "a|b", "arguments": ""}}]},
            "invalid_value",
            ".tool_calls[0].function.name",
        ),
        (
            {"role": "assistant", "tool_calls": [CALLED | {"type": "custom"}]},
            "invalid_value",
            ".tool_calls[0].type",
        ),
        ({"role": "assistant", "tool_calls": [CALLED] * 129}, "invalid_value", ".tool_calls"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x", "cache": {}}]},
            "unknown_parameter",
            ".content[0].cache",
        ),
    ],
)
def test_no_field_of_a_message_is_dropped(message: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(messages=[{"role": "user", "content": "x"}, message])
    assert refused.value.code == code
    assert str(refused.value.param).replace("messages[1]", "").replace("messages", "") == param


def test_every_sampling_field_arrives() -> None:
    call = chat(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.2, presence_penalty=-1,
        frequency_penalty=2, logit_bias={"5": -100}, seed=3, stop=["a", "b"], logprobs=True, top_logprobs=4,
        ignore_eos=True,
    )  # fmt: skip
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.2, -1)
    assert (sampling.frequency_penalty, sampling.logit_bias) == (2, {5: -100.0})
    assert (sampling.seed, sampling.stop, sampling.logprobs) == (3, ("a", "b"), 4)
    assert sampling.ignore_eos


def test_fields_without_effect_are_accepted_as_openai_accepts_them() -> None:
    call = chat(
        user="u", metadata={"a": "b"}, store=False, parallel_tool_calls=True, tools=[], tool_choice="none",
        response_format={"type": "text"}, modalities=["text"], top_k=-1, top_p=0, stop=None,
        safety_identifier="x",
    )  # fmt: skip
    assert call.sampling.top_k == 0
    assert 0 < call.sampling.top_p < 1e-6


def test_the_end_user_is_the_safety_identifier_else_the_user() -> None:
    for fields, named in (
        ({}, ""),
        ({"user": "u"}, "u"),
        ({"user": "u", "safety_identifier": "s" * 64}, "s" * 64),
        ({"user": "u", "safety_identifier": ""}, "u"),
        ({"user": {"id": "u", "email": "u@example.org"}}, "u"),
        ({"user": {"id": 5}}, ""),
    ):
        assert chat(**fields).end_user == text(prompt="a", **fields).end_user == named
    for name in ("user", "safety_identifier"):
        with pytest.raises(ApiError, match="65 characters") as caught:
            chat(**{name: "x" * 65})
        assert (caught.value.status, caught.value.param) == (400, name)


def test_the_limits_on_a_call_go_by_its_tier_model_size_and_end_user() -> None:
    def limit(kind: SubjectKind = SubjectKind.TENANT, **fields: Any) -> Limit:
        shape = {"window": Window.DAY} | fields
        return Limit("lim", "ten_1", kind, "ten_1", Meter.REQUESTS, 5, **shape)

    call = chat(max_tokens=10, n=2, user="amy")
    tokens = call.input_tokens + 20
    everything = [
        limit(model=call.model), limit(model="x"), limit(above_tokens=tokens - 1), limit(above_tokens=tokens),
        limit(tier=Tier.BATCH), limit(SubjectKind.END_USER),
    ]  # fmt: skip
    call = replace(call, principal=dataclasses.replace(call.principal, limits=tuple(everything)))
    user = everything[-1].of_end_user(end_user_id(call.principal.tenant_id, "amy"))
    assert call.limits_at(0) == (everything[0], everything[2], user)
    assert call.limits_at(0, Tier.BATCH) == (everything[0], everything[2], everything[4], user)
    assert call.limits_at(0)[-1].identity != everything[-1].identity
    assert replace(call, end_user="").limits_at(0) == (everything[0], everything[2])


def test_what_its_tenant_has_declared_of_the_metadata_is_a_label() -> None:
    labelled = principal(labels={"team": ("ads", "search"), "feature": ("x",)})
    call = chat(who=labelled, metadata={"team": "search", "note": "the client's own"})
    assert call.labels == {"team": "search"}
    assert chat(who=labelled).labels == chat(metadata={"team": "anything"}).labels == {}


@pytest.mark.parametrize(
    ("metadata", "param", "code", "says"),
    [
        ({"team": "sales"}, "metadata.team", "invalid_label", "ads, search"),
        ({"team": ""}, "metadata.team", "invalid_label", "ads, search"),
        ({"a": 1}, "metadata", "invalid_type", "str"),
        ({f"k{n}": "v" for n in range(17)}, "metadata", "invalid_value", "the most is 16"),
        ({"k" * 65: "v"}, "metadata", "invalid_value", "the most is 64"),
        ({"note": "v" * 513}, "metadata.note", "invalid_value", "the most is 512"),
    ],
)
def test_metadata_that_cannot_be_taken_is_named(
    metadata: dict[str, Any], param: str, code: str, says: str
) -> None:
    with pytest.raises(ApiError) as refused:
        chat(who=principal(labels={"team": ("ads", "search")}), metadata=metadata)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)
    assert says in refused.value.message


def test_choices_of_a_seeded_prompt_have_seeds_of_their_own() -> None:
    call = text(prompt=["a", "b"], n=2, seed=2**63 - 1)
    seeds = [call.sampling_of(index).seed for index in range(4)]
    assert seeds == [2**63 - 1, -(2**63), 2**63 - 1, -(2**63)]
    assert text(n=2).sampling_of(1).seed is None


def test_log_probabilities_mean_the_chosen_token_or_so_many_alternatives() -> None:
    assert chat().sampling.logprobs is None
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=False).sampling.logprobs is None
    assert text(logprobs=0).sampling.logprobs == 0
    assert text(logprobs=5).sampling.logprobs == 5


def test_a_configuration_that_makes_no_sense_is_named() -> None:
    with pytest.raises(ValueError, match="max_body_bytes"):
        GatewayConfig(max_body_bytes=0)
    with pytest.raises(ValueError, match="lease_ttl_s"):
        GatewayConfig(lease_ttl_s=float("nan"))
    with pytest.raises(ValueError, match="ttl_batch_s"):
        GatewayConfig(ttl_batch_s=0)
    with pytest.raises(ValueError, match="long_share_kv must be at most 1"):
        GatewayConfig(long_share_kv=1.5)
    assert GatewayConfig(lookahead_sequences=0).lookahead_sequences == 0


def test_a_model_of_a_chain_is_asked_for_and_allowed_by_the_chains_name() -> None:
    asked = decode(json.dumps({"model": "big", "prompt": "hello"}).encode(), CompletionRequest)

    def parsed(who: Principal) -> Call:
        return parse_text(asked, replace(context(who=who), model=replace(MODEL, asked="big")))

    assert parsed(principal(models=frozenset({"big"}))).model == "m"
    with pytest.raises(ApiError) as refused:
        parsed(principal(models=frozenset({"m"})))
    assert refused.value.code == "model_not_found"


def test_an_end_user_is_known_by_a_hash_and_a_conversation_by_its_leading_blocks() -> None:
    named = [chat(user="ann").traits, chat(safety_identifier="ann", user="x").traits, text(user="ann").traits]
    assert all(traits is not None and traits.user == named[0].user != 0 for traits in named)  # type: ignore[union-attr]
    assert chat().traits.user == 0  # type: ignore[union-attr]
    assert chat(user="bob").traits.user != named[0].user  # type: ignore[union-attr]

    first = chat(messages=[{"role": "user", "content": "a" * 70}]).traits
    later = [{"role": "user", "content": "a" * 70}, {"role": "user", "content": "b" * 20}]
    assert len(first.blocks) == 1  # type: ignore[union-attr]
    assert chat(messages=later).traits.blocks == first.blocks  # type: ignore[union-attr]
    elsewhere = chat(who=principal("ten_2"), messages=later).traits
    assert elsewhere.blocks != first.blocks  # type: ignore[union-attr]


def test_a_prompt_that_cannot_fit_is_refused_by_its_least_tokens() -> None:
    with pytest.raises(ApiError) as refused:
        text(prompt="x" * 200)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")
    assert "at least 100 tokens" in refused.value.message


class Spent(Exception):
    pass


def test_the_budget_is_asked_for_all_prompts_together_before_the_last_one_is_tokenised() -> None:
    asked: list[int] = []

    def require(tokens: int) -> None:
        asked.append(tokens)
        if tokens > 12:
            raise Spent

    body = {"model": "m", "prompt": ["x" * 10, "y" * 6]}
    with pytest.raises(Spent):
        parse_text(
            decode(json.dumps(body).encode(), CompletionRequest),
            replace(context(), require_budget=require),
        )
    assert asked == [5, 13]


def test_the_first_token_id_that_is_none_is_named() -> None:
    with pytest.raises(ApiError, match="token id 1000 is not in"):
        text(prompt=[1, 1000, -1])


def test_tools_that_may_not_be_called_add_nothing_to_our_own_engines_prompt() -> None:
    """It runs the ids that are counted here: what is held for tools would be read as text."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    call = chat(tools=[tool], tool_choice="none", parallel_tool_calls=False)
    assert list(call.prompt_of(0)) == [ord(letter) for letter in "hello"]
    assert not call.wording_of(0).is_uncountable
    assert not call.wording_of(0).fields


def test_earlier_reasoning_may_come_back_as_sdks_send_it() -> None:
    """A tool loop sends the whole message back. Its server decides what it reads, so all of it is held."""
    said = {
        "role": "assistant", "content": "b", "reasoning_content": "hm", "reasoning": "hmm",
        "refusal": "no",
    }  # fmt: skip
    messages = [{"role": "user", "content": "a"}, said, {"role": "user", "content": "c"}]
    server = ServerOffer("a", Capabilities(frozenset({"text"}), kind="vllm"), is_up=True)
    elsewhere = replace(context(), model=replace(MODEL, context_tokens=1000, servers=(server,)))
    body = decode(json.dumps({"model": "m", "messages": messages}).encode(), ChatCompletionRequest)
    call = parse_chat(body, elsewhere)
    assert (call.input_tokens, call.wording_of(0).is_uncountable) == (3 + 2 + 3 + 2 + 3 * OTHER_TOKENS, True)
    assert call.wording_of(0).messages[1] == said
    with pytest.raises(ApiError, match="only allowed in a message of role 'assistant'"):
        chat(messages=[{"role": "user", "content": "a", "reasoning": "b"}])
