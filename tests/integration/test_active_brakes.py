"""A stored brake holds in every gateway of a database, and ends once, by its time or by an operator."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.cluster.active_brakes import ActiveBrakes
from gateway.flow.control_rules import Control, ControlMode
from gateway.flow.knobs import DEFAULT_BOUNDS, Knob
from tenants.admin.admin import Admin
from tenants.admin.audit import Actor
from tenants.admin.commands import BrakeEnd, BrakeSet
from tenants.admin.platform.brakes import MAX_BRAKE_S
from tenants.admin.transaction import Transactions
from tenants.directory.directory import Directory
from tenants.errors import DatabaseUnavailable, Invalid, NotFound
from tenants.storage.database import Database
from tests.support.audited import audited
from tests.support.builders import flow_controller
from tests.support.quota import Clock

ACTOR = Actor("cli:tester", "cli")
STANDARD, BATCH = 1, 2


class House:
    """One gateway's brakes, with an engine, a queue and a control loop."""

    def __init__(self, database: Database, pepper: bytes, clock: Clock) -> None:
        self.told: list[dict[int, float]] = []
        self.pumps = 0
        self.flow = flow_controller()
        self.control = Control(ControlMode.ADVICE, DEFAULT_BOUNDS)
        self.directory = Directory(database, pepper)
        self.admin = Admin(Transactions(database, pepper, clock))
        deps = SimpleNamespace(
            admin=self.admin, directory=self.directory, upstreams=(self,), clock=clock, wall_clock=clock
        )
        pool = SimpleNamespace(flow=self.flow, dispatcher=self, control=self.control)
        self.brakes = ActiveBrakes(cast(Any, deps), cast(Any, {"tiny": pool}))

    def set_brakes(self, shares: Mapping[int, float]) -> None:
        self.told.append(dict(shares))

    def pump(self) -> None:
        self.pumps += 1

    async def look(self) -> None:
        """What the gateway does four times a second."""
        await self.directory.refresh()
        await self.brakes.follow()

    @property
    def holds(self) -> dict[int, float]:
        """In its queue and its engine alike."""
        assert self.told[-1] == self.flow.knobs.brakes.shares
        return self.told[-1]


async def actions(house: House) -> list[tuple[str, str]]:
    return [(row.action, row.actor) for row in await audited(house.admin)]


async def test_it_holds_in_all_gateways_until_its_time_is_over_and_its_end_is_written_once(
    database: Database, pepper: bytes, clock: Clock
) -> None:
    here, there = House(database, pepper, clock), House(database, pepper, clock)
    for house in (here, there):
        await house.brakes.start()
        assert house.holds == {}, "an engine may know an earlier one"
    await here.admin.brakes.set(ACTOR, BrakeSet(tier="batch", share=0.1, for_s=1800, reason="night job"))
    for house in (here, there):
        await house.look()
        assert house.holds == {BATCH: 0.1}
        assert house.control.values[Knob.BATCH_SHARE] == 0.1
        assert house.pumps == 2
    clock.advance(1799)
    await here.look()
    assert (here.holds, here.pumps) == ({BATCH: 0.1}, 2), "nothing has changed"
    clock.advance(1)
    for house in (here, there, here, there):
        await house.look()
        assert house.holds == {}
        assert house.control.values[Knob.BATCH_SHARE] == 1.0
        assert house.brakes.now == ()
    rows = await audited(here.admin)
    assert [(row.action, row.actor, row.target) for row in rows] == [
        ("brake.set", "cli:tester", "brake.batch"),
        ("brake.end", "system", "brake.batch"),
    ]
    assert rows[0].after == rows[1].before
    assert rows[1].before is not None
    assert (rows[1].before["share"], rows[1].before["by"]) == (0.1, "cli:tester")


async def test_two_gateways_that_see_the_end_at_once_write_it_once(
    database: Database, pepper: bytes, clock: Clock
) -> None:
    admins = [Admin(Transactions(database, pepper, clock)) for _ in range(2)]
    await admins[0].brakes.set(ACTOR, BrakeSet(tier="batch", share=0.1, for_s=10))
    seen = await admins[0].brakes.stored()
    clock.advance(10)

    async def as_seen_before() -> list[Any]:
        return seen

    admins[1].brakes.stored = as_seen_before  # type: ignore[method-assign]
    for admin in admins:
        await admin.brakes.end_over()
    assert [row.action for row in await audited(admins[0])] == ["brake.set", "brake.end"]


async def test_a_tier_has_one_brake_and_two_tiers_may_have_theirs(
    database: Database, pepper: bytes, clock: Clock
) -> None:
    house = House(database, pepper, clock)
    await house.brakes.start()
    for tier, share in (("batch", 0.1), ("standard", 0.5), ("batch", 0.3)):
        await house.admin.brakes.set(ACTOR, BrakeSet(tier=tier, share=share, for_s=60))
    await house.look()
    assert house.holds == {STANDARD: 0.5, BATCH: 0.3}
    ended = await house.admin.brakes.end(ACTOR, BrakeEnd(tier="standard"))
    assert ended.share == 0.5
    await house.look()
    assert house.holds == {BATCH: 0.3}
    with pytest.raises(NotFound, match="no such brake: 'standard'"):
        await house.admin.brakes.end(ACTOR, BrakeEnd(tier="standard"))
    third = (await audited(house.admin))[2]
    assert third.before is not None
    assert third.before["share"] == 0.1
    await house.admin.brakes.set(ACTOR, BrakeSet(tier="batch", share=1, for_s=60))
    await house.look()
    assert house.holds == {}, "all of it is no bound"
    assert [each.share for each in house.brakes.now] == [1.0], "and is shown"


async def test_one_that_is_over_before_a_new_one_is_set_ends_in_the_audit_all_the_same(
    database: Database, pepper: bytes, clock: Clock
) -> None:
    house = House(database, pepper, clock)
    await house.admin.brakes.set(ACTOR, BrakeSet(tier="batch", share=0.1, for_s=10))
    clock.advance(100)
    assert await house.admin.brakes.all() == []
    with pytest.raises(NotFound):
        await house.admin.brakes.end(ACTOR, BrakeEnd(tier="batch"))
    await house.admin.brakes.set(ACTOR, BrakeSet(tier="batch", share=0.2, for_s=10))
    assert await actions(house) == [
        ("brake.set", "cli:tester"),
        ("brake.end", "system"),
        ("brake.set", "cli:tester"),
    ]


async def test_a_start_takes_over_what_holds_and_ends_what_is_over(
    database: Database, pepper: bytes, clock: Clock
) -> None:
    before = House(database, pepper, clock)
    await before.admin.brakes.set(ACTOR, BrakeSet(tier="batch", share=0.1, for_s=10))
    await before.admin.brakes.set(ACTOR, BrakeSet(tier="standard", share=0.2, for_s=100))
    clock.advance(50)
    after = House(database, pepper, clock)
    await after.brakes.start()
    assert after.holds == {STANDARD: 0.2}
    await after.look()
    assert await actions(after) == [("brake.set", "cli:tester")] * 2 + [("brake.end", "system")]


async def test_it_ends_in_time_without_the_database_and_the_audit_follows(
    database: Database, pepper: bytes, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(database, pepper, clock)
    await house.admin.brakes.set(ACTOR, BrakeSet(tier="batch", share=0.1, for_s=10))
    await house.brakes.start()
    assert house.holds == {BATCH: 0.1}

    async def away(*_: Any) -> Any:
        raise DatabaseUnavailable("it is away")

    with monkeypatch.context() as outage:
        outage.setattr(database, "read", away)
        outage.setattr(database, "write", away)
        clock.advance(10)
        await house.brakes.follow()
        assert house.holds == {}
    assert await actions(house) == [("brake.set", "cli:tester")]
    await house.brakes.follow()
    assert await actions(house) == [("brake.set", "cli:tester"), ("brake.end", "system")]


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"share": 1.01}, "share", "is 1.01, and must be above 0 and at most 1"),
        ({"share": 0}, "share", "is 0, and must be above 0 and at most 1"),
        ({"share": float("nan")}, "share", "must be a number above 0 and at most 1"),
        ({"share": float("inf")}, "share", "must be a number above 0 and at most 1"),
        ({"for_s": MAX_BRAKE_S + 1}, "for_s", "must be 1 to 86400 seconds (24 hours)"),
        ({"for_s": 0}, "for_s", "must be 1 to 86400 seconds (24 hours)"),
        ({"tier": "interactive"}, "tier", "a brake holds standard or batch; interactive is never braked"),
        ({"reason": "x" * 201}, "reason", "say why, in 1 to 200 characters"),
    ],
)
async def test_what_makes_no_sense_is_refused_and_leaves_no_trace(
    database: Database, pepper: bytes, clock: Clock, fields: dict[str, Any], field: str, message: str
) -> None:
    house = House(database, pepper, clock)
    wanted: dict[str, Any] = {"tier": "batch", "share": 0.1, "for_s": 60.0} | fields
    with pytest.raises(Invalid) as refused:
        await house.admin.brakes.set(ACTOR, BrakeSet(**wanted))
    assert refused.value.field == field
    assert message in refused.value.message
    assert await audited(house.admin) == []
    assert await house.admin.brakes.stored() == []
