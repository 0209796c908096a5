"""Two pools of one chain: a request is settled once, where it was taken, and nothing is left elsewhere.

The real lifecycles, queues, quota stores and ledger, each in front of an upstream that does what it is told.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from engine.messages import SamplingParams
from gateway.dispatch.admission import Admission
from gateway.domain.call import Call, Chained
from gateway.domain.fallback import FallbackReason, PoolTried
from gateway.domain.ids import new_request_id
from gateway.pools.chain_walk import ChainWalk
from gateway.requests.run import Run
from tenants.nouns.alias import Chain
from tenants.outcomes import RequestOutcome
from tenants.pricing.pricing import Price, uniform_book
from tenants.storage.database import open_database
from tenants.types import Limit, Meter, Principal, SubjectKind, Tier
from tests.integration.test_lifecycle import LIMITS, PRINCIPAL, PROMPT, House, timed, told
from tests.support.engine_process import until

PRICE = Price(100, 50, 300)
BOOK = uniform_book({"m": PRICE, "other": PRICE}, version=7)
LONGER = [*PROMPT, 11, 12]
"""The prompt as the second model counts it."""


class Street:
    """Two houses: what the first one does not take goes to the second."""

    def __init__(self, first: House, second: House) -> None:
        self.first, self.second = first, second

    async def begin(self, principal: Principal = PRINCIPAL, max_tokens: int = 20) -> Run:
        request_id = new_request_id(1e9)

        async def parse(pool: str) -> Call:
            return Call(
                request_id, True, pool, principal, Tier.STANDARD, (PROMPT if pool == "m" else LONGER,), 1,
                max_tokens, SamplingParams(), True, True, 1, pool=pool,
                chained=Chained(walk.fallback, walk.prices, walk.onward),
            )  # fmt: skip

        walk = ChainWalk(
            "big", Chain(("m", "other")), [Tier.STANDARD], BOOK,
            parse=parse, has_engine=lambda pool: True, on_passed=lambda pool, reason: None, only=None,
        )  # fmt: skip
        return self.first.lifecycle.begin(await walk.first())

    async def ended_elsewhere(self, run: Run, reason: FallbackReason) -> None:
        """The second house runs it; the rule of one reserve row and one settle row holds there, and nothing
        of it is left in the first."""
        sequence = f"{run.call.request_id}.0"
        await until(lambda: sequence in self.second.engine.submitted)
        assert self.first.lifecycle.find(run.call.request_id) is None
        assert self.second.lifecycle.find(run.call.request_id) is run
        assert self.second.engine.submitted[sequence].prompt_token_ids == LONGER
        self.second.engine.emit(sequence, 3)
        self.second.engine.end(sequence, "stop")
        closed, _ = await self.second.closed(run)
        assert closed.cause is None
        fallback = closed.account.fallback
        assert fallback is not None
        assert (fallback.asked, fallback.taken, fallback.price_ratio) == ("big", "other", 1.0)
        assert fallback.tried == (PoolTried("m", reason),)
        assert fallback.price_picousd == (100_000, 50_000, 300_000)
        reserve, settle = await self.second.ledger.find(run.call.request_id)
        assert (reserve.model, reserve.price_version, settle.model) == ("other", 7, "other")
        assert settle.amounts.input_tokens == len(LONGER)
        assert settle.amounts.cost_nanousd == 100 * len(LONGER) + 300 * 3
        assert reserve.detail["fallback"]["tried"] == [{"model": "m", "reason": reason.value}]
        for house in (self.first, self.second):
            house.flow.check()
            assert len(house.flow) == len(house.flow.in_flight) == 0
            assert not house.holds.live


@pytest.fixture
async def street(sqlite_url: str) -> AsyncIterator[Street]:
    database = open_database(sqlite_url)
    second = House(database, price={"m": PRICE, "other": PRICE})
    first = House(database, price={"m": PRICE, "other": PRICE}, elsewhere=lambda call: second.lifecycle)
    yield Street(first, second)
    await first.close()
    await second.close()
    await database.close()


def misses_targets(house: House) -> list[tuple[str, Tier, str]]:
    """From now on the house refuses for a target; returns what is counted as refused for one."""
    refused: list[tuple[str, Tier, str]] = []
    house.engine.snapshot = timed(100)
    house.lifecycle.admission = Admission(
        lambda tenant_id, tier: {"ttft": 1e-9}, lambda *each: refused.append(each)
    )
    house.lifecycle.admission.strictness = 1.0
    return refused


async def test_a_request_that_would_miss_its_target_goes_on_and_is_no_miss(street: Street) -> None:
    refused = misses_targets(street.first)
    run = await street.begin()
    await street.ended_elsewhere(run, FallbackReason.DEADLINE)
    assert refused == []
    assert street.first.lifecycle.admission.expected_late.at(0.0) > 0.5


@pytest.mark.parametrize("waiting", [1, 2], ids=["its turn comes too late", "the queue is full"])
async def test_what_the_queue_keeps_too_long_goes_on_before_anything_is_held(
    street: Street, waiting: int
) -> None:
    house = street.first
    house.engine.snapshot = timed(100)
    runs = [await house.running(max_tokens=5) for _ in range(2)]
    in_line = [house.begin(max_tokens=5) for _ in range(waiting)]
    await until(lambda: len(house.flow) == waiting)
    if waiting == 1:
        house.lifecycle.admission.factor = 1e12  # on the expected wait, beside a deadline
    run = await street.begin()
    await until(lambda: f"{run.call.request_id}.0" in street.second.engine.submitted)
    for each in in_line:
        each.interrupt(RequestOutcome.DISCONNECTED)
        await house.closed(each)
    for each, (name,) in runs:
        house.engine.end(name, "stop")
        await house.closed(each)
    await street.ended_elsewhere(run, FallbackReason.DEADLINE)


async def test_a_spent_budget_goes_on_where_another_limit_counts(street: Street) -> None:
    """The houses count for themselves here, as limits of one model do."""
    hold = street.first.begin(max_tokens=970)
    await until(lambda: street.first.holds.live)
    run = await street.begin()
    await until(lambda: run.call.model == "other")
    street.first.lifecycle.cancel(hold)
    await street.first.closed(hold)
    await street.ended_elsewhere(run, FallbackReason.BUDGET)


async def test_what_goes_on_takes_no_stream_of_its_tenants_rate_in_the_pool_that_it_leaves(
    street: Street,
) -> None:
    rate = Limit("lim_9", "ten_1", SubjectKind.TENANT, "ten_1", Meter.OUTPUT_TOKENS, 100, rate_per_s=1.0)
    fed_one = replace(PRINCIPAL, limits=(*LIMITS, rate))
    hold = street.first.begin(max_tokens=970)
    await until(lambda: street.first.holds.live)
    run = await street.begin(fed_one)
    await until(lambda: run.call.model == "other")
    assert len(street.first.lifecycle._stream_limiter) == 0
    street.first.lifecycle.cancel(hold)
    await street.first.closed(hold)
    _, (name,) = await street.first.running(principal=fed_one, max_tokens=5)
    street.first.engine.end(name, "stop")
    await street.ended_elsewhere(run, FallbackReason.BUDGET)


async def test_where_no_pool_takes_it_the_first_refusal_counts_once(street: Street) -> None:
    refused, later = misses_targets(street.first), misses_targets(street.second)
    run = await street.begin()
    closed, _ = await street.first.closed(run)
    assert told(run, closed).code == "target_unreachable"
    assert closed.account.outcome == "refused"
    assert (refused, later) == ([("ten_1", Tier.STANDARD, "ttft")], [])
    assert (run.call.model, run.call.prompts, run.estimate) == ("m", (PROMPT,), None)
    fallback = closed.account.fallback
    assert fallback is not None
    assert [each.model for each in fallback.tried] == ["m", "other"]
    assert told(run, closed).late_payload()["fairgate"]["fallback"] == fallback.as_json()
    assert await street.first.ledger.find(run.call.request_id) == []


async def test_what_keeps_every_pool_from_it_ends_the_walk(street: Street) -> None:
    """A ledger that is away is told as such, and not as the first pool's refusal."""
    misses_targets(street.first)
    await street.second.database.close()
    run = await street.begin()
    closed, _ = await street.first.closed(run)
    assert (told(run, closed).status, told(run, closed).code) == (503, "database_unavailable")
    assert not street.second.engine.submitted
    await until(lambda: street.first.lifecycle.running == street.second.lifecycle.running == 0)


async def test_a_client_that_leaves_on_the_way_is_settled_once(street: Street) -> None:
    misses_targets(street.first)
    run = await street.begin()
    run.interrupt(RequestOutcome.DISCONNECTED)
    closed, _ = await street.first.closed(run)
    assert closed.account.outcome == "disconnected"
    rows = await street.second.ledger.find(run.call.request_id)
    assert [(row.kind, row.model) for row in rows] == [("reserve", "other"), ("settle", "other")]
    await until(lambda: not street.second.holds.live)
