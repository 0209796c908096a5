"""A stored drain takes a replica out of rotation in every gateway of a database, until it is resumed."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.cluster.active_directory import ActiveDirectory
from gateway.cluster.active_drains import ActiveDrains
from gateway.routes.views.upstreams_view import find_drain, find_replica, state_of
from tenants.admin.admin import Admin
from tenants.admin.audit import Actor
from tenants.admin.commands import ReplicaDrain
from tenants.admin.platform import drains
from tenants.admin.transaction import Transactions
from tenants.directory.directory import Directory
from tenants.directory.gateways import GatewayRegistry
from tenants.errors import DatabaseUnavailable, Invalid, NotFound
from tenants.storage.database import Database
from tests.support.audited import audited
from tests.support.quota import Clock

ACTOR = Actor("cli:tester", "cli")


@dataclass
class Named:
    """A replica as one gateway calls it; `name` is the same at all."""

    replica_id: str
    name: str
    is_drained: bool = False
    changes: list[bool] = field(default_factory=list)

    def set_drained(self, is_drained: bool) -> None:
        self.is_drained = is_drained
        self.changes.append(is_drained)


class Rotation:
    """One gateway's drains, with its pools."""

    def __init__(self, database: Database, pepper: bytes, gateway_id: str, **pools: list[Named]) -> None:
        clock = Clock()
        self.directory = Directory(database, pepper)
        self.admin = Admin(Transactions(database, pepper, clock))
        self.registry = GatewayRegistry(database)
        self.gateway_id = gateway_id
        self.pools = {
            name: SimpleNamespace(name=name, spec=SimpleNamespace(upstreams=replicas))
            for name, replicas in pools.items()
        }
        deps = SimpleNamespace(
            admin=self.admin, directory=self.directory, registry=self.registry, gateway_id=gateway_id,
            config=SimpleNamespace(gateway_stale_s=30.0),
        )  # fmt: skip
        self.drains = ActiveDrains(cast(Any, deps), cast(Any, self.pools))

        async def nothing() -> None:
            pass

        lifecycle = cast(Any, SimpleNamespace(follow_directory=nothing))
        self.in_force = ActiveDirectory(cast(Any, deps), lifecycle, self.drains.follow)

    async def start(self) -> None:
        await self.registry.beat(self.gateway_id, "", frozenset())
        await self.in_force.refresh()


async def test_a_drain_holds_in_all_gateways_by_name_and_is_confirmed_by_each(
    database: Database, pepper: bytes
) -> None:
    one = Rotation(database, pepper, "one", llama=[Named("left", "left"), Named("right", "right")])
    other = Rotation(
        database, pepper, "other", llama=[Named("a", "right"), Named("b", "left")], mini=[Named("c", "left")]
    )
    for gateway in (one, other):
        await gateway.start()
    await one.admin.drains.drain(ACTOR, "llama", "left", ReplicaDrain(reason="new driver"))
    await one.in_force.refresh()
    late = await one.registry.not_serving(30.0, wait_s=0)
    assert [each.gateway_id for each in late] == ["other"], "it has not followed yet"
    await other.in_force.refresh()
    assert await one.registry.not_serving(30.0, wait_s=0) == []
    drained = {
        each.replica_id
        for gateway in (one, other)
        for pool in gateway.pools.values()
        for each in pool.spec.upstreams
        if each.is_drained
    }
    assert drained == {"left", "b"}, "of another model on the same server it is not"
    restarted = Rotation(database, pepper, "other", llama=[Named("b", "left")])
    await restarted.start()
    assert restarted.pools["llama"].spec.upstreams[0].is_drained
    [shown] = await one.admin.drains.all()
    await other.admin.drains.resume(ACTOR, *shown.identity)
    for gateway in (one, other):
        await gateway.in_force.refresh()
        await gateway.in_force.refresh()
    assert one.pools["llama"].spec.upstreams[0].changes == [True, False]
    assert other.pools["llama"].spec.upstreams[1].changes == [True, False]
    rows = await audited(one.admin)
    assert [(row.action, row.actor, row.target) for row in rows] == [
        ("upstream.drain", "cli:tester", "left"),
        ("upstream.resume", "cli:tester", "left"),
    ]
    assert rows[0].after == rows[1].before == shown.as_json()
    assert (rows[0].before, rows[1].after) == (None, None)


async def test_a_second_drain_keeps_the_first_ones_time_and_resuming_twice_is_refused(
    database: Database, pepper: bytes
) -> None:
    clock = Clock()
    admin = Admin(Transactions(database, pepper, clock))
    first = await admin.drains.drain(ACTOR, "llama", "left", ReplicaDrain())
    clock.advance(60)
    second = await admin.drains.drain("key:fg_live_x", "llama", "left", ReplicaDrain(reason="still"))
    assert (second.since_us, second.by, second.reason) == (first.since_us, "key:fg_live_x", "still")
    assert await admin.drains.all() == [second]
    assert await admin.drains.resume(ACTOR, "llama", "left") == second
    with pytest.raises(NotFound, match="no such drain: 'left of llama'"):
        await admin.drains.resume(ACTOR, "llama", "left")
    assert await admin.drains.all() == []


async def test_drains_are_bounded_and_a_reason_too(
    database: Database, pepper: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "MAX_DRAINS", 2)
    admin = Admin(Transactions(database, pepper))
    with pytest.raises(Invalid, match="1 to 200 characters"):
        await admin.drains.drain(ACTOR, "llama", "left", ReplicaDrain(reason="x" * 201))
    for pool in ("llama", "mini"):
        await admin.drains.drain(ACTOR, pool, "left", ReplicaDrain())
    with pytest.raises(Invalid) as refused:
        await admin.drains.drain(ACTOR, "more", "left", ReplicaDrain())
    assert (refused.value.field, "resume the ones that are gone" in str(refused.value)) == ("replica", True)
    await admin.drains.drain(ACTOR, "mini", "left", ReplicaDrain(reason="again"))
    assert len(await audited(admin)) == 3


async def test_without_the_database_a_revision_is_not_confirmed_and_drains_stay_as_they_were(
    database: Database, pepper: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Rotation(database, pepper, "one", llama=[Named("left", "left")])
    await gateway.start()
    await gateway.admin.drains.drain(ACTOR, "llama", "left", ReplicaDrain())
    await gateway.directory.refresh()

    async def away() -> Any:
        raise DatabaseUnavailable("it is away")

    with monkeypatch.context() as outage:
        outage.setattr(gateway.admin.drains, "all", away)
        await gateway.in_force.follow()
    assert not gateway.pools["llama"].spec.upstreams[0].is_drained
    assert len(await gateway.registry.not_serving(30.0, wait_s=0)) == 1
    await gateway.in_force.follow()
    assert gateway.pools["llama"].spec.upstreams[0].is_drained
    assert await gateway.registry.not_serving(30.0, wait_s=0) == []


async def test_a_drain_of_a_replica_that_only_others_have_is_found_by_its_name(
    database: Database, pepper: bytes
) -> None:
    gateway: Any = Rotation(database, pepper, "one", llama=[Named("left", "left")])
    await gateway.start()
    assert find_replica(gateway, "left")[0] == "llama"
    for missing in (lambda: find_replica(gateway, "right"), lambda: find_drain(gateway, "left")):
        with pytest.raises(NotFound):
            missing()
    await gateway.admin.drains.drain(ACTOR, "llama", "right", ReplicaDrain())
    await gateway.admin.drains.drain(ACTOR, "mini", "left", ReplicaDrain())
    await gateway.in_force.refresh()
    assert find_drain(gateway, "right").identity == ("llama", "right")
    with pytest.raises(NotFound):
        find_drain(gateway, "left")  # this gateway's own of that name is not drained
    await gateway.admin.drains.drain(ACTOR, "mini", "right", ReplicaDrain())
    await gateway.in_force.refresh()
    with pytest.raises(Invalid, match="drained replicas of llama, mini are called 'right'"):
        find_drain(gateway, "right")


@pytest.mark.parametrize(
    ("is_up", "is_drained", "running", "missing", "state"),
    [
        (True, False, 3, 0, "serving"),
        (False, False, 0, 0, "away"),
        (True, True, 3, 0, "draining"),
        (True, True, 0, 1, "draining"),
        (True, True, 0, 0, "drained"),
        (False, True, 0, 0, "drained"),
    ],
)
def test_a_drained_replica_may_be_stopped_once_every_gateway_said_that_nothing_runs_there(
    is_up: bool, is_drained: bool, running: int, missing: int, state: str
) -> None:
    assert state_of(is_up=is_up, is_drained=is_drained, running=running, missing=missing) == state
