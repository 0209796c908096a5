"""Storage of targets, counts, misses and timelines in both databases."""

from __future__ import annotations

import pytest

from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.errors import Invalid, NotFound
from tenants.ledger import timelines
from tenants.ledger.timelines import StoredTimeline
from tenants.nouns.tenant import TenantCreate
from tenants.resources.reading import read_page
from tenants.resources.records.misses import MISSES, MissQuery
from tenants.resources.slos import SLOS, SloQuery
from tenants.slo import store as slo_store
from tenants.slo.slo import DAY_S, SPAN_S, Missed, SloTally
from tenants.slo.store import CountKey
from tenants.slo.target import Slo, SloSet
from tenants.storage.database import Database
from tenants.types import Tier
from tests.support.audited import audited

NOW_S = 1_700_000_130.0


@pytest.fixture
def admin(database: Database, pepper: bytes) -> Admin:
    return Admin(Transactions(database, pepper, clock=lambda: NOW_S))


async def all_slos(admin: Admin, tenant: str | None = None) -> list[Slo]:
    return (await read_page(admin, SLOS, SloQuery(tenant=tenant))).rows


def _missed(request_id: str, cause: str, at_s: float = NOW_S, tenant_id: str = "ten_a") -> Missed:
    return Missed(
        request_id, tenant_id, "standard", "ttft", cause, 500_000, None, round(at_s * 1e6), {"fair_s": 1.5}
    )


async def test_setting_a_target_again_replaces_it_and_every_act_is_audited(
    admin: Admin, database: Database
) -> None:
    tenant = await admin.tenants.create("test", TenantCreate(name="acme"))
    first = await admin.slos.set("test", SloSet(tier="standard", metric="ttft", target_s=0.5))
    again = await admin.slos.set(
        "test", SloSet(tier="standard", metric="ttft", target_s=0.4, percentile=99.9)
    )
    own = await admin.slos.set("test", SloSet(tier="standard", metric="ttft", target_s=0.2, tenant="acme"))

    assert again.id == first.id
    assert [(each.tenant_id, each.target_us, each.per_mille) for each in await all_slos(admin)] == [
        ("", 400_000, 999),
        (tenant.tenant_id, 200_000, 950),
    ]
    assert [each.id for each in await all_slos(admin, "acme")] == [own.id]
    await admin.slos.remove("test", own.id)
    with pytest.raises(NotFound):
        await admin.slos.remove("test", own.id)
    rows = await audited(admin)
    assert [row.action for row in rows][-4:] == ["slo.set", "slo.set", "slo.set", "slo.remove"]
    assert rows[-3].before == first.as_json()


@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        ("tier", {"tier": "gold"}),
        ("metric", {"metric": "latency"}),
        ("target_s", {"target_s": 0.0}),
        ("target_s", {"target_s": float("nan")}),
        ("target_s", {"target_s": 1e9}),
        ("percentile", {"percentile": 0.5}),
        ("percentile", {"percentile": 95.55}),
        ("percentile", {"percentile": 101.0}),
    ],
)
async def test_a_target_that_makes_no_sense_is_refused_by_its_field(
    admin: Admin, field: str, wanted: dict[str, object]
) -> None:
    sensible = {"tier": "standard", "metric": "ttft", "target_s": 0.5}
    with pytest.raises(Invalid) as refused:
        await admin.slos.set("test", SloSet(**sensible | wanted))  # type: ignore[arg-type]

    assert refused.value.field == field


async def test_counts_of_several_gateways_add_up_and_burn(admin: Admin, database: Database) -> None:
    tenant = await admin.tenants.create("test", TenantCreate(name="acme"))
    await admin.slos.set("test", SloSet(tier="standard", metric="ttft", target_s=0.5))
    key = CountKey(tenant.tenant_id, "standard", "ttft")
    for missed in (0, 30):
        await slo_store.add(database, {key: SloTally(100, missed)}, [], NOW_S)
    causes = ["quota", "quota", "capacity"]
    misses = [_missed(f"r{at}", cause, NOW_S - at, tenant.tenant_id) for at, cause in enumerate(causes)]
    await slo_store.add(database, {}, misses, NOW_S)
    await slo_store.add(database, {}, misses, NOW_S)

    (report,) = await admin.slos.report()
    assert (report.tenant_name, report.period) == ("acme", SloTally(200, 30))
    assert report.as_json()["attainment"] == 0.85
    assert report.as_json()["budget_left"] == -2.0
    assert [each.long_rate for each in report.burning] == pytest.approx([3.0, 3.0, 3.0])
    assert report.causes == {"quota": 2, "capacity": 1}
    assert await admin.slos.report(tier="batch") == []
    assert [each.request_id for each in (await read_page(admin, MISSES, MissQuery(cause="quota"))).rows] == [
        "r0",
        "r1",
    ]
    (one,) = await admin.slos.misses_of("r2")
    assert one.evidence == {"fair_s": 1.5}
    assert one.actual_us is None


async def test_what_no_report_asks_for_is_taken_away(admin: Admin, database: Database) -> None:
    key = CountKey("ten_a", "standard", "ttft")
    await slo_store.add(
        database, {key: SloTally(1, 1)}, [_missed("old", "quota", NOW_S - 40 * DAY_S)], NOW_S - 40 * DAY_S
    )
    await slo_store.add(
        database, {key: SloTally(1, 0)}, [_missed("week", "quota", NOW_S - 7 * DAY_S)], NOW_S - 7 * DAY_S
    )
    await slo_store.add(database, {key: SloTally(1, 0)}, [_missed("new", "fault")], NOW_S)
    await slo_store.purge(database, NOW_S)

    days, spans = await database.read(
        lambda connection: tuple(slo_store.counts(connection, span_s, 0, None) for span_s in (DAY_S, SPAN_S))
    )
    assert len(days[key]) == 2, "a week ago is in the period"
    assert len(spans[key]) == 1, "and in no window"
    assert [each.request_id for each in (await read_page(admin, MISSES, MissQuery())).rows] == ["new", "week"]
    await slo_store.purge(database, NOW_S, most_misses=1)
    assert [each.request_id for each in (await read_page(admin, MISSES, MissQuery())).rows] == ["new"]


async def test_targets_are_read_as_they_were_set(admin: Admin, database: Database) -> None:
    made = await admin.slos.set("test", SloSet(tier="batch", metric="e2e", target_s=90, percentile=50))

    assert await slo_store.read_slos(database) == [made]
    assert made.tier is Tier.BATCH


async def test_timelines_are_kept_up_to_an_age_and_a_number(database: Database) -> None:
    rows = [StoredTimeline(f"r{number}", "ten_a", number * 1000, bytes([number])) for number in range(10)]
    await timelines.add(database, rows)
    await timelines.add(database, [StoredTimeline("r3", "ten_b", 1, b"another")])

    assert await timelines.find(database, "r3") == rows[3], "what is there stays"
    assert await timelines.find(database, "r99") is None
    assert await timelines.purge(database, before_us=4000, most_rows=100) == 4
    assert await timelines.find(database, "r3") is None
    assert await timelines.purge(database, before_us=0, most_rows=2) == 4
    left = [each.request_id for each in rows if await timelines.find(database, each.request_id)]
    assert left == ["r8", "r9"]


async def test_descriptions_stay_as_long_as_a_timeline_refers_to_them(database: Database) -> None:
    old, new = b"one server", b"another"
    ids = {content: timelines.description_id(content) for content in (old, new)}
    assert len(set(ids.values())) == 2
    assert {len(each) for each in ids.values()} == {16}
    rows = [
        StoredTimeline("r1", "ten_a", 1000, b"", ids[old], ids[new]),
        StoredTimeline("r2", "ten_a", 2000, b"", ids[new], ids[new]),
    ]
    contents = {each: content for content, each in ids.items()}
    for row in rows:
        await timelines.add(database, [row], contents)
    await timelines.add(database, [StoredTimeline("r0", "ten_a", 500, b"", ids[new])], contents)

    assert await timelines.find(database, "r1") == rows[0]
    assert await timelines.described(database, [*ids.values(), "unknown"]) == contents
    await timelines.purge(database, before_us=1500, most_rows=100)
    assert await timelines.described(database, ids.values()) == {ids[new]: new}
