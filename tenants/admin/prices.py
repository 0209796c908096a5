"""Admin acts on the price book.

Every change is a new version of the models and tiers that it changes; ledger rows refer to versions."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, RowMapping, and_, insert, or_, select

from tenants.admin.audit import Actor
from tenants.admin.cursor import (
    DEFAULT_PAGE,
    Number,
    Page,
    SortKey,
    Text,
    checked_limit,
    decode_cursor,
    page_of,
)
from tenants.admin.transaction import AdminActs, Change, IfMatch
from tenants.directory import queries
from tenants.errors import Invalid, NotFound
from tenants.instants import from_us
from tenants.nouns import checks
from tenants.pricing.price_row import PriceRow, PriceSet, as_stored, changed, entry_columns, entry_of
from tenants.pricing.pricing import Price, PriceBook, PriceEntry
from tenants.storage import tables
from tenants.types import Tier

MAX_VERSIONS = 1_000_000


class PriceActs(AdminActs):
    async def set(self, actor: Actor | str, wanted: PriceSet, *, if_match: IfMatch = None) -> list[PriceRow]:
        """Makes a new version of the book, unless nothing changes; earlier reservations keep theirs. `tier`
        None: in all tiers. Returns the model's rows now."""
        model = checks.model("model", wanted.model)
        tiers = list(Tier) if wanted.tier is None else [checks.choice("tier", Tier, wanted.tier)]

        def act(connection: Connection, now_us: int) -> Change[list[PriceRow]]:
            book = queries.price_book(connection)
            before = _rows_of(connection, model)
            old = {tier: book.entries.get((model, tier)) for tier in tiers}
            multipliers = self._transactions.tier_multipliers
            new = {tier: changed(old[tier], wanted, multipliers[tier]) for tier in tiers}
            entries = {(model, tier): new[tier] for tier in tiers if new[tier] != old[tier]}
            _insert(connection, book, entries, now_us)
            after = _rows_of(connection, model)
            return Change(after, model[:128], None, as_stored(before), as_stored(after))

        return await self._transactions.act(actor, "price.set", act, if_match)

    async def seed(self, actor: Actor | str, prices: Mapping[str, Price]) -> list[str]:
        """Prices models that the book lacks, in all tiers; returns their names."""
        known = (await self._transactions.read(queries.price_book)).models
        if not set(prices) - known:
            return []

        def act(connection: Connection, now_us: int) -> Change[list[str]]:
            book = queries.price_book(connection)
            missing = sorted(set(prices) - book.models)
            entries = {
                (model, tier): PriceEntry(prices[model], self._transactions.tier_multipliers[tier])
                for model in missing
                for tier in Tier
            }
            version = _insert(connection, book, entries, now_us)
            return Change(missing, f"version {version}", None, after={"models": missing})

        return await self._transactions.act(actor, "price.seed", act)

    async def all(self) -> list[PriceRow]:
        """Prices in force, by model and tier."""
        return await self._transactions.read(in_force)

    async def page_history(
        self, model: str, *, cursor: str | None = None, limit: int = DEFAULT_PAGE
    ) -> Page[PriceRow]:
        """Every version's rows of one model, newest first. Raises `Invalid`, `NotFound`."""
        most, filters = checked_limit(limit), {"model": model}
        checks.plain_text("model", model)
        key = tuple[Number, Text]
        last = None if cursor is None else decode_cursor("price history", filters, cursor, key)
        rows = await self._transactions.read(lambda one: history(one, model, last, most + 1))
        if not rows and last is None:
            raise NotFound("price", model)
        page = page_of(rows, most, "price history", filters, lambda row: (row.version, row.tier.value))
        tiers = list(Tier)
        shown = sorted(page.rows, key=lambda row: (-row.version, tiers.index(row.tier)))
        return Page(shown, page.next_cursor)


def history(connection: Connection, model: str, after: SortKey | None, most: int) -> list[PriceRow]:
    """Every version's rows of one model, newest first. `after`: version and tier of the last one."""
    table, beyond = tables.prices, []
    if after is not None:
        same = and_(table.c.version == after[0], table.c.tier > after[1])
        beyond.append(or_(table.c.version < after[0], same))
    query = select(table).where(table.c.model == model, *beyond)
    query = query.order_by(table.c.version.desc(), table.c.tier).limit(most)
    return [*map(_row, connection.execute(query).mappings())]


def _insert(
    connection: Connection, book: PriceBook, entries: Mapping[tuple[str, Tier], PriceEntry], now_us: int
) -> int:
    """Returns the new version, or the current one without `entries`."""
    if not entries:
        return book.version
    if book.version >= MAX_VERSIONS:
        raise Invalid("price", f"the price book has reached its limit of {MAX_VERSIONS} versions")
    version = book.version + 1
    PriceBook({**book.entries, **entries}, version)  # refuses too many models
    values = [
        {
            "version": version,
            "model": model,
            "tier": tier.value,
            **entry_columns(entry),
            "created_us": now_us,
        }
        for (model, tier), entry in entries.items()
    ]
    connection.execute(insert(tables.prices), values)
    return version


def _rows_of(connection: Connection, model: str) -> list[PriceRow]:
    return [row for row in in_force(connection) if row.model == model]


def in_force(connection: Connection) -> list[PriceRow]:
    """By model and tier; what changed last first."""
    query = queries.prices_in_force(queries.price_version(connection))
    rows = [_row(row) for row in connection.execute(query).mappings()]
    order = list(Tier)
    return sorted(rows, key=lambda row: (row.model, -row.version, order.index(row.tier)))


def _row(row: RowMapping) -> PriceRow:
    entry, created_at = entry_of(row), from_us(row["created_us"])
    return PriceRow(row["version"], row["model"], Tier(row["tier"]), entry, created_at)
