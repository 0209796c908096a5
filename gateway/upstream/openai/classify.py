"""Classifies the end of a call to another server, for its sequence and for the server. Pure.

A failure before the first token may be retried elsewhere (`NotBegun`). Each makes the server suspect.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from gateway.upstream.base import NotBegun, SequenceRefused, UpstreamBusy, UpstreamFailed
from gateway.upstream.openai.response import Meaning, StreamError, meaning, refusal
from gateway.upstream.openai.response_reader import CutShort


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
