"""Asks another server for a few tokens: does it stop where told, do its counts match its text, and does its
prefix cache keep tenants apart (`fairgate model check`)."""

from __future__ import annotations

import secrets
from typing import Any

from engine.messages import Submit
from gateway.requests.prompt import EstimatedRenderer, PromptRenderer
from gateway.upstream.base import CountedOutcome, SequenceRefused, UpstreamLost, UpstreamUnavailable, Wording
from gateway.upstream.openai.monitor import CONTRADICTIONS
from gateway.upstream.openai.upstream import OpenAIUpstream

Renderer = PromptRenderer | EstimatedRenderer
MAX_TOKENS = 8
NONCE_BYTES = 160
"""Random bytes of a prompt that no cache holds, in hexadecimal: some ten blocks."""


async def faults_of(upstream: OpenAIUpstream, renderer: Renderer) -> list[str]:
    """What is wrong with the answers of a server that is up; empty: nothing was found. Costs it at most five
    short answers."""
    try:
        for is_streamed in (True, False):
            await _ask(upstream, renderer, "Count from one to one hundred.", is_streamed=is_streamed)
        faults = [f"it {CONTRADICTIONS[kind]}" for kind, number in upstream.contradictions.items() if number]
        if upstream.is_salted:
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
