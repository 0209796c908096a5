"""Parsers of setting texts, by the type and the bounds of the setting's field.

Every parser takes the text of a flag, an environment variable or a TOML value, and returns the value or
raises `ValueError` with what would have been accepted, fit to follow the name of the setting.
"""

from __future__ import annotations

import builtins
import pathlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin
from urllib.parse import urlsplit

from msgspec import Meta

from gateway.config import Origin
from tenants.errors import Invalid
from tenants.networks import Network, network_of
from tenants.pricing.pricing import Price
from tenants.storage.redis_url import parse_redis_url

T = TypeVar("T")


@dataclass(frozen=True)
class ValueKind(Generic[T]):
    """A kind of value: what it accepts in words, the parser, and the text of a value."""

    accepts: str
    parse: Callable[[str], T]
    shown: Callable[[T], str] = str

    def __call__(self, text: str) -> T:
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
    if get_origin(base) in (Union, UnionType):  # or not set, or the word auto
        [base] = [kind for kind in get_args(base) if isinstance(kind, type) and kind is not NoneType]
    for mark in marks:
        if isinstance(mark, ValueKind):
            return mark
    meta = [Meta(), *(mark for mark in marks if isinstance(mark, Meta))][-1]
    extra = meta.extra or {}
    if "auto" in extra:
        bounds = Meta(ge=extra["least"], le=meta.le, extra={"unit": extra.get("unit")})
        return _or_auto(kind_of(Annotated[base, bounds]), extra["auto"])
    low: Any = meta.ge
    high: Any = meta.le
    match base, (meta.extra or {}).get("unit"):
        case _, "bytes":
            return _number(
                f"a size from {low} to {high} bytes, such as 512KiB, 4MiB or 1GiB", low, high, _size, str
            )
        case _, "percent":
            return _whole(low, high, lambda number: number / 100, lambda value: round(value * 100))
        case _, "days":
            return _whole(low, high, lambda number: number * 86_400.0, lambda value: round(value / 86_400))
        case builtins.int, _:
            return _whole(low, high, int, int)
        case builtins.float, "ratio" | "usd":
            return _number(f"a number from {low:g} to {high:g}", low, high, float, lambda value: f"{value:g}")
        case builtins.float, _:
            accepts = f"a number of seconds from {low:g} to {high:g}"
            return _number(accepts, low, high, float, lambda value: f"{value:g}")
        case builtins.bool, _:
            return _mapped({"yes": True, "no": False})
        case builtins.str, _:
            return _text(meta.title or "", meta.pattern or "")
        case pathlib.Path, _:
            return _path()
        case other, _ if other == tuple[Network, ...]:
            return _list_of(
                network_of, "networks in CIDR notation, separated by commas, such as 10.0.0.0/8,2001:db8::/32"
            )
        case other, _ if other == tuple[Origin, ...]:
            return _list_of(
                _origin,
                "origins separated by commas, such as https://chat.example.com,http://localhost:3000, or *",
            )
    return _mapped({str(choice): choice for choice in get_args(base) or base})


def _or_auto(kind: ValueKind[T], auto: T) -> ValueKind[T]:
    """The word auto, or a value of `kind`."""
    return ValueKind(
        f"auto, or {kind.accepts}",
        lambda text: auto if text.lower() == "auto" else kind.parse(text),
        lambda value: "auto" if value == auto else kind.shown(value),
    )


def _number(
    accepts: str, low: float, high: float, read: Callable[[str], Any], shown: Callable[[Any], str]
) -> ValueKind[Any]:
    def parse(text: str) -> Any:
        number = read(text)
        if not low <= number <= high:  # also refuses NaN
            raise ValueError(text)
        return number

    return ValueKind(accepts, parse, shown)


def _whole(
    low: float, high: float, value_of: Callable[[int], float], number_of: Callable[[Any], int]
) -> ValueKind[Any]:
    """A whole number of some unit; underscores may group digits."""

    def read(text: str) -> float:
        if not re.fullmatch(r"[+-]?\d[\d_]*", text):
            raise ValueError(text)
        return value_of(int(text))

    accepts = f"a whole number from {number_of(low)} to {number_of(high)}"
    return _number(accepts, low, high, read, lambda value: str(number_of(value)))


def _size(text: str) -> int:
    """A number of bytes, with an optional unit: 512KiB, 4MiB, 2GiB."""
    units = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
    match = re.fullmatch(r"(\d+)\s*([a-zA-Z]*)", text)
    if match is None or match[2].lower() not in units:
        raise ValueError(text)
    return int(match[1]) * units[match[2].lower()]


def _mapped(choices: Mapping[str, T]) -> ValueKind[T]:
    words = {choice: word for word, choice in choices.items()}

    def parse(text: str) -> T:
        if text.lower() not in choices:
            raise ValueError(text)
        return choices[text.lower()]

    return ValueKind("one of " + ", ".join(choices), parse, lambda value: words[value])


def word(*choices: str) -> ValueKind[str]:
    return _mapped({choice: choice for choice in choices})


def _path() -> ValueKind[Path]:
    """A path; `~` is the home directory."""

    def parse(text: str) -> Path:
        if not text or "\0" in text:
            raise ValueError(text)
        return Path(text).expanduser()

    return ValueKind("a path", parse)


def _list_of(read: Callable[[str], T], accepts: str) -> ValueKind[tuple[T, ...]]:
    def parse(text: str) -> tuple[T, ...]:
        try:
            return tuple(read(item.strip()) for item in text.split(",") if item.strip())
        except ValueError as error:
            raise Unaccepted(str(error)) from None

    return ValueKind(accepts, parse, lambda value: ",".join(map(str, value)))


def _origin(text: str) -> str:
    [_, form] = get_args(Origin)
    if not re.fullmatch(form.pattern, text):
        raise ValueError(f"{text[:64]!r} is not an origin: scheme and host, without a path")
    return text


def _text(accepts: str, pattern: str) -> ValueKind[str]:
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


def redis_url() -> ValueKind[str]:
    """A URL of Redis, of one server, Sentinels or a cluster; empty: not set."""

    def parse(text: str) -> str:
        try:
            return parse_redis_url(text).url if text else text
        except ValueError as error:
            raise Unaccepted(str(error)) from None

    return ValueKind("a URL such as redis://127.0.0.1:6379/0, or nothing", parse)


def prices() -> ValueKind[dict[str, Price]]:
    """`model=input/output[/cached input]`, nano-dollars a token, several separated by commas."""

    def parse(text: str) -> dict[str, Price]:
        parsed: dict[str, Price] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            match = re.fullmatch(r"([^=]+)=(\d{1,12})/(\d{1,12})(?:/(\d{1,12}))?", item)
            if match is None:
                raise Unaccepted(f"{item!r} is not of that form")
            name, price_input, price_output = match[1].strip(), int(match[2]), int(match[3])
            cached = int(match[4]) if match[4] else price_input
            try:
                parsed[name] = Price(price_input, cached, price_output)
            except Invalid as error:
                raise Unaccepted(f"{item!r}: {error}") from None
        return parsed

    return ValueKind(
        "MODEL=INPUT/OUTPUT[/CACHED], nano-dollars a token, separated by commas, such as my-model=150/600",
        parse,
    )


def multipliers(names: tuple[str, ...]) -> ValueKind[dict[str, int]]:
    """`tier=thousandths` for some of the tiers, separated by commas."""

    def parse(text: str) -> dict[str, int]:
        parsed: dict[str, int] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            match = re.fullmatch(r"([a-z]+)\s*=\s*(\d{1,6})", item)
            if match is None or match[1] not in names:
                raise Unaccepted(f"{item!r} is not of that form")
            parsed[match[1]] = int(match[2])
        return parsed

    return ValueKind(
        f"TIER=THOUSANDTHS, separated by commas, for the tiers {', '.join(names)}",
        parse,
        lambda value: ",".join(f"{tier}={multiplier}" for tier, multiplier in value.items()),
    )
