"""Computes each charge of the ledger again, from its tokens, its tier and the version of the prices.

A charge bounded by what its request held may be below the price. Where a gateway died with its engine, the
cached part of the input is unknown: the charge lies between that of all and of none of it cached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sqlalchemy import Connection, select

from tenants.directory import queries
from tenants.errors import UnknownPrice
from tenants.pricing.pricing import PriceBook, PriceEntry
from tenants.storage.database import Database
from tenants.storage.tables import SETTLES, ledger

PAGE = 1_000
MAX_FINDINGS = 20
MAX_BOOKS = 64
"""Versions of the price book in memory."""
_HELD_COST = 2
"""Its place in `detail.held`."""
_COLUMNS = [
    ledger.c[name]
    for name in (
        *("id", "request_id", "model", "tier", "input_tokens", "output_tokens", "cost_nanousd"),
        *("price_version", "detail"),
    )
]


@dataclass(frozen=True, slots=True)
class WrongCharge:
    """A charge that differs from its price."""

    ledger_id: int
    request_id: str
    cost_nanousd: int
    least: int
    most: int

    def __str__(self) -> str:
        due = f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"
        return (
            f"ledger row {self.ledger_id}, request {self.request_id}:"
            f" charged {self.cost_nanousd} nano-dollars, its tokens cost {due}"
        )


@dataclass(slots=True)
class PriceVerdict:
    charges: int = 0
    unpriced: int = 0
    """Without prices, or of a model that these lack."""
    wrong: list[WrongCharge] = field(default_factory=list)
    """The first ones, at most `MAX_FINDINGS`."""
    wrong_count: int = 0


def due(
    entry: PriceEntry, input_tokens: int, output_tokens: int, detail: Mapping[str, Any]
) -> tuple[int, int]:
    """The least and the most that these tokens may cost, in nano-dollars. Pure."""
    cached = detail.get("cached_tokens")
    if isinstance(cached, int):
        known = min(max(cached, 0), input_tokens)
        least = most = entry.cost_nanousd(input_tokens, known, output_tokens)
    else:
        least = entry.cost_nanousd(input_tokens, input_tokens, output_tokens)
        most = entry.cost_nanousd(input_tokens, 0, output_tokens)
    held = detail.get("held")
    if isinstance(held, list) and len(held) > _HELD_COST and isinstance(held[_HELD_COST], int):
        least, most = min(least, held[_HELD_COST]), min(most, held[_HELD_COST])
    return least, most


async def verify_prices(database: Database) -> PriceVerdict:
    verdict, books = PriceVerdict(), dict[int, PriceBook]()
    last_id = 0
    while page := await database.read(partial(_settles, last_id)):
        for row in page:
            version = row.price_version
            if version not in books:
                if len(books) >= MAX_BOOKS:
                    books.clear()
                books[version] = await database.read(partial(queries.price_book, version=version))
            _judge(verdict, row, books[version])
        last_id = page[-1].id
    return verdict


def _settles(last_id: int, connection: Connection) -> list[Any]:
    query = select(*_COLUMNS).where(SETTLES, ledger.c.id > last_id)
    return list(connection.execute(query.order_by(ledger.c.id).limit(PAGE)).all())


def _judge(verdict: PriceVerdict, row: Any, book: PriceBook) -> None:
    try:
        entry = book.entry(row.model, row.tier)
    except UnknownPrice:
        verdict.unpriced += 1
        return
    verdict.charges += 1
    least, most = due(entry, row.input_tokens, row.output_tokens, row.detail)
    if least <= row.cost_nanousd <= most:
        return
    verdict.wrong_count += 1
    if len(verdict.wrong) < MAX_FINDINGS:
        verdict.wrong.append(WrongCharge(row.id, row.request_id, row.cost_nanousd, least, most))
