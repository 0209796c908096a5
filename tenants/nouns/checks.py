"""Checks of values that several nouns have. Pure; each error names the field, the bound and the remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from enum import StrEnum
from typing import TypeVar
from zoneinfo import ZoneInfo

from tenants.errors import Invalid

MAX_MODELS = 100
MAX_MODEL_CHARS = 256
MAX_DISPLAY_CHARS = 100
MAX_REASON_CHARS = 200
REASON = {"pattern": r"\S", "maxLength": MAX_REASON_CHARS}
MAX_ZONE_CHARS = 64
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ZONE = re.compile(r"[A-Za-z][A-Za-z0-9_+/-]*")
_ID = re.compile(r"(ten|prj|key|lim)_")
E = TypeVar("E", bound=StrEnum)


def name(field: str, value: str) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise Invalid(field, "use 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit")
    if _ID.match(value):
        raise Invalid(field, "must not look like an id (ten_, prj_, key_, lim_)")
    return value


def display_name(value: str) -> str | None:
    """A name for people, with spaces; None: there is none."""
    text = value.strip() if isinstance(value, str) else "\n"
    if len(text) > MAX_DISPLAY_CHARS or not text.isprintable():
        raise Invalid("display_name", f"needs at most {MAX_DISPLAY_CHARS} printable characters; empty: none")
    return text or None


def plain_text(field: str, value: str, most: int = 256) -> str:
    """A value to look for, of printable characters: PostgreSQL takes no NUL."""
    if not value or len(value) > most or not value.isprintable():
        raise Invalid(field, f"needs 1 to {most} printable characters; leave it out for any")
    return value


def finite(field: str, value: float, what: str = "a finite number") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Invalid(field, f"must be {what}")
    return value


def choice(field: str, kind: type[E], value: str) -> E:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise Invalid(field, f"{value!r} is not one of {known}") from None


def models(values: Iterable[str] | None) -> frozenset[str] | None:
    """None: all."""
    if values is None:
        return None
    chosen = frozenset(values)
    if not chosen or len(chosen) > MAX_MODELS:
        raise Invalid("models", f"name 1 to {MAX_MODELS} models, or leave it out to allow all")
    return frozenset(model("models", value) for value in chosen)


def model(field: str, value: str) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_MODEL_CHARS:
        raise Invalid(field, f"a model's name has 1 to {MAX_MODEL_CHARS} characters")
    return value


def seconds(field: str, value: float, most: float, *, least: float = 0.0) -> float:
    if not least <= finite(field, value, "a finite number of seconds") <= most:
        raise Invalid(field, f"must lie between {least:g} and {most:g} seconds")
    return float(value)


def whole(value: int, most: int, *, least: int = 0, field: str = "amount") -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Invalid(field, "must be a whole number")
    if not least <= value <= most:
        raise Invalid(field, f"must lie between {least} and {most}")
    return value


def instant(field: str, value: str) -> datetime:
    """ISO 8601 with a time zone, such as 2026-01-31T18:00:00+01:00."""
    try:
        at = datetime.fromisoformat(value)
        if at.tzinfo is None:
            raise ValueError
        return at.astimezone(UTC)
    except (ValueError, TypeError, OverflowError):
        raise Invalid(
            field,
            f"{str(value)[:40]!r} is not an instant with a time zone, such as 2026-01-31T18:00:00+01:00",
        ) from None


def iana_zone(value: str) -> str:
    try:
        if len(value) > MAX_ZONE_CHARS or ZONE.fullmatch(value) is None:
            raise ValueError
        ZoneInfo(value)
    except (ValueError, OSError, KeyError, TypeError):
        raise Invalid(
            "time_zone", f"{str(value)[:64]!r} is not a time zone such as UTC or Europe/Berlin"
        ) from None
    return value


def reason(value: str) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_REASON_CHARS:
        raise Invalid("reason", f"say why, in 1 to {MAX_REASON_CHARS} characters")
    return value
