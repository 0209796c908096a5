"""Which fields an audited act changed, from what to what. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_SHOWN = 200
"""Characters of one value; the file has all."""
MOST_NAMED = 6
"""Fields of one act in a line of words, each value of at most `MOST_CHARACTERS`."""
MOST_CHARACTERS = 40


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


def words(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> str:
    """`weight 1.0 -> 3.0`; of what was made or removed only that."""
    if before is None or after is None:
        return "" if before is after else "made" if before is None else "removed"
    differ = changes(before, after)
    first = [f"{one.name} {_short(one.before)} -> {_short(one.after)}" for one in differ[:MOST_NAMED]]
    more = f" and {len(differ) - MOST_NAMED} more" if len(differ) > MOST_NAMED else ""
    return ", ".join(first) + more


def _short(text: str | None) -> str:
    text = "null" if text is None else text
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"
