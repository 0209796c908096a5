"""Lists in pages: each row once, in one order, while others arrive; filters; a bound of what a page reads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from tenants.admin.admin import Admin
from tenants.admin.cursor import Page
from tenants.admin.lists.scans import MOST_SCANNED
from tenants.errors import Invalid, NotFound
from tenants.instants import from_us
from tenants.nouns.key import KeyCreate
from tenants.nouns.limit import LimitSet
from tenants.nouns.project import ProjectCreate
from tenants.nouns.tenant import TenantCreate
from tenants.pricing.price_row import PriceSet
from tenants.resources.keys import KEYS, KeyQuery
from tenants.resources.limits import LIMITS, LimitQuery
from tenants.resources.prices import PRICES, PriceQuery
from tenants.resources.reading import read_page
from tenants.resources.records.ended import ENDED, EndedQuery
from tenants.resources.slos import SLOS, SloQuery
from tenants.resources.tenants import TENANTS, TenantQuery
from tenants.slo import store as slo_store
from tenants.slo.slo import Missed
from tenants.slo.target import METRICS, Slo, SloSet
from tenants.storage.database import Database
from tests.support.many_requests import CAUSES, MODELS, SPAN_US, Sizes, fill
from tests.support.quota import Clock

NOW_US = 1_760_000_000_000_000
REQUESTS = 60


Ask = Callable[..., Awaitable[Page[Any]]]


async def pages(ask: Ask, limit: int, between: Callable[[], Awaitable[object]] | None = None) -> list[Any]:
    """All rows of a list, page by page; `between` pages something else happens."""
    rows: list[Any] = []
    cursor = None
    while True:
        page = await ask(cursor=cursor, limit=limit)
        assert len(page.rows) <= limit
        rows += page.rows
        cursor = page.next_cursor
        if cursor is None:
            return rows
        if between is not None:
            await between()


async def test_each_list_shows_every_object_once_while_others_arrive(admin: Admin, clock: Clock) -> None:
    for number in range(7):
        await admin.tenants.create("test", TenantCreate(name=f"b{number}"))
        await admin.projects.create("test", ProjectCreate(tenant="b0", name=f"p{number}"))
        key, _ = await admin.keys.create("test", KeyCreate(tenant="b0"))
        await admin.limits.set(
            "test", LimitSet(tenant="b0", key=key.key_id, meter="requests", window="day", amount=1)
        )
        await admin.prices.set("test", PriceSet(model=f"m{number}", free=True))
        await admin.slos.set("test", SloSet(tenant=f"b{number}", tier="batch", metric="e2e", target_s=1))
        clock.now_s += number % 2  # some of them at one instant
    for metric in METRICS:
        await admin.slos.set("test", SloSet(tier="batch", metric=metric, target_s=2))
    arrived = 0

    async def arrive() -> None:
        nonlocal arrived
        arrived += 1
        await admin.tenants.create("test", TenantCreate(name=f"a{arrived}"))
        await admin.projects.create("test", ProjectCreate(tenant="b0", name=f"a{arrived}"))
        await admin.prices.set("test", PriceSet(model=f"a{arrived}", free=True))

    async def listed(**page: Any) -> Page[Any]:
        return await read_page(admin, TENANTS, TenantQuery(), **page)

    tenants = [each.name for each in await pages(listed, 3, arrive)]
    assert tenants == [f"b{number}" for number in range(7)], (
        "what comes before the page shown is not in the list"
    )
    assert sorted(await admin.tenants.all(), key=str) == sorted(await pages(listed, 2), key=str)
    lists: list[tuple[Ask, list[Any]]] = [
        (partial(read_page, admin, PRICES, PriceQuery()), await admin.prices.all()),
    ]
    for ask, whole in lists:
        for limit in (1, 3, 1000):
            found = await pages(ask, limit)
            assert sorted(found, key=str) == sorted(whole, key=str)

    of_tenant: list[Slo] = []
    cursor = None
    while len(of_tenant) < len(METRICS):
        page = await read_page(admin, SLOS, SloQuery(tenant="b1"), cursor=cursor, limit=1)
        of_tenant, cursor = of_tenant + page.rows, page.next_cursor
    assert (cursor, {slo.metric for slo in of_tenant}) == (None, {*METRICS})
    with pytest.raises(NotFound):
        await read_page(admin, KEYS, KeyQuery(tenant="none"))
    for limit in (0, 1_001):
        with pytest.raises(Invalid, match="limit"):
            await read_page(admin, LIMITS, LimitQuery(), limit=limit)


async def requests(admin: Admin, limit: int = 7, **wanted: str) -> list[Any]:
    async def ask(**page: Any) -> Page[Any]:
        return await read_page(admin, ENDED, EndedQuery(**wanted), **page)

    return await pages(ask, limit)


async def test_ended_requests_are_found_by_filters_together_newest_first(
    admin: Admin, database: Database
) -> None:
    await database.write(lambda one: fill(one, Sizes(REQUESTS, 3, 6), NOW_US))
    whole = await requests(admin, 1000)
    assert [each.request_id for each in whole] == [f"req_{number}" for number in range(REQUESTS, 0, -1)]
    assert all(each.packed for each in whole)
    for limit in (1, 7, 60):
        assert await requests(admin, limit) == whole
    middle_us = NOW_US - SPAN_US // 2
    filters: list[tuple[dict[str, str], Callable[[Any], bool]]] = [
        (
            {"tenant": "ten_2", "tier": "batch"},
            lambda each: each.tenant_id == "ten_2" and each.tier == "batch",
        ),
        ({"tenant": "t3", "project": "default"}, lambda each: each.project_id == "prj_3"),
        (
            {"cause": CAUSES[1], "key": "key_2", "outcome": "completed"},
            lambda each: ("e2e", CAUSES[1]) in each.misses and each.key_id == "key_2",
        ),
        (
            {"since": from_us(middle_us).isoformat(), "cause": CAUSES[0]},
            lambda each: each.ended_us >= middle_us and ("e2e", CAUSES[0]) in each.misses,
        ),
    ]
    for wanted, is_it in filters:
        expected = [each for each in whole if is_it(each)]
        for limit in (2, 1000):
            assert await requests(admin, limit, **wanted) == expected, wanted
    for field, given in {"tenant": "none", "project": "prj_none", "key": "key_none"}.items():
        with pytest.raises(NotFound):
            await read_page(admin, ENDED, EndedQuery(**{field: given}))
    wrong = {"tier": "gold", "model": "a\0", "outcome": "", "since": "yesterday", "project": "default"}
    for field, given in wrong.items():
        with pytest.raises(Invalid) as caught:
            await read_page(admin, ENDED, EndedQuery(**{field: given}))
        assert caught.value.field == {"since": "from", "project": "tenant"}.get(field, field)


async def test_a_request_with_two_misses_of_one_cause_is_listed_once(
    admin: Admin, database: Database
) -> None:
    await database.write(lambda one: fill(one, Sizes(8, 1, 1), NOW_US))
    also = Missed("req_4", "ten_1", "batch", "ttft", CAUSES[2], 1, 2, NOW_US, {})
    await slo_store.add(database, {}, [also], NOW_US / 1e6)
    [found] = await requests(admin, 1, cause=CAUSES[2])
    assert (found.request_id, found.misses) == ("req_4", (("e2e", CAUSES[2]), ("ttft", CAUSES[2])))


async def test_a_page_ends_where_it_has_looked_at_enough_and_goes_on_there(
    admin: Admin, database: Database
) -> None:
    count = MOST_SCANNED * 2 + 10
    await database.write(lambda one: fill(one, Sizes(count, 2, 2), NOW_US))
    query, cursors, seen = EndedQuery(model="none-such"), 0, EndedQuery(model=f"model-{1 % MODELS}")
    page = await read_page(admin, ENDED, query)
    while page.next_cursor is not None:
        assert page.rows == []
        cursors += 1
        page = await read_page(admin, ENDED, query, cursor=page.next_cursor)
    assert cursors == 2
    assert len(await requests(admin, 1000, model=seen.model or "")) == len(range(1, count + 1, MODELS))
