"""How values of rows are written on pages and in tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple
from urllib.parse import quote

NUMBERS = ("number", "seconds", "money", "share", "percent", "factor", "thousandths", "token_price")
NONE = "–"
Json = dict[str, Any]


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
    TOKEN_PRICE = "token_price"
    """Nano-dollars a token; on pages as dollars per million tokens."""
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
