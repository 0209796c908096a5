"""The outcome of a sequence that another server ran. Pure."""

from __future__ import annotations

from engine.messages import Submit
from gateway.upstream.base import CountedOutcome
from gateway.upstream.lease_buffer import End
from gateway.upstream.openai.response import Usage


def outcome_of(
    submit: Submit,
    end: End,
    usage: Usage | None,
    *,
    replica_id: str,
    is_prompt_counted: bool,
    has_run: bool,
    first_token_s: float | None,
    finished_s: float,
    uncertain_tokens: int,
) -> CountedOutcome:
    """`usage`: the server's own count, where it gave one. `is_prompt_counted`: the gateway has counted the
    prompt by the model's tokenizer. `has_run`: the server has computed the prompt. Times are seconds since
    the sequence was sent."""
    prompt_tokens, cached_tokens = len(submit.prompt_token_ids), 0
    if usage is not None and usage.prompt_tokens > 0:
        prompt_tokens = usage.prompt_tokens
        cached_tokens = min(usage.cached_tokens, prompt_tokens)
    return CountedOutcome(
        sequence_id=submit.sequence_id,
        request_id=submit.request_id,
        tenant_id=submit.tenant_id,
        finish=end.finish,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens if has_run else 0,
        computed_tokens=prompt_tokens - cached_tokens if has_run else 0,
        emitted_tokens=end.tokens,
        index=submit.index,
        tier=submit.tier,
        first_token_s=first_token_s,
        finished_s=finished_s,
        trace_context=submit.trace_context,
        replica_id=replica_id,
        basis=end.basis if is_prompt_counted or usage is not None else "estimate",
        uncertain_tokens=uncertain_tokens,
    )
