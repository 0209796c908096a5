"""Live state of all gateways: each request once, and every gateway that did not answer is counted.

Several gateways' parts over a real Redis and a real database; what they run is a plain list here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import cast

import msgspec
import pytest

from gateway.metrics.waits import KeptWaits
from gateway.pools.fleet import Fleet
from gateway.pools.live_counters import GatewayNow, TenantNow
from gateway.pools.peer_requests import PeerRequests
from gateway.pools.request_actions import (
    COUNT,
    COUNTERS,
    LIST,
    NOT_HERE,
    WAITING,
    ActionResult,
    RequestAction,
    RequestActions,
)
from gateway.pools.waiting import WaitingHere, WaitingNow
from tenants.directory.gateways import GatewayRegistry
from tenants.storage.database import Database
from tests.integration.test_peer_requests import House

Act = Callable[[RequestAction], Awaitable[ActionResult]]
ASK = RequestAction(LIST)


class Runs:
    """What one gateway runs: ids with the seconds that they are there, and a number on one replica."""

    def __init__(self, *requests: tuple[str, float], at: str = "http://a", count: int = 0) -> None:
        self._requests = requests
        self._replica = ("llama", at, count)

    async def act(self, ask: RequestAction) -> ActionResult:
        if ask.act == COUNT:
            return ActionResult(True, [self._replica])
        return ActionResult(True, [{"id": name, "elapsed_s": since_s} for name, since_s in self._requests])


@pytest.fixture
async def house(redis_url: str) -> AsyncIterator[House]:
    async with AsyncExitStack() as closing:
        yield House(redis_url, closing)


def seen_by(peers: PeerRequests | None, own: Runs, registry: GatewayRegistry) -> Fleet:
    return Fleet("one", cast(RequestActions, own), peers, registry, 30.0)


async def living(registry: GatewayRegistry, *names: str) -> None:
    for name in names:
        await registry.beat(name, "", frozenset())


async def test_every_request_is_there_once_the_oldest_first(house: House, database: Database) -> None:
    registry = GatewayRegistry(database)
    await living(registry, "one", "two", "three")
    own = Runs(("b", 2.0), ("moved", 5.0), count=1)
    fleet = seen_by(await house.gateway(own.act), own, registry)
    await house.gateway(Runs(("a", 9.0), ("moved", 4.0), count=2).act)
    await house.gateway(Runs(("c", 2.0), at="http://b", count=4).act)
    found = await fleet.live_requests(ASK)
    shown = [(each["id"], each["elapsed_s"]) for each in found.data]
    assert shown == [("a", 9.0), ("moved", 5.0), ("b", 2.0), ("c", 2.0)]
    assert (found.has_more, found.gateways_missing) == (False, 0)
    counts, missing = await fleet.in_flight()
    assert (dict(counts), missing) == ({("llama", "http://a"): 3, ("llama", "http://b"): 4}, 0)


async def test_more_than_the_most_says_so(
    house: House, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.pools.fleet.MAX_LISTED", 2)
    own = Runs(("a", 1.0), ("b", 2.0))
    fleet = seen_by(await house.gateway(own.act), own, GatewayRegistry(database))
    await house.gateway(Runs(("c", 3.0)).act)
    found = await fleet.live_requests(ASK)
    assert ([each["id"] for each in found.data], found.has_more) == (["c", "b"], True)


async def test_a_gateway_that_lives_and_does_not_hear_the_question_is_missing(
    house: House, database: Database
) -> None:
    registry = GatewayRegistry(database)
    await living(registry, "one", "two", "deaf", "deaf too")
    own = Runs(("a", 1.0))
    fleet = seen_by(await house.gateway(own.act), own, registry)
    await house.gateway(Runs(("b", 2.0)).act)
    assert (await fleet.live_requests(ASK)).gateways_missing == 2
    await registry.forget("deaf")
    assert (await fleet.in_flight())[1] == 1


async def test_one_that_does_not_know_the_question_is_missing_and_adds_nothing(
    house: House, database: Database
) -> None:
    async def older(ask: RequestAction) -> ActionResult:
        return NOT_HERE

    own = Runs(count=1)
    fleet = seen_by(await house.gateway(own.act), own, GatewayRegistry(database))
    await house.gateway(older)
    counts, missing = await fleet.in_flight()
    assert (counts["llama", "http://a"], missing) == (1, 1)


async def test_without_redis_this_gateways_own_are_shown_and_the_others_counted(
    house: House, database: Database
) -> None:
    registry = GatewayRegistry(database)
    await living(registry, "one", "two", "three")
    own = Runs(("a", 1.0))
    peers = await house.gateway(own.act)
    fleet = seen_by(peers, own, registry)
    peers.is_listening.clear()
    found = await fleet.live_requests(ASK)
    assert ([each["id"] for each in found.data], found.gateways_missing) == (["a"], 2)

    await database.close()
    assert (await fleet.live_requests(ASK)).gateways_missing == 1, "at least"
    alone = seen_by(None, own, registry)
    assert (await alone.live_requests(ASK)).gateways_missing == 0


class Counts:
    """What one gateway counts, and what waits there."""

    def __init__(self, gateway_id: str, *waits: tuple[str, float], total: int = 0) -> None:
        tenant = TenantNow("t1", "standard", 1.0, queued=len(waits), had=1.0, due=2.0)
        queued = {"standard": len(waits)}
        self._now = GatewayNow(gateway_id, "", 0.0, 10, queued, 1, 0.0, [tenant])
        rows = [WaitingNow(name, "t1", "m", "standard", "waiting", since_s, 1) for name, since_s in waits]
        kept = [KeptWaits("t1", "batch", len(rows), 1.0, 2.0, 3.0, 4.0, 0.5)]
        self._waiting = WaitingHere(rows, total or len(rows), kept * bool(total))

    async def act(self, ask: RequestAction) -> ActionResult:
        assert ask.act == COUNTERS or (ask.act, ask.of_tenants, ask.tier) == (WAITING, ("t1", "t2"), "batch")
        value = self._now if ask.act == COUNTERS else self._waiting
        return ActionResult(True, msgspec.to_builtins(value))


async def test_live_figures_of_all_gateways_are_added_up_and_one_of_another_version_is_missing(
    house: House, database: Database
) -> None:
    async def strange(ask: RequestAction) -> ActionResult:
        return ActionResult(True, {"what": "is this"})

    registry = GatewayRegistry(database)
    await living(registry, "one", "two", "strange")
    own = Counts("one", ("b", 2.0), ("moved", 5.0))
    fleet = Fleet("one", cast(RequestActions, own), await house.gateway(own.act), registry, 30.0)
    await house.gateway(Counts("two", ("a", 9.0), ("moved", 4.0), total=7).act)
    await house.gateway(strange)
    now = await fleet.now()
    assert [each.gateway_id for each in now.gateways] == ["one", "two"]
    assert (now.missing, now.queued["standard"], now.running) == (1, 4, 2)
    assert [(each.queued, each.had, each.due) for each in now.tenants] == [(4, 2.0, 4.0)]
    found = await fleet.waiting({"t2", "t1"}, "batch")
    assert [each.request_id for each in found.data] == ["a", "moved", "b"]
    assert (found.total, found.gateways, found.gateways_missing) == (9, 2, 1)
    assert [(line.tenant_id, line.requests, line.told_p50_s) for line in found.kept] == [("t1", 2, 1.0)]
