"""Settings of the vLLM plug-in: environment variables, as vLLM has no place for a plug-in's flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from engine.scheduling.options import AUTO, PolicyOptions
from engine.scheduling.policy import DEFAULT_POLICY, options_of, refuse_idle_options

POLICY = "FAIRGATE_VLLM_POLICY"
OPTIONS = "FAIRGATE_VLLM_OPTIONS"
SLOTS = "FAIRGATE_VLLM_SLOTS"
PLACES = "FAIRGATE_VLLM_PLACES"
KEY_FILE = "FAIRGATE_VLLM_KEY_FILE"
SOCKET = "FAIRGATE_VLLM_SOCKET"
GATEWAY_TIMEOUT = "FAIRGATE_VLLM_GATEWAY_TIMEOUT_S"
VARIABLES = (POLICY, OPTIONS, SLOTS, PLACES, KEY_FILE, SOCKET, GATEWAY_TIMEOUT)
"""All that there are; the last three are read by `channel/setup.py`."""
MOST = 1 << 20


class BadPluginSetting(ValueError):
    """A setting of the plug-in that makes no sense; the message names the variable and what it takes."""


@dataclass(frozen=True, slots=True)
class PluginSettings:
    policy: str = DEFAULT_POLICY
    options: PolicyOptions = field(default_factory=PolicyOptions)
    slots: int | Literal["auto"] = AUTO
    """Sequences that decode in one step; 0: all that have a place."""
    places: int = 0
    """Sequences that may hold KV at once; 0: as many as vLLM's `--max-num-seqs`."""

    def with_slots(self, options: PolicyOptions) -> PolicyOptions:
        """Options with the server's slots, where they name none of their own."""
        return replace(options, slots=self.slots) if options.slots == AUTO else options


def read_settings(environ: Mapping[str, str]) -> PluginSettings:
    """Raises `BadPluginSetting`."""
    policy = environ.get(POLICY, "").strip() or DEFAULT_POLICY
    values: dict[str, object] = {}
    for part in filter(None, (piece.strip() for piece in environ.get(OPTIONS, "").split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            raise BadPluginSetting(f"{OPTIONS} takes NAME=VALUE, several separated by commas, not {part!r}")
        values[name.strip()] = value.strip()
    try:
        options = options_of(values)
        refuse_idle_options(policy, options)
    except ValueError as error:
        raise BadPluginSetting(f"{OPTIONS}: {error}") from None
    return PluginSettings(
        policy,
        options,
        AUTO if environ.get(SLOTS, AUTO).strip() in ("", AUTO) else _number(environ, SLOTS),
        _number(environ, PLACES),
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "").strip() or "0"
    if not (text.isascii() and text.isdigit()) or int(text) > MOST:
        raise BadPluginSetting(
            f"{name} takes a whole number from 0 (no limit of its own) to {MOST}, not {text!r}"
        )
    return int(text)
