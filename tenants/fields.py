"""How the fields of commands are described and taken, for bodies, options and forms alike. Pure."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from tenants.errors import Invalid
from tenants.typed import duration_typed, number_typed

C = TypeVar("C", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Field:
    """Stands in the annotation of a command's field."""

    help: str = ""
    label: str = ""
    """On forms; empty: the field's name."""
    option: str = ""
    """On the command line; empty: the name with dashes."""
    choices: tuple[str, ...] = ()
    schema: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further keywords of JSON Schema: bounds and forms, from the constants that check them."""
    is_argument: bool = False
    """On the command line it has no option: it stands by itself."""
    is_duration: bool = False
    """Seconds, on the command line as a duration such as 30m."""
    hundred: int = 0
    """What 100 % is, of a number that may be typed in per cent."""
    form_help: str | None = None
    """On forms, in place of `help`."""
    unit: str = ""
    """What a form asks for, such as `$ per million tokens`."""
    scale: int = 1
    """What is typed on a form, times this, is the field's number."""
    is_secret: bool = False
    """Never shown again, nor kept."""
    none: str = ""
    """On the command line: the word, or the option, that empties the field."""
    none_help: str = ""
    """Of that option."""
    metavar: str = ""
    """On the command line, what the option takes; empty: its kind."""
    without: str = ""
    """Of a new one, in words: what holds where it is not given."""
    option_default: str = ""
    """On the command line, where that has another one."""


class CommandField(NamedTuple):
    name: str
    kind: type
    """`str`, `int`, `float`, `bool`, `list` or `dict`; of an optional field the kind it may have."""
    default: Any
    """`msgspec.NODEFAULT`: it must be given."""
    field: Field

    @property
    def is_required(self) -> bool:
        return self.default is msgspec.NODEFAULT

    @property
    def is_flag(self) -> bool:
        return self.kind is bool

    @property
    def json_schema(self) -> dict[str, Any]:
        """Its keywords, with the choices."""
        if not self.field.choices:
            return dict(self.field.schema)
        # A text that a word empties may be empty.
        empty = ("",) if self.has_word and self.kind is str else ()
        chosen: dict[str, Any] = {"enum": [*map(str, self.field.choices), *empty]}
        if self.kind is list:
            chosen = {"items": {"type": "string"} | chosen}
        return {**self.field.schema, **chosen}

    @property
    def has_word(self) -> bool:
        """Whether a word of its option empties it."""
        return bool(self.field.none) and not self.field.none.startswith("--")

    @property
    def option(self) -> str:
        return self.field.option or "--" + self.name.replace("_", "-")

    @property
    def label(self) -> str:
        return self.field.label or self.name.replace("_", " ").capitalize()

    @property
    def form_hint(self) -> str:
        return self.field.help if self.field.form_help is None else self.field.form_help

    @property
    def form_label(self) -> str:
        """With its unit."""
        return f"{self.label} ({self.field.unit})" if self.field.unit else self.label


@cache
def fields_of(command: type[msgspec.Struct]) -> tuple[CommandField, ...]:
    """In the struct's order."""
    hints, fields = get_type_hints(command, include_extras=True), []
    for one in msgspec.structs.fields(command):
        declared, kind = _declared(hints[one.name])
        default = one.default
        if one.default_factory is not msgspec.NODEFAULT:
            default = one.default_factory()
        fields.append(CommandField(one.name, kind, default, declared))
    return tuple(fields)


def _declared(hint: Any) -> tuple[Field, type]:
    given = Field()
    if get_origin(hint) is Annotated:
        hint, *metadata = get_args(hint)
        given = next((part for part in metadata if isinstance(part, Field)), given)
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
        if get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        return given, str
    return given, get_origin(hint) or hint


def without_secrets(record: Any) -> dict[str, Any]:
    """A dataclass as JSON, without the fields whose annotation says that they are secret."""
    hints = get_type_hints(type(record), include_extras=True)
    return {name: getattr(record, name) for name, hint in hints.items() if not _declared(hint)[0].is_secret}


def command_of(command: type[C], given: Mapping[str, Any]) -> C:
    """The command from fields as typed, in which an empty text stands for a field that is left out. Raises
    `Invalid` for the first field that is missing or of another kind."""
    values: dict[str, Any] = {}
    for one in fields_of(command):
        value = given.get(one.name)
        if value is None or value == "" or value == ():
            if one.is_required:
                raise Invalid(one.name, "is missing")
            continue
        values[one.name] = _as_kind(one, value)
    return command(**values)


def _as_kind(one: CommandField, value: Any) -> Any:
    if not isinstance(value, str):
        return list(value) if one.kind is list else value
    if one.kind is bool:
        return value == "yes"
    if one.kind is list:
        return [part.strip() for part in value.split(",") if part.strip()]
    if one.kind in (int, float):
        if one.field.is_duration and (seconds := duration_typed(value)) is not None:
            return seconds
        number = number_typed(value, one.field.hundred)
        if number is None:
            raise Invalid(one.name, f"{value[:40]!r} is not a number")
        number *= one.field.scale
        if one.kind is int and number != int(number):
            if one.field.scale == 1:
                raise Invalid(one.name, f"{value[:40]!r} is not a whole number")
            raise Invalid(one.name, f"{value[:40]!r} is finer than 1/{one.field.scale}, and would be rounded")
        return one.kind(number)
    return value


def as_typed(one: CommandField, value: Any) -> str:
    """A value as a form shows it; inverse of what `command_of` reads."""
    match value:
        case bool():
            return "yes" if value else ""
        case int() | float():
            number = Decimal(str(value)) / one.field.scale
            return f"{number.normalize():f}" if number else "0"
        case str():
            return value
        case list() | tuple():
            return ", ".join(map(str, value))
        case _:
            return ""
