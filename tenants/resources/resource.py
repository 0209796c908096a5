"""A resource: one declaration of a noun, which routes, pages, commands and the configuration file read.

A list or an act without a scope fails at import."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from sqlalchemy import Connection
from sqlalchemy.sql import ColumnElement

from tenants.admin.admin import Admin
from tenants.admin.audit import Actor
from tenants.admin.cursor import SortKey
from tenants.admin.table_noun import TableNoun
from tenants.admin.transaction import IfMatch
from tenants.people.roles import Act
from tenants.resources.query import ListQuery, filters_of
from tenants.resources.shown import Json, PageColumn, Shown, page_columns
from tenants.types import SCOPES

R = TypeVar("R")


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
    form_title: str = ""
    """Of its form and the button there; empty: its summary."""
    hint: str = ""
    """What its form says above the fields."""
    done: str = ""
    """What a page says after it; empty: that it is done."""
    changes_rows: bool = False
    """It sets by names: each row of a page leads to its form, filled in."""
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
    def button(self) -> str:
        """On the row that it changes."""
        return self.verb.replace("_", " ").capitalize()

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
