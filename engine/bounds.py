"""Structs whose numbers are checked against the bounds in their annotations."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec


class Bounded(msgspec.Struct, frozen=True, kw_only=True):
    """Checks every field with a `msgspec.Meta` when it is made; ValueError names field, bound and value."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            for mark in getattr(hint, "__metadata__", ()):
                if isinstance(mark, msgspec.Meta):
                    _check(name, getattr(self, name), mark)


def _check(name: str, value: Any, meta: msgspec.Meta) -> None:
    extra = meta.extra or {}
    if "auto" in extra:
        # One number means: derive it. Values proper have a bound of their own.
        if value == extra["auto"]:
            return
        meta = msgspec.Meta(ge=extra["least"], le=meta.le)
    if meta.gt is not None and not value > meta.gt:  # "not": refuses NaN, too
        raise ValueError(f"{name} must be more than {meta.gt}, not {value!r}")
    if meta.ge is not None and not value >= meta.ge:
        raise ValueError(f"{name} must be at least {meta.ge}, not {value!r}")
    if meta.le is not None and not value <= meta.le:
        raise ValueError(f"{name} must be at most {meta.le}, not {value!r}")
