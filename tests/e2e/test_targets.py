"""A running server admits by the targets of tenants and tiers, and without targets by arrival.

The engine runs one sequence at a time and is sent two more, so that both lines decide, its own and the
queue's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.commands import answer_of
from tests.support.server_process import MODEL, Server, server_process, until

PATIENCE_S = 20_000
STRICTNESS = 0.005
"""What waits for minutes, on a busy machine, is far from being refused."""
ENDLESS = {"model": MODEL, "prompt": "on and on", "max_tokens": 8000, "ignore_eos": True, "stream": True}
SHORT = {"model": MODEL, "prompt": "short", "max_tokens": 4, "ignore_eos": True, "stream": True}
PROGRESS = {"x-fairgate-progress": "1"}
"""Headers come when the request is in line."""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    arguments = ["--engine-max-sequences", "1", "--gateway-ttl-standard", str(PATIENCE_S)]
    arguments += ["--gateway-admission", str(STRICTNESS)]
    with server_process(tmp_path_factory.mktemp("targets"), chat_model, *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def keys(narrow: Server) -> dict[str, str]:
    names = {name: narrow.tenant(name, tier="standard") for name in ("loose", "tight")}
    return names | {"crowd": narrow.tenant("crowd", tier="interactive", tiers=["interactive"])}


@contextmanager
def slos(server: Server) -> Iterator[None]:
    """The tier's own target, and a tighter one of the tenant `tight`."""
    answer_of(server, "slo", "set", "--tier", "standard", "--metric", "e2e", "--target", "20")
    asked = {"tenant": "tight", "tier": "standard", "metric": "e2e", "target_s": 2.0}
    server.admin("POST", "/slos", asked)
    try:
        yield
    finally:
        for each in server.admin("GET", "/slos")["data"]:
            server.admin("DELETE", f"/slos/{each['id']}")


def admitted(server: Server, keys: dict[str, str], *tenants: str) -> list[int]:
    """Requests of `tenants`, one after the other behind a long stream that then ends: the numbers of the
    requests in the order in which the engine admitted them."""
    with ExitStack() as stack:

        def send(tenant: str, body: dict[str, object]) -> str:
            client = stack.enter_context(server.http(keys[tenant]))
            response = stack.enter_context(
                client.stream("POST", "/v1/completions", json=body, headers=PROGRESS)
            )
            assert response.status_code == 200
            if body is SHORT:
                streams.append(response.iter_lines())
            name: str = response.headers["x-request-id"]
            return name

        streams: list[Iterator[str]] = []
        long = send("crowd", ENDLESS)
        until(lambda: server.status()["engines"][0]["running"] == 1)
        names = {send(tenant, SHORT): number for number, tenant in enumerate(tenants)}
        until(lambda: server.status()["engines"][0]["waiting"] == 2)
        with server.http(keys["crowd"]) as client:
            assert client.delete(f"/v1/requests/{long}").status_code == 200
        for stream in streams:
            assert "data: [DONE]" in list(stream)
    until(server.is_idle)
    (engine,) = server.admin("GET", "/policy?decisions=32")["engines"]
    ids = [each["sequence_id"].rpartition(".")[0] for each in engine["decisions"] if each["kind"] == "admit"]
    return [names[each] for each in ids if each in names]


@pytest.mark.parametrize("policy", ["edf", "priority"])
def test_admissions_go_by_the_targets_of_tenant_and_tier(
    narrow: Server, keys: dict[str, str], policy: str
) -> None:
    answer_of(narrow, "policy", "set", policy)
    tenants = ("loose", "tight", "loose", "tight")
    with slos(narrow):
        order = admitted(narrow, keys, *tenants)
    assert sorted(order) == [0, 1, 2, 3]
    assert order.index(1) < order.index(0), "in the engine: both were there when the place became free"
    assert order.index(3) < order.index(2), "in the queue: both waited in the gateway"
    order = admitted(narrow, keys, *tenants)
    # For `priority` what a tenant has had counts once one of each has run.
    assert order == [0, 1, 2, 3] or (policy == "priority" and order[:2] == [0, 1]), (
        "without targets by arrival"
    )


def test_the_setting_alone_refuses_what_is_expected_after_its_target(
    narrow: Server, keys: dict[str, str]
) -> None:
    def code(tenant: str) -> str | None:
        with narrow.http(keys[tenant]) as client:
            answer = client.post("/v1/completions", json=SHORT | {"stream": False, "max_tokens": 200})
        found: str | None = answer.json()["error"]["code"] if answer.is_error else None
        return found

    control = narrow.status()["models"]["pools"][MODEL]["control"]
    assert (control["mode"], control["in_force"]["admission"]) == ("advice", STRICTNESS)
    assert code("tight") is None, "it has no target yet"
    made = narrow.admin(
        "POST", "/slos", {"tier": "standard", "metric": "e2e", "target_s": 0.0001, "tenant": "tight"}
    )
    try:
        assert code("tight") == "target_unreachable"
        assert code("loose") is None
    finally:
        narrow.admin("DELETE", f"/slos/{made['id']}")
