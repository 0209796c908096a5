"""Ready sets of settings for three kinds of load, after widely used vLLM configurations.

For interactive use, for throughput, and for long contexts mixed with short requests. Those that say how long
prompts are treated choose the composition `decode-first`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.scheduling.options import PolicyOptions

DEFAULT_BATCHED_TOKENS = 2048
"""Least tokens of a step where the model's context is shorter than that."""
MAX_SEQUENCES = 128


@dataclass(frozen=True, slots=True)
class TemplateSettings:
    """What a template sets. The policy is first come, first served; another one takes the options as well."""

    name: str
    options: PolicyOptions
    max_batched_tokens: int
    max_sequences: int = MAX_SEQUENCES
    policy: str = "fcfs"


def _interactive(context_tokens: int) -> TemplateSettings:
    options = PolicyOptions(
        compose="decode-first",
        max_num_partial_prefills=2,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=max(1, context_tokens * 4 // 100),
    )
    return TemplateSettings("interactive", options, max(DEFAULT_BATCHED_TOKENS, 2 * context_tokens))


def _throughput(context_tokens: int) -> TemplateSettings:
    options = PolicyOptions(max_num_partial_prefills=1)
    return TemplateSettings("throughput", options, 4 * context_tokens)


def _long_context(context_tokens: int) -> TemplateSettings:
    options = PolicyOptions(
        compose="decode-first",
        max_num_partial_prefills=2,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=max(1, context_tokens * 6 // 100),
    )
    return TemplateSettings("long-context", options, max(DEFAULT_BATCHED_TOKENS, 2 * context_tokens))


TEMPLATES: dict[str, Callable[[int], TemplateSettings]] = {
    "interactive": _interactive,
    "throughput": _throughput,
    "long-context": _long_context,
}


def template(name: str, context_tokens: int) -> TemplateSettings:
    """Settings of template `name` for a model's context. Raises `ValueError`, also below 1."""
    if name not in TEMPLATES:
        raise ValueError(f"no template {name!r}; there are {', '.join(sorted(TEMPLATES))}")
    if context_tokens < 1:
        raise ValueError(f"context_tokens must be at least 1, not {context_tokens}")
    return TEMPLATES[name](context_tokens)
