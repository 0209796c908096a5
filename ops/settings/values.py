"""How does the text of a setting become a value, and what may it say?

Every parser takes the text of a flag, an environment variable or a TOML value, and returns the value or
raises `ValueError` with what would have been accepted, fit to follow the name of the setting.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from tenants.errors import Invalid
from tenants.pricing.pricing import Price

T = TypeVar("T")


@dataclass(frozen=True)
class ValueKind(Generic[T]):
    """A kind of value: what it accepts in words, and the parser."""

    accepts: str
    parse: Callable[[str], T]

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


def integer(low: int, high: int, unit: str = "") -> ValueKind[int]:
    """A whole number from `low` to `high`; underscores may group digits."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d[\d_]*", text):
            raise ValueError(text)
        number = int(text)
        if not low <= number <= high:
            raise ValueError(text)
        return number

    return ValueKind(f"a whole number from {low} to {high}{' ' + unit if unit else ''}", parse)


def size_bytes(low: int, high: int) -> ValueKind[int]:
    """A number of bytes, with an optional unit: 512KiB, 4MiB, 2GiB."""
    units = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}

    def parse(text: str) -> int:
        match = re.fullmatch(r"(\d+)\s*([a-zA-Z]*)", text)
        if match is None or match[2].lower() not in units:
            raise ValueError(text)
        number = int(match[1]) * units[match[2].lower()]
        if not low <= number <= high:
            raise ValueError(text)
        return number

    return ValueKind(f"a size from {low} to {high} bytes, such as 512KiB, 4MiB or 1GiB", parse)


def seconds(low: float, high: float) -> ValueKind[float]:
    """A time in seconds."""

    def parse(text: str) -> float:
        number = float(text)
        if not low <= number <= high:  # also refuses NaN
            raise ValueError(text)
        return number

    return ValueKind(f"a number of seconds from {low:g} to {high:g}", parse)


def word(*choices: str) -> ValueKind[str]:
    """One of some words."""

    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(text)
        return text.lower()

    return ValueKind("one of " + ", ".join(choices), parse)


def path() -> ValueKind[Path]:
    """A path; `~` is the home directory."""

    def parse(text: str) -> Path:
        if not text or "\0" in text:
            raise ValueError(text)
        return Path(text).expanduser()

    return ValueKind("a path", parse)


def text_of(accepts: str, pattern: str) -> ValueKind[str]:
    """Text that matches a pattern wholly."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(text)
        return text

    return ValueKind(accepts, parse)


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

    return ValueKind(f"TIER=THOUSANDTHS, separated by commas, for the tiers {', '.join(names)}", parse)
