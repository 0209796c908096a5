"""Records as rows of their tables and as JSON, field by field, by the fields' types. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from enum import Enum
from functools import cache
from types import UnionType
from typing import Annotated, Any, NamedTuple, Self, get_args, get_origin, get_type_hints

from tenants.instants import from_us, to_us
from tenants.networks import Network, network_of

Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class As:
    """Stands in the annotation of a field that is stored or shown otherwise than its name says."""

    name: str = ""
    """Of the column, and in JSON."""
    json: str = ""
    """In JSON alone."""
    is_only_if_true: bool = False
    """JSON has it only where it is true."""
    is_stored: bool = True


class Codec(NamedTuple):
    """How values of a type are written, and read back."""

    to_json: Convert
    to_column: Convert
    from_column: Convert
    is_instant: bool = False


class Column(NamedTuple):
    field: str
    column: str
    """Empty: it has none."""
    json: str
    is_only_if_true: bool
    codec: Codec


@dataclass(frozen=True, slots=True)
class Record:
    """Base of frozen records, each a row of a table. An instant `x_at` is stored as `x_us`, and a tuple or
    mapping without entries as NULL."""

    @classmethod
    def from_row(cls, row: Mapping[Any, Any], **unstored: Any) -> Self:
        stored = {one.field: one.codec.from_column(row[one.column]) for one in columns_of(cls) if one.column}
        return cls(**stored, **unstored)

    def as_row(self) -> dict[str, Any]:
        known = columns_of(type(self))
        return {one.column: one.codec.to_column(getattr(self, one.field)) for one in known if one.column}

    def as_json(self) -> dict[str, Any]:
        """As CLI, admin API and audit show it."""
        return {
            one.json: one.codec.to_json(getattr(self, one.field))
            for one in columns_of(type(self))
            if not one.is_only_if_true or getattr(self, one.field)
        }


def _columns_of(record: Any) -> tuple[Column, ...]:
    hints, columns = get_type_hints(record, include_extras=True), []
    for one in fields(record):
        hint, declared = hints[one.name], As()
        if get_origin(hint) is Annotated:
            hint, *metadata = get_args(hint)
            declared = next((part for part in metadata if isinstance(part, As)), declared)
        codec, name = _codec_of(hint), declared.name or one.name
        column = name.removesuffix("_at") + "_us" if codec.is_instant else name
        columns.append(
            Column(
                one.name,
                column if declared.is_stored else "",
                declared.json or name,
                declared.is_only_if_true,
                codec,
            )
        )
    return tuple(columns)


columns_of: Callable[[Any], tuple[Column, ...]] = cache(_columns_of)
"""Of a record, in the order of its fields."""


def _codec_of(hint: Any) -> Codec:
    origin, parts = get_origin(hint), get_args(hint)
    if hint == Network:
        return _alike(str, network_of)
    if origin is UnionType:
        [kind] = [part for part in parts if part is not type(None)]
        codec = _codec_of(kind)
        converts = (_or_none(codec.to_json), _or_none(codec.to_column), _or_none(codec.from_column))
        return Codec(*converts, codec.is_instant)
    if hint is datetime:
        return Codec(datetime.isoformat, to_us, from_us, is_instant=True)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _alike(lambda member: member.value, hint)
    if origin is frozenset:
        return _set_of(parts[0])
    if origin is tuple:
        part = _codec_of(parts[0])
        return _null_if_empty(
            lambda values: [part.to_json(value) for value in values],
            lambda values: tuple(part.from_column(value) for value in values or ()),
        )
    if origin is Mapping:
        part = _codec_of(parts[1])
        return _null_if_empty(
            lambda values: {name: part.to_json(value) for name, value in values.items()},
            lambda values: {name: part.from_column(value) for name, value in (values or {}).items()},
        )
    return _alike(_same, _same)


def _same(value: Any) -> Any:
    return value


def _alike(written: Convert, read: Convert) -> Codec:
    """JSON and column have the same."""
    return Codec(written, written, read)


def _null_if_empty(written: Convert, read: Convert) -> Codec:
    return Codec(written, lambda values: written(values) or None, read)


def _or_none(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _set_of(kind: Any) -> Codec:
    """A list: of an enumeration in its order, else sorted."""
    if issubclass(kind, Enum):
        return _alike(
            lambda members: [member.value for member in kind if member in members],
            lambda values: frozenset(kind(value) for value in values),
        )
    return _alike(sorted, frozenset)
