"""Spans as plain data, in OpenTelemetry's terms, before any of its objects is made. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

Attribute = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Attribute]


class SpanKind(StrEnum):
    """As OpenTelemetry calls them."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened at one instant within a span."""

    name: str
    at_ns: int
    """Since 1970, as every time here."""
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpanLink:
    """Another span that has to do with this one, in its own trace or in another."""

    trace_id: str
    span_id: str
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpanRecord:
    name: str
    kind: SpanKind
    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 of them."""
    parent_id: str
    """Empty: it is the root of its trace."""
    start_ns: int
    end_ns: int
    attributes: Attributes = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    links: Sequence[SpanLink] = ()
    error: str = ""
    """What went wrong; empty: nothing, or nothing that is an error."""
    is_parent_remote: bool = False
    state: str = ""


def span_id_of(owner: str, name: str) -> str:
    """The id of a span, from its owner's id and its name: known before the span is made."""
    return hashlib.blake2b(f"{owner}/{name}".encode(), digest_size=8).hexdigest()
