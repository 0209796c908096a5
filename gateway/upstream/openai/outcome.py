"""How a call to another server ended: with an outcome of its sequence, or an error and a verdict. Pure.

A failure before the first token may be retried elsewhere (`NotBegun`). Each makes the server suspect.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from msgspec.structs import replace

from engine.messages import Submit
from gateway.upstream.base import (
    ABOUT_PROMPT,
    CountedOutcome,
    NotBegun,
    SequenceRefused,
    UpstreamBusy,
    UpstreamFailed,
)
from gateway.upstream.lease_buffer import End
from gateway.upstream.openai.response import TELLING_FINISHES, Meaning, StreamError, Usage, meaning, refusal
from gateway.upstream.openai.response_reader import CutShort, ResponseReader


def outcome_of(
    submit: Submit,
    end: End,
    usage: Usage | None,
    *,
    replica_id: str,
    is_prompt_counted: bool,
    is_cache_told: bool,
    has_run: bool,
    first_token_s: float | None,
    finished_s: float,
    uncertain_tokens: int,
    answer: ResponseReader | None = None,
    incomplete: str = "",
) -> CountedOutcome:
    """`usage`: the server's own count. `is_prompt_counted`: by the model's tokenizer, which then decides;
    else an estimate bounds the server's count. `is_cache_told`: the tenant may know the cache hits; otherwise
    the whole prompt counts as computed. `has_run`: the prompt was computed. `answer`, `incomplete`: how a
    completion ended in the server's words. Times: seconds since sending."""
    prompt_tokens, cached_tokens = len(submit.prompt_token_ids), 0
    if usage is not None and usage.prompt_tokens > 0:
        if not is_prompt_counted:
            prompt_tokens = min(prompt_tokens, usage.prompt_tokens)
        if is_cache_told:
            cached_tokens = min(usage.cached_tokens, prompt_tokens)
    found = CountedOutcome(
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
        reasoning_tokens=0 if usage is None else min(usage.reasoning_tokens, end.tokens),
        incomplete=incomplete,
    )
    if answer is None:
        return found
    # Where we cut it, it has not come to the end that the server says.
    word = answer.finish_word if end.finish == "stop" else ""
    return replace(
        found,
        finish_word=word if word in TELLING_FINISHES else "",
        unknown_finish="" if word in TELLING_FINISHES else word,
        choice_fields=_passed_on(answer.choice_fields, end),
        fingerprint=answer.fingerprint,
    )


def _passed_on(fields: Mapping[str, Any], end: End) -> Mapping[str, Any]:
    """Of an answer that we cut: fields about its prompt, and the ids of the tokens that were passed on."""
    if end.finish in ("stop", "length"):
        return fields
    kept = {name: fields[name] for name in ABOUT_PROMPT if name in fields}
    return kept | ({"token_ids": fields["token_ids"][: end.tokens]} if "token_ids" in fields else {})


class CallVerdict(StrEnum):
    ANSWERS = "answers"
    REFUSED = "refused"
    """It answers, and will not run this request."""
    BUSY = "busy"
    FAILED = "failed"
    """By its own fault, the request's or the gateway's: not known yet."""
    ABANDONED = "abandoned"


def of_head(headers: Mapping[str, str], wanted: str) -> NotBegun | None:
    """The error in the headers of a 200, whose content type should be `wanted`."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != wanted:
        return NotBegun("garbage", f"its answer is not of the type {wanted!r}")
    if headers.get("content-encoding", "identity").lower() != "identity":
        return NotBegun("garbage", "it answered with a compressed body")
    return None


def of_refusal(status: int, body: bytes, *known: str) -> tuple[CallVerdict, Exception]:
    """`known`: keys that no client may read."""
    match meaning(status):
        case Meaning.REFUSED:
            return CallVerdict.REFUSED, SequenceRefused(*refusal(body, *known))
        case Meaning.BUSY:
            return CallVerdict.BUSY, UpstreamBusy("it is full (429)")
        case Meaning.KEY:
            return CallVerdict.FAILED, NotBegun("key", f"it does not take the gateway's key ({status})")
        case Meaning.UNSURE:
            code, message, param = refusal(body, *known)
            refused = SequenceRefused(code, f"{message} (status {status})", param)
            return CallVerdict.FAILED, NotBegun("status", f"it answered with status {status}", refused)
        case Meaning.AWAY:
            return CallVerdict.FAILED, NotBegun("away", f"it answered with status {status}")
        case Meaning.FAILED:
            return CallVerdict.FAILED, NotBegun("status", f"it answered with status {status}")


def of_fault(fault: Exception, *, has_begun: bool) -> UpstreamFailed:
    match fault:
        case CutShort():
            return failure("closed", "its answer ended before its last word", has_begun=has_begun)
        case StreamError():
            return failure("garbage", "it failed in mid-answer", has_begun=has_begun)
    return failure("garbage", "it sent what is no answer", has_begun=has_begun)


def failure(code: str, message: str, *, has_begun: bool) -> UpstreamFailed:
    return UpstreamFailed(message) if has_begun else NotBegun(code, message)
