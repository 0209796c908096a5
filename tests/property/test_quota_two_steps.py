"""Limits on tenant and platform, held in two steps in a cluster: what overlaps never exceeds either, and one
after the other answers like the store that holds in one step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tenants.quota.memory import MemoryQuotaStore
from tenants.quota.redis import RedisQuotaStore
from tenants.quota.store import Denied, Granted, QuotaStore
from tenants.types import Amounts, Meter, Window
from tests.support import services
from tests.support.quota import Clock, filled, limit, on_platform, stepwise

LEASE_S = 30.0
EVERYONE = [on_platform(amount=70, window=Window.DAY), on_platform(Meter.CONCURRENCY, amount=4)]
LIMITS = [
    [limit(amount=60 + 10 * number, tenant_id=tenant_id, window=Window.DAY), *EVERYONE]
    for number, tenant_id in enumerate(("ten_a", "ten_b"))
]
EVERY = [LIMITS[0][0], LIMITS[1][0], *EVERYONE]


@dataclass(frozen=True)
class Act:
    what: str
    number: int
    """Of the request; it says of which tenant it is, how large, and whether the platform limits it."""
    by: int


acts = st.builds(
    Act,
    st.sampled_from(("reserve", "reserve", "top_up", "settle", "rebind")),
    st.integers(0, 8),
    st.integers(0, 1),
)
quick = settings(
    max_examples=40, deadline=None, database=None, phases=(Phase.generate,), derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


async def done(store: QuotaStore, act: Act) -> Granted | Denied | bool | str:
    path, size = LIMITS[act.number % 2], 5 + 4 * act.number
    is_alone = act.number % 3 == 0
    request_id = f"r{act.number}"
    try:
        match act.what:
            case "reserve":
                hold = stepwise(size, size, size + 3)
                return await store.reserve(request_id, path[: 1 if is_alone else 3], hold, LEASE_S)
            case "top_up":
                most = Amounts(output_tokens=size + 6)
                return await store.top_up(request_id, Amounts(output_tokens=size), most, most)
            case "rebind":
                hold = stepwise(size, size, size + 3)
                return await store.rebind(request_id, path, hold, Amounts(output_tokens=0), must_fit=True)
        return await store.settle(request_id, Amounts(output_tokens=size))
    except KeyError:
        return "gone"


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:
        yield runner.get_loop()


@pytest.fixture(scope="module")
def gateways(loop: asyncio.AbstractEventLoop) -> Iterator[tuple[list[RedisQuotaStore], Clock]]:
    server = services.start_cluster(1, 0).nodes[0]
    clock, url = Clock(), server.url.replace("redis://", "redis+cluster://")
    stores = [RedisQuotaStore(url, timeout_s=30, virtual_clock=clock) for _ in range(2)]
    loop.run_until_complete(filled(stores[0]))
    yield stores, clock
    for store in stores:
        loop.run_until_complete(store.close())
    server.stop()


async def a_new_day(stores: list[RedisQuotaStore], clock: Clock) -> None:
    """Ends what runs; asserts that nothing is held then."""
    clock.advance(86_400 * 2)
    await stores[0].expire()
    for store in stores:
        store._places.clear()
    assert [(state.used, state.held) for state in await stores[0].states(EVERY)] == [(0, 0)] * len(EVERY)


def test_what_overlaps_exceeds_neither_the_tenants_limits_nor_the_platforms(
    loop: asyncio.AbstractEventLoop, gateways: tuple[list[RedisQuotaStore], Clock]
) -> None:
    stores, clock = gateways
    kinds = set[str]()

    @quick
    @given(st.lists(st.lists(acts, min_size=2, max_size=6), min_size=5, max_size=10))
    def run(rounds: list[list[Act]]) -> None:
        async def together() -> None:
            await a_new_day(stores, clock)
            for at_once in rounds:
                answers = await asyncio.gather(*(done(stores[act.by], act) for act in at_once))
                kinds.update(type(answer).__name__ for answer in answers)
                for state in await stores[0].states(EVERY):
                    assert state.used + state.held <= state.limit.amount
                    assert state.held >= 0

        loop.run_until_complete(together())

    run()
    assert kinds == {"Granted", "Denied", "bool", "str"}
    loop.run_until_complete(a_new_day(stores, clock))


def test_one_after_the_other_they_answer_like_the_store_that_holds_in_one_step(
    loop: asyncio.AbstractEventLoop, gateways: tuple[list[RedisQuotaStore], Clock]
) -> None:
    stores, clock = gateways
    kinds = set[str]()

    @quick
    @given(st.lists(acts, min_size=15, max_size=40))
    def run(history: list[Act]) -> None:
        async def alike() -> None:
            await a_new_day(stores, clock)
            memory = MemoryQuotaStore(clock)
            for act in history:
                if act.what == "reserve" and f"r{act.number}" in memory._holds:
                    continue
                gateway = stores[act.number // 2 % 2]
                expected, answer = await done(memory, act), await done(gateway, act)
                kinds.add(f"{act.what} {type(answer).__name__}")
                if isinstance(expected, Denied) and act.what != "reserve":
                    assert isinstance(answer, Denied)
                    return  # the tenant's hold may have been raised before the platform refused
                if isinstance(answer, Denied) and isinstance(expected, Denied):
                    assert set(answer.states) == set(expected.states)
                    # The tenant's refusal comes first, whether the platform's would last longer or not.
                    assert answer == expected or answer.limit == LIMITS[act.number % 2][0]
                else:
                    assert answer == expected
                assert await stores[0].states(EVERY) == await memory.states(EVERY)

        loop.run_until_complete(alike())

    run()
    assert kinds >= {
        f"{what} {kind}" for what in ("reserve", "top_up", "rebind") for kind in ("Granted", "Denied")
    }
