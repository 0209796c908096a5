"""Validates sequences on arrival; refuses those that can never run in this engine."""

from __future__ import annotations

from math import isfinite

from engine.messages import ModelInfo, Refused, SequenceState, Submit


def refuse_submit(submit: Submit, model: ModelInfo, kv_capacity_tokens: int) -> Refused | None:
    """Why `submit` can never run; None: it can. `kv_capacity_tokens`: tokens in the whole KV cache."""

    def refused(code: str, message: str) -> Refused:
        return Refused(sequence_id=submit.sequence_id, code=code, message=message)

    prompt_tokens = len(submit.prompt_token_ids)
    if prompt_tokens == 0:
        return refused("invalid_request", "prompt_token_ids must hold at least one token")
    if min(submit.prompt_token_ids) < 0 or max(submit.prompt_token_ids) >= model.vocabulary:
        return refused(
            "invalid_request",
            f"prompt_token_ids must lie between 0 and {model.vocabulary - 1}, the model's vocabulary",
        )
    if submit.max_tokens < 1 or submit.lease_tokens < 1:
        return refused("invalid_request", "max_tokens and lease_tokens must be at least 1")
    if submit.tier < 0:
        return refused("invalid_request", f"tier must not be negative, not {submit.tier}")
    if not (isfinite(submit.weight) and submit.weight > 0):
        return refused("invalid_request", f"weight must be a number greater than 0, not {submit.weight}")
    for name in ("deadline_in_s", "own_deadline_in_s", "ttft_target_s", "tpot_target_s"):
        seconds = getattr(submit, name)
        if seconds is not None and not (isfinite(seconds) and seconds >= 0):
            return refused("invalid_request", f"{name} must be a number of at least 0, not {seconds}")
    if prompt_tokens + submit.max_tokens > model.context_tokens:
        return refused(
            "context_length_exceeded",
            f"the model's context is {model.context_tokens} tokens; the prompt has {prompt_tokens} and "
            f"max_tokens is {submit.max_tokens}: shorten the prompt or lower max_tokens",
        )
    most_tokens = prompt_tokens + submit.max_tokens - 1
    if most_tokens > kv_capacity_tokens:
        return refused(
            "too_large",
            f"the engine's KV cache holds {kv_capacity_tokens} tokens; this request may need {most_tokens}: "
            "shorten the prompt or lower max_tokens",
        )
    return None


def refuse_state(state: SequenceState, model: ModelInfo) -> Refused | None:
    """Why an exported sequence, its `submit` checked before, cannot go on here; None: it can."""
    emitted = len(state.output_token_ids)
    known = len(state.submit.prompt_token_ids) + emitted
    most_cached = min(state.kv_tokens, len(state.submit.prompt_token_ids))
    if emitted and not 0 <= min(state.output_token_ids) <= max(state.output_token_ids) < model.vocabulary:
        message = (
            f"output_token_ids must lie between 0 and {model.vocabulary - 1}, the model's vocabulary: "
            "import the state into an engine that serves the model it was exported from"
        )
    elif emitted >= state.submit.max_tokens:
        message = f"the state has {emitted} output tokens, max_tokens is {state.submit.max_tokens}"
    elif emitted > state.submit.lease_tokens:
        message = f"the state has {emitted} output tokens, the lease covers {state.submit.lease_tokens}"
    elif not 0 <= state.kv_tokens < known:
        message = f"kv_tokens is {state.kv_tokens}, the sequence has {known} tokens"
    elif state.kv and not state.kv_tokens:
        message = "the state has kv, but kv_tokens is 0: say how many tokens it holds, or leave kv out"
    elif not 0 <= state.cached_tokens <= most_cached:
        message = (
            f"cached_tokens is {state.cached_tokens}; of the prompt, {most_cached} tokens had been computed"
        )
    elif state.text_sent < 0:
        message = f"text_sent must not be negative, not {state.text_sent}"
    else:
        return None
    return Refused(sequence_id=state.submit.sequence_id, code="invalid_state", message=message)
