"""The outcome of another server's sequence: whose count of the prompt decides."""

from __future__ import annotations

from typing import Any

import pytest

from engine.messages import SamplingParams, Submit
from gateway.upstream.base import CountedOutcome
from gateway.upstream.lease_buffer import End
from gateway.upstream.openai.outcome import outcome_of
from gateway.upstream.openai.response import Usage
from gateway.upstream.openai.response_reader import WholeResponse
from gateway.upstream.openai.token_count import TokenCount

HELD = 100


def outcome(
    usage: Usage | None, *, is_prompt_counted: bool, finish: str = "stop", **more: Any
) -> CountedOutcome:
    submit = Submit("r-0", "r", "t", [0] * HELD, 10, 10, SamplingParams())
    return outcome_of(
        submit, End(finish, 5, "upstream"), usage, replica_id="other",
        is_prompt_counted=is_prompt_counted, is_cache_told=True, has_run=True, first_token_s=0.1,
        finished_s=0.2, uncertain_tokens=0, **more,
    )  # fmt: skip


def test_an_answer_that_was_cut_keeps_what_is_of_its_prompt_and_the_ids_of_what_was_passed_on() -> None:
    answer = WholeResponse(TokenCount(10, None))
    about = {"prompt_token_ids": [1], "prompt_logprobs": [None]}
    answer.choice_fields = about | {"token_ids": list(range(8)), "stop_reason": "x"}
    for finish, shown in (("stop", answer.choice_fields), ("budget", about | {"token_ids": list(range(5))})):
        found = outcome(None, is_prompt_counted=True, finish=finish, answer=answer)
        assert found.choice_fields == shown


@pytest.mark.parametrize(("said", "charged"), [(60, 60), (HELD, HELD), (10 * HELD, HELD)])
def test_of_an_estimated_prompt_the_servers_count_decides_up_to_what_is_held(said: int, charged: int) -> None:
    found = outcome(Usage(said, 5), is_prompt_counted=False)
    assert (found.prompt_tokens, found.computed_tokens, found.basis) == (charged, charged, "upstream")


def test_a_counted_prompt_stays_as_it_was_counted() -> None:
    assert outcome(Usage(3, 5), is_prompt_counted=True).prompt_tokens == HELD


def test_an_estimated_prompt_without_a_servers_count_is_charged_as_estimated_and_says_so() -> None:
    found = outcome(None, is_prompt_counted=False)
    assert (found.prompt_tokens, found.basis) == (HELD, "estimate")
