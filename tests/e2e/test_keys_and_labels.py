"""Keys that are bound to networks, labels in the ledger, and batch requests that wait for hours.

A real server behind what it takes for a trusted proxy, whose batch tier gives up after a second, and whose
engine runs one sequence at a time.
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

from tests.support.commands import answer_of, fairgate
from tests.support.server_process import MODEL, Server, server_process, until

SHORT = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
ENDLESS = SHORT | {"max_tokens": 8000, "stream": True}
NETWORKS = ["10.0.0.0/8", "2001:db8::/32"]
INSIDE, OUTSIDE = {"x-forwarded-for": "10.1.2.3"}, {"x-forwarded-for": "198.51.100.7"}


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    """All tests speak from 127.0.0.1, which is a trusted proxy here."""
    arguments = ["--gateway-trusted-proxies", "127.0.0.1", "--gateway-ttl-batch", "1"]
    arguments += ["--engine-max-sequences", "1", "--gateway-long-tokens", "8192"]
    with server_process(tmp_path_factory.mktemp("behind"), chat_model, *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def keys(behind: Server) -> dict[str, str]:
    """Of two tenants; those of acme are bound."""
    every = ["interactive", "standard", "batch"]
    behind.tenant("acme", tier="batch", tiers=every)
    return {
        "bound": behind.key("acme", allow_from=NETWORKS),
        "admin": behind.key("acme", allow_from=NETWORKS, scopes=["admin:read", "admin:write"]),
        "acme": behind.key("acme"),
        "other": behind.tenant("other", tier="interactive", tiers=every),
    }


def audited(server: Server, action: str, name: str) -> list[tuple[Any, Any, str]]:
    """One field before and after each act, and where that came from."""
    with sqlite3.connect(server.data_dir / "fairgate.db") as connection:
        rows = connection.execute(
            "SELECT before, after, origin FROM audit WHERE action = ? ORDER BY seq", (action,)
        ).fetchall()
    return [(json.loads(before)[name], json.loads(after)[name], origin) for before, after, origin in rows]


def status_and_code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"] if response.is_error else ""


# ---------------------------------------------------------------- networks


@pytest.mark.parametrize(
    ("forwarded", "seen"),
    [
        (["10.1.2.3"], None),
        (["::ffff:10.1.2.3"], None),
        (["2001:db8::7"], None),
        (["198.51.100.7, 10.1.2.3, 127.0.0.1"], None),
        (["198.51.100.7"], "198.51.100.7"),
        # What the client itself says stands to the left, and counts for nothing.
        (["10.1.2.3, 198.51.100.7"], "198.51.100.7"),
        (["10.1.2.3", "198.51.100.7"], "198.51.100.7"),
        ([], "127.0.0.1"),
        (["10.1.2.3, nonsense"], "X-Forwarded-For"),
        (["'; DROP TABLE"], "X-Forwarded-For"),
        ([","], "X-Forwarded-For"),
    ],
)
def test_a_bound_key_is_refused_from_any_other_address(
    behind: Server, keys: dict[str, str], forwarded: list[str], seen: str | None
) -> None:
    headers = [("authorization", f"Bearer {keys['bound']}")]
    headers += [("x-forwarded-for", each) for each in forwarded]
    answer = httpx.get(f"{behind.url}/v1/models", headers=headers)
    assert status_and_code(answer) == ((200, "") if seen is None else (403, "address_not_allowed"))
    if seen is not None:
        message = answer.json()["error"]["message"]
        assert seen in message
        assert not any(network in message for network in NETWORKS), "a thief need not know where to go"


def test_it_holds_on_every_route_for_this_key_alone_and_a_wrong_key_is_still_a_wrong_key(
    behind: Server, keys: dict[str, str]
) -> None:
    with behind.http(keys["bound"]) as bound, behind.http(keys["admin"]) as admin:
        for client, method, path in [
            (bound, "POST", "/v1/completions"),
            (bound, "GET", "/v1/requests"),
            (bound, "POST", "/v1/quotes"),
            (admin, "GET", "/admin/v1/status"),
            (admin, "POST", "/admin/v1/keys"),
        ]:
            body = SHORT if method == "POST" else None
            refused = client.request(method, path, json=body, headers=OUTSIDE)
            assert status_and_code(refused) == (403, "address_not_allowed"), path
        assert bound.post("/v1/completions", json=SHORT, headers=INSIDE).status_code == 200
        assert admin.get("/admin/v1/status", headers=INSIDE).status_code == 200
    other_end = "y" if keys["bound"].endswith("x") else "x"
    with behind.http(keys["bound"][:-1] + other_end) as wrong:
        assert status_and_code(wrong.get("/v1/models", headers=OUTSIDE)) == (401, "invalid_api_key")
    for free in (keys["acme"], keys["other"]):
        with behind.http(free) as client:
            assert client.get("/v1/models", headers=OUTSIDE).status_code == 200
    sdk = OpenAI(base_url=f"{behind.url}/v1", api_key=keys["bound"], default_headers=OUTSIDE)
    with pytest.raises(openai.PermissionDeniedError, match=r"from 198\.51\.100\.7"):
        sdk.models.list()


def test_without_trusted_proxies_the_header_opens_nothing(server: Server) -> None:
    server.admin("POST", "/tenants", {"name": "direct"})
    far = server.key("direct", allow_from=["10.0.0.0/8"])
    near = server.key("direct", allow_from=["127.0.0.1"])
    with server.http(far) as client:
        refused = client.get("/v1/models", headers=INSIDE)
    assert status_and_code(refused) == (403, "address_not_allowed")
    assert "from 127.0.0.1." in refused.json()["error"]["message"]
    with server.http(near) as client:
        assert client.get("/v1/models", headers=OUTSIDE).status_code == 200


def test_networks_are_set_by_command_and_route_kept_by_rotation_and_audited(behind: Server) -> None:
    behind.admin("POST", "/tenants", {"name": "moving"})
    made = answer_of(behind, "key", "create", "--tenant", "moving", "--allow-from", "10.0.0.0/8")
    assert made["allow_from"] == ["10.0.0.0/8"]
    rotated = answer_of(behind, "key", "rotate", made["id"])
    assert rotated["allow_from"] == ["10.0.0.0/8"]

    def status(headers: dict[str, str]) -> int:
        with behind.http(rotated["key"]) as client:
            return client.get("/v1/models", headers=headers).status_code

    until(lambda: status(INSIDE) == 200)
    assert status(OUTSIDE) == 403
    with behind.http() as client:
        path, where = f"/admin/v1/keys/{made['id']}", {"x-forwarded-for": "203.0.113.9"}
        changed = client.patch(path, json={"allow_from": ["198.51.100.0/24"]}, headers=where)
        assert changed.json()["allow_from"] == ["198.51.100.0/24"]
        assert (status(INSIDE), status(OUTSIDE)) == (403, 200)
        for networks, says in [
            (["10.0.0.1/8"], "did you mean 10.0.0.0/8"),
            (["office"], "'office' is not a network"),
            ([f"10.0.{n}.0/24" for n in range(33)], "the most is 32"),
        ]:
            refused = client.patch(path, json={"allow_from": networks})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "allow_from")
            assert says in refused.json()["error"]["message"]
    failed = fairgate(behind, "key", "set", made["id"], "--allow-from", "10.0.0.1/8")
    assert failed.exit_code == 1
    assert "did you mean 10.0.0.0/8" in failed.stderr
    assert fairgate(behind, "key", "set", made["id"]).exit_code == 2
    assert answer_of(behind, "key", "set", made["id"], "--allow-from-anywhere")["allow_from"] == []
    until(lambda: status(INSIDE) == 200)
    assert audited(behind, "key.update", "allow_from") == [
        (["10.0.0.0/8"], ["198.51.100.0/24"], "203.0.113.9"),
        (["198.51.100.0/24"], [], "cli"),
    ]


def test_what_a_key_may_do_is_changed_by_command_and_route_and_in_force_at_once(behind: Server) -> None:
    behind.admin("POST", "/tenants", {"name": "changing", "tier": "standard"})
    made = behind.admin("POST", "/keys", {"tenant": "changing"})

    def code(**fields: Any) -> str | None:
        with behind.http(made["key"]) as client:
            answer = client.post("/v1/completions", json=SHORT | fields)
        return None if answer.is_success else answer.json()["error"]["code"]

    def change(body: dict[str, Any]) -> dict[str, Any]:
        changed: dict[str, Any] = behind.admin("PATCH", f"/keys/{made['id']}", body)
        return changed

    assert code() is None
    change({"scopes": ["quote"]})
    assert code() == "insufficient_permissions"
    done = answer_of(behind, "key", "set", made["id"], "--scope", "inference", "--tier", "batch")
    assert (done["scopes"], done["tiers"]) == (["inference"], ["batch"])
    assert code(service_tier="standard") == "service_tier_not_allowed"
    assert change({"tiers": [], "models": ["another"]})["tiers"] is None
    assert code() == "model_not_found"
    far = "2027-01-31T18:00:00+01:00"
    done = answer_of(behind, "key", "set", made["id"], "--all-models", "--expires", far)
    assert done["expires_at"] == "2027-01-31T17:00:00+00:00"
    assert code() is None
    never = answer_of(behind, "key", "set", made["id"], "--expires", "never", "--tier", "tenant")
    assert never["expires_at"] is None
    change({"expires_in_s": 1})
    until(lambda: code() == "invalid_api_key")
    change({"expires": ""})
    assert code() is None
    for wrong in (["--all-models", "--model", "m"], ["--tier", "tenant", "--tier", "batch"]):
        assert fairgate(behind, "key", "set", made["id"], *wrong).exit_code == 2
    assert (["batch"], None) in [row[:2] for row in audited(behind, "key.update", "tiers")]


# ---------------------------------------------------------------- labels


def test_declared_labels_go_to_the_ledger_and_other_metadata_goes_nowhere(
    behind: Server, keys: dict[str, str]
) -> None:
    declared = answer_of(behind, "tenant", "set", "acme", "--label", "team=search", "--label", "team=ads")
    assert declared["labels"] == {"team": ["ads", "search"]}
    behind.admin("PATCH", "/tenants/acme", {"labels": {"env": ["prod"]}})
    sdk = OpenAI(base_url=f"{behind.url}/v1", api_key=keys["acme"])
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 2,
    }
    answer = sdk.chat.completions.with_raw_response.create(
        **asked, metadata={"team": "search", "env": "prod", "note": "mine"}
    )
    request_id = answer.headers["x-request-id"]
    labels = {"team": "search", "env": "prod"}
    with behind.http(keys["acme"]) as client:
        assert client.get(f"/v1/requests/{request_id}").json()["labels"] == labels
    rows = answer_of(behind, "ledger", "show", request_id)["rows"]
    assert {row["kind"]: row["labels"] for row in rows} == {"reserve": labels, "settle": labels}
    with pytest.raises(openai.BadRequestError, match="ads, search") as refused:
        sdk.chat.completions.create(**asked, metadata={"team": "sales"})
    assert (refused.value.code, refused.value.param) == ("invalid_label", "metadata.team")
    # Another tenant has declared nothing: the same pair is its own affair.
    with behind.http(keys["other"]) as client:
        done = client.post("/v1/completions", json=SHORT | {"metadata": {"team": "sales"}})
        assert client.get(f"/v1/requests/{done.headers['x-request-id']}").json()["labels"] == {}
    assert answer_of(behind, "tenant", "set", "acme", "--drop-label", "team")["labels"] == {"env": ["prod"]}
    again = fairgate(behind, "tenant", "set", "acme", "--drop-label", "team")
    assert again.exit_code == 1
    assert "there is no label 'team'; labels: 'env'" in again.stderr
    assert [after for _, after, _ in audited(behind, "tenant.update", "labels")] == [
        {"team": ["ads", "search"]}, {"team": ["ads", "search"], "env": ["prod"]}, {"env": ["prod"]},
    ]  # fmt: skip


# ---------------------------------------------------------------- long waits


def test_a_batch_request_outwaits_its_tier_when_its_client_says_so(
    behind: Server, keys: dict[str, str]
) -> None:
    asked = SHORT | {"service_tier": "flex", "stream": True}
    patient = {"x-fairgate-timeout-s": "86400", "x-fairgate-progress": "1"}
    with behind.http(keys["other"]) as crowd, behind.http(keys["acme"]) as client, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(
                crowd.stream("POST", "/v1/completions", json=ENDLESS, headers={"x-fairgate-progress": "1"})
            )
        until(lambda: len(crowd.get("/v1/requests").json()["data"]) == 3)
        with client.stream("POST", "/v1/completions", json=asked, headers=patient) as waiting:
            assert waiting.status_code == 200
            with behind.http(keys["acme"]) as second:
                # Came later, said nothing, and has waited for as long as the tier allows.
                late = second.post("/v1/completions", json=asked)
                assert late.status_code == 503
                assert late.json()["error"]["code"] in ("queue_timeout", "deadline_unreachable")
                shown = second.get(f"/v1/requests/{waiting.headers['x-request-id']}").json()
            assert shown["status"] == "waiting"
            for each in crowd.get("/v1/requests").json()["data"]:
                crowd.delete(f"/v1/requests/{each['id']}")
            assert "data: [DONE]" in waiting.read().decode()
    until(behind.is_idle)
    assert behind.verify()["problems"] == []


def test_an_idempotency_key_outlives_the_wait_that_its_client_named(
    behind: Server, keys: dict[str, str]
) -> None:
    with behind.http(keys["acme"]) as client:
        for name, waits in (("brief", {}), ("patient", {"x-fairgate-timeout-s": "86400"})):
            headers = {"idempotency-key": name} | waits
            # For a moment after the crowd before it, a wait beyond the tier's limit may be expected: 503.
            until(
                lambda headers=headers: client.post("/v1/completions", json=SHORT, headers=headers).is_success
            )
    with sqlite3.connect(behind.data_dir / "fairgate.db") as connection:
        expires_us = dict(
            connection.execute("SELECT idempotency_key, expires_us FROM idempotent_answers").fetchall()
        )
    later_s = (expires_us["patient"] - expires_us["brief"]) / 1e6
    assert 86_400 <= later_s < 86_400 + 600
