"""A resource: one declaration of a noun, which routes, pages, commands and the configuration file read.

A list or an act without a scope fails at import."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import quote

import msgspec
from sqlalchemy import Connection
from sqlalchemy.sql import ColumnElement

from tenants.admin.admin import Admin
from tenants.admin.audit import Actor
from tenants.admin.cursor import SortKey
from tenants.admin.table_noun import TableNoun
from tenants.admin.transaction import IfMatch
from tenants.people.roles import Act
from tenants.types import SCOPES

R = TypeVar("R")
NUMBERS = ("number", "seconds", "money", "share", "percent", "factor", "thousandths")
NONE = "–"
Json = dict[str, Any]


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


PAGE_TIMES = {Kind.SINCE: "from", Kind.UNTIL: "to"}
LABELS = {Kind.SINCE: "From (UTC)", Kind.UNTIL: "Until (UTC)"}
MOST = dict.fromkeys((Kind.TENANT, Kind.PROJECT, Kind.KEY), 64)
"""Characters of names, ids and prefixes."""
HELP = {
    Kind.TENANT: "Name or id.",
    Kind.PROJECT: "Id, or beside the tenant its name.",
    Kind.KEY: "Id or visible prefix.",
    Kind.REQUEST: "Its id, or that of its answer.",
    Kind.SINCE: "From then on.",
    Kind.UNTIL: "Before then.",
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


class NamedFilter(NamedTuple):
    field: str
    """In the struct."""
    name: str
    """In addresses, and with dashes as an option: `from` of the field `since`."""
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


class Form(StrEnum):
    """How a value is written on pages and in tables."""

    TEXT = "text"
    CODE = "code"
    BADGE = "badge"
    ID = "id"
    """Its end, with the whole in the title."""
    INSTANT = "instant"
    NUMBER = "number"
    SECONDS = "seconds"
    MONEY = "money"
    """Nano-dollars."""
    SHARE = "share"
    """0 to 1, in per cent."""
    PERCENT = "percent"
    FACTOR = "factor"
    """As it was set: 1, 0.25."""
    THOUSANDTHS = "thousandths"
    """1000: 1."""
    TENANT = "tenant"
    PROJECT = "project"
    KEY = "key"
    """These by name, else by id."""
    CHANGES = "changes"
    """The fields that differ between the row's `before` and `after`."""
    LINKS = "links"
    """Pairs of a text and the address that it leads to."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One value of a row, as pages and tables show it."""

    name: str
    """Of the row's JSON; of a tenant, project or key without `_id`."""
    label: str
    form: Form = Form.TEXT
    link: str = ""
    """Where it leads on pages, with the row's values in it: `/console/requests/{id}`."""
    good: str = ""
    """Of a badge: the value that is as it should be."""
    missing: str = NONE
    """What stands for none."""
    beside: bool = False
    """On pages in one cell with the one before it, after a comma."""
    below: bool = False
    """The same, on a line of its own."""
    of: str = ""
    """Of a share: the value of the row that it is a part of; empty: it is one by itself."""
    on_page: bool = True
    in_table: bool = True
    """Of the command."""

    def href(self, row: Mapping[str, Any]) -> str:
        return self.link.format_map({name: quote(str(value), safe="") for name, value in row.items()})


class PageColumn(NamedTuple):
    """A column of a page's table: values that stand in one cell."""

    parts: tuple[Shown, ...]

    @property
    def label(self) -> str:
        return ", ".join(part.label for part in self.parts if part.label)

    @property
    def is_tenant(self) -> bool:
        """Which says nothing where only one tenant's rows are shown."""
        return len(self.parts) == 1 and self.parts[0].form is Form.TENANT

    @property
    def is_number(self) -> bool:
        return self.parts[0].form in NUMBERS

    @property
    def heading(self) -> str | tuple[str, str]:
        """As `tables.html` takes it."""
        return (self.label, "number") if self.is_number else self.label


def page_columns(shown: tuple[Shown, ...]) -> list[PageColumn]:
    columns: list[PageColumn] = []
    for part in shown:
        if not part.on_page:
            continue
        if (part.beside or part.below) and columns:
            columns[-1] = PageColumn((*columns[-1].parts, part))
        else:
            columns.append(PageColumn((part,)))
    return columns


@dataclass(frozen=True, slots=True)
class PageRequest:
    """What a reader reads one page by."""

    query: Any
    """Of the resource's `ListQuery`."""
    after: SortKey | None
    most: int
    """Rows: one more than the page has, to see whether there are more."""
    of_tenant: str | None
    """Only what this tenant (id) may see."""
    now_us: int
    only: frozenset[str] | None = None
    """Only what belongs to these tenants (ids); None: to any."""


Reader = Callable[[Connection, PageRequest], tuple[list[R], SortKey | None]]
"""Returns rows in order, and the sort key of the last row scanned where a bound ended the scan early. Raises
`Invalid`, `NotFound`."""


@dataclass(frozen=True, slots=True)
class OwnList(Generic[R]):
    """The list that a tenant's own key reads."""

    path: str
    scope: str
    summary: str
    description: str = ""
    shown: Callable[[R], R] = lambda row: row
    """A row as its tenant may see it."""


@dataclass(frozen=True, slots=True)
class ActCall:
    """One call of an act."""

    actor: Actor
    reference: str = ""
    """Which one, from the path; empty: the act is on none that is there."""
    command: Any = None
    """Of the act's command struct."""
    if_match: IfMatch = None
    tenant: str | None = None
    """Only one of this tenant is found."""


@dataclass(frozen=True, slots=True)
class ActDone:
    shown: Mapping[str, Any]
    """What the answer shows, once also a new secret."""
    stored: Mapping[str, Any] | None
    """What its entity tag is made of; None: it is gone."""


@dataclass(frozen=True)
class ResourceAct:
    """A change of the noun: one transaction with its audit row."""

    name: str
    """As the audit has it, `limit.override`; what follows the dot is the command."""
    run: Callable[[Admin, ActCall], Awaitable[ActDone]]
    scope: str
    """That an API key needs."""
    act: Act
    """That a person must be allowed to do."""
    summary: str
    command: type[msgspec.Struct] | None = None
    is_body_optional: bool = False
    method: str = "POST"
    path: str = ""
    """Behind the noun's own; `{reference}` names the one it changes."""
    status: int = 200
    is_partial: bool = False
    """What is not named stays as it is, though it is no PATCH."""
    is_list: bool = False
    """It answers rows, as the list does."""
    takes_condition: bool = True
    """Whether `If-Match` counts: of a change to what may exist."""
    description: str = ""
    confirm: tuple[str, ...] = ()
    """What a page says before it is done; empty: it asks nothing."""
    command_verb: str = ""
    """The command, where it is not the verb of the name."""
    command_help: str = ""
    answers: str = ""
    """In place of it, what `--json` answers; before that stand summary and description."""
    has_command: bool = True
    """False: the command line does it with a command of its own."""
    words: Callable[[Mapping[str, Any]], str] | None = None
    """What its command says of the answer; None: that it is done."""

    @property
    def verb(self) -> str:
        return self.name.partition(".")[2]

    @property
    def is_on_one(self) -> bool:
        return "{reference}" in self.path

    @property
    def is_change(self) -> bool:
        """Whether its command names what differs, one field at least."""
        return self.method == "PATCH" or self.is_partial

    def said(self, shown: Mapping[str, Any]) -> str:
        if self.words is not None:
            return self.words(shown)
        noun = self.name.partition(".")[0]
        return f"{noun} {shown.get('name') or shown.get('id', '')}: {self.verb.replace('_', ' ')} done"


@dataclass(frozen=True)
class Document(Generic[R]):
    """How a noun stands in the configuration file: a section of parts, each the fields of a command."""

    section: str
    part_name: str
    """In the file's schema."""
    command: type[msgspec.Struct]
    """Of the act that sets one; its field `tenant` is the tenant that the part stands in."""
    names: tuple[str, ...]
    """Fields that tell one part from another."""
    what: str
    """One part for people: `target {metric} in tier {tier}`."""
    rows: Callable[[Connection], list[R]]
    draft: Callable[[Any], R]
    """What the command would make, without id. Raises `Invalid`."""
    order: Callable[[R], Any]
    set: str
    """The act's name."""
    remove: str
    of_platform: bool = True
    of_tenants: bool = False

    @classmethod
    def of(
        cls,
        noun: TableNoun[R],
        command: type[msgspec.Struct],
        names: tuple[str, ...],
        what: str,
        *,
        section: str = "",
        part_name: str = "",
        order: Callable[[R], Any] | None = None,
        of_platform: bool = True,
        of_tenants: bool = False,
    ) -> Document[R]:
        """Of a noun with a table of its own, in its order."""
        return cls(
            section or noun.words,
            part_name or f"Config{noun.name.capitalize()}",
            command,
            names,
            what,
            noun.rows,
            noun.draft,
            order or (lambda row: tuple(noun.as_row(row)[column.name] for column in noun.order)),
            f"{noun.name}.set",
            f"{noun.name}.remove",
            of_platform,
            of_tenants,
        )


@dataclass(frozen=True)
class Resource(Generic[R]):
    """A noun. Rows have names beside ids wherever they are shown."""

    name: str
    """In the singular: its command group, and the name of its path's parameter."""
    plural: str
    """Its address: `/admin/v1/<plural>`, `/console/<plural>`."""
    title: str
    record: type[R]
    query: type[ListQuery]
    read: Reader[R]
    order: tuple[ColumnElement[Any], ...] | Callable[[Any], tuple[type, ...]]
    """What the list is sorted by; its last row's values are the cursor. Or their types, by the query."""
    as_json: Callable[[R], Json]
    """Without secrets."""
    shown: tuple[Shown, ...]
    scope: str
    """That an API key needs to list it."""
    act: Act
    """That a person must be allowed to do to see it."""
    summary: str
    description: str = ""
    key_of: Callable[[R], SortKey] | None = None
    """A row's values of `order`; None: its attributes of these names."""
    noun: str = ""
    """What people call it, where that is not its name."""
    command: str = "list"
    group_help: str = ""
    command_help: str = ""
    answers: str = ""
    """In place of it, what `--json` answers; before that stands the summary."""
    own: OwnList[R] | None = None
    find: Callable[[Connection, str, str | None, int], R] | None = None
    """One by its reference, with a tenant only among that one's, as it is at that time (microseconds). Raises
    `NotFound`, `Invalid`."""
    stored: Callable[[R], Json] | None = None
    """What the entity tag of one is made of; None: its JSON."""
    stored_list: Callable[[Any, list[R]], Mapping[str, Any] | None] | None = None
    """What the entity tag of all rows of a query is made of; None: they have none."""
    one_description: str = ""
    """Of the route that shows one."""
    is_named_in_tenant: bool = False
    """A reference may be a name, beside the tenant's: routes and commands take `tenant`, too."""
    is_whole: bool = False
    """Its command lists all there are, as a JSON list without pages."""
    rows: int = 50
    """Of a page of its command, where it is not given."""
    acts: tuple[ResourceAct, ...] = ()
    document: Document[R] | None = None
    """None: it stands in no configuration file, or in a section of its own making."""
    file: tuple[str, ...] = ()
    """Columns of the list as a CSV file; empty: it has none."""
    has_page: bool = True
    """False: the console shows it in pages of its own."""
    empty: tuple[str, str] = ("There is none", "With these filters there is none; take one away.")
    """What a page says where there are no rows, and what to do."""
    page: str = ""
    """Of its pages' addresses; empty: as its plural."""
    menu: str = ""
    """The menu's entry that its page belongs to; empty: its own."""

    def __post_init__(self) -> None:
        scopes = [self.scope, *(act.scope for act in self.acts), *([self.own.scope] if self.own else [])]
        if unknown := [scope for scope in scopes if scope not in SCOPES]:
            raise ValueError(f"{self.name}: a list or act has no scope that there is: {unknown}")
        filters_of(self.query)

    @property
    def article(self) -> str:
        return "an" if (self.noun or self.name)[0] in "aeiou" else "a"

    @property
    def path(self) -> str:
        return f"/admin/v1/{self.plural}"

    @property
    def page_path(self) -> str:
        return f"/console/{self.page or self.plural}"

    @property
    def page_columns(self) -> list[PageColumn]:
        return page_columns(self.shown)

    def stored_of(self, row: R) -> Json:
        return (self.stored or self.as_json)(row)

    def sort_key(self, row: R) -> SortKey:
        if self.key_of is not None:
            return self.key_of(row)
        assert isinstance(self.order, tuple)
        return tuple(getattr(row, column.name) for column in self.order)

    def key_types(self, query: ListQuery) -> tuple[type, ...]:
        if callable(self.order):
            return self.order(query)
        return tuple(column.type.python_type for column in self.order)
