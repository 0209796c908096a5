"""Compares the sums on the console's pages with the ledger, from outside, as a person who reads them.

For servers whose whole ledger is younger than the 30 days that pages show.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from sqlalchemy import Connection, text

from ops.sandbox.page_reader import ConsolePage, PageCell, PageReader, logged_in_reader
from ops.sandbox.server import until
from ops.sandbox.usage_check import DAY_US, GROUPS, LOOKS, MAX_EXAMPLES, charges
from tenants.storage.database import open_database

NAMES = ("Requests", "Input tokens", "Cached", "Output tokens", "Charged", "Credited", "Device time")
Amounts = dict[str, int]
Group = TypeVar("Group", str, int)
Shown = dict[str, int | None]
"""Amounts by what the ledger calls them, as a page shows them; None: it shows no number."""
CALLED = {name: name for name in NAMES} | {"Cost": "Charged"}
"""Names of an amount on pages, with its name here."""
FIGURES = ("Requests", "Input tokens", "Output tokens", "Charged")
MEASURES = {
    "charged": ("Charged", 10**9),
    "requests": ("Requests", 1),
    "input": ("Input tokens", 1),
    "output": ("Output tokens", 1),
    "device": ("Device time", 1_000),
}
"""Charts over time on the page of usage, and how many of the ledger's units one of the chart's has."""
OVERVIEW_S = 25.0
"""Longer than the overview keeps what it has read of the database."""


@dataclass(frozen=True)
class LedgerBooks:
    """The rows that charge, and ids by names."""

    rows: Sequence[Mapping[str, Any]]
    tenants: Mapping[str, str]
    """Ids by name."""
    projects: Mapping[tuple[str, str], str]
    """Ids by tenant id and name."""

    def by(self, column: str, **of: str) -> dict[str, Amounts]:
        """Sums by a column, of the rows with these values; groups of zeros alone are left out."""
        return _summed((row[column], row) for row in self.rows if _has(row, of))

    def by_day(self) -> dict[int, Amounts]:
        """By the UTC day: its start, seconds since 1970."""
        return _summed((row["at_us"] // DAY_US * DAY_US // 1_000_000, row) for row in self.rows)

    def total(self, **of: str) -> Amounts:
        return _summed((0, row) for row in self.rows if _has(row, of)).get(0, dict.fromkeys(NAMES, 0))


def read_books(connection: Connection) -> LedgerBooks:
    tenants = connection.execute(text("SELECT name, id FROM tenants"))
    projects = connection.execute(text("SELECT tenant_id, name, id FROM projects"))
    return LedgerBooks(
        charges(connection),
        {row.name: row.id for row in tenants},
        {(row.tenant_id, row.name): row.id for row in projects},
    )


def _summed(rows: Iterable[tuple[Group, Mapping[str, Any]]]) -> dict[Group, Amounts]:
    by_group: dict[Group, Amounts] = {}
    for group, row in rows:
        sums = by_group.setdefault(group, dict.fromkeys(NAMES, 0))
        for name, amount in zip(NAMES, _ledger_amounts(row), strict=True):
            sums[name] += amount
    return {group: sums for group, sums in by_group.items() if any(sums.values())}


def _has(row: Mapping[str, Any], values: Mapping[str, str]) -> bool:
    return all(row[name] == value for name, value in values.items())


def _ledger_amounts(row: Mapping[str, Any]) -> tuple[int, ...]:
    """In the order of `NAMES`."""
    detail = json.loads(row["detail"]) if isinstance(row["detail"], str) else row["detail"]
    cached = int(detail.get("cached_tokens") or 0) if row["kind"] == "settle" else 0
    is_credit = row["kind"] == "credit"
    return (
        int(row["kind"] == "settle"),
        row["input_tokens"],
        max(0, min(cached, row["input_tokens"])),
        row["output_tokens"],
        0 if is_credit else row["cost_nanousd"],
        -row["cost_nanousd"] if is_credit else 0,
        row["gpu_ms"],
    )


@dataclass(frozen=True)
class PageSums:
    pages: int
    differences: list[str]


async def page_sums(
    operator: httpx.AsyncClient,
    visitor: httpx.AsyncClient,
    database_url: str,
    only: Collection[str] = (),
) -> PageSums:
    """Where pages and ledger differ. `operator` has the admin scopes; `visitor` has no key and becomes the
    reader; `only`: tenants whose own pages are read (none: all). Pages that differ are read again, as
    requests may settle meanwhile. Raises `httpx.HTTPError`, `DatabaseUnavailable`."""
    database = open_database(database_url)
    try:
        async with logged_in_reader(operator, visitor) as reader:
            for _ in range(LOOKS):
                check = _Check(reader, await database.read(read_books))
                await check.pages(only)
                if not check.differences:
                    break
            differences: list[str] = []

            async def overview_is_equal() -> bool:
                last = _Check(reader, await database.read(read_books))
                await last.overview()
                differences[:] = last.differences
                return not differences

            await until(overview_is_equal, OVERVIEW_S)
            return PageSums(len(reader.paths), [*check.differences, *differences][:MAX_EXAMPLES])
    finally:
        await database.close()


class _Check:
    def __init__(self, reader: PageReader, books: LedgerBooks) -> None:
        self.differences: list[str] = []
        self._reader = reader
        self._books = books

    async def pages(self, only: Collection[str]) -> None:
        await self._usage()
        quotes = await self._reader.get("/console/quotes")
        credited = sum(row["Credited"].amount or 0 for row in quotes.rows("Credits"))
        self._same(quotes.path, "Credited", credited, self._books.total()["Credited"])
        listed: dict[str, str] = {}
        for page in await self._reader.all_of("/console/tenants", "More tenants"):
            listed |= {row["Name"].text: row["Name"].link for row in page.rows("Tenants")}
        self._same("/console/tenants", "names", sorted(listed), sorted(self._books.tenants))
        for name in sorted({*(only or listed)} & {*listed} & {*self._books.tenants}):
            await self._tenant(self._books.tenants[name], listed[name])

    async def overview(self) -> None:
        """Today's charges. The page keeps what it read of the database for some seconds."""
        page = await self._reader.get("/console")
        today_s = int(time.time()) // (DAY_US // 1_000_000) * (DAY_US // 1_000_000)
        charged = self._books.by_day().get(today_s, {}).get("Charged", 0)
        self._same(page.path, "spend today", page.figures["Spend today"].amount, charged)

    async def _usage(self) -> None:
        total, days = self._books.total(), self._books.by_day()
        for group, column in GROUPS.items():
            path = f"/console/usage?group={group}"
            shown: dict[str, Shown] = {}
            for page in await self._reader.all_of(path, "More groups"):
                self._figures(page, total)
                self._over_time(page, "charged", days)
                rows = page.rows(f"Usage by {group}")
                shown |= {row["Requests"].of_link(group): _amounts(row) for row in rows}
            self._groups(path, shown, self._books.by(column))
        for measure in MEASURES:
            self._over_time(await self._reader.get(f"/console/usage?group=&show={measure}"), measure, days)

    async def _tenant(self, tenant_id: str, path: str) -> None:
        page, books = await self._reader.get(path), self._books
        self._figures(page, books.total(tenant_id=tenant_id))
        for table, group, column in (("Usage by key", "key", "key_id"), ("Usage by model", "model", "model")):
            shown = {row["Requests"].of_link(group): _amounts(row) for row in page.rows(table)}
            if "All of them" not in page.links:
                self._groups(f"{path}, {table.lower()}", shown, books.by(column, tenant_id=tenant_id))
        for key_id in books.by("key_id", tenant_id=tenant_id):
            of_key = await self._reader.get(f"{path}/keys/{quote(key_id)}")
            self._figures(of_key, books.total(tenant_id=tenant_id, key_id=key_id))
        for projects in await self._reader.all_of(f"{path}/projects", "More projects"):
            for row in projects.rows("Projects"):
                name = row["Name"].text
                usage = await self._reader.get(projects.links[f"Usage of {name}"])
                self._figures(usage, books.total(project_id=books.projects[tenant_id, name]))

    def _over_time(self, page: ConsolePage, measure: str, days: Mapping[int, Amounts]) -> None:
        name, units = MEASURES[measure]
        shown = {
            int(cells[0].exact): sum(int(Decimal(cell.exact) * units) for cell in cells[1:])
            for cells in page.tables.get(f"{name} by day", [])
        }
        self._same(
            page.path,
            f"{name} by day",
            {day_s: amount for day_s, amount in shown.items() if amount},
            {day_s: sums[name] for day_s, sums in days.items() if sums[name]},
        )

    def _figures(self, page: ConsolePage, expected: Amounts) -> None:
        shown = _amounts(page.figures)
        self._same(page.path, "figures", shown, {name: expected[name] for name in {*shown, *FIGURES}})

    def _groups(self, path: str, shown: Mapping[str, Shown], expected: Mapping[str, Amounts]) -> None:
        """A table has a row for each group of the ledger, and no other."""
        for group in sorted({*shown, *expected}):
            row = shown.get(group, {})
            sums = expected.get(group, dict.fromkeys(NAMES, 0))
            self._same(path, group, row, {name: sums[name] for name in {*row, *FIGURES}})

    def _same(self, path: str, what: str, shown: object, expected: object) -> None:
        if shown != expected:
            self.differences.append(f"{path}: {what}: the page says {shown}, the ledger {expected}")


def _amounts(cells: Mapping[str, PageCell]) -> Shown:
    return {CALLED[name]: cell.amount for name, cell in cells.items() if name in CALLED}
