"""A file of usage is the ledger, to the nano-dollar, however much of it is folded and however many pages."""

from __future__ import annotations

import csv
import json
from collections import Counter
from decimal import Decimal

import pytest

from tenants.admin.admin import Admin
from tenants.admin.lists.usage import UsageAsked
from tenants.admin.lists.usage_export import export_usage
from tenants.admin.transaction import Transactions
from tenants.errors import DatabaseUnavailable, Invalid
from tenants.ledger.batch_insert import COLUMNS
from tenants.storage.database import Database
from tenants.usage.fold import fold
from tests.support.usage import traffic, write


async def lines(admin: Admin, form: str, window: str, group_by: str = "") -> list[str]:
    asked = UsageAsked(from_="2026-01-05", to="2026-01-12", window=window, group_by=group_by)
    return "".join([text async for text in await export_usage(admin.transactions, asked, form)]).splitlines()


@pytest.mark.parametrize(("window", "groups"), [("day", ""), ("month", "label:team,outcome")])
async def test_all_formats_add_up_to_the_ledger(
    database: Database, pepper: bytes, monkeypatch: pytest.MonkeyPatch, window: str, groups: str
) -> None:
    monkeypatch.setattr("tenants.admin.lists.usage_export.MAX_PAGE", 5)
    rows, admin = traffic(300), Admin(Transactions(database, pepper))
    await write(database, rows)
    await database.write(lambda connection: fold(connection, 150))
    charged = Counter[bool]()
    for each in (dict(zip(COLUMNS, row, strict=True)) for row in rows):
        if each["kind"] != "reserve":
            charged[each["kind"] == "credit"] += each["cost_nanousd"]
    billed = {True: Decimal(0), False: Decimal(0)}
    for charge in csv.DictReader(await lines(admin, "focus", window, groups)):
        billed[charge["ChargeCategory"] == "Credit"] += Decimal(charge["BilledCost"])
    assert billed == {kind: Decimal(nanousd).scaleb(-9) for kind, nanousd in charged.items()}
    plain = list(csv.DictReader(await lines(admin, "csv", window, groups)))
    packed = [json.loads(line) for line in await lines(admin, "jsonl", window, groups)]
    assert [{name: str(value or "") for name, value in row.items()} for row in packed] == [
        {name: value if value != "0" else "" for name, value in row.items()} for row in plain
    ]
    assert sum(row["cost_nanousd"] - row["credit_nanousd"] for row in packed) == charged.total()


async def test_what_no_file_can_have_is_refused(
    database: Database, pepper: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = Admin(Transactions(database, pepper))
    assert len(await lines(admin, "csv", "day")) == 1, "a head alone where nothing was used"
    with pytest.raises(Invalid, match="format: 'xml' is not one of focus, csv, jsonl"):
        await lines(admin, "xml", "day")
    with pytest.raises(Invalid, match="window: of format focus is hour, day or month"):
        await lines(admin, "focus", "total")
    monkeypatch.setattr("tenants.usage.read.MOST_UNFOLDED", 3)
    await write(database, traffic(10))
    with pytest.raises(DatabaseUnavailable, match="still being added up"):
        await lines(admin, "csv", "day")
