"""Two real gateways with one Redis and one engine serve two tenants by weight, each entering by one gateway;
round trips to Redis per request.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from tests.support import services
from tests.support.engine_process import engine_options, running_engine
from tests.support.server_process import Server, server_process, until

CLIENTS = 24
"""Of each tenant, at any time: more than the engine runs at once, so both always wait."""
MEASURED_COST = 120_000
"""Of both tenants together: some 1,060 requests. A gateway that the machine lets stand for half a second
keeps its tenant from 700 cost tokens, of which only what is under way (U) is made good."""
LOOK_S = 0.1
STALE_S = 6


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[tuple[list[Server], str]]:
    """Two gateways, and the URL of their Redis."""
    with ExitStack() as closing:
        postgres, own_redis = services.start_postgres(), services.start_redis()
        closing.callback(postgres.stop)
        closing.callback(own_redis.stop)
        base = tmp_path_factory.mktemp("fair")
        options = engine_options(chat_model, base / "engine", max_sequences=2, num_blocks=2048)
        closing.enter_context(running_engine(options))
        gateways: list[Server] = []
        for name in ("one", "other"):
            data_dir = base / name
            if name == "other":
                data_dir.mkdir()
                shutil.copy(base / "one" / "pepper", data_dir / "pepper")
            arguments = ["--database-url", postgres.url, "--redis-url", own_redis.url]
            arguments += ["--engine-address", options.address, "--gateway-stale", str(STALE_S)]
            # A crowd of long streams fills the window, and no lane of its own.
            arguments += ["--gateway-long-tokens", "8192"]
            gateways.append(closing.enter_context(server_process(data_dir, chat_model, *arguments)))
        gateways[1].owner_key = gateways[0].owner_key
        yield gateways, own_redis.url


def flows(server: Server) -> dict[str, Any]:
    """What each tenant has had by way of this gateway."""
    return {shown["name"]: shown for shown in server.status()["tenants"]}


def knows(server: Server, key: str) -> bool:
    """Whether a key that the other gateway made is known here already."""
    with server.http(key) as client:
        return client.get("/v1/models").status_code == 200


class Load:
    """So many clients of a tenant, each of which asks again as soon as it has its answer."""

    def __init__(self, server: Server, key: str) -> None:
        self.server = server
        self.key = key
        self.answers = 0
        self.is_over = False

    async def run(self) -> None:
        headers = {"authorization": f"Bearer {self.key}"}
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(
            base_url=self.server.url, headers=headers, timeout=120, limits=limits
        ) as client:
            await asyncio.gather(*(self._one(client, number) for number in range(CLIENTS)))

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        while not self.is_over:
            # A prompt that is in no cache: most of the cost for few steps.
            prompt = f"{self.answers:06}" + "x" * (80 + number)
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "seed": number}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            self.answers += 1


class Shares:
    """What two tenants were charged while both of them waited.

    On a busy machine the clients of one may for a while be slower than its share: then it waits for nothing,
    and is owed nothing. So the service is added up from look to look, and only between two looks at each of
    which both had requests waiting.
    """

    def __init__(self) -> None:
        self.served = [0, 0]
        self._last: list[int] | None = None

    def look(self, shown: list[dict[str, Any]]) -> None:
        if not all(each["queued"]["standard"] for each in shown):
            self._last = None
            return
        now = [each["service_cost"] for each in shown]
        if self._last is not None:
            self.served = [
                total + late - early for total, late, early in zip(self.served, now, self._last, strict=True)
            ]
        self._last = now


def test_weights_hold_across_two_gateways_within_five_per_cent(house: tuple[list[Server], str]) -> None:
    (one, other), redis_url = house
    keys = [one.tenant("light", weight=1), one.tenant("heavy", weight=3)]
    until(lambda: all(knows(other, key) for key in keys))
    loads = [Load(one, keys[0]), Load(other, keys[1])]
    shares = Shares()

    async def measured() -> None:
        tasks = [asyncio.create_task(load.run()) for load in loads]
        try:
            async with asyncio.timeout(300):
                while sum(shares.served) < MEASURED_COST:
                    assert not any(task.done() for task in tasks), "a client failed"
                    shares.look(await asyncio.to_thread(shown))
                    await asyncio.sleep(LOOK_S)
        finally:
            for load in loads:
                load.is_over = True
            await asyncio.gather(*tasks)

    def shown() -> list[dict[str, Any]]:
        return [flows(one)["light"], flows(other)["heavy"]]

    asyncio.run(measured())
    light, heavy = shares.served
    assert 2.85 <= heavy / light <= 3.15, f"service {light} and {heavy}"
    assert flows(one)["heavy"]["dispatched"] == 0, "all of a tenant's traffic enters by one gateway"
    for server in (one, other):
        until(server.is_idle)
    with redis.Redis.from_url(redis_url) as client:
        until(lambda: not list(client.scan_iter("fairgate:flow:*:tickets")))


PROGRESS = {"x-fairgate-progress": "1"}
EVERY_TIER = ["interactive", "standard", "batch"]


def stream(closing: ExitStack, server: Server, key: str, max_tokens: int) -> tuple[str, Iterator[str]]:
    """A stream by way of this gateway: its request id, and its lines as they come."""
    body = {"model": "tiny", "prompt": "on", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    client = closing.enter_context(server.http(key))
    answer = closing.enter_context(client.stream("POST", "/v1/completions", json=body, headers=PROGRESS))
    assert answer.status_code == 200
    return answer.headers["x-request-id"], answer.iter_lines()


def test_a_client_need_not_know_which_gateway_has_its_request(house: tuple[list[Server], str]) -> None:
    """Everything below is asked of one gateway; the requests are the other's. The crowd is so large that the
    engine, which runs two of it at once, does not come to an end of it however slow the test is, and so small
    that the last of it is not refused for a wait beyond its tier's limit."""
    (one, other), _ = house
    key = one.tenant("asks", tier="standard", tiers=EVERY_TIER)
    crowd = one.tenant("crowd", tier="interactive", tiers=EVERY_TIER)
    until(lambda: knows(other, key) and knows(other, crowd))
    with ExitStack() as closing:
        before = [stream(closing, other, crowd, 8000)[0] for _ in range(5)]
        until(lambda: other.status()["queued"]["interactive"] > 0)
        request_id, lines = stream(closing, other, key, 4)
        path = f"/v1/requests/{request_id}"
        client = closing.enter_context(one.http(key))
        until(lambda: client.get(path).json()["status"] == "waiting")
        listed = client.get("/v1/requests").json()
        assert [each["id"] for each in listed["data"]] == [request_id]
        assert listed["gateways_missing"] == 0
        # An operator sees everybody's, with their names.
        everything = one.admin("GET", "/requests")["data"]
        assert {each["tenant"] for each in everything} == {"asks", "crowd"}
        assert [each["id"] for each in one.admin("GET", "/requests?tenant=asks")["data"]] == [request_id]
        offer = client.post(f"{path}/tier", json={"service_tier": "priority", "preview": True}).json()
        assert (offer["moved"], offer["tier"], offer["to"]["tier"]) == (False, "standard", "interactive")
        # In the crowd's own tier it would be owed a place.
        moved = client.post(f"{path}/tier", json={"service_tier": "flex"}).json()
        assert (moved["moved"], moved["tier"]) == (True, "batch")
        # Its owner's only, wherever it is.
        with one.http(crowd) as stranger:
            for refused in (stranger.get(path), stranger.delete(path)):
                assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found")
        by_operator = one.admin("POST", f"/requests/{request_id}/tier", {"service_tier": "default"})
        assert (by_operator["moved"], by_operator["from"]["tier"]) == (True, "batch")
        assert client.delete(path).json()["status"] == "cancelled"
        assert any("request_cancelled" in line for line in lines)
        until(lambda: client.get(path).json()["status"] == "ended")
        assert client.get(path).json()["outcome"] == "cancelled"
        # A refusal is the other's own word.
        late = client.post(f"/v1/requests/{before[0]}/tier", json={"service_tier": "flex"})
        assert late.status_code == 404, "another tenant's"
        with one.http(crowd) as owner:
            refused = owner.post(f"/v1/requests/{before[0]}/tier", json={"service_tier": "flex"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "request_not_waiting")
            for each in before:
                assert owner.delete(f"/v1/requests/{each}").status_code == 200
    for server in (one, other):
        until(server.is_idle)


def test_a_quote_of_one_gateway_is_redeemed_once_at_another(house: tuple[list[Server], str]) -> None:
    (one, other), _ = house
    key = one.tenant("quoted", tier="standard", tiers=["standard"])
    until(lambda: knows(other, key))
    body = {"model": "tiny", "prompt": "on", "max_tokens": 4}
    with one.http(key) as asked, other.http(key) as elsewhere:
        [offer] = asked.post("/v1/quotes", json=body).json()["quotes"]
        headers = {"X-Fairgate-Quote": offer["token"]}
        answer = elsewhere.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json()["fairgate"]["quote"]["id"]
        for client in (asked, elsewhere):
            refused = client.post("/v1/completions", json=body, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "quote_redeemed")


def test_a_killed_gateways_requests_leave_the_shared_queue(house: tuple[list[Server], str]) -> None:
    (one, other), redis_url = house
    key = one.tenant("survivor")
    until(lambda: knows(other, key))
    mates = [Load(other, key), Load(one, key)]

    async def scenario() -> None:
        tasks = [asyncio.create_task(load.run()) for load in mates]
        async with asyncio.timeout(120):
            while min(load.answers for load in mates) < 5:
                assert not any(task.done() for task in tasks), "a client failed"
                await asyncio.sleep(0.02)
            other.kill()
            mates[0].is_over = True
            had = mates[1].answers
            # Its places are the living gateway's after `STALE_S`; until then it has the others.
            while mates[1].answers < had + 30:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            mates[1].is_over = True
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())
    with redis.Redis.from_url(redis_url) as client:
        [gateways] = list(client.scan_iter("fairgate:flow:*:gateways"))
        until(lambda: client.hlen(gateways) == 1, deadline_s=STALE_S * 3)
        until(lambda: not list(client.scan_iter("fairgate:flow:*:tickets")), deadline_s=STALE_S * 3)
    until(one.is_idle, deadline_s=40)
    other.start()


def test_a_policy_that_cannot_be_shared_is_refused_with_the_way_out(house: tuple[list[Server], str]) -> None:
    (one, _), _ = house
    with one.http() as client:
        answer = client.post("/admin/v1/policy", json={"policy": "drr"})
    assert answer.status_code == 400, answer.text
    assert "fcfs, vtc, hybrid, not drr" in answer.text
    assert "gateway_queue=own" in answer.text
    assert one.status()["policy"] == "hybrid"


def test_a_queue_that_takes_nothing_is_not_ready_and_one_that_lost_a_key_serves(
    house: tuple[list[Server], str],
) -> None:
    (one, _), redis_url = house
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4}

    def answer() -> httpx.Response:
        return client.post("/v1/completions", json=body)

    def shared_queue() -> tuple[int, str]:
        ready = client.get("/readyz")
        return ready.status_code, ready.json()["checks"]["shared_queue"]

    with redis.Redis.from_url(redis_url) as keys, one.http(one.tenant("patient")) as client:
        assert (answer().status_code, shared_queue()) == (200, (200, "ok"))
        for key in list(keys.scan_iter("fairgate:flow:*:gateways")):
            keys.set(key, "garbage")
        assert answer().status_code == 200
        keys.execute_command("ACL", "SETUSER", "default", "-zrangebylex")
        until(lambda: shared_queue()[0] == 503)
        assert shared_queue()[1].startswith("broken")
        refused = answer()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "quota_store_unavailable")
        keys.execute_command("ACL", "SETUSER", "default", "+zrangebylex")
        until(lambda: shared_queue() == (200, "ok"), deadline_s=60)
        assert answer().status_code == 200
