"""A redeemed quote on the way of a request and in the ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from msgspec import json
from msgspec.structs import replace

from engine.forecast.wait.forecast import Figures
from engine.messages import SamplingParams
from gateway.domain.call import Call
from gateway.domain.ids import new_request_id
from gateway.domain.quote_binding import Binding
from gateway.domain.quote_token import Quote
from gateway.domain.timeline import TimelineKind
from gateway.requests.run import Closed, Run
from gateway.upstream.base import UpstreamLost
from tenants.outcomes import RequestOutcome
from tenants.pricing.pricing import Price, uniform_book
from tenants.storage.database import open_database
from tenants.types import Amounts, Tier
from tests.integration.test_lifecycle import PRINCIPAL, PROMPT, House, timed
from tests.support.engine_process import until

QUOTED_PRICES = uniform_book({"m": Price(10, 5, 30)}, version=7)
"""A tenth of what is in force."""
LATE = Figures((30.0, 30.0), (30.0, 30.0), (30.0, 30.0), (30.0, 30.0))
AT_ONCE = Figures((0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0))


@pytest.fixture
async def house(sqlite_url: str) -> AsyncIterator[House]:
    database = open_database(sqlite_url)
    made = House(database)
    yield made
    await made.close()
    await database.close()


def binding(figures: Figures) -> Binding:
    quote = Quote(
        "offer", "ten_1", "key", "m", b"", False, "standard", 1, 7, 0, 1e12, 10, 1, 20, (10, 20), (400, 700),
        700, figures, figures, 0, {}, "replay", 5, False,
    )  # fmt: skip
    return Binding(quote, QUOTED_PRICES, quote.estimate())


def begin(house: House, figures: Figures, quote: Quote | None = None, timeout_s: float | None = None) -> Run:
    bound = binding(figures) if quote is None else Binding(quote, QUOTED_PRICES, quote.estimate())
    call = Call(
        request_id=new_request_id(1e9), chat=True, model="m", principal=PRINCIPAL, tier=Tier.STANDARD,
        prompts=(PROMPT,), choices=1, max_tokens=20, sampling=SamplingParams(), stream=True,
        include_usage=True, created=1, binding=bound, timeout_s=timeout_s,
    )  # fmt: skip
    return house.lifecycle.begin(call)


async def answered(house: House, figures: Figures, tokens: int = 7) -> tuple[Run, Closed]:
    run = begin(house, figures)
    one = f"{run.call.request_id}.0"
    await until(lambda: one in house.engine.submitted)
    house.engine.emit(one, tokens)
    house.engine.end(one, "stop")
    closed, _ = await house.closed(run)
    return run, closed


async def test_it_is_held_and_charged_by_the_quoted_prices_and_told_what_was_quoted(house: House) -> None:
    run, closed = await answered(house, LATE)
    rows = await house.ledger.find(run.call.request_id)
    assert [(row.kind, row.price_version) for row in rows] == [("reserve", 7), ("settle", 7)]
    assert rows[1].amounts.cost_nanousd == 10 * 10 + 30 * 7
    assert closed.account.charged.cost_nanousd <= closed.account.estimate.max_cost_nanousd  # type: ignore[union-attr]
    shown = json.decode(json.encode(closed.account.as_json()))
    assert shown["quote"] == {
        "id": "offer", "kept": True, "missed": [], "credit_nanousd": 0, "credit_capped": False,
        "binding": True, "own_s": {"ttft": 0.0, "e2e": 0.0},
    }  # fmt: skip
    assert shown["estimate"]["e2e_s"]["p90"] == 30.0


async def test_a_miss_of_ours_is_credited_once_on_the_bill_and_said_in_the_account(house: House) -> None:
    run, closed = await answered(house, AT_ONCE)
    rows = await house.ledger.find(run.call.request_id)
    assert [row.kind for row in rows] == ["reserve", "settle", "credit"]
    charged, credit = rows[1].amounts.cost_nanousd, rows[2]
    assert charged == 310
    assert credit.amounts == Amounts(0, 0, -155, 0)
    assert (credit.price_version, credit.outcome, credit.tenant_id) == (7, "quote", "ten_1")
    quote = closed.account.as_json()["quote"]
    assert (quote["kept"], quote["missed"], quote["credit_nanousd"]) == (False, ["ttft", "e2e"], 155)
    [total] = await house.ledger.totals(tenant_id="ten_1")
    assert (total.cost_nanousd, total.output_tokens, total.requests) == (155, 7, 1)
    # Settling it again, after a crash or a lost answer, changes nothing.
    again = replace(rows[1], amounts=Amounts(1, 1, 1, 1))
    counts, credited = await house.ledger.settle_with_credit(again, credit, 10**9)
    assert (counts.amounts, credited) == (rows[1].amounts, 155)
    assert len(await house.ledger.find(run.call.request_id)) == 3


async def test_a_tenants_credits_of_a_day_are_capped_and_the_account_says_so(house: House) -> None:
    house.lifecycle._finisher._most_credit_nanousd = 200
    credited = []
    for _ in range(3):
        run, closed = await answered(house, AT_ONCE)
        shown = closed.account.as_json()["quote"]
        credited.append((shown["credit_nanousd"], shown["credit_capped"]))
        kinds = [row.kind for row in await house.ledger.find(run.call.request_id)]
        assert ("credit" in kinds) == (shown["credit_nanousd"] > 0)
    assert credited == [(155, False), (45, True), (0, True)]
    [total] = await house.ledger.totals(tenant_id="ten_1")
    assert total.cost_nanousd == 3 * 310 - 200


async def test_a_wait_quoted_in_a_crowd_refuses_nothing_after_it(house: House) -> None:
    """Quoted 30 s, it may take 20 now: by the quote it would be late, by what is ahead it is not."""
    house.engine.snapshot = timed(100)
    run = begin(house, LATE, timeout_s=20.0)
    one = f"{run.call.request_id}.0"
    await until(lambda: one in house.engine.submitted)
    house.engine.emit(one, 7)
    house.engine.end(one, "stop")
    closed, _ = await house.closed(run)
    assert closed.cause is None
    assert closed.account.estimate is not None
    assert closed.account.estimate.wait_s == (30.0, 30.0), "what was promised stays"


async def test_what_does_not_bind_is_never_credited(house: House) -> None:
    unlearned = binding(AT_ONCE)
    run = begin(house, AT_ONCE, replace(unlearned.quote, is_binding=False))
    one = f"{run.call.request_id}.0"
    await until(lambda: one in house.engine.submitted)
    house.engine.emit(one, 7)
    house.engine.end(one, "stop")
    closed, _ = await house.closed(run)
    quote = closed.account.as_json()["quote"]
    assert (quote["kept"], quote["binding"], quote["credit_nanousd"]) == (False, False, 0)
    rows = await house.ledger.find(run.call.request_id)
    assert [(row.kind, row.price_version) for row in rows] == [("reserve", 7), ("settle", 7)]


async def test_settled_by_another_gateway_it_is_not_credited_by_this_one(house: House) -> None:
    run = begin(house, AT_ONCE)
    one = f"{run.call.request_id}.0"
    await until(lambda: one in house.engine.submitted)
    [reserve] = await house.ledger.find(run.call.request_id)
    await house.ledger.settle(replace(reserve, kind="settle", outcome="recovered", charged_to=()))
    house.engine.emit(one, 3)
    house.engine.end(one, "stop")
    await house.closed(run)
    assert [row.kind for row in await house.ledger.find(run.call.request_id)] == ["reserve", "settle"]


async def test_a_client_that_leaves_breaks_no_promise_of_ours(house: House) -> None:
    run = begin(house, LATE)
    one = f"{run.call.request_id}.0"
    await until(lambda: one in house.engine.submitted)
    house.engine.emit(one, 4)
    await until(lambda: run.output_tokens == 4)
    run.interrupt(RequestOutcome.DISCONNECTED)
    closed, _ = await house.closed(run)
    assert closed.account.as_json()["quote"]["kept"] is None
    assert [row.kind for row in await house.ledger.find(run.call.request_id)] == ["reserve", "settle"]


@pytest.mark.parametrize("kind", [TimelineKind.STALLED, TimelineKind.TOPPED_UP])
async def test_an_answer_that_nobody_read_or_its_rate_held_up_breaks_no_promise(
    house: House, kind: TimelineKind
) -> None:
    run = begin(house, Figures((30.0, 30.0), (30.0, 30.0), (30.0, 30.0), (0.0, 0.0)))
    one = f"{run.call.request_id}.0"
    await until(lambda: one in house.engine.submitted)
    run.timeline.note(kind, run.times.arrived_s, 60_000_000)
    house.engine.emit(one, 4)
    house.engine.end(one, "stop")
    closed, _ = await house.closed(run)
    assert closed.account.as_json()["quote"]["kept"] is True
    assert [row.kind for row in await house.ledger.find(run.call.request_id)] == ["reserve", "settle"]


async def test_a_lost_engine_breaks_the_promise(house: House) -> None:
    run = begin(house, LATE)
    one = f"{run.call.request_id}.0"
    await until(lambda: one in house.engine.submitted)
    house.engine.emit(one, 4)
    await until(lambda: run.output_tokens == 4)
    house.engine.fail(one, UpstreamLost("gone"))
    closed, _ = await house.closed(run)
    quote = closed.account.as_json()["quote"]
    assert (quote["kept"], quote["missed"]) == (False, ["engine_lost"])
    assert quote["credit_nanousd"] == (10 * 10 + 30 * 4) // 2
    assert [row.kind for row in await house.ledger.find(run.call.request_id)][-1] == "credit"


async def test_binding_requests_are_judged_apart_from_the_plain_ones(house: House) -> None:
    await answered(house, AT_ONCE)
    await until(lambda: not house.lifecycle.running)
    coverage = house.lifecycle._estimates.calibration.coverage
    assert coverage["binding", "ttft", 0.9].judged == 1
    assert ("plain", "ttft", 0.9) not in coverage
    run, (one,) = await house.running()
    house.engine.emit(one, 2)
    house.engine.end(one, "stop")
    await house.closed(run)
    await until(lambda: not house.lifecycle.running)
    assert coverage["plain", "ttft", 0.9].judged == 1


async def test_an_order_by_deadline_knows_what_was_promised(house: House) -> None:
    run = begin(house, Figures((1.0, 2.0), (1.0, 2.0), (1.0, 2.0), (3.0, 9.0)))
    one = f"{run.call.request_id}.0"
    await until(lambda: one in house.engine.submitted)
    [flight] = house.flow.in_flight
    assert flight.ticket.entry.deadline_s == pytest.approx(run.times.arrived_s + 9.0)
    assert flight.ticket.expires_s is None, "a promise of a time is no limit on the wait"
    house.engine.emit(one, 1)
    house.engine.end(one, "stop")
    await house.closed(run)


async def test_what_it_promises_goes_with_it_until_it_changes_its_tier(house: House) -> None:
    run, _ = await answered(house, LATE)
    submit = house.engine.submitted[f"{run.call.request_id}.0"]
    assert 29.0 < submit.ttft_target_s < 30.0
    assert submit.deadline_in_s == pytest.approx(submit.ttft_target_s), "both were promised within 30 s"
    running = [await house.running(), await house.running()]
    moved = begin(house, LATE)
    await until(lambda: moved.status == "waiting")
    await house.lifecycle.move(moved, Tier.BATCH, "tenant")
    house.engine.end(running[0][1][0], "stop")
    one = f"{moved.call.request_id}.0"
    await until(lambda: one in house.engine.submitted)
    submit = house.engine.submitted[one]
    assert (submit.ttft_target_s, submit.deadline_in_s) == (0.0, None)
