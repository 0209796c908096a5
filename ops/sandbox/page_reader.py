"""Reads pages of the console as a person who is logged in: their figures, their tables and their links."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from urllib.parse import parse_qs, urlsplit

import httpx


@dataclass
class PageCell:
    """A cell of a table, or a figure."""

    text: str = ""
    exact: str = ""
    """Its value with all digits, where the page has it: money in nano-dollars, in charts in dollars."""
    link: str = ""

    @property
    def amount(self) -> int | None:
        """Its whole number; None: it shows none."""
        digits = self.exact or self.text.replace(",", "")
        return int(digits) if digits.removeprefix("-").isdecimal() else None

    def of_link(self, name: str) -> str:
        return parse_qs(urlsplit(self.link).query).get(name, [""])[0]


@dataclass
class ConsolePage:
    """The content of a page; figures, tables and links by their names."""

    path: str
    figures: dict[str, PageCell] = field(default_factory=dict)
    tables: dict[str, list[list[PageCell]]] = field(default_factory=dict)
    heads: dict[str, list[str]] = field(default_factory=dict)
    """Heads of the columns, by the table's name."""
    links: dict[str, str] = field(default_factory=dict)
    form_token: str = ""

    def rows(self, table: str) -> list[dict[str, PageCell]]:
        """A table's rows by column head; none for a missing table."""
        heads = self.heads.get(table, [])
        return [dict(zip(heads, row, strict=True)) for row in self.tables.get(table, [])]


class _Parser(HTMLParser):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.page = ConsolePage(path)
        self._table = ""
        self._into: PageCell | None = None
        """The cell, head, figure or link whose text is read."""
        self._until = ""
        self._figure = ""
        self._link: PageCell | None = None
        self._link_name = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        kinds = values.get("class", "").split()
        if tag == "div" and values.get("role") == "region":
            self._table = values["aria-label"]
            self.page.tables[self._table], self.page.heads[self._table] = [], []
        elif tag == "tr" and self._table:
            self.page.tables[self._table].append([])
        elif tag in ("td", "th") and self._table:
            self._begin(PageCell(exact=values.get("data-value", "")), tag)
        elif tag == "div" and ("subheader" in kinds or "h1" in kinds):
            self._begin(PageCell(link="name" if "subheader" in kinds else ""), "div")
        elif tag == "data" and self._into is not None:
            self._into.exact = values.get("value", "")
        elif tag == "a":
            self._link, self._link_name = PageCell(link=values.get("href", "")), values.get("aria-label", "")
            if self._into is not None and not self._into.link:
                self._into.link = self._link.link
        elif tag == "input" and values.get("name") == "form_token":
            self.page.form_token = values.get("value", "")

    def handle_endtag(self, tag: str) -> None:
        if tag == "a" and self._link is not None:
            self.page.links[self._link_name or self._link.text.strip()] = self._link.link
            self._link = None
        elif tag == "table":
            self.page.tables[self._table] = [row for row in self.page.tables[self._table] if row]
            self._table = ""
        elif self._into is not None and tag == self._until:
            self._end(self._into, tag)
            self._into = None

    def handle_data(self, data: str) -> None:
        for cell in (self._into, self._link):
            if cell is not None:
                cell.text += data

    def _begin(self, cell: PageCell, until: str) -> None:
        self._into, self._until = cell, until

    def _end(self, cell: PageCell, tag: str) -> None:
        cell.text = " ".join(cell.text.split())
        if tag == "th":
            self.page.heads[self._table].append(cell.text)
        elif tag == "td":
            self.page.tables[self._table][-1].append(cell)
        elif cell.link == "name":
            self._figure = cell.text
        else:
            self.page.figures[self._figure] = cell


def parse_page(path: str, text: str) -> ConsolePage:
    parser = _Parser(path)
    parser.feed(text)
    return parser.page


class PageReader:
    """A person's browser without scripts."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.paths: set[str] = set()

    async def get(self, path: str) -> ConsolePage:
        answer = await self._http.get(path)
        answer.raise_for_status()
        self.paths.add(path)
        return parse_page(path, answer.text)

    async def all_of(self, path: str, more: str) -> list[ConsolePage]:
        """A page and those behind its link `more`, to the last. Raises `httpx.HTTPError`."""
        pages = [await self.get(path)]
        while following := pages[-1].links.get(more):
            pages.append(await self.get(following))
        return pages


@contextlib.asynccontextmanager
async def logged_in_reader(
    operator: httpx.AsyncClient, visitor: httpx.AsyncClient
) -> AsyncIterator[PageReader]:
    """Makes an auditor with `operator`, logs in as them with `visitor` (no key). Raises `httpx.HTTPError`."""
    body = {"name": f"reads-pages-{secrets.token_hex(8)}", "role": "auditor"}
    made = (await operator.post("/admin/v1/people", json=body)).raise_for_status().json()
    link, reader = urlsplit(made["link"]), PageReader(visitor)
    form = await reader.get(f"{link.path}?{link.query}")
    password = secrets.token_urlsafe(24)
    fields = {"password": password, "repeat": password, "token": parse_qs(link.query)["token"][0]}
    answer = await visitor.post(link.path, data=fields | {"form_token": form.form_token})
    if not answer.has_redirect_location:
        raise httpx.HTTPStatusError(
            f"{answer.status_code} to a log-in", request=answer.request, response=answer
        )
    reader.paths.clear()
    try:
        yield reader
    finally:
        await operator.post(f"/admin/v1/people/{made['name']}/suspend")
