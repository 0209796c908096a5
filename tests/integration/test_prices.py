"""The price book is versioned, followed by running servers, and rejects unknown models."""

from __future__ import annotations

from typing import Any

import pytest

from tenants.admin import prices
from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.directory.directory import Directory
from tenants.errors import Invalid, NotFound, UnknownPrice
from tenants.pricing import pricing
from tenants.pricing.price_row import PriceSet
from tenants.pricing.pricing import FREE, Price, PriceEntry, TokenWeights
from tenants.storage.database import Database, open_database
from tenants.types import Tier
from tests.support.audited import audited
from tests.support.quota import Clock

ACTOR = "cli:tester"
MULTIPLIERS = {Tier.INTERACTIVE: 3_000, Tier.STANDARD: 1_000, Tier.BATCH: 100}
SMALL = Price(150, 75, 600)


@pytest.fixture
def admin(database: Database, pepper: bytes) -> Admin:
    return Admin(Transactions(database, pepper, Clock(), MULTIPLIERS))


async def test_settings_seed_what_the_book_does_not_know_and_change_nothing_else(
    admin: Admin, directory: Directory
) -> None:
    assert directory.prices.version == 0
    assert await admin.prices.seed(ACTOR, {"small": SMALL, "gift": FREE}) == ["gift", "small"]
    await directory.refresh()
    book = directory.prices
    assert book.version == 1
    assert {tier: book.entry("small", tier).multiplier for tier in Tier} == MULTIPLIERS
    assert book.cost_nanousd("small", Tier.BATCH, 100, 0, 10) == (100 * 150 + 10 * 600) // 10
    assert await admin.prices.seed(ACTOR, {"small": FREE}) == []
    assert await admin.prices.seed(ACTOR, {"small": FREE, "large": SMALL}) == ["large"]
    await directory.refresh()
    assert (directory.prices.version, directory.prices.entry("small", Tier.STANDARD).price) == (2, SMALL)
    assert [row.action for row in await audited(admin)] == ["price.seed", "price.seed"]


async def test_every_change_is_a_version_and_old_ones_stay_what_they_were(
    admin: Admin, directory: Directory
) -> None:
    await admin.prices.seed(ACTOR, {"small": SMALL})
    rows = await admin.prices.set(ACTOR, PriceSet(model="small", output_nanousd=700))
    assert [(row.version, row.tier, row.entry.price.output_nanousd) for row in rows] == [
        (2, tier, 700) for tier in Tier
    ]
    change = {"input_nanousd": 10, "cached_input_nanousd": 1, "multiplier": 400, "cached_input_weight": 250}
    await admin.prices.set(ACTOR, PriceSet(model="small", tier="batch", **change))
    await admin.prices.set(ACTOR, PriceSet(model="gift", free=True))
    await admin.prices.set(ACTOR, PriceSet(model="gift", multiplier=400, tier="batch"))
    await directory.refresh()
    assert directory.prices.version == 5
    assert directory.prices.entry("small", Tier.BATCH) == PriceEntry(
        Price(10, 1, 700), 400, TokenWeights(cached_input=250)
    )
    assert directory.prices.entry("small", Tier.STANDARD) == PriceEntry(Price(150, 75, 700), 1_000)
    outputs = []
    for version in range(1, 6):
        book = await directory.prices_at(version)
        assert book.version == version
        outputs.append(book.entry("small", Tier.STANDARD).price.output_nanousd)
    assert outputs == [600, 700, 700, 700, 700]
    assert (await directory.prices_at(2)).entry("small", Tier.BATCH).multiplier == 100
    with pytest.raises(UnknownPrice):
        (await directory.prices_at(3)).entry("gift", Tier.STANDARD)
    assert (await directory.prices_at(0)) is directory.prices
    history = (await admin.prices.page_history("small")).rows
    assert [(row.version, row.tier) for row in history] == [
        (3, Tier.BATCH),
        *((2, tier) for tier in Tier),
        *((1, tier) for tier in Tier),
    ]
    assert [row.version for row in (await admin.prices.page_history("small", limit=1)).rows] == [3]


async def test_a_change_that_changes_nothing_makes_no_version(admin: Admin, directory: Directory) -> None:
    await admin.prices.seed(ACTOR, {"small": SMALL})
    await admin.prices.set(ACTOR, PriceSet(model="small", input_nanousd=150, output_nanousd=600))
    await admin.prices.set(ACTOR, PriceSet(model="small", multiplier=100, tier="batch"))
    await directory.refresh()
    assert directory.prices.version == 1


async def test_acts_on_prices_are_audited(admin: Admin) -> None:
    await admin.prices.seed(ACTOR, {"small": SMALL})
    await admin.prices.set(ACTOR, PriceSet(model="small", output_nanousd=700, tier="batch"))
    seeded, changed = await audited(admin)
    assert (seeded.action, seeded.target, seeded.after) == ("price.seed", "version 1", {"models": ["small"]})
    assert (changed.action, changed.target) == ("price.set", "small")
    assert changed.before is not None
    assert changed.after is not None
    assert changed.before["batch"]["output_nanousd"] == 600
    assert (changed.after["batch"]["output_nanousd"], changed.after["batch"]["version"]) == (700, 2)
    assert changed.after["standard"] == changed.before["standard"]


async def test_a_new_price_reaches_a_running_server_by_itself(
    directory: Directory, database_url: str, pepper: bytes
) -> None:
    elsewhere = open_database(database_url)
    other = Admin(Transactions(elsewhere, pepper))
    held = directory.prices
    await other.prices.set(ACTOR, PriceSet(model="small", input_nanousd=3, output_nanousd=5))
    await directory.next_poll()
    await directory.next_poll()
    assert directory.prices.cost_nanousd("small", Tier.STANDARD, 1, 0, 1) == 8
    with pytest.raises(UnknownPrice):
        held.entry("small", Tier.STANDARD)  # a book never changes
    assert await directory.prices_at(1) is directory.prices
    await elsewhere.close()


async def test_bad_prices_name_their_field_and_make_no_version(
    admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    await admin.prices.seed(ACTOR, {"small": SMALL})
    whole: dict[str, Any] = {"input_nanousd": 1, "output_nanousd": 1}
    for field, model, change, tier in (
        ("tier", "small", whole, "gold"),
        ("model", "", whole, None),
        ("model", "x" * 257, whole, None),
        ("input_nanousd", "new", {"output_nanousd": 1}, None),
        ("input_nanousd", "small", {"input_nanousd": -1}, None),
        ("cached_input_nanousd", "small", {"cached_input_nanousd": 151}, None),
        ("multiplier", "small", {"multiplier": 100_001}, None),
        ("cached_input_weight", "small", {"input_weight": 500}, None),
        ("free", "small", {"free": True, "output_nanousd": 1}, None),
    ):
        with pytest.raises(Invalid) as caught:
            await admin.prices.set(ACTOR, PriceSet(model=model, tier=tier, **change))
        assert caught.value.field == field
    with pytest.raises(NotFound, match="price"):
        await admin.prices.page_history("new")
    with pytest.raises(Invalid, match="limit"):
        await admin.prices.page_history("small", limit=0)
    monkeypatch.setattr(pricing, "MAX_MODELS", 1)
    with pytest.raises(Invalid, match="at most 1 models"):
        await admin.prices.set(ACTOR, PriceSet(model="new", **whole))
    monkeypatch.setattr(prices, "MAX_VERSIONS", 1)
    with pytest.raises(Invalid, match="versions"):
        await admin.prices.set(ACTOR, PriceSet(model="small", free=True))
    assert {row.version for row in await admin.prices.all()} == {1}
    assert len(await audited(admin)) == 1
