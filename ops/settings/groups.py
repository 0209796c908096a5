"""Groups of settings: the admin listener, and the scheduling policy with its templates."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import replace as replaced

from engine.bounds import Bounded
from engine.process.options import EngineSettings
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import DEFAULT_POLICY, LEARNED_POLICIES, POLICIES, TABLE_POLICIES, is_idle
from engine.scheduling.templates import TEMPLATES, template
from ops.settings import values

_PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d{2}|6[0-4]\d{3}|[1-5]\d{4}|\d{1,4})"
MOST_BATCHED_TOKENS = 131_072
"""Of the setting `engine.max_batched_tokens`; a template for a very long model asks for no more."""


class AdminSettings(Bounded, frozen=True, kw_only=True):
    """Where operators reach the gateway."""

    listen: Annotated[
        str,
        Meta(
            title="an address and a port, such as 127.0.0.1:9000 or [::1]:9000",
            pattern=rf"((\[[0-9A-Fa-f:.]{{2,45}}(%[A-Za-z0-9._-]{{1,32}})?\]|[A-Za-z0-9._-]{{1,253}}):{_PORT})?",
        ),
        "Address and port of a second listener: the admin API, the console and the metrics answer only there,"
        " and are 404 on the public port. Health checks answer on both. The default has no second listener:"
        " everything answers on the public port.",
    ] = ""

    @property
    def host_and_port(self) -> tuple[str, int] | None:
        """Where it listens; None: there is no second listener."""
        host, _, port = self.listen.rpartition(":")
        return (host, int(port)) if self.listen else None


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
    options: PolicyOptions = dataclasses.field(default_factory=PolicyOptions)


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
    compose = policy.options.compose if "policy.compose" in given else chosen.options.compose
    options: dict[str, Any] = {
        name: value
        for name, value in chosen.options.changed().items()
        if f"policy.{name}" not in given and not is_idle(name, compose)
    }
    sizes: dict[str, Any] = {
        "max_batched_tokens": min(MOST_BATCHED_TOKENS, chosen.max_batched_tokens),
        "max_sequences": chosen.max_sequences,
    }
    left = {name: value for name, value in sizes.items() if f"engine.{name}" not in given}
    return Templated(
        replace(policy, template="", options=replace(policy.options, **options)), replaced(engine, **left)
    )
