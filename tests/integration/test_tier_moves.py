"""A waiting request that changes its tier holds, pays and settles what the new tier costs, nothing else.

The real lifecycle, queue, quota store and ledger (the house of `test_lifecycle.py`), one engine place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from engine.messages import TIER_RANKS
from gateway.budget.holds import BudgetDenied
from gateway.cluster.crash_charge import reckon
from gateway.errors import ApiError
from gateway.metrics.recent_lag import RecentLag
from gateway.metrics.waits import RecentWaits
from gateway.pools.pool import Pools
from gateway.pools.request_actions import CANCEL, LIST, MOVE, OFFER, SHOW, RequestAction, RequestActions
from gateway.requests.run import Run
from tenants.errors import DatabaseUnavailable
from tenants.ledger.rows import LedgerRow
from tenants.outcomes import RequestOutcome
from tenants.quota.store import QuotaStoreUnavailable
from tenants.storage.database import open_database
from tenants.types import Limit, Meter, SubjectKind, Tier, Window
from tests.integration.test_lifecycle import PRINCIPAL, PROMPT, House, told
from tests.support.builders import site
from tests.support.engine_process import until

MOST = 100 * len(PROMPT) + 300 * 20
"""Nano-dollars of a whole request at the list price, which is the standard tier's."""


def cost_limit(amount: int) -> Limit:
    return Limit("lim_c", "ten_1", SubjectKind.TENANT, "ten_1", Meter.COST_NANOUSD, amount, Window.LIFETIME)


class Line(House):
    """A house whose engine has no place left: every arrival waits."""

    async def fill(self) -> list[str]:
        """Two requests that run: all there is room for."""
        _, first = await self.running(principal=OTHERS)
        _, second = await self.running(principal=OTHERS)
        return first + second

    async def waiting(self, *limits: Limit, **fields: Any) -> Run:
        run = self.begin(principal=replace(PRINCIPAL, limits=limits), **fields)
        await until(lambda: run.status == "waiting")
        return run

    async def held_nanousd(self, limit: Limit) -> int:
        (state,) = await self.store.states([limit])
        return state.held

    async def served(self, run: Run, tokens: int = 20) -> LedgerRow:
        """Gives it its turn, lets it run to its end, and returns its settle row."""
        name = f"{run.call.request_id}.0"
        await until(lambda: name in self.engine.submitted)
        self.engine.emit(name, tokens)
        self.engine.end(name, "length")
        closed, _ = await self.closed(run)
        assert closed.cause is None, closed.cause
        assert closed.account.charged.output_tokens == tokens
        return (await self.ledger.find(run.call.request_id))[-1]


OTHERS = replace(PRINCIPAL, tenant_id="ten_2", tenant_name="others", limits=())


@pytest.fixture
async def line(sqlite_url: str) -> AsyncIterator[Line]:
    database = open_database(sqlite_url)
    made = Line(database)
    # By tenants one without a running request would be owed a place.
    made.flow.set_order("fcfs")
    yield made
    await made.close()
    await database.close()


async def test_a_move_up_holds_and_charges_the_new_tiers_price(line: Line) -> None:
    running = await line.fill()
    limit = cost_limit(10 * MOST)
    run = await line.waiting(limit)
    assert await line.held_nanousd(limit) == MOST
    offer = await line.lifecycle.move(run, Tier.INTERACTIVE, "tenant")
    assert (offer.before.input_nanousd, offer.after.input_nanousd) == (100, 200)
    assert (offer.before.cost_nanousd[2], offer.after.cost_nanousd[2]) == (MOST, 2 * MOST)
    assert await line.held_nanousd(limit) == 2 * MOST
    ticket = line.flow.ticket(run.call.request_id)
    assert ticket is not None
    assert ticket.entry.tier == TIER_RANKS["interactive"]
    line.engine.end(running[0], "stop")
    settled = await line.served(run)
    assert (settled.tier, settled.amounts.cost_nanousd) == ("interactive", 2 * MOST)
    assert line.engine.submitted[f"{run.call.request_id}.0"].tier == TIER_RANKS["interactive"]
    (state,) = await line.store.states([limit])
    assert (state.used, state.held) == (2 * MOST, 0)
    line.store.check()


async def test_a_move_down_gives_the_difference_back_at_the_end(line: Line) -> None:
    running = await line.fill()
    limit = cost_limit(10 * MOST)
    run = await line.waiting(limit)
    await line.lifecycle.move(run, Tier.BATCH, "tenant")
    assert await line.held_nanousd(limit) == MOST, "what is held is never lowered before the end"
    line.engine.end(running[0], "stop")
    settled = await line.served(run)
    assert (settled.tier, settled.amounts.cost_nanousd) == ("batch", MOST // 2)
    (state,) = await line.store.states([limit])
    assert (state.used, state.held) == (MOST // 2, 0)


async def test_a_move_overtakes_who_came_before_it(line: Line) -> None:
    running = await line.fill()
    first = await line.waiting()
    second = await line.waiting()
    await line.lifecycle.move(second, Tier.INTERACTIVE, "tenant")
    line.engine.end(running[0], "stop")
    await until(lambda: second.status == "running")
    assert first.status == "waiting"


async def test_a_move_that_the_budget_does_not_cover_changes_nothing(line: Line) -> None:
    running = await line.fill()
    limit = cost_limit(2 * MOST - 1)
    run = await line.waiting(limit)
    with pytest.raises(BudgetDenied):
        await line.lifecycle.move(run, Tier.INTERACTIVE, "tenant")
    assert run.call.tier is Tier.STANDARD
    assert await line.held_nanousd(limit) == MOST
    assert [row.kind for row in await line.ledger.find(run.call.request_id)] == ["reserve"]
    line.engine.end(running[0], "stop")
    settled = await line.served(run)
    assert (settled.tier, settled.amounts.cost_nanousd) == ("standard", MOST)


async def test_what_may_be_cut_moves_with_what_it_probably_needs(line: Line) -> None:
    """Without `max_tokens` nothing is promised: the move needs no worst case."""
    running = await line.fill()
    limit = cost_limit(2 * MOST - 1)
    run = await line.waiting(limit, asked_max_tokens=False)
    run.predicted_tokens_to_hold = 5
    await line.lifecycle.move(run, Tier.INTERACTIVE, "tenant")
    line.engine.end(running[0], "stop")
    settled = await line.served(run, tokens=3)
    assert settled.amounts.cost_nanousd == 2 * (100 * len(PROMPT) + 300 * 3)


async def test_a_bucket_beside_the_budget_does_not_let_a_promise_be_broken(line: Line) -> None:
    """The bucket cannot hold the worst case; the budget, which could, has no room for it."""
    await line.fill()
    bucket = Limit("lim_b", "ten_1", SubjectKind.TENANT, "ten_1", Meter.OUTPUT_TOKENS, 64, rate_per_s=1000.0)
    limit = cost_limit(2 * MOST - 1)
    run = await line.waiting(limit, bucket)
    with pytest.raises(BudgetDenied):
        await line.lifecycle.move(run, Tier.INTERACTIVE, "tenant")
    assert run.call.tier is Tier.STANDARD
    rows = await line.ledger.find(run.call.request_id)
    assert rows[-1].tier == "standard"


async def test_only_what_stands_in_line_can_move(line: Line) -> None:
    run, _ = await line.running(principal=OTHERS)
    with pytest.raises(ApiError) as late:
        await line.lifecycle.move(run, Tier.BATCH, "tenant")
    assert late.value.code == "request_not_waiting"
    assert "running" in late.value.message


async def test_a_turn_that_comes_while_the_ledger_writes_keeps_its_tier_and_the_ledger_says_so(
    line: Line,
) -> None:
    running = await line.fill()
    limit = cost_limit(10 * MOST)
    run = await line.waiting(limit)
    top_up = line.store.top_up

    async def its_turn_comes(*arguments: Any) -> Any:
        line.engine.end(running[0], "stop")
        await until(lambda: run.status == "running")
        return await top_up(*arguments)

    line.store.top_up = its_turn_comes  # type: ignore[method-assign]
    with pytest.raises(ApiError) as late:
        await line.lifecycle.move(run, Tier.INTERACTIVE, "tenant")
    assert late.value.code == "request_not_waiting"
    line.store.top_up = top_up  # type: ignore[method-assign]
    settled = await line.served(run)
    assert (settled.tier, settled.amounts.cost_nanousd) == ("standard", MOST)
    rows = await line.ledger.find(run.call.request_id)
    assert [row.tier for row in rows] == ["standard", "interactive", "standard", "standard"]


async def test_tiers_with_limits_of_their_own_are_not_moved_between(line: Line) -> None:
    await line.fill()
    own = Limit(
        "lim_t", "ten_1", SubjectKind.TENANT, "ten_1", Meter.OUTPUT_TOKENS, 1000, Window.DAY,
        tier=Tier.INTERACTIVE,
    )  # fmt: skip
    run = await line.waiting(own)
    with pytest.raises(ApiError) as limited:
        await line.lifecycle.move(run, Tier.INTERACTIVE, "tenant")
    assert limited.value.code == "tier_has_limits"
    offer = await line.lifecycle.move(run, Tier.BATCH, "tenant")
    assert offer.after.tier is Tier.BATCH


async def test_moving_to_its_own_tier_changes_nothing(line: Line) -> None:
    await line.fill()
    run = await line.waiting()
    offer = await line.lifecycle.move(run, Tier.STANDARD, "tenant")
    assert offer.before == offer.after
    assert [row.kind for row in await line.ledger.find(run.call.request_id)] == ["reserve"]
    assert run.moves == []


async def test_a_gateway_that_dies_after_a_move_leaves_the_new_price_behind(line: Line) -> None:
    running = await line.fill()
    run = await line.waiting(cost_limit(10 * MOST))
    await line.lifecycle.move(run, Tier.INTERACTIVE, "tenant")
    line.engine.end(running[0], "stop")
    name = f"{run.call.request_id}.0"
    await until(lambda: name in line.engine.submitted)
    (open_request,) = await line.ledger.open_requests(request_ids=[run.call.request_id])
    line.engine.emit(name, 4)
    line.engine.end(name, "stop")
    await line.closed(run)
    outcomes = [use.outcome for use in run.uses if use.outcome is not None]
    reckoned = reckon(open_request, outcomes, line.prices)
    assert reckoned.charged.cost_nanousd == 2 * (100 * len(PROMPT) + 300 * 4)


async def test_a_move_under_way_ends_before_the_settlement_begins(line: Line) -> None:
    """The client leaves while the ledger writes the move: the settle row comes after it."""
    await line.fill()
    run = await line.waiting(cost_limit(10 * MOST))
    append = line.ledger.append

    async def the_client_leaves(row: LedgerRow, **fields: Any) -> bool:
        if row.kind == "top_up":
            run.interrupt(RequestOutcome.DISCONNECTED)
            await asyncio.sleep(0.05)  # long enough for a settlement that does not wait
        return await append(row, **fields)

    line.ledger.append = the_client_leaves  # type: ignore[method-assign]
    with pytest.raises((ApiError, QuotaStoreUnavailable, DatabaseUnavailable)):
        await line.lifecycle.move(run, Tier.INTERACTIVE, "tenant")
    await line.closed(run)
    rows = await line.ledger.find(run.call.request_id)
    assert [row.kind for row in rows] == ["reserve", "top_up", "top_up", "settle"]
    assert rows[-1].amounts.cost_nanousd == 0


async def test_cancelling_ends_what_waits_and_what_runs_and_charges_what_was_emitted(line: Line) -> None:
    run, (one,) = await line.running()
    line.engine.emit(one, 3)
    await until(lambda: run.output_tokens == 3)
    line.lifecycle.cancel(run)
    line.lifecycle.cancel(run)
    closed, _ = await line.closed(run)
    assert closed.cause is not None
    assert (told(run, closed).status, told(run, closed).code) == (499, "request_cancelled")
    await line.check(run, RequestOutcome.CANCELLED, 5)  # two more before the engine heard of it


async def test_a_cancelled_wait_costs_nothing(line: Line) -> None:
    await line.fill()
    run = await line.waiting(cost_limit(10 * MOST))
    line.lifecycle.cancel(run)
    closed, _ = await line.closed(run)
    assert closed.account.outcome == "cancelled"
    rows = await line.ledger.find(run.call.request_id)
    assert [row.kind for row in rows] == ["reserve", "settle"]
    assert (rows[1].amounts.cost_nanousd, rows[1].amounts.requests) == (0, 0)
    assert line.lifecycle.find(run.call.request_id) is None or run.status == "ended"


# ---------------------------------------------------------------- asked by another gateway


async def test_another_gateways_question_is_answered_about_the_askers_own_requests_only(line: Line) -> None:
    running = await line.fill()
    run = await line.waiting(cost_limit(10 * MOST))
    request_id, tenant_id = run.call.request_id, PRINCIPAL.tenant_id
    pool: Any = SimpleNamespace(lifecycle=line.lifecycle)
    under_way = RequestActions(site(None), Pools(m=pool), RecentLag(), RecentWaits())
    assert not (await under_way.act(RequestAction(SHOW, request_id, "ten_2"))).is_found
    assert not (await under_way.act(RequestAction(CANCEL, request_id, "ten_2"))).is_found
    assert [each["id"] for each in (await under_way.act(RequestAction(LIST, tenant_id=tenant_id))).value] == [
        request_id
    ]
    foreign = RequestAction(LIST, tenant_id="ten_3", of_tenant=tenant_id)
    assert (await under_way.act(foreign)).value == []
    # An operator's list: every tenant's, each with its owner; or one tenant's, one status, one tier.
    listed = (await under_way.act(RequestAction(LIST))).value
    assert [each["tenant_id"] for each in listed] == ["ten_2", "ten_2", tenant_id]
    for ask in (RequestAction(LIST, of_tenant=tenant_id), RequestAction(LIST, status="waiting")):
        assert [each["id"] for each in (await under_way.act(ask)).value] == [request_id]
    assert len((await under_way.act(RequestAction(LIST, of_tenant="ten_2"))).value) == 2
    assert (await under_way.act(RequestAction(LIST, tier="batch"))).value == []
    shown = await under_way.act(RequestAction(SHOW, request_id, tenant_id))
    assert (shown.tenant_id, shown.result()["status"]) == (tenant_id, "waiting")
    offer = (await under_way.act(RequestAction(OFFER, request_id, None, "interactive"))).result()
    for side in ("from", "to"):
        left_s = offer[side]["time_left_s"]
        assert offer[side]["tokens_ahead"].keys() == {"own", "others", "higher_tier"}
        assert 0 <= left_s["p50"] <= left_s["p90"]
    moved = (
        await under_way.act(RequestAction(MOVE, request_id, tenant_id, "interactive", "operator"))
    ).result()
    assert (moved["moved"], moved["tier"], run.moves[0].by) == (True, "interactive", "operator")
    other = running[0].removesuffix(".0")
    refused = await under_way.act(RequestAction(MOVE, other, None, "batch"))
    assert refused.is_found
    with pytest.raises(ApiError) as error:
        refused.result()
    assert (error.value.status, error.value.code) == (409, "request_not_waiting")
    assert (await under_way.act(RequestAction(CANCEL, request_id))).result()["status"] == "cancelled"
    closed, _ = await line.closed(run)
    assert closed.account.outcome == "cancelled"
