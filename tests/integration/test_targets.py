"""Targets reach the queue's order and the engine.

The real lifecycle, queue and ledger (the house of `test_lifecycle.py`), and an engine with two places.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

import pytest

from engine.messages import Submit
from gateway.dispatch.admission import Admission
from gateway.domain.targets import LEAST_S
from gateway.requests.run import Run
from tenants.storage.database import open_database
from tenants.types import Principal, Tier
from tests.integration.test_lifecycle import PRINCIPAL, House
from tests.support.engine_process import until

SLOS: Mapping[tuple[str, Tier], Mapping[str, float]] = {
    ("tight", Tier.STANDARD): {"ttft": 0.5, "tpot": 0.1, "e2e": 3.0},
    ("loose", Tier.STANDARD): {"e2e": 20.0},
    ("loose", Tier.BATCH): {"ttft": 1.0, "e2e": 5.0},
}


def of(tenant_id: str) -> Principal:
    return replace(PRINCIPAL, tenant_id=tenant_id, tenant_name=tenant_id, limits=())


class TargetHouse(House):
    """A house with SLOs, in which one request after the other ends."""

    def set_slos(self, slos: Mapping[tuple[str, Tier], Mapping[str, float]]) -> None:
        self.lifecycle.admission = Admission(lambda tenant_id, tier: slos.get((tenant_id, tier), {}))

    async def fill(self) -> None:
        """Two requests that run: all there is room for."""
        for _ in range(2):
            await self.running(principal=of("others"))

    async def waiting(self, tenant_id: str, timeout_s: float | None = None) -> Run:
        run = self.begin(principal=of(tenant_id), timeout_s=timeout_s)
        await until(lambda: run.status == "waiting")
        return run

    async def order_of_turns(self, *runs: Run) -> list[int]:
        """Numbers of `runs` in the order of their turns, one place becoming free at a time."""
        numbers = {run.call.request_id: number for number, run in enumerate(runs)}
        ended: set[str] = set()
        while len(ended) < 2 + len(runs):
            name = next(each for each in self.engine.submitted if each not in ended)
            ended.add(name)
            self.engine.end(name, "stop")
            most = min(2 + len(ended), 2 + len(runs))
            await until(lambda most=most: len(self.engine.submitted) == most)  # type: ignore[misc]
        ids = [each.request_id for each in self.engine.submitted.values()]
        return [numbers[each] for each in ids if each in numbers]

    async def submitted(self, run: Run) -> Submit:
        name = f"{run.call.request_id}.0"
        await until(lambda: name in self.engine.submitted)
        return self.engine.submitted[name]


@pytest.fixture
async def house(sqlite_url: str) -> AsyncIterator[TargetHouse]:
    database = open_database(sqlite_url)
    made = TargetHouse(database)
    made.set_slos(SLOS)
    yield made
    await made.close()
    await database.close()


@pytest.mark.parametrize("order", ["edf", "priority"])
async def test_turns_go_by_the_targets_of_tenant_and_tier(house: TargetHouse, order: str) -> None:
    house.flow.set_order(order)
    await house.fill()
    loose, later = await house.waiting("loose"), await house.waiting("loose")
    tight = await house.waiting("tight")
    assert await house.order_of_turns(loose, later, tight) == [2, 0, 1]


@pytest.mark.parametrize("order", ["edf", "priority"])
async def test_without_targets_turns_go_by_arrival(house: TargetHouse, order: str) -> None:
    house.set_slos({})
    house.flow.set_order(order)
    await house.fill()
    runs = [await house.waiting("loose"), await house.waiting("loose"), await house.waiting("tight")]
    assert await house.order_of_turns(*runs) == [0, 1, 2]


@pytest.mark.parametrize("order", ["edf", "priority"])
async def test_a_clients_word_orders_its_tenants_own_requests_only(house: TargetHouse, order: str) -> None:
    house.flow.set_order(order)
    await house.fill()
    loose, tight = await house.waiting("loose"), await house.waiting("tight")
    urgent = await house.waiting("loose", timeout_s=1.0)
    # As without the word the tenant with the tighter SLO goes first; then the word decides.
    assert await house.order_of_turns(loose, tight, urgent) == [1, 2, 0]


async def test_an_engine_is_sent_what_is_left_of_each_target(house: TargetHouse) -> None:
    house.flow.set_order("edf")
    await house.fill()
    run = await house.waiting("tight", timeout_s=2.0)
    house.engine.end(next(iter(house.engine.submitted)), "stop")
    submit = await house.submitted(run)
    assert submit.deadline_in_s is not None
    assert submit.own_deadline_in_s is not None
    waited_s = 3.0 - submit.deadline_in_s
    assert 0 < waited_s < 2.0
    assert submit.ttft_target_s == pytest.approx(max(LEAST_S, 0.5 - waited_s), abs=0.05)
    assert submit.own_deadline_in_s == pytest.approx(2.0 - waited_s, abs=0.05)
    assert submit.tpot_target_s == 0.1


async def test_without_targets_an_engine_is_sent_none(house: TargetHouse) -> None:
    run, _ = await house.running(principal=of("others"))
    submit = await house.submitted(run)
    assert (submit.ttft_target_s, submit.tpot_target_s) == (0.0, 0.0)
    assert submit.deadline_in_s is None
    assert submit.own_deadline_in_s is None


async def test_another_tier_has_other_targets(house: TargetHouse) -> None:
    house.flow.set_order("edf")
    await house.fill()
    run = await house.waiting("loose", timeout_s=10.0)
    arrived_s = run.times.arrived_s

    def deadlines() -> tuple[float | None, float | None]:
        ticket = house.flow.ticket(run.call.request_id)
        assert ticket is not None
        (entry,) = house.flow.queue.tiers.entries()
        assert entry.tier == ticket.entry.tier
        assert entry.deadline_s == ticket.entry.deadline_s
        assert entry.own_deadline_s == ticket.entry.own_deadline_s
        return entry.deadline_s, entry.own_deadline_s

    before_s, own_s = deadlines()
    assert before_s == pytest.approx(arrived_s + 20.0, abs=0.5)
    assert own_s == arrived_s + 10.0
    await house.lifecycle.move(run, Tier.BATCH, "tenant")
    after_s, own_s = deadlines()
    assert after_s == pytest.approx(arrived_s + 5.0, abs=0.5)
    assert own_s is None, "what is promised is earlier"
    house.engine.end(next(iter(house.engine.submitted)), "stop")
    submit = await house.submitted(run)
    assert 0 < submit.ttft_target_s <= 1.0
    assert submit.deadline_in_s is not None
    assert submit.deadline_in_s <= 5.0
