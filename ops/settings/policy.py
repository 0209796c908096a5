"""Settings of the scheduling policy, and what a template makes of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from msgspec.structs import replace as replaced

from engine.process.options import EngineSettings
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import DEFAULT_POLICY, LEARNED_POLICIES, POLICIES, TABLE_POLICIES
from engine.scheduling.templates import TEMPLATES, template
from ops.settings import values

MOST_BATCHED_TOKENS = 131_072
"""Of the setting `engine.max_batched_tokens`; a template for a very long model asks for no more."""


@dataclass(frozen=True)
class PolicySettings:
    """The policy of the queue and of the engines, until `fairgate policy set` stores another."""

    name: Annotated[
        str,
        values.word(*sorted(POLICIES | TABLE_POLICIES | LEARNED_POLICIES)),
        "Scheduling policy of queue and engine; one that `fairgate policy set` stored goes before it.",
    ] = DEFAULT_POLICY
    template: Annotated[
        str,
        values.word(*sorted(TEMPLATES)),
        "Ready set of options and sizes for one kind of load, by the model's length; what is set besides"
        " goes before it.",
    ] = ""
    options: PolicyOptions = field(default_factory=PolicyOptions)


@dataclass(frozen=True)
class Templated:
    """Settings with what a template sets."""

    policy: PolicySettings
    engine: EngineSettings


def templated(
    policy: PolicySettings, engine: EngineSettings, given: Collection[str], context_tokens: int
) -> Templated:
    """The settings with the template's options and sizes, where `given` does not name them. Raises ValueError
    for options that do not go together."""
    chosen = template(policy.template, context_tokens)
    options: dict[str, Any] = {
        name: value for name, value in chosen.options.changed().items() if f"policy.{name}" not in given
    }
    sizes: dict[str, Any] = {
        "max_batched_tokens": min(MOST_BATCHED_TOKENS, chosen.max_batched_tokens),
        "max_sequences": chosen.max_sequences,
    }
    left = {name: value for name, value in sizes.items() if f"engine.{name}" not in given}
    return Templated(
        replace(policy, template="", options=replace(policy.options, **options)), replaced(engine, **left)
    )
