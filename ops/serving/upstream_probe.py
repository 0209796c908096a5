"""Checks another server's stops, token counts and prefix cache by short answers (`fairgate model check`)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from engine.messages import Submit
from gateway.requests.prompt import EstimatedRenderer, PromptRenderer
from gateway.upstream.base import CountedOutcome, SequenceRefused, UpstreamLost, UpstreamUnavailable, Wording
from gateway.upstream.openai.config import PrefixCache
from gateway.upstream.openai.monitor import CONTRADICTIONS
from gateway.upstream.openai.upstream import OpenAIUpstream

MOST_REASON_CHARACTERS = 120
Renderer = PromptRenderer | EstimatedRenderer
MAX_TOKENS = 8
NONCE_BYTES = 160
"""Random bytes of a prompt that no cache holds, in hexadecimal: some ten blocks."""
FOREIGN = ("foreign", "malformed", "form", "time", "server", "replayed")
"""Reasons of refused signatures that no gateway with the right key and clock causes."""


def can(replica: Mapping[str, Any]) -> str:
    """Capabilities beyond plain text; `replica` as `Upstream.describe` and the status page have it."""
    words = [word for word in replica.get("capabilities", ()) if word != "text"]
    known = ", ".join(words) or "plain text only"
    untried = "; not tried yet: " + ", ".join(replica["untried"]) if replica.get("untried") else ""
    return known + untried


def cannot(replica: Mapping[str, Any]) -> str:
    """What it refuses, in its own words; empty: nothing, or the settings state what it can."""
    return "; ".join(
        f"{word} ({reason[:MOST_REASON_CHARACTERS]})" for word, reason in replica.get("cannot", {}).items()
    )


async def faults_of(upstream: OpenAIUpstream, renderer: Renderer) -> list[str]:
    """Faults in the answers of a server that is up; empty: none found. Costs at most five short answers."""
    try:
        for is_streamed in (True, False):
            await _ask(upstream, renderer, "Count from one to one hundred.", is_streamed=is_streamed)
        contradictions = upstream.monitor.contradictions
        faults = [f"it {CONTRADICTIONS[kind]}" for kind, number in contradictions.items() if number]
        if upstream.monitor.prefix_cache is PrefixCache.SALTED:
            faults += await _faults_of_cache(upstream, renderer)
    except (SequenceRefused, UpstreamLost, UpstreamUnavailable) as error:
        return [f"it does not answer as it should: {error}"]
    return faults


async def _faults_of_cache(upstream: OpenAIUpstream, renderer: Renderer) -> list[str]:
    prompt = secrets.token_hex(NONCE_BYTES)
    cached = [
        (await _ask(upstream, renderer, prompt, tenant_id=tenant)).cached_tokens for tenant in ("a", "a", "b")
    ]
    # What a chat template puts before each prompt may be cached for all.
    if 2 * cached[2] > cached[1]:
        return ["it ignores cache_salt, so that tenants share its prefix cache: update it, or hide the cache"]
    return []


async def _ask(
    upstream: OpenAIUpstream,
    renderer: Renderer,
    prompt: str,
    *,
    tenant_id: str = "check",
    is_streamed: bool = False,
) -> CountedOutcome:
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    is_chat = renderer.has_chat_template
    submit = Submit(
        sequence_id=secrets.token_hex(8),
        request_id="check",
        tenant_id=tenant_id,
        prompt_token_ids=renderer.chat_tokens(messages) if is_chat else renderer.text_tokens(prompt),
        max_tokens=MAX_TOKENS,
        lease_tokens=MAX_TOKENS,
    )
    wording = Wording(
        messages if is_chat else None,
        prompt=prompt,
        is_streamed=is_streamed,
        sampling={"temperature": 0.0},
    )
    outcome = None
    async for delta in upstream.run(submit, wording):
        outcome = delta.outcome or outcome
    assert isinstance(outcome, CountedOutcome)
    upstream.acknowledge([outcome.sequence_id])
    return outcome


def plugin_detail(described: Mapping[str, Any]) -> str:
    plugin = described["plugin"]
    detail = (
        f"Fairgate's plug-in {plugin['version']} in vLLM {plugin['vllm_version']}: token-fair by the policy"
        f" {plugin['policy']}, budgets exact inside its decode, {plugin['slots']} slots a step,"
        f" {plugin['places']} places"
    )
    if untried := plugin["not_supported"]:
        detail += f"; never tried with {', '.join(untried)}"
    return detail


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
