"""The settings of a process as people may read them: values, where each comes from, and no secret."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gateway.console.formats import without_password
from gateway.deps import ShownSetting
from gateway.upstream.openai.config import UpstreamSettings
from ops.settings.settings import SETTINGS, SettingInfo, Settings, is_hub_id
from tenants.nouns.alias import Chain, alias_as_json
from tenants.pricing.pricing import Price

OF_ENGINES = {"model", "revision", "telemetry.otlp", "telemetry.spans_per_s"}
"""Settings of an engine beside those of its groups and its policy's."""


def shown_settings(given: Settings, effective: Settings) -> tuple[ShownSetting, ...]:
    """Every setting. `effective`: those that were given, with what their template sets."""
    return tuple(_shown(row, given, effective) for row in SETTINGS)


def variables_of(settings: Settings) -> dict[str, str]:
    """Environment variables that give an engine on another machine what was given here."""
    rows = [row for row in SETTINGS if row.name in settings.given]
    ours = [row for row in rows if row.group.startswith(("engine", "policy")) or row.name in OF_ENGINES]
    found = {row.variable: _text(row, _value(row, settings)) for row in ours}
    if "model" in settings.given and not is_hub_id(settings.model):
        found["FAIRGATE_MODEL"] = str(settings.model.absolute())
    return found


def _shown(row: SettingInfo, given: Settings, effective: Settings) -> ShownSetting:
    value, before = _value(row, effective), _value(row, given)
    source = given.given.get(row.name, "")
    if row.name == "policy.template":  # the effective ones have it applied, and name it no more
        value = before
    elif not source and value != before:
        source = f"template {given.policy.template}"
    if row.secret:
        return ShownSetting(row.name, "set" if value else "not set", source, row.help)
    return ShownSetting(row.name, _text(row, value), source, row.help)


def _value(row: SettingInfo, settings: Settings) -> Any:
    holder: Any = settings
    for part in filter(None, row.group.split(".")):
        holder = getattr(holder, part)
    return getattr(holder, row.field)


def _text(row: SettingInfo, value: Any) -> str:
    if value in ((), {}, None, ""):
        return ""
    if isinstance(value, tuple) and isinstance(value[0], UpstreamSettings):
        return ", ".join(f"{item.name} ({item.pool_name} at {without_password(item.url)})" for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_item(item)}" for name, item in value.items())
    return row.kind.shown(value)


def _item(value: Any) -> str:
    if isinstance(value, Price):
        return f"{value.input_nanousd}/{value.output_nanousd}/{value.cached_input_nanousd}"
    if isinstance(value, Chain | Mapping):
        return json.dumps(alias_as_json(value))
    return str(value)
