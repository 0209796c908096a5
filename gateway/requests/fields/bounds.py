"""Bounds size and depth of request fields that other servers get unchecked. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway import errors

MAX_FIELD_CHARACTERS = 256 * 1024
"""Of all texts and names in one field."""
MAX_FIELD_VALUES = 20_000
"""Objects, lists, texts and numbers in one field."""
MAX_FIELD_DEPTH = 64
"""Nested objects and lists; a JSON schema takes two per level of its objects."""


def require_bounded(name: str, value: object) -> None:
    """Raises `ApiError` for a field that is too large or nested too deeply."""
    if not isinstance(value, Mapping | list | str):
        return
    values = characters = 0
    pending: list[tuple[Any, int]] = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        values += 1
        if isinstance(item, str):
            characters += len(item)
        elif isinstance(item, Mapping):
            characters += sum(map(len, item))
            pending += [(inner, depth + 1) for inner in item.values()]
        elif isinstance(item, list):
            pending += [(inner, depth + 1) for inner in item]
        if depth > MAX_FIELD_DEPTH:
            raise errors.bad_request(
                f"'{name}' is nested too deeply: the most is {MAX_FIELD_DEPTH} objects and lists in each"
                " other. Flatten it.",
                name,
            )
        if values + len(pending) > MAX_FIELD_VALUES:
            raise errors.bad_request(
                f"'{name}' holds more than {MAX_FIELD_VALUES} values, the limit. Send fewer.",
                name,
            )
        if characters > MAX_FIELD_CHARACTERS:
            raise errors.bad_request(
                f"'{name}' holds more than {MAX_FIELD_CHARACTERS} characters, the limit. Shorten it.",
                name,
            )
