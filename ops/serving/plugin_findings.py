"""What `fairgate doctor` and `fairgate model check` say of Fairgate's plug-in in a vLLM server. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FOREIGN = ("foreign", "malformed", "form", "time", "server", "replayed")
"""Reasons of refused signatures that no gateway with the right key and clock causes."""


def plugin_detail(described: Mapping[str, Any]) -> str:
    plugin = described["plugin"]
    found = (
        f"Fairgate's plug-in {plugin['version']} in vLLM {plugin['vllm_version']}: token-fair by the policy"
        f" {plugin['policy']}, budgets exact inside its decode, {plugin['slots']} slots a step,"
        f" {plugin['places']} places"
    )
    if untried := plugin["not_supported"]:
        found += f"; never tried with {', '.join(untried)}"
    return found


def plugin_faults(described: Mapping[str, Any], max_concurrent: int | None = None) -> list[str]:
    """Faults of the plug-in; empty: none found. `max_concurrent`: from the settings; None: its window."""
    plugin = described["plugin"]
    faults = []
    most = described["window"] if max_concurrent is None else max_concurrent
    if most <= plugin["slots"]:
        faults.append(
            f"max_concurrent {most} is not above its {plugin['slots']} slots: it has no one to choose from;"
            " set twice as many or more"
        )
    if plugin["policy_refusal"]:
        faults.append(f"its plug-in does not take the policy: {plugin['policy_refusal']}")
    if foreign := sum(plugin["refused_signatures"].get(reason, 0) for reason in FOREIGN):
        faults.append(
            f"{foreign} requests came there with a signature that is not good: another gateway has another"
            " key or another clock"
        )
    if plugin["lost_outcomes"]:
        faults.append(
            f"its plug-in had to forget {plugin['lost_outcomes']} outcomes before they were settled"
        )
    return faults
