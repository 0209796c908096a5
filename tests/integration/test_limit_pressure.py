"""How close limits are to refusing, by what requests used and what was refused, on both databases."""

from __future__ import annotations

import pytest

from tenants.counts import refusal_store
from tenants.counts.refusal_store import RefusedRequest
from tenants.quota import pressure
from tenants.quota.pressure import Level, LimitPressure, Traffic, level_of
from tenants.quota.store import LimitState
from tenants.storage.database import Database
from tenants.storage.flushes import Flush
from tenants.types import Limit, LimitMode, Meter, SubjectKind, Window
from tests.support.usage import MONDAY_US, row, write

MINUTE_US = 60_000_000
NOON_US = MONDAY_US + 12 * 60 * MINUTE_US


def state(used: int, held: int = 0, limit_id: str = "lim_1", **shape: object) -> LimitState:
    fields: dict[str, object] = {"window": Window.DAY} | shape
    limit = Limit(
        limit_id,
        "ten_a",
        SubjectKind.TENANT,
        "ten_a",
        Meter.TOTAL_TOKENS,
        1_000,
        **fields,  # type: ignore[arg-type]
    )
    return LimitState(limit, used, held, max(0, 1_000 - used - held), 3_600.0)


@pytest.mark.parametrize(
    ("used", "held", "refused", "level"),
    [
        (799, 0, None, Level.FREE),
        (500, 300, None, Level.NEARLY),
        (970, 0, None, Level.NEARLY),
        (971, 0, None, Level.EXHAUSTED),
        (600, 380, None, Level.NEARLY),  # what is held may come back
        (600, 0, 401, Level.EXHAUSTED),
        (600, 0, 400, Level.FREE),  # it would fit now
        (500, 0, 501, Level.FREE),  # a large request alone says little
    ],
)
def test_a_limit_without_room_for_a_typical_request_is_exhausted(
    used: int, held: int, refused: int | None, level: Level
) -> None:
    smallest = {} if refused is None else {"lim_1": refused}
    traffic = Traffic({"ten_a": {Meter.TOTAL_TOKENS: 30.0}}, smallest=smallest)
    assert level_of(state(used, held), traffic) is level


async def test_refusals_of_today_are_counted_and_dated_by_their_limit(database: Database) -> None:
    await write(database, [row("req_used", at_us=NOON_US - MINUTE_US)])  # 30 tokens

    def refused(number: int, at_us: int, available: int) -> RefusedRequest:
        return RefusedRequest(
            f"req_{number}",
            at_us,
            "insufficient_quota",
            "ten_a",
            limit_id="lim_1",
            wanted=40,
            available=available,
        )

    at = [MONDAY_US - MINUTE_US, MONDAY_US + MINUTE_US, NOON_US - 30 * MINUTE_US, NOON_US - 2 * MINUTE_US]
    left = (5, 900, 20, 10)
    rows = [refused(number, at[number], left[number]) for number in range(4)]
    counts = {one.key: 7 for one in rows}
    await refusal_store.add(database, counts, rows, Flush("test", 1), NOON_US / 1e6)

    async def found(*states: LimitState, tenant_id: str | None = None) -> list[LimitPressure]:
        return await database.read(lambda one: pressure.read(one, states, NOON_US, tenant_id))

    soft, rate = state(990, mode=LimitMode.SOFT), state(990, window=None, rate_per_s=1.0)
    both = await found(state(850, limit_id="lim_2"), state(990), soft, rate)
    assert [(one.limit.limit_id, one.level, one.refused, one.since_us) for one in both] == [
        ("lim_1", Level.EXHAUSTED, 21, at[2]),  # not by yesterday's refusal, nor by that of a large request
        ("lim_2", Level.NEARLY, 0, None),
    ]
    assert await found(state(990), tenant_id="ten_a") == both[:1]
    [again] = await found(state(600), tenant_id="ten_b")
    assert (again.level, again.refused, again.since_us) == (Level.FREE, 0, None)
