"""Templates set what they say, for models of any length."""

from __future__ import annotations

import pytest

from engine.scheduling.policy import make_policy
from engine.scheduling.templates import TEMPLATES, template


@pytest.mark.parametrize(
    ("name", "prompts", "threshold", "step_tokens"),
    [("interactive", 2, 320, 16_000), ("throughput", 1, 0, 32_000), ("long-context", 2, 480, 16_000)],
)
def test_a_template_lets_short_prompts_pass_long_ones_or_takes_large_steps(
    name: str, prompts: int, threshold: int, step_tokens: int
) -> None:
    settings = template(name, 8000)
    options = settings.options
    assert (options.max_num_partial_prefills, options.max_long_partial_prefills) == (prompts, 1)
    assert options.long_prefill_token_threshold == threshold
    assert (settings.max_batched_tokens, settings.max_sequences) == (step_tokens, 128)


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
    says = "no template 'fast'; there are interactive, long-context, throughput"
    with pytest.raises(ValueError, match=says):
        template("fast", 4096)
    with pytest.raises(ValueError, match="context_tokens must be at least 1, not 0"):
        template("interactive", 0)
