"""Which fields an audited act changed, from what to what. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_SHOWN = 200
"""Characters of one value; the file has all."""


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field before and after an act; None: absent."""

    name: str
    before: str | None
    after: str | None


def changes(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> list[FieldChange]:
    """The fields that differ, in the object's order; nested names are joined with points."""
    old, new = dict(_flat(before or {})), dict(_flat(after or {}))
    names = [*old, *(name for name in new if name not in old)]
    return [
        FieldChange(name, _text(old, name), _text(new, name))
        for name in names
        if name not in old or name not in new or old[name] != new[name]
    ]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping):  # an empty one has no field
            yield from _flat(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    if name not in fields:
        return None
    value = fields[name]
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def as_stored(value: Mapping[str, Any] | None) -> str:
    """Exact JSON, for files; empty: no object."""
    return "" if value is None else msgspec.json.encode(value).decode()
