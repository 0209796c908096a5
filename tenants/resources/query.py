"""The filters of a list, as a struct whose fields say how each picks rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from sqlalchemy.sql import ColumnElement


class Kind(StrEnum):
    """What a filter is compared with."""

    TEXT = "text"
    TENANT = "tenant"
    """Name or id."""
    PROJECT = "project"
    """Id, or beside a tenant its name."""
    KEY = "key"
    """Id or visible prefix."""
    REQUEST = "request"
    """A request's id; API and pages also take that of its answer."""
    CHOICE = "choice"
    WORDS = "words"
    """Some of the choices, with commas between them; empty: none."""
    FLAG = "flag"
    SINCE = "since"
    """An instant with a time zone, inclusive."""
    UNTIL = "until"
    """The same, exclusive."""
    START = "start"
    """An instant, or a date."""
    SEVERAL = "several"
    """Texts: it may be given more than once."""


LABELS = {Kind.SINCE: "From (UTC)", Kind.UNTIL: "Until (UTC)"}
MOST = dict.fromkeys((Kind.TENANT, Kind.PROJECT, Kind.KEY), 64)
"""Characters of names, ids and prefixes."""
HELP = {
    Kind.TENANT: "Name or id.",
    Kind.PROJECT: "Id; with the tenant also a name.",
    Kind.KEY: "Id or visible prefix.",
    Kind.REQUEST: "Id of the request or of its answer.",
    Kind.SINCE: "From this time on.",
    Kind.UNTIL: "Before this time.",
}


@dataclass(frozen=True, slots=True)
class Filter:
    """How one field of a query picks rows; stands in the field's annotation."""

    column: ColumnElement[Any] | None = None
    """None: the resource's own reader takes the value."""
    kind: Kind = Kind.TEXT
    label: str = ""
    """On pages; empty: the field's name."""
    help: str = ""
    choices: tuple[str, ...] = ()
    """Of a text: suggestions."""
    most: int = 256
    """Characters."""
    option: str = ""
    """On the command line, with spaces between several; empty: its name with dashes."""
    usual: str = ""
    """What the command takes where it is not given, such as 24h."""
    schema: Mapping[str, Any] | None = None
    """Keywords of JSON Schema, in place of its bounds."""


class ListQuery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of the filters of a list: each field optional, with a `Filter` in its annotation. None: any."""


PAGE_TIMES = {Kind.SINCE: "from", Kind.UNTIL: "to"}


class NamedFilter(NamedTuple):
    field: str
    """In the struct."""
    name: str
    """In addresses, and with dashes as an option, but for times: those have the same options everywhere."""
    default: Any
    filter: Filter

    @property
    def page_name(self) -> str:
        """In addresses of pages: all have `from` and `to`."""
        return PAGE_TIMES.get(self.filter.kind, self.name)


@cache
def filters_of(query: type[ListQuery]) -> tuple[NamedFilter, ...]:
    """In the struct's order. Raises `TypeError` for a field without a `Filter`."""
    hints, filters = get_type_hints(query, include_extras=True), []
    for one in msgspec.structs.fields(query):
        given = get_args(hints[one.name]) if get_origin(hints[one.name]) is Annotated else ()
        declared = next((part for part in given if isinstance(part, Filter)), None)
        if declared is None:
            raise TypeError(f"{query.__name__}.{one.name} has no Filter in its annotation")
        words = declared.help or HELP.get(declared.kind, "")
        choices = tuple(map(str, declared.choices))
        most = min(declared.most, MOST.get(declared.kind, declared.most))
        label = declared.label or LABELS.get(declared.kind) or one.encode_name.replace("_", " ").capitalize()
        filters.append(
            NamedFilter(
                one.name,
                one.encode_name,
                one.default,
                replace(declared, help=words, label=label, most=most, choices=choices),
            )
        )
    return tuple(filters)
