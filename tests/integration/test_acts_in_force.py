"""What admin acts do to requests that wait and run: limits that are set, keys that are taken away.

A real directory, ledger and quota store, and the scripted engine of `test_lifecycle.py`, which runs two
sequences at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec import structs

from gateway.budget.holds import BudgetDenied
from gateway.pools.pool import ModelPool, Pools
from gateway.requests.run import Run
from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.directory.directory import Directory
from tenants.directory.gateways import GatewayRegistry
from tenants.ledger.verify import verify_ledger
from tenants.nouns.key import KeyCreate
from tenants.nouns.limit import LimitSet
from tenants.nouns.tenant import TenantCreate
from tenants.outcomes import RequestOutcome
from tenants.quota.store import QuotaStoreUnavailable
from tenants.storage.database import Database
from tenants.types import Amounts, Limit, Principal
from tests.integration.test_lifecycle import PROMPT, House
from tests.support.engine_process import until

ACTOR = "test"
NOW_S = 1e9
"""The wall clock of `House`."""


class Acts:
    """A house whose principals are those of a real directory."""

    def __init__(self, database: Database, pepper: bytes) -> None:
        self.admin = Admin(Transactions(database, pepper))
        self.directory = Directory(database, pepper)
        self.house = House(database, standings=self.directory)
        self.database = database

    async def tenant(self) -> Principal:
        await self.admin.tenants.create(ACTOR, TenantCreate(name="acme"))
        _, secret = await self.admin.keys.create(ACTOR, KeyCreate(tenant="acme"))
        await self.directory.refresh()
        return self.directory.authenticate(secret, NOW_S)

    async def limit(self, amount: int, *, follows: bool = True) -> Limit:
        """Sets a lifetime's limit on the tenant; `follows`: requests that run take it over."""
        wanted = LimitSet(tenant="acme", meter="total_tokens", amount=amount, window="lifetime")
        made = await self.admin.limits.set(ACTOR, wanted)
        await self.directory.refresh()
        if follows:
            await self.house.lifecycle.follow_directory()
        return made

    async def used(self, limit: Limit) -> tuple[int, int]:
        """Used and held, which the ledger says as well."""
        [state] = await self.house.store.states([limit])
        standing = await self.house.ledger.standing([limit], datetime.fromtimestamp(NOW_S, UTC))
        assert standing.used == [(limit, state.used)]
        report = await verify_ledger(self.database, self.house.store, running=lambda: self.house.holds.live)
        assert report.ok, report.problems
        return state.used, state.held


@pytest.fixture
async def acts(database: Database, pepper: bytes) -> AsyncIterator[Acts]:
    found = Acts(database, pepper)
    yield found
    await found.house.close()


async def full(acts: Acts, principal: Principal) -> list[tuple[Run, list[str]]]:
    """As many as the engine runs."""
    return [await acts.house.running(principal=principal) for _ in range(2)]


async def waiting(acts: Acts, principal: Principal, max_tokens: int = 20) -> Run:
    run = acts.house.begin(principal=principal, max_tokens=max_tokens)
    await until(lambda: run.in_line)
    return run


async def ended(acts: Acts, run: Run, ids: list[str], tokens: int) -> None:
    for each in ids:
        acts.house.engine.emit(each, tokens)
        acts.house.engine.end(each, "length")
    await acts.house.closed(run)


async def test_a_limit_that_was_set_while_a_request_waited_counts_it_from_its_turn_on(acts: Acts) -> None:
    principal = await acts.tenant()
    [(first, ids), (second, others)] = await full(acts, principal)
    late = await waiting(acts, principal)
    limit = await acts.limit(1_000)
    # Those that run count at once, with what they hold; the one that waits does at its turn.
    assert await acts.used(limit) == (0, 2 * (len(PROMPT) + 20))
    await ended(acts, first, ids, 20)
    await until(lambda: f"{late.call.request_id}.0" in acts.house.engine.submitted)
    assert await acts.used(limit) == (30, 2 * 30)
    await ended(acts, second, others, 20)
    await ended(acts, late, [f"{late.call.request_id}.0"], 5)
    assert await acts.used(limit) == (30 + 30 + 15, 0)
    rows = await acts.house.ledger.find(late.call.request_id)
    assert [(row.kind, bool(row.charged_to)) for row in rows] == [
        ("reserve", False), ("top_up", True), ("settle", False),
    ]  # fmt: skip


async def test_where_it_has_no_room_at_its_turn_it_is_refused_and_refunded(acts: Acts) -> None:
    principal = await acts.tenant()
    [(first, ids), (second, others)] = await full(acts, principal)
    late = await waiting(acts, principal)
    # Set, and not followed yet: the turn alone has to find it.
    limit = await acts.limit(2 * 30 + 29, follows=False)
    await acts.house.lifecycle.follow_directory()
    await ended(acts, first, ids, 20)
    closed, _ = await acts.house.closed(late)
    assert isinstance(closed.cause, BudgetDenied)
    assert closed.cause.denied.limit.limit_id == limit.limit_id
    await ended(acts, second, others, 20)
    assert await acts.used(limit) == (60, 0)
    assert acts.house.holds.held(late.call.request_id).requests == 0


async def test_a_request_is_held_on_the_limits_of_the_moment_whenever_it_was_authenticated(
    acts: Acts,
) -> None:
    principal = await acts.tenant()
    limit = await acts.limit(35)
    assert principal.limits == ()
    first, ids = await acts.house.running(principal=principal)
    refused = acts.house.begin(principal=principal)
    closed, _ = await acts.house.closed(refused)
    assert isinstance(closed.cause, BudgetDenied)
    assert not refused.in_line, "before it is queued"
    await ended(acts, first, ids, 20)
    assert await acts.used(limit) == (30, 0)


async def test_what_runs_tops_up_by_a_limit_that_came_later(acts: Acts) -> None:
    principal = await acts.tenant()
    # No limit counts output: all of it is covered, so it is not asked for again.
    whole, ids = await acts.house.running(principal=principal, max_tokens=200)
    limit = await acts.limit(100)
    assert await acts.used(limit) == (0, 210), "whatever room the limit has"
    await ended(acts, whole, ids, 120)
    assert await acts.used(limit) == (130, 0)


@pytest.mark.parametrize("mode", ["soft", "shadow"])
async def test_a_rate_that_only_watched_what_runs_holds_all_of_it_once_it_is_hard(
    acts: Acts, mode: str
) -> None:
    key_id = (await acts.tenant()).key_id
    rate = LimitSet(tenant="acme", meter="total_tokens", amount=1_000, rate_per_s=0.001, mode=mode)
    await acts.admin.limits.set(ACTOR, rate)
    await acts.directory.refresh()
    principal = acts.directory.standing(key_id, NOW_S)
    run, ids = await acts.house.running(principal=principal, max_tokens=200)
    limit = await acts.admin.limits.set(ACTOR, structs.replace(rate, mode="hard"))
    await acts.directory.refresh()
    await acts.house.lifecycle.follow_directory()
    [state] = await acts.house.store.states([limit])
    assert state.held == len(PROMPT) + 200
    await ended(acts, run, ids, 150)
    assert not acts.house.holds.pending, "its settlement is through"
    [state] = await acts.house.store.states([limit])
    assert (state.used, state.held) == (len(PROMPT) + 150, 0)


async def test_a_limit_that_comes_while_a_top_up_is_written_holds_that_as_well(acts: Acts) -> None:
    principal = await acts.tenant()
    run, ids = await acts.house.running(principal=principal, max_tokens=200)
    limit = await acts.limit(10_000, follows=False)
    holds, request_id = acts.house.holds, run.call.request_id
    held = holds.held(request_id)
    more = structs.replace(held, output_tokens=held.output_tokens + 50)
    writing = asyncio.create_task(holds.top_up(request_id, Amounts(requests=0), more, more))
    await asyncio.sleep(0)  # the store has granted it
    await holds.rebind(request_id, [limit], must_fit=False)
    await writing
    assert await acts.used(limit) == (0, more.input_tokens + more.output_tokens)
    await ended(acts, run, ids, 200)


@pytest.mark.parametrize("finds", ["the next look", "its turn"])
async def test_what_waits_under_a_suspended_tenant_ends_refunded(acts: Acts, finds: str) -> None:
    principal = await acts.tenant()
    [(first, ids), (second, others)] = await full(acts, principal)
    late = await waiting(acts, principal)
    await acts.admin.tenants.suspend(ACTOR, "acme")
    await acts.directory.refresh()
    if finds == "the next look":
        await acts.house.lifecycle.follow_directory()
    else:
        await ended(acts, first, ids, 5)
    closed, _ = await acts.house.closed(late)
    assert closed.account.outcome == RequestOutcome.WITHDRAWN.value
    assert late.withdrawn_because == "tenant_suspended"
    [_, settle] = await acts.house.ledger.find(late.call.request_id)
    assert settle.amounts.requests == settle.amounts.input_tokens == settle.amounts.output_tokens == 0
    # What runs goes on.
    if finds == "the next look":
        await ended(acts, first, ids, 5)
    await ended(acts, second, others, 20)
    assert second.withdrawn_because == ""


async def test_what_runs_ends_charged_where_it_is_to_end_now(acts: Acts) -> None:
    principal = await acts.tenant()
    run, ids = await acts.house.running(principal=principal)
    acts.house.engine.emit(ids[0], 3)
    await acts.admin.keys.revoke(ACTOR, principal.key_id, now=True)
    await acts.directory.refresh()
    await acts.house.lifecycle.follow_directory()
    closed, _ = await acts.house.closed(run)
    assert closed.account.outcome == RequestOutcome.WITHDRAWN.value
    settle = (await acts.house.ledger.find(run.call.request_id))[-1]
    emitted = 3 + acts.house.engine.hides_after_cancel
    assert (settle.outcome, settle.amounts.output_tokens) == ("withdrawn", emitted)


async def test_what_is_to_end_now_waits_for_no_other_request(acts: Acts) -> None:
    principal = await acts.tenant()
    busy, ids = await acts.house.running(principal=principal)
    await acts.admin.tenants.create(ACTOR, TenantCreate(name="other"))
    _, secret = await acts.admin.keys.create(ACTOR, KeyCreate(tenant="other"))
    await acts.directory.refresh()
    run, _ = await acts.house.running(principal=acts.directory.authenticate(secret, NOW_S))
    await busy.accounts.acquire()  # as while its hold changes, and a store is slow
    await acts.limit(1_000, follows=False)
    await acts.admin.tenants.suspend(ACTOR, "other", now=True)
    await acts.directory.refresh()
    following = asyncio.create_task(acts.house.lifecycle.follow_directory())
    try:
        closed, _ = await acts.house.closed(run)
        assert closed.account.outcome == RequestOutcome.WITHDRAWN.value
        assert not following.done()
    finally:
        busy.accounts.release()
        await following
    await ended(acts, busy, ids, 20)


async def test_what_fails_in_one_pool_keeps_no_other_from_the_directory(
    acts: Acts, database: Database
) -> None:
    principal = await acts.tenant()
    other = House(database, standings=acts.directory)
    both = Pools(
        {name: cast(ModelPool, SimpleNamespace(lifecycle=each.lifecycle)) for name, each in
         (("m", acts.house), ("n", other))}
    )  # fmt: skip
    await acts.house.running(principal=principal)
    run, _ = await other.running(principal=principal)
    limit = await acts.limit(1_000, follows=False)
    assert await acts.house.store.begin_rebuild("another gateway", 30)  # until then it changes no hold
    with pytest.raises(QuotaStoreUnavailable):
        await both.follow_directory()
    assert [state.held for state in await other.store.states([limit])] == [len(PROMPT) + 20]
    assert run.leases is not None
    await acts.house.store.finish_rebuild("another gateway", "")
    await other.close()


async def test_an_act_waits_for_every_gateway_that_lives(database: Database, pepper: bytes) -> None:
    registry, admin = GatewayRegistry(database), Admin(Transactions(database, pepper))
    for name in ("one", "other"):
        await registry.beat(name, "", frozenset())
    await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    directory = Directory(database, pepper)
    await directory.refresh()
    await registry.serve("one", directory.revision)
    assert [each.gateway_id for each in await registry.not_serving(60, wait_s=0)] == ["other"]
    pending = asyncio.create_task(registry.not_serving(60))
    await asyncio.sleep(0)
    await registry.serve("other", directory.revision)
    assert await pending == []
    # A later act is not confirmed by an earlier revision; the dead are not waited for.
    await admin.tenants.suspend(ACTOR, "acme")
    assert len(await registry.not_serving(60, wait_s=0)) == 2
    assert await registry.not_serving(-1, wait_s=0) == []
