"""Sessions are what the ledger has of their calls; the tenant's own, the newest, and for a day."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select

from tenants.admin.admin import Admin
from tenants.admin.lists import sessions
from tenants.admin.transaction import Transactions
from tenants.errors import NotFound
from tenants.ledger import timelines
from tenants.ledger.timelines import StoredTimeline
from tenants.nouns.tenant import TenantCreate
from tenants.storage.database import Database
from tenants.storage.tables import ledger
from tenants.usage.sums import DAY_US
from tests.support.usage import MONDAY_US, row, write


class House:
    """A database with calls of two tenants, at an instant of its own."""

    def __init__(self, database: Database, pepper: bytes) -> None:
        self.database, self.now_us = database, MONDAY_US
        self.admin = Admin(Transactions(database, pepper, clock=lambda: self.now_us / 1e6))
        self.tenants: dict[str, str] = {}

    async def calls(self, tenant: str, *calls: tuple[str, str | None, int], **charged: object) -> None:
        """Each a request's id, its session, and microseconds since Monday."""
        if tenant not in self.tenants:
            created = await self.admin.tenants.create("test", TenantCreate(name=tenant))
            self.tenants[tenant] = created.tenant_id
        tenant_id = self.tenants[tenant]
        kept, rows = [], []
        for request_id, session, at_us in calls:
            kept.append(StoredTimeline(request_id, tenant_id, MONDAY_US + at_us, b"", session=session))
            common = {"tenant_id": tenant_id, "at_us": MONDAY_US + at_us}
            rows += [row(request_id, "reserve", **common), row(request_id, **common | charged)]
        await write(self.database, rows)
        await timelines.add(self.database, kept)

    async def listed(self, tenant: str, limit: int = 1_000) -> list[str]:
        found = await self.admin.sessions.read(tenant, limit=limit)
        return [each["id"] for each in found["data"]]


@pytest.fixture
def house(database: Database, pepper: bytes) -> House:
    return House(database, pepper)


async def test_a_sessions_sums_are_the_ledgers_by_model_and_outcome(house: House) -> None:
    await house.calls("acme", ("r1", "run", 1), ("r2", "run", 2), ("r3", None, 3), ("r4", "other", 9))
    told = {"model": "big", "outcome": "cancelled", "detail": '{"cached_tokens": 4, "wait_s": 1.5}'}
    await house.calls("acme", ("r5", "run", 5), input_tokens=7, cost_nanousd=2**40 + 1, **told)
    await house.calls("globex", ("r6", "run", 6))
    tenant_id = house.tenants["acme"]
    credit = {"tenant_id": tenant_id, "input_tokens": 0, "output_tokens": 0, "cost_nanousd": -11}
    await write(house.database, [row("r5", "credit", **credit | told)])
    columns = (func.sum(ledger.c.input_tokens), func.sum(ledger.c.output_tokens))
    settled = ledger.c.request_id.in_(["r1", "r2", "r5"]) & (ledger.c.kind == "settle")
    cost = func.sum(ledger.c.cost_nanousd)
    totals = await house.database.read(lambda it: it.execute(select(*columns, cost).where(settled)).one())

    run = await house.admin.sessions.read("acme", "run")
    assert (run["calls"], run["cached_tokens"], run["wait_us"]) == (3, 4, 1_500_000)
    assert (run["input_tokens"], run["cost_nanousd"], run["credit_nanousd"]) == (totals[0], totals[2], 11)
    big, small = run["by"]
    assert (big["model"], big["outcome"], big["cost_nanousd"]) == ("big", "cancelled", 2**40 + 1)
    assert (small["calls"], small["output_tokens"]) == (2, 40)
    assert [each["id"] for each in run["newest"]] == ["r5", "r2", "r1"]
    assert run["first_call_at"] < run["last_call_at"] == run["newest"][0]["ended_at"]
    listed = await house.admin.sessions.read("acme")
    assert listed["data"][1] == {name: run[name] for name in listed["data"][1]}
    assert [each["id"] for each in listed["data"]] == ["other", "run"]
    assert (await house.admin.sessions.read("globex", "run"))["calls"] == 1
    with pytest.raises(NotFound):
        await house.admin.sessions.read("globex", "other")


async def test_a_session_is_forgotten_a_day_after_its_last_call(house: House) -> None:
    await house.calls("acme", ("r1", "long", 0), ("r2", "short", 1), ("r3", "long", 2))
    house.now_us += DAY_US + 1
    assert await house.listed("acme") == ["long"]
    assert (await house.admin.sessions.read("acme", "long"))["calls"] == 2
    house.now_us += 1
    assert await house.listed("acme") == []
    with pytest.raises(NotFound):
        await house.admin.sessions.read("acme", "long")


async def test_one_answer_reads_and_adds_up_a_bounded_number_of_calls(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.calls("acme", ("r1", "old", 1), ("r2", "long", 2), ("r3", "long", 3), ("r4", "new", 4))
    some = await house.admin.sessions.read("acme", limit=2)
    assert ([each["id"] for each in some["data"]], some["has_more"]) == (["new", "long"], True)
    monkeypatch.setattr(sessions, "MOST_SUMMED", 2)
    new, long, old = (await house.admin.sessions.read("acme"))["data"]
    assert [each["calls"] for each in (new, long, old)] == [1, None, None]
    assert (await house.admin.sessions.read("acme", "long"))["input_tokens"] == 20
    monkeypatch.setattr(sessions, "MOST_SUMMED", 1)
    cut = await house.admin.sessions.read("acme", "long")
    assert (cut["cost_nanousd"], cut["by"], [each["id"] for each in cut["newest"]]) == (
        None,
        None,
        ["r3", "r2"],
    )
    monkeypatch.setattr(sessions, "MOST_READ", 3)
    assert await house.listed("acme") == ["new", "long"]
    monkeypatch.setattr(sessions, "MOST_LISTED", 1)
    assert await house.listed("acme") == ["new"]
