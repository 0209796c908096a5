"""What a request says of sampling, and what a model says where it says nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.messages import SamplingParams
from gateway.config import GatewayConfig
from gateway.domain.call import ServedModel
from gateway.requests.fields.sampling import model_defaults, said_sampling, sampling_of
from gateway.requests.schemas import ChatCompletionRequest, CompletionRequest, Sampling, decode
from tenants.errors import Invalid

MODEL = ServedModel("m", context_tokens=100, vocabulary=1000)
MESSAGES = {"model": "m", "messages": []}
NEUTRAL: dict[str, Any] = {
    "temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0,
    "frequency_penalty": 0, "logit_bias": {}, "stop": [], "ignore_eos": False,
}  # fmt: skip
EVERYTHING: dict[str, Any] = {
    "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2,
    "presence_penalty": 0.3, "frequency_penalty": 0.4, "logit_bias": {"5": -100}, "seed": 1,
    "stop": ["a", "b"], "ignore_eos": True,
}  # fmt: skip


def asked(fields: dict[str, Any], into: type[Sampling] = ChatCompletionRequest) -> Sampling:
    prompt = MESSAGES if into is ChatCompletionRequest else {"model": "m", "prompt": "p"}
    return decode(json.dumps(prompt | fields).encode(), into)


@pytest.mark.parametrize("into", [ChatCompletionRequest, CompletionRequest])
@pytest.mark.parametrize(
    "fields",
    [
        {}, NEUTRAL, EVERYTHING, {"stop": "a"}, {"temperature": None, "seed": None, "top_k": 0},
        *({name: value} for name, value in NEUTRAL.items()),
    ],
)  # fmt: skip
def test_servers_get_what_was_said_and_nothing_else(into: type[Sampling], fields: dict[str, Any]) -> None:
    request = asked(fields | {"max_tokens": 5, "n": 2, "stream": True, "user": "u"}, into)
    assert said_sampling(request) == {name: value for name, value in fields.items() if value is not None}


def test_of_log_probabilities_too() -> None:
    assert said_sampling(asked({"logprobs": True})) == {"logprobs": True}
    both = {"logprobs": True, "top_logprobs": 2}
    assert said_sampling(asked(both)) == both
    assert said_sampling(asked({"logprobs": 0}, CompletionRequest)) == {"logprobs": 0}


def test_every_way_to_sample_can_be_said() -> None:
    said = said_sampling(asked(EVERYTHING | {"logprobs": True}))
    assert set(SamplingParams.__struct_fields__) <= set(said)


OWN = {"temperature": 0.01, "top_k": 1, "repetition_penalty": 1.3}


@pytest.mark.parametrize(
    ("file", "found"),
    [
        (None, {}),
        ({"do_sample": False, "eos_token_id": [1, 2], "max_new_tokens": 9, "top_p": None}, {}),
        (OWN | {"do_sample": True}, OWN),
        ({"top_p": 0.5, "min_p": 0.1, "presence_penalty": 1}, {"top_p": 0.5, "min_p": 0.1}),
    ],
)
def test_a_model_has_defaults_of_its_own(
    tmp_path: Path, file: dict[str, Any] | None, found: dict[str, Any]
) -> None:
    if file is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(file))
    assert model_defaults(tmp_path) == SamplingParams(**found)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ('{"temperature": "hot"}', r"float.*temperature"),
        ('{"top_p": 3}', r"'top_p': 3 must be at least 0 and at most 1"),
        ('{"repetition_penalty": 0}', r"'repetition_penalty': 0 must be greater than 0"),
        ('{"top_k": 1.5}', r"int.*top_k"),
        ("{", "truncated"),
        ("[]", "object"),
    ],
)
def test_defaults_that_cannot_be_are_named(tmp_path: Path, file: str, says: str) -> None:
    (tmp_path / "generation_config.json").write_text(file)
    with pytest.raises(Invalid, match=rf"generation_config\.json: .*{says}"):
        model_defaults(tmp_path)


def test_what_a_request_does_not_say_is_the_models() -> None:
    model = replace(MODEL, sampling=SamplingParams(**OWN | {"top_p": 0.0, "min_p": 0.2}))

    def sampling(**fields: Any) -> SamplingParams:
        return sampling_of(asked(fields), None, model, GatewayConfig())

    assert sampling() == sampling(**OWN, top_p=0, min_p=0.2)
    assert sampling(**NEUTRAL) == sampling_of(asked({}), None, MODEL, GatewayConfig())
    assert (sampling(top_k=5).top_k, sampling(top_k=5).temperature) == (5, 0.01)
