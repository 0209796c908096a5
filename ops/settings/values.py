"""Parsers of setting texts, by the type and the bounds of the setting's field.

Every parser takes the text of a flag, an environment variable or a TOML value, and returns the value or
raises `ValueError` with what would have been accepted, fit to follow the name of the setting.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import EnumMeta
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args
from urllib.parse import urlsplit

from msgspec import Meta

from tenants.errors import Invalid
from tenants.pricing.pricing import Price

T = TypeVar("T")
N = TypeVar("N", int, float)
SCALES: dict[str, tuple[float, int]] = {"percent": (1, 100), "days": (86_400.0, 1)}
"""By unit of a whole number: what it is multiplied and divided by."""


@dataclass(frozen=True)
class ValueKind(Generic[T]):
    """A kind of value: what it accepts in words, the parser, and the text of a value."""

    accepts: str
    parse: Callable[[str], T]
    shown: Callable[[T], str] = str

    def __call__(self, text: str) -> T:
        """The value of `text`; `ValueError` says what is accepted."""
        try:
            return self.parse(text.strip())
        except (ValueError, ArithmeticError) as error:
            detail = str(error)
            known = isinstance(error, Unaccepted)
            raise Unaccepted(f"{self.accepts} ({detail})" if known and detail else self.accepts) from None


class Unaccepted(ValueError):
    """The text is none of what the setting accepts."""


def kind_of(hint: Any) -> ValueKind[Any]:
    """The kind of a field: a `ValueKind` in its annotation, or what follows from its type and bounds."""
    base, *marks = get_args(hint)
    for mark in marks:
        if isinstance(mark, ValueKind):
            return mark
    meta = [mark for mark in marks if isinstance(mark, Meta)][-1] if base in (int, float, str) else Meta()
    unit = (meta.extra or {}).get("unit")
    if base is bool:
        return _yes_or_no()
    if base is Path:
        return _path()
    if base is str:
        return _text(meta)
    if unit == "bytes":
        return _size(meta)
    if unit in SCALES:
        return _whole(meta, *SCALES[unit])
    if base is int:
        return _whole(meta)
    if base is float:
        return _seconds(meta)
    if isinstance(base, EnumMeta):
        choices = word(*base)
        return ValueKind(choices.accepts, lambda text: base(choices.parse(text)))
    return word(*get_args(base))


def _bounded(number: N, meta: Meta) -> N:
    """`number`, unless it is out of bounds (NaN is). Raises `ValueError`."""
    low, high = _bounds(meta)
    if not low <= number <= high:
        raise ValueError(number)
    return number


def _bounds(meta: Meta) -> tuple[float, float]:
    assert meta.ge is not None
    assert meta.le is not None
    return meta.ge, meta.le


def _whole(meta: Meta, factor: float = 1, divisor: int = 1) -> ValueKind[Any]:
    """A whole number in a unit of `factor / divisor`; underscores may group digits."""

    def parse(text: str) -> float:
        if not re.fullmatch(r"[+-]?\d[\d_]*", text):
            raise ValueError(text)
        number = int(text) * factor
        return _bounded(number / divisor if divisor != 1 else number, meta)

    def shown(value: float) -> str:
        return str(round(value * divisor / factor))

    low, high = _bounds(meta)
    return ValueKind(f"a whole number from {shown(low)} to {shown(high)}", parse, shown)


def _size(meta: Meta) -> ValueKind[int]:
    """A number of bytes, with an optional unit: 512KiB, 4MiB, 2GiB."""
    units = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}

    def parse(text: str) -> int:
        match = re.fullmatch(r"(\d+)\s*([a-zA-Z]*)", text)
        if match is None or match[2].lower() not in units:
            raise ValueError(text)
        return _bounded(int(match[1]) * units[match[2].lower()], meta)

    return ValueKind(f"a size from {meta.ge} to {meta.le} bytes, such as 512KiB, 4MiB or 1GiB", parse)


def _seconds(meta: Meta) -> ValueKind[float]:
    return ValueKind(
        f"a number of seconds from {meta.ge:g} to {meta.le:g}",
        lambda text: _bounded(float(text), meta),
        lambda value: f"{value:g}",
    )


def word(*choices: str) -> ValueKind[str]:
    """One of some words."""

    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(text)
        return text.lower()

    return ValueKind("one of " + ", ".join(choices), parse)


def _yes_or_no() -> ValueKind[bool]:
    yes_or_no = word("yes", "no")
    return ValueKind(
        yes_or_no.accepts,
        lambda text: yes_or_no.parse(text) == "yes",
        lambda value: "yes" if value else "no",
    )


def _path() -> ValueKind[Path]:
    """A path; `~` is the home directory."""

    def parse(text: str) -> Path:
        if not text or "\0" in text:
            raise ValueError(text)
        return Path(text).expanduser()

    return ValueKind("a path", parse)


def _text(meta: Meta) -> ValueKind[str]:
    """Text that matches the whole pattern; the title says so in words."""
    title, pattern = meta.title or "", meta.pattern or ""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(text)
        return text

    return ValueKind(title, parse)


def url(*schemes: str, example: str) -> ValueKind[str]:
    """A URL with one of these schemes; empty: not set."""

    def parse(text: str) -> str:
        if text and urlsplit(text).scheme not in schemes:
            raise ValueError(text)
        return text

    return ValueKind(f"a URL such as {example}, or nothing", parse)


def prices() -> ValueKind[dict[str, Price]]:
    """`model=input/output[/cached input]`, nano-dollars a token, several separated by commas."""

    def parse(text: str) -> dict[str, Price]:
        found: dict[str, Price] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            match = re.fullmatch(r"([^=]+)=(\d{1,12})/(\d{1,12})(?:/(\d{1,12}))?", item)
            if match is None:
                raise Unaccepted(f"{item!r} is not of that form")
            name, price_input, price_output = match[1].strip(), int(match[2]), int(match[3])
            cached = int(match[4]) if match[4] else price_input
            try:
                found[name] = Price(price_input, cached, price_output)
            except Invalid as error:
                raise Unaccepted(f"{item!r}: {error}") from None
        return found

    return ValueKind(
        "MODEL=INPUT/OUTPUT[/CACHED], nano-dollars a token, separated by commas, such as my-model=150/600",
        parse,
    )


def multipliers(names: tuple[str, ...]) -> ValueKind[dict[str, int]]:
    """`tier=thousandths` for some of the tiers, separated by commas."""

    def parse(text: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            match = re.fullmatch(r"([a-z]+)\s*=\s*(\d{1,6})", item)
            if match is None or match[1] not in names:
                raise Unaccepted(f"{item!r} is not of that form")
            found[match[1]] = int(match[2])
        return found

    return ValueKind(
        f"TIER=THOUSANDTHS, separated by commas, for the tiers {', '.join(names)}",
        parse,
        lambda value: ",".join(f"{tier}={multiplier}" for tier, multiplier in value.items()),
    )
