"""Templates set what they say, for models of any length."""

from __future__ import annotations

import pytest

from engine.scheduling.policy import make_policy
from engine.scheduling.templates import TEMPLATES, UnknownTemplate, template


def test_interactive_lets_a_short_prompt_pass_a_long_one() -> None:
    settings = template("interactive", 8000)
    options = settings.options
    assert (options.max_num_partial_prefills, options.max_long_partial_prefills) == (2, 1)
    assert options.long_prefill_token_threshold == 320
    assert (settings.max_batched_tokens, settings.max_sequences) == (16_000, 128)


def test_throughput_takes_large_steps() -> None:
    settings = template("throughput", 8000)
    options = settings.options
    assert (options.max_num_partial_prefills, options.max_long_partial_prefills) == (1, 1)
    assert options.long_prefill_token_threshold == 0
    assert (settings.max_batched_tokens, settings.max_sequences) == (32_000, 128)
    assert settings.graph_sizes == (1, 2, 4, 8, 16, 32, 64, 128)


def test_long_context_has_a_higher_threshold() -> None:
    settings = template("long-context", 8000)
    options = settings.options
    assert (options.max_num_partial_prefills, options.max_long_partial_prefills) == (2, 1)
    assert options.long_prefill_token_threshold == 480
    assert (settings.max_batched_tokens, settings.max_sequences) == (16_000, 128)


def test_short_models_keep_a_least_step() -> None:
    assert template("interactive", 100).max_batched_tokens == 2048
    assert template("long-context", 1).options.long_prefill_token_threshold == 1
    assert template("throughput", 100).max_batched_tokens == 400


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_template_makes_a_policy(name: str) -> None:
    settings = template(name, 4096)
    assert settings.name == name
    assert settings.policy == "fcfs"
    assert make_policy(settings.policy, settings.options).compose.name == "decode-first"
    # Where it says how long prompts are treated, whatever the policy.
    treats_long = settings.options.long_prefill_token_threshold > 0
    expected = "decode-first" if treats_long else "token-fair"
    assert make_policy("hybrid", settings.options).compose.name == expected


def test_an_unknown_template_is_named_with_those_that_exist() -> None:
    with pytest.raises(
        UnknownTemplate, match="no template 'fast'; there are interactive, long-context, throughput"
    ):
        template("fast", 4096)
    with pytest.raises(ValueError, match="context_tokens must be at least 1, not 0"):
        template("interactive", 0)
