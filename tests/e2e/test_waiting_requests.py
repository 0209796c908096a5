"""Cancelling, moving and following a request that waits.

A real server whose engine runs one sequence at a time, so that there is a line to stand in.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.support.server_process import Server, server_process, until
from tests.support.waiting_streams import ENDLESS, SHORT, events, full, waiting

PATIENCE_S = 20_000


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    arguments = ["--engine-max-sequences", "1", "--gateway-max-queued-per-tenant", "2"]
    # Endless streams fill the window, and no lane of their own.
    arguments += ["--gateway-long-tokens", "8192"]
    # On a slow machine the forecast for endless streams would rightly refuse what comes after them.
    arguments += ["--gateway-ttl-standard", str(PATIENCE_S), "--gateway-ttl-batch", str(PATIENCE_S)]
    with server_process(tmp_path_factory.mktemp("narrow"), chat_model, *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def keys(narrow: Server) -> dict[str, str]:
    every = ["interactive", "standard", "batch"]
    return {
        "crowd": narrow.tenant("crowd", tier="interactive", tiers=every),
        "acme": narrow.tenant("acme", tier="standard", tiers=every),
        "other": narrow.tenant("other", tier="standard", tiers=every),
        "modest": narrow.tenant("modest", tier="batch", tiers=["batch"]),
    }


# ---------------------------------------------------------------- progress


def test_a_waiting_stream_has_its_headers_at_once_and_hears_how_the_wait_goes_on(
    narrow: Server, keys: dict[str, str]
) -> None:
    with full(narrow, keys["crowd"]) as crowd, waiting(narrow, keys["acme"]) as (request_id, lines):
        heard = events(lines)
        kind, said = next(heard)
        assert kind == "comment"
        assert (said["status"], said["tier"]) == ("waiting", "standard")
        assert set(said["tokens_ahead"]) == {"own", "others", "higher_tier"}
        assert said["time_left_s"]["p50"] <= said["time_left_s"]["p90"]
        with narrow.http(keys["acme"]) as client:
            shown = client.get(f"/v1/requests/{request_id}").json()
        assert (shown["status"], shown["output_tokens"]) == ("waiting", 0)
        with narrow.http(keys["crowd"]) as client:
            for each in crowd:
                assert client.delete(f"/v1/requests/{each}").status_code == 200
        rest = list(heard)
    assert rest[-1] == ("done", None)
    (account,) = [said["fairgate"] for kind, said in rest if kind == "data" and "fairgate" in said]
    assert account["actual"]["output_tokens"] == 4


def test_without_asking_for_progress_headers_come_with_the_first_token(server: Server) -> None:
    key = server.tenant("plain-stream")
    with (
        server.http(key) as client,
        client.stream("POST", "/v1/completions", json=SHORT | {"stream": True}) as response,
    ):
        assert response.headers["x-accel-buffering"] == "no"
        assert "no-transform" in response.headers["cache-control"]
        assert all(kind != "comment" for kind, _ in events(response.iter_lines()))


def test_what_is_refused_after_the_headers_ends_the_stream_with_an_error_event(
    narrow: Server, keys: dict[str, str]
) -> None:
    with full(narrow, keys["crowd"]), waiting(narrow, keys["acme"]) as (request_id, lines):
        with narrow.http(keys["acme"]) as client:
            client.delete(f"/v1/requests/{request_id}")
        heard = [each for each in events(lines) if each[0] != "comment"]
    ((kind, said),) = heard
    assert kind == "error"
    assert (said["error"]["code"], said["error"]["status"]) == ("request_cancelled", 499)
    assert said["error"]["should_retry"] is False
    assert said["fairgate"]["outcome"] == "cancelled"
    assert said["fairgate"]["tokens"]["charged"] == 0


def test_the_sdk_raises_the_error_event_as_its_own_error(narrow: Server, keys: dict[str, str]) -> None:
    with OpenAI(api_key=keys["acme"], base_url=f"{narrow.url}/v1", max_retries=0) as client:
        stream = iter(client.completions.create(**_sdk(ENDLESS)))
        next(stream)
        with narrow.http(keys["acme"]) as http:
            (mine,) = http.get("/v1/requests").json()["data"]
            http.delete(f"/v1/requests/{mine['id']}")
        with pytest.raises(openai.APIError) as raised:
            list(stream)
    assert raised.value.code == "request_cancelled"
    assert "were charged" in raised.value.message


def _sdk(body: dict[str, Any]) -> dict[str, Any]:
    """The SDK's arguments for a body with our vendor extra."""
    fields = {name: value for name, value in body.items() if name != "ignore_eos"}
    return fields | {"extra_body": {"ignore_eos": body["ignore_eos"]}}


# ---------------------------------------------------------------- cancelling


def test_cancelling_is_idempotent_and_says_afterwards_how_it_ended(
    narrow: Server, keys: dict[str, str]
) -> None:
    with full(narrow, keys["crowd"]), waiting(narrow, keys["acme"]) as (request_id, lines):
        with narrow.http(keys["acme"]) as client:
            assert client.delete(f"/v1/requests/{request_id}").json()["status"] == "cancelled"
            list(lines)
            until(lambda: client.get(f"/v1/requests/{request_id}").json()["status"] == "ended")
            again = client.delete(f"/v1/requests/{request_id}")
        assert again.status_code == 200
        assert (again.json()["outcome"], again.json()["cost_nanousd"]) == ("cancelled", 0)


def test_another_tenants_request_is_not_there(narrow: Server, keys: dict[str, str]) -> None:
    with full(narrow, keys["crowd"]), waiting(narrow, keys["acme"]) as (request_id, lines):
        with narrow.http(keys["other"]) as client:
            strange = client.delete(f"/v1/requests/{request_id}")
            unknown = client.delete("/v1/requests/req_00000000000000000000000000")
            assert strange.status_code == unknown.status_code == 404
            for answer, name in ((strange, request_id), (unknown, "req_00000000000000000000000000")):
                assert answer.json()["error"]["code"] == "request_not_found"
                assert name in answer.json()["error"]["message"]
            assert client.get(f"/v1/requests/{request_id}").status_code == 404
            moved = client.post(f"/v1/requests/{request_id}/tier", json={"service_tier": "priority"})
            assert moved.status_code == 404
            assert client.get("/v1/requests").json()["data"] == []
        with narrow.http(keys["acme"]) as client:
            assert client.get(f"/v1/requests/{request_id}").json()["status"] == "waiting"
            client.delete(f"/v1/requests/{request_id}")
        list(lines)
    with narrow.http(keys["other"]) as client:
        assert client.delete(f"/v1/requests/{request_id}").status_code == 404, "nor when it has ended"


# ---------------------------------------------------------------- moving


def test_a_move_states_both_prices_and_is_charged_the_new_one(narrow: Server, keys: dict[str, str]) -> None:
    with full(narrow, keys["crowd"]) as crowd, waiting(narrow, keys["acme"]) as (request_id, lines):
        with narrow.http(keys["acme"]) as client:
            path = f"/v1/requests/{request_id}/tier"
            preview = client.post(path, json={"service_tier": "flex", "preview": True}).json()
            assert (preview["moved"], preview["tier"]) == (False, "standard")
            moved = client.post(path, json={"service_tier": "flex"}).json()
        assert (moved["moved"], moved["tier"]) == (True, "batch")
        assert moved["from"]["price_per_token_nanousd"] == {"input": 100, "cached_input": 50, "output": 300}
        assert moved["to"]["price_per_token_nanousd"] == {"input": 50, "cached_input": 25, "output": 150}
        most = 100 * len("short") + 300 * 4
        assert (moved["from"]["cost_nanousd"]["max"], moved["to"]["cost_nanousd"]["max"]) == (most, most // 2)
        with narrow.http(keys["crowd"]) as client:
            for each in crowd:
                client.delete(f"/v1/requests/{each}")
        said = [said for kind, said in events(lines) if kind == "data"]
    assert said[-1]["service_tier"] == "flex"
    account = said[-1]["fairgate"]
    assert (account["tier"], account["actual"]["cost_nanousd"]) == ("batch", most // 2)
    ((move),) = account["moves"]
    assert (move["from"], move["to"], move["by"]) == ("standard", "batch", "tenant")


def test_a_tier_that_the_key_may_not_use_is_refused_by_name(narrow: Server, keys: dict[str, str]) -> None:
    with full(narrow, keys["crowd"]), waiting(narrow, keys["modest"]) as (request_id, lines):
        with narrow.http(keys["modest"]) as client:
            path = f"/v1/requests/{request_id}/tier"
            refused = client.post(path, json={"service_tier": "priority"})
            assert refused.status_code == 403
            assert refused.json()["error"]["code"] == "service_tier_not_allowed"
            assert "Allowed tiers: batch" in refused.json()["error"]["message"]
            unknown = client.post(path, json={"service_tier": "first class"})
            assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "service_tier")
            assert client.get(f"/v1/requests/{request_id}").json()["tier"] == "batch"
            client.delete(f"/v1/requests/{request_id}")
        list(lines)


def test_an_operator_may_and_it_is_audited(narrow: Server, keys: dict[str, str]) -> None:
    with full(narrow, keys["crowd"]), waiting(narrow, keys["modest"]) as (request_id, lines):
        moved = narrow.admin("POST", f"/requests/{request_id}/tier", {"service_tier": "interactive"})
        assert (moved["moved"], moved["to"]["tier"]) == (True, "interactive")
        cancelled = narrow.admin("DELETE", f"/requests/{request_id}")
        assert cancelled["status"] == "cancelled"
        ended = [said for kind, said in events(lines) if kind == "error"]
    assert ended[0]["fairgate"]["moves"][0]["by"] == "operator"
    rows = [row for row in audit(narrow) if row["target"] == request_id]
    assert [row["action"] for row in rows] == ["request.move", "request.cancel"]
    assert (rows[0]["before"]["tier"], rows[0]["after"]["tier"]) == ("batch", "interactive")


def audit(server: Server) -> list[dict[str, Any]]:
    """The audit's rows, read from the server's database."""
    with sqlite3.connect(f"file:{server.data_dir / 'fairgate.db'}?mode=ro", uri=True) as database:
        names = ("action", "target", "before", "after")
        rows = database.execute(f"SELECT {', '.join(names)} FROM audit ORDER BY seq").fetchall()
    return [
        dict(zip(names, (row[0], row[1], *(json.loads(each or "null") for each in row[2:])), strict=True))
        for row in rows
    ]


def test_what_runs_or_has_ended_cannot_move(narrow: Server, keys: dict[str, str]) -> None:
    with full(narrow, keys["crowd"]) as crowd:
        with narrow.http(keys["crowd"]) as client:
            refused = client.post(f"/v1/requests/{crowd[0]}/tier", json={"service_tier": "flex"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "request_not_waiting")
        assert refused.headers["x-should-retry"] == "false"
    with narrow.http(keys["crowd"]) as client:
        ended = client.post(f"/v1/requests/{crowd[0]}/tier", json={"service_tier": "flex"})
    assert "'ended'" in ended.json()["error"]["message"]


# ---------------------------------------------------------------- soft preemption


def test_a_jump_is_on_both_accounts_and_changes_neither_tokens_nor_charge(
    narrow: Server, keys: dict[str, str]
) -> None:
    """One place: a batch stream has it, and an interactive request takes it for its four tokens."""
    settings = {"temperature": 0, "max_tokens": 1500, "service_tier": "flex"}
    body = SHORT | settings | {"stream_options": {"include_usage": True}}
    with narrow.http(keys["acme"]) as client:
        alone = client.post("/v1/completions", json=SHORT | settings).json()
    with waiting(narrow, keys["acme"], **body) as (_, lines):
        heard = events(lines)
        first = next(said for kind, said in heard if kind == "data")
        with narrow.http(keys["crowd"]) as client:
            quick = client.post("/v1/completions", json=SHORT).json()["fairgate"]
        chunks = [first, *(said for kind, said in heard if kind == "data")]
    assert (
        "".join(each["text"] for chunk in chunks for each in chunk["choices"]) == alone["choices"][0]["text"]
    )
    slow = chunks[-1]["fairgate"]
    assert slow["displaced"] == {
        "places_taken": 0, "tokens_by_this": 0, "places_lost": 1, "tokens_of_this": 4
    }  # fmt: skip
    assert quick["displaced"] == {
        "places_taken": 1, "tokens_by_this": 4, "places_lost": 0, "tokens_of_this": 0
    }  # fmt: skip
    assert slow["actual"]["preemptions"] == quick["actual"]["preemptions"] == 0
    for name in ("input_tokens", "output_tokens", "cost_nanousd"):
        assert slow["actual"][name] == alone["fairgate"]["actual"][name]


# ---------------------------------------------------------------- deadlines


def test_a_deadline_in_a_header_ends_the_wait(narrow: Server, keys: dict[str, str]) -> None:
    with full(narrow, keys["crowd"]), narrow.http(keys["acme"]) as client:
        late = client.post("/v1/completions", json=SHORT, headers={"x-fairgate-timeout-s": "0.6"})
    assert late.status_code == 503
    assert late.json()["error"]["code"] in ("queue_timeout", "deadline_unreachable")
    assert late.headers["x-should-retry"] == "true"


@pytest.mark.parametrize("name", ["X-Fairgate-Timeout-S", "x-stainless-read-timeout"])
@pytest.mark.parametrize("value", ["-5", "0", "tomorrow"])
def test_a_deadline_that_is_none_is_refused_by_its_headers_name(
    narrow: Server, keys: dict[str, str], name: str, value: str
) -> None:
    with narrow.http(keys["acme"]) as client:
        refused = client.post("/v1/completions", json=SHORT, headers={name: value})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].lower() == name.lower()


def test_progress_that_is_not_asked_for_properly_is_refused(narrow: Server, keys: dict[str, str]) -> None:
    with narrow.http(keys["acme"]) as client:
        refused = client.post("/v1/completions", json=SHORT, headers={"x-fairgate-progress": "please"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Fairgate-Progress")


# ---------------------------------------------------------------- what the SDK does by itself


class Counted:
    """An `openai` client with its own retries on, and what it sent and how long it meant to sleep."""

    def __init__(self, server: Server, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.statuses: list[int] = []
        self.promised_ms: list[str | None] = []
        self.slept_s: list[float] = []
        self.before_retry: list[Any] = []
        http = httpx.Client(event_hooks={"response": [self._seen]})
        self.client = OpenAI(
            api_key=key, base_url=f"{server.url}/v1", max_retries=2, http_client=http, timeout=PATIENCE_S
        )
        monkeypatch.setattr(openai._base_client, "time", self)

    def _seen(self, response: httpx.Response) -> None:
        self.statuses.append(response.status_code)
        self.promised_ms.append(response.headers.get("retry-after-ms"))

    def sleep(self, seconds: float) -> None:
        """What the SDK calls between two attempts: nothing is waited for, the obstacle is removed."""
        self.slept_s.append(seconds)
        for act in self.before_retry:
            act()

    def time(self) -> float:
        raise AssertionError("only dates need the time of day, and we send none")


def test_a_fairness_wait_is_tried_again_after_the_time_that_we_gave(
    narrow: Server, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests of the tenant wait, the most that may; the third comes back when it was told to."""
    counted = Counted(narrow, keys["acme"], monkeypatch)
    with full(narrow, keys["crowd"]) as crowd, ExitStack() as stack:
        lines = [stack.enter_context(waiting(narrow, keys["acme"]))[1] for _ in range(2)]

        def make_room() -> None:
            with narrow.http(keys["crowd"]) as client:
                for each in crowd:
                    client.delete(f"/v1/requests/{each}")
            for each in lines:
                list(each)

        counted.before_retry = [make_room]
        with counted.client as client:
            answer = client.completions.create(**_sdk(SHORT))
    assert answer.choices[0].finish_reason == "length"
    assert counted.statuses == [429, 200]
    assert counted.promised_ms[0] is not None
    assert counted.slept_s == [float(counted.promised_ms[0]) / 1000]


def test_a_spent_budget_is_not_tried_again(
    narrow: Server, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = narrow.tenant("broke")
    narrow.limit("broke", "total_tokens", 5, window="lifetime")
    counted = Counted(narrow, key, monkeypatch)
    with counted.client as client, pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(**_sdk(SHORT))
    assert refused.value.code == "insufficient_quota"
    assert (counted.statuses, counted.slept_s) == ([429], [])
    headers = refused.value.response.headers
    assert headers["x-should-retry"] == "false"
    assert headers["ratelimit-policy"] == '"tenant-total_tokens-lifetime";q=5;qu="tokens"'
    assert headers["ratelimit"] == '"tenant-total_tokens-lifetime";r=5'


def test_everything_was_settled(narrow: Server) -> None:
    until(narrow.is_idle)
    report = narrow.verify()
    assert report["ok"], report
    assert report["open_requests"] == 0
