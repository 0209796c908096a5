"""W3C trace context of a request: `traceparent` and `tracestate`, read strictly and passed on.

Invalid context is dropped; a broken `tracestate` leaves the `traceparent` valid
(https://www.w3.org/TR/trace-context-2/). The caller's flags are passed on. Trace and span ids follow from the
request's id, as other processes get the ids of spans that are made later, or never.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

import msgspec

from engine.telemetry.spans import span_id_of

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_PARENT_CHARACTERS = 256
"""A future version may have further fields."""
MAX_STATE_CHARACTERS = 512
"""The least that the standard requires everybody to pass on."""
MAX_STATE_MEMBERS = 32
SAMPLED, RANDOM = 0b01, 0b10
KNOWN_FLAGS = SAMPLED | RANDOM
"""Sampled, and random trace id."""
_PARENT = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})(?P<trace_id>[0-9a-f]{32})-(?!0{16})(?P<span_id>[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<more>-[\x21-\x7e]*)?"
)
_MEMBER = re.compile(
    r"(?P<key>[a-z0-9][a-z0-9_*/@-]{0,255})=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)


class TraceContext(msgspec.Struct, frozen=True):
    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    flags: int = 0
    state: str = ""
    """`tracestate`; empty: none."""


class RequestTrace(msgspec.Struct, frozen=True):
    """The trace that a request belongs to, and the names of its spans."""

    request_id: str
    trace_id: str
    parent_id: str = ""
    """The caller's span; empty: the request is the root."""
    flags: int = RANDOM
    state: str = ""

    @staticmethod
    def of(request_id: str, caller: TraceContext | None) -> RequestTrace:
        if caller is None:
            return RequestTrace(request_id, hashlib.blake2b(request_id.encode(), digest_size=16).hexdigest())
        return RequestTrace(request_id, caller.trace_id, caller.span_id, caller.flags, caller.state)

    def span_id(self, name: str) -> str:
        return span_id_of(self.request_id, name)

    def traceparent(self, name: str) -> str:
        return f"00-{self.trace_id}-{self.span_id(name)}-{self.flags:02x}"

    def onward(self, name: str) -> Mapping[str, str]:
        """Headers for a server whose work is below the span of this name."""
        headers = {TRACEPARENT: self.traceparent(name)}
        return headers | ({TRACESTATE: self.state} if self.state else {})


def read(parents: Iterable[str], states: Iterable[str]) -> tuple[TraceContext | None, str]:
    """The context, and the name of a useless header (empty: none). Several `traceparent` count as none."""
    given = list(parents)
    if not given:
        return None, ""
    parent = None
    if len(given) == 1 and len(given[0]) <= MAX_PARENT_CHARACTERS:
        parent = _PARENT.fullmatch(given[0].strip(" \t"))
    if parent is None or (parent["version"] == "00" and parent["more"]):
        return None, TRACEPARENT
    state, flags = _state(",".join(states)), int(parent["flags"], 16) & KNOWN_FLAGS
    context = TraceContext(parent["trace_id"], parent["span_id"], flags, state or "")
    return context, TRACESTATE if state is None else ""


def _state(text: str) -> str | None:
    """`tracestate` without empty members; None: malformed, or too long to be passed on."""
    if len(text) > MAX_STATE_CHARACTERS:
        return None
    members = [member for tag in text.split(",") if (member := tag.strip(" \t"))]
    keys = {
        member_match["key"] for member in members if (member_match := _MEMBER.fullmatch(member)) is not None
    }
    if len(members) > MAX_STATE_MEMBERS or len(keys) < len(members):
        return None
    return ",".join(members)
