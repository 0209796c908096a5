"""Missed targets are judged and written beside the request path, and failures there affect no request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from engine.step_time.model import PRIOR
from gateway.explain import slo_monitor
from gateway.explain.attribution import MissVerdict, RequestFacts
from gateway.explain.fluid_share import FluidMachine, Job
from gateway.explain.slo_monitor import Compared, PoolLoad, SloMonitor
from gateway.explain.timeline_writer import TimelineWriter
from gateway.statistics import MEMORY
from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.ledger import timelines as stored
from tenants.outcomes import RequestOutcome
from tenants.resources.reading import read_page
from tenants.resources.records.misses import MISSES, MissQuery
from tenants.slo.target import SloSet
from tenants.storage.database import Database, open_database
from tenants.types import Tier
from tests.support.builders import site

NOW_S = 1_700_000_130.0
MACHINE = FluidMachine(PRIOR, 8, 256, 65_536)
FACTS = RequestFacts(
    Job("req_1", "ten_a", 1, 1.0, 10.0, 64, 41), 10.0, RequestOutcome.COMPLETED, 12.0, 14.0, 14.1
)


class House:
    """A monitor of one model's targets; its stopwatch advances by `took_s` at each reading."""

    def __init__(self, database: Database, pepper: bytes, machine: FluidMachine | None = MACHINE) -> None:
        self.registry = CollectorRegistry()
        self.admin = Admin(Transactions(database, pepper, clock=lambda: NOW_S))
        self.revision = 0
        self.now_s = 0.0
        self.took_s = 0.0
        here = site(database, lambda: NOW_S, self.registry)
        self.monitor = SloMonitor(here, lambda: self.revision, stopwatch=self._look)
        self.load = self.monitor.pools["m"] = PoolLoad(lambda: machine)

    def _look(self) -> float:
        self.now_s += self.took_s
        return self.now_s

    async def target(self, target_s: float) -> None:
        await self.admin.slos.set("test", SloSet(tier="standard", metric="ttft", target_s=target_s))
        self.revision += 1
        await self.monitor.refresh()

    def count(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


async def test_a_miss_is_judged_counted_and_written_with_its_evidence(
    database: Database, pepper: bytes
) -> None:
    house = House(database, pepper)
    await house.target(1.0)
    told: list[tuple[str, MissVerdict]] = []
    house.load.on_verdict = lambda request_id, verdict: told.append((request_id, verdict))
    assert house.monitor.ended("m", FACTS, Tier.STANDARD) == Compared(1, 1)
    assert house.monitor.ended("m", replace(FACTS, first_token_s=10.5), Tier.STANDARD) == Compared(0, 0)
    assert house.monitor.ended("m", FACTS, Tier.BATCH) == Compared(0, 0), "no target binds it"
    assert house.load.attainment.value == pytest.approx(MEMORY), "one missed, then one met"
    await house.monitor.judge_pending()
    await house.monitor.flush()

    (missed,) = (await read_page(house.admin, MISSES, MissQuery())).rows
    assert (missed.request_id, missed.cause, missed.actual_us) == ("req_1", "scheduling", 2_000_000)
    assert missed.evidence["alone_s"] > 0
    assert [(name, verdict.cause.value) for name, verdict in told] == [("req_1", "scheduling")]
    (report,) = await house.admin.slos.report()
    assert (report.period.total, report.period.missed) == (2, 1)
    assert house.count("fairgate_slo_misses_total", metric="ttft", tier="standard", cause="scheduling") == 1
    assert house.count("fairgate_slo_requests_total", metric="ttft", tier="standard", met="yes") == 1
    allowed = house.count("fairgate_slo_allowed_misses_total", metric="ttft", tier="standard")
    assert allowed == pytest.approx(2 * 0.05), "of two requests, at the default of 95 %"


async def test_a_target_has_its_series_before_the_first_request(database: Database, pepper: bytes) -> None:
    """Prometheus sees no increase in a series that begins with one."""
    house = House(database, pepper)
    await house.target(1.0)
    for met in ("yes", "no"):
        labels = {"metric": "ttft", "tier": "standard", "met": met}
        assert house.count("fairgate_slo_requests_total", **labels) == 0
    assert house.count("fairgate_slo_allowed_misses_total", metric="ttft", tier="standard") == 0


async def test_a_judgement_is_followed_by_a_rest(database: Database, pepper: bytes) -> None:
    house = House(database, pepper)
    await house.target(1.0)
    house.took_s = 0.5
    house.monitor.ended("m", FACTS, Tier.STANDARD)
    await house.monitor.judge_pending()
    rest_s = house.monitor._rest_until_s - house.now_s
    house.took_s = 0.0
    house.monitor.ended("m", FACTS, Tier.STANDARD)
    await house.monitor.judge_pending()

    assert rest_s >= slo_monitor.REST * 0.5
    assert len(house.load.pending) == 1
    house.now_s += rest_s
    await house.monitor.judge_pending()
    assert house.load.pending == []


async def test_beyond_what_may_wait_misses_are_counted_and_not_explained(
    database: Database, pepper: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slo_monitor, "MAX_PENDING", 2)
    house = House(database, pepper)
    await house.target(1.0)
    compared = [house.monitor.ended("m", FACTS, Tier.STANDARD) for _ in range(5)]
    assert compared == [Compared(1, 1)] * 2 + [Compared(1, 0)] * 3

    assert len(house.load.pending) == 2
    assert house.count("fairgate_slo_misses_total", metric="ttft", tier="standard", cause="unjudged") == 3
    await house.monitor.flush()
    (report,) = await house.admin.slos.report()
    assert report.period.missed == 5


async def test_who_is_refused_for_a_target_has_missed_it(database: Database, pepper: bytes) -> None:
    house = House(database, pepper)
    await house.target(1.0)
    for tier, metric in ((Tier.STANDARD, "ttft"), (Tier.STANDARD, "e2e"), (Tier.BATCH, "ttft")):
        house.monitor.refused("ten_a", tier, metric)
    assert house.monitor.ended("m", replace(FACTS, first_token_s=10.5), Tier.STANDARD) == Compared(0, 0)
    assert house.count("fairgate_slo_misses_total", metric="ttft", tier="standard", cause="refused") == 1
    assert house.count("fairgate_slo_requests_total", metric="ttft", tier="standard", met="no") == 1
    assert house.load.attainment.value == 1.0, "of those that got in line"
    await house.monitor.flush()
    (report,) = await house.admin.slos.report()
    assert (report.period.total, report.period.missed) == (2, 1)
    assert (await read_page(house.admin, MISSES, MissQuery())).rows == []


async def test_without_a_step_time_model_the_cause_is_unknown(database: Database, pepper: bytes) -> None:
    house = House(database, pepper, machine=None)
    await house.target(1.0)
    house.monitor.ended("m", FACTS, Tier.STANDARD)
    await house.monitor.judge_pending()
    await house.monitor.flush()

    assert [each.cause for each in (await read_page(house.admin, MISSES, MissQuery())).rows] == ["unknown"]


async def test_a_database_that_is_away_delays_and_loses_nothing(sqlite_url: str, pepper: bytes) -> None:
    database = open_database(sqlite_url)
    house = House(database, pepper)
    await house.target(1.0)
    timelines = TimelineWriter(site(database, lambda: NOW_S))
    house.monitor.ended("m", FACTS, Tier.STANDARD)
    timelines.keep("req_1", "ten_a", b"packed")
    await house.monitor.judge_pending()
    await database.close()
    await house.monitor.close()
    await timelines.close()
    found = await timelines.find("req_1")
    assert found is not None
    assert found.packed == b"packed"

    again = open_database(sqlite_url)
    house.monitor._database = timelines._database = again
    try:
        await house.monitor.flush()
        await timelines.flush()
        row = await stored.find(again, "req_1")
        assert row is not None
        assert row.packed == b"packed"
        admin = Admin(Transactions(again, pepper, clock=lambda: NOW_S))
        assert [each.request_id for each in (await read_page(admin, MISSES, MissQuery())).rows] == ["req_1"]
        assert [each.period.missed for each in await admin.slos.report()] == [1]
    finally:
        await again.close()


async def test_more_timelines_than_may_wait_are_dropped_and_counted(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.explain.timeline_writer.MAX_WAITING", 3)
    registry = CollectorRegistry()
    database = open_database(sqlite_url)
    timelines = TimelineWriter(site(database, lambda: NOW_S, registry))
    for number in range(5):
        timelines.keep(f"req_{number}", "ten_a", b"packed")
    await timelines.flush()

    assert registry.get_sample_value("fairgate_timelines_dropped_total") == 2
    assert await stored.find(database, "req_2") is not None
    assert await stored.find(database, "req_3") is None
    await database.close()
