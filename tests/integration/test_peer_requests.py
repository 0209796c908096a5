"""Questions between gateways: the one that has the request answers; missing answers are reported.

Several gateways' parts over a real Redis; their actions are a plain function here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import msgspec
import pytest
import redis

from gateway.errors import ApiError, not_waiting
from gateway.pools.peer_requests import MAX_ASKING, PeerRequests
from gateway.pools.request_actions import (
    LIST,
    NOT_HERE,
    SHOW,
    ActionResult,
    PeerRefusal,
    RequestAction,
    Unreachable,
)
from tenants.storage.redis_client import is_cluster
from tests.support import services

Act = Callable[[RequestAction], Awaitable[ActionResult]]


def holder(name: str, *ids: str) -> Act:
    """A gateway with these requests."""

    async def act(ask: RequestAction) -> ActionResult:
        if ask.act == LIST:
            return ActionResult(True, [{"id": each} for each in ids])
        return ActionResult(True, {"at": name}, None, "ten_1") if ask.request_id in ids else NOT_HERE

    return act


class House:
    """Gateways of one Redis."""

    def __init__(self, url: str, closing: AsyncExitStack) -> None:
        self.url = url
        self._closing = closing

    async def gateway(self, act: Act, *, answer_s: float = 30.0, url: str | None = None) -> PeerRequests:
        made = PeerRequests(url or self.url, prefix="fairgate-test-elsewhere", answer_s=answer_s)
        self._closing.push_async_callback(made.close)
        made.start(act)
        async with asyncio.timeout(30):
            await made.is_listening.wait()
        return made


@pytest.fixture
async def house(redis_url: str) -> AsyncIterator[House]:
    async with AsyncExitStack() as closing:
        yield House(redis_url, closing)


async def test_the_gateway_with_the_request_answers(house: House) -> None:
    asker = await house.gateway(holder("own", "mine"))
    await house.gateway(holder("second", "a"))
    await house.gateway(holder("third", "b"))
    heard = await asker.ask(RequestAction(SHOW, "b", "ten_1"))
    assert heard.found is not None
    assert heard.found.result() == {"at": "third"}
    assert heard.found.tenant_id == "ten_1"


async def test_no_gateway_has_it_and_all_said_so(house: House) -> None:
    asker = await house.gateway(holder("own"))
    await house.gateway(holder("second", "a"))
    heard = await asker.ask(RequestAction(SHOW, "x", "ten_1"))
    assert (heard.found, heard.missing, len(heard.answers)) == (None, 0, 1)


async def test_a_gateway_alone_is_answered_at_once_and_does_not_ask_itself(house: House) -> None:
    asker = await house.gateway(holder("own", "mine"))
    heard = await asker.ask(RequestAction(SHOW, "mine", "ten_1"))
    assert (heard.answers, heard.missing) == ([], 0)


async def test_a_list_has_every_gateways_part(house: House) -> None:
    asker = await house.gateway(holder("own", "mine"))
    await house.gateway(holder("second", "a", "b"))
    await house.gateway(holder("third", "c"))
    heard = await asker.ask(RequestAction(LIST, tenant_id="ten_1"), wants_all=True)
    assert sorted(item["id"] for each in heard.answers for item in each.value) == ["a", "b", "c"]
    assert heard.missing == 0


async def test_who_does_not_answer_in_time_is_missing(house: House) -> None:
    async def never(ask: RequestAction) -> ActionResult:
        await asyncio.Event().wait()
        return NOT_HERE

    asker = await house.gateway(holder("own"), answer_s=0.2)
    await house.gateway(never)
    await house.gateway(holder("third", "c"))
    heard = await asker.ask(RequestAction(LIST, tenant_id="ten_1"), wants_all=True)
    assert (len(heard.answers), heard.missing) == (1, 1)


async def test_a_refusal_arrives_as_it_was(house: House) -> None:
    refusal = not_waiting(status="running")

    async def refuses(ask: RequestAction) -> ActionResult:
        return ActionResult(True, None, PeerRefusal.of(refusal), "ten_1")

    asker = await house.gateway(holder("own"))
    await house.gateway(refuses)
    heard = await asker.ask(RequestAction(SHOW, "a", "ten_1"))
    assert heard.found is not None
    with pytest.raises(ApiError) as refused:
        heard.found.result()
    assert refused.value == refusal


async def test_answers_find_their_own_questions(house: House) -> None:
    asker = await house.gateway(holder("own"))
    await house.gateway(holder("second", *(f"r{number}" for number in range(50))))
    found = await asyncio.gather(
        *(asker.ask(RequestAction(SHOW, f"r{number}", "ten_1")) for number in range(50))
    )
    assert all(each.found is not None for each in found)


async def test_too_many_questions_at_once_are_not_asked(house: House) -> None:
    release = asyncio.Event()

    async def slow(ask: RequestAction) -> ActionResult:
        await release.wait()
        return NOT_HERE

    asker = await house.gateway(holder("own"))
    await house.gateway(slow)
    asking = [asyncio.create_task(asker.ask(RequestAction(SHOW, "a", "t"))) for _ in range(MAX_ASKING)]
    await asyncio.sleep(0)
    with pytest.raises(Unreachable):
        await asker.ask(RequestAction(SHOW, "a", "t"))
    release.set()
    assert all(each.missing == 0 for each in await asyncio.gather(*asking))


async def test_houses_in_other_databases_of_the_same_redis_hear_nothing(house: House) -> None:
    if is_cluster(house.url):
        pytest.skip("a cluster has one database")
    asker = await house.gateway(holder("own"))
    await house.gateway(holder("stranger", "a"), url=f"{house.url.rsplit('/', 1)[0]}/7")
    assert (await asker.ask(RequestAction(SHOW, "a", "t"))).answers == []


async def test_garbage_is_not_answered_and_stops_no_gateway(house: House, redis_url: str) -> None:
    asker = await house.gateway(holder("own"))
    await house.gateway(holder("second", "a"))
    with services.open_redis(redis_url) as client:
        [channel] = client.pubsub_channels("fairgate-test-elsewhere*:gateways")
        client.publish(channel, b"\xff\xff")
        client.publish(channel, msgspec.msgpack.encode({"act": 7}))
    assert (await asker.ask(RequestAction(SHOW, "a", "t"))).found is not None


@pytest.mark.long
@pytest.mark.parametrize("start", [services.start_cluster, services.start_sentinel])
async def test_the_server_of_a_subscription_dies_and_its_gateway_is_asked_again(
    start: Callable[[], Any],
) -> None:
    server = start()
    async with AsyncExitStack() as closing:
        closing.callback(server.stop)
        house = House(server.url, closing)
        asker = await house.gateway(holder("own"))
        await house.gateway(holder("second", "a"))
        assert (await asker.ask(RequestAction(SHOW, "a", "t"))).found is not None
        next(node for node in server.nodes if _listeners(node)).kill()
        found = None
        async with asyncio.timeout(30):
            while found is None:
                await asker.is_listening.wait()
                with suppress(Unreachable):
                    found = (await asker.ask(RequestAction(SHOW, "a", "t"), within_s=0.5)).found
        heard = await asker.ask(RequestAction(SHOW, "x", "t"))
        assert (len(heard.answers), heard.missing) == (1, 0)


def _listeners(node: services.Service) -> int:
    with redis.Redis.from_url(node.url) as client:
        return len(client.pubsub_channels("fairgate-test-elsewhere*:gateways"))


async def test_without_redis_no_gateway_can_be_asked_and_afterwards_all_again() -> None:
    own = services.start_redis()
    async with AsyncExitStack() as closing:
        closing.callback(own.stop)
        house = House(own.url, closing)
        asker = await house.gateway(holder("own"))
        await house.gateway(holder("second", "a"))
        own.stop()
        with pytest.raises(Unreachable):
            await asker.ask(RequestAction(SHOW, "a", "t"))
