"""A control loop that acts on an overload: what its server refuses, and its moves wherever they show."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from ops.cli.main import cli
from tests.support.commands import answer_of, fairgate
from tests.support.people import logged_in
from tests.support.server_process import MODEL, Server, server_process, until

BODY = {"model": MODEL, "prompt": "sun and rain", "max_tokens": 4, "ignore_eos": True}


@dataclass
class Overload:
    """A server whose loop has moved admission, and what it answered while a target could not be kept."""

    server: Server
    refused: httpx.Response
    others: httpx.Response
    """To a tenant without a target."""


@pytest.fixture(scope="module")
def overload(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Overload]:
    data_dir = tmp_path_factory.mktemp("acting")
    with server_process(data_dir, chat_model, "--gateway-control", "acting") as server:
        late, other = server.tenant("late"), server.tenant("patient")
        # It cannot be kept: to the forecast that is an overload.
        made = server.admin(
            "POST", "/slos", {"tier": "standard", "metric": "ttft", "target_s": 0.0001, "tenant": "late"}
        )

        answers: list[httpx.Response] = []

        def is_refused() -> bool:
            answers.append(ask(server, late))
            return answers[-1].status_code != 200

        until(is_refused)
        others = ask(server, other)
        server.admin("DELETE", f"/slos/{made['id']}")
        until(lambda: server.admin("GET", "/policy/moves?knob=admission")["data"])
        until(lambda: ask(server, late).status_code == 200)
        yield Overload(server, answers[-1], others)


@pytest.fixture(scope="module")
def acting(overload: Overload) -> Server:
    return overload.server


def ask(server: Server, key: str) -> httpx.Response:
    with server.http(key) as client:
        return client.post("/v1/completions", json=BODY)


def test_under_overload_it_refuses_what_would_be_late_and_says_when_to_try_again(overload: Overload) -> None:
    answer = overload.refused
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["code"] == "target_unreachable"
    assert "its target is 0.0001 s" in answer.json()["error"]["message"]
    assert float(answer.headers["retry-after"]) >= 1
    assert answer.headers["x-should-retry"] == "true"
    control = overload.server.status()["models"]["pools"][MODEL]["control"]
    assert control["mode"] == "acting"
    assert "admission" in [move["knob"] for move in control["moves"] if move["is_made"]]
    assert overload.others.status_code == 200, "nothing binds it"


def test_a_move_is_listed_with_its_reason(acting: Server) -> None:
    shown = answer_of(acting, "policy", "moves", "--knob", "admission", "--made")
    first = shown["data"][-1]
    gateway_id = acting.status()["gateway_id"]
    assert (first["model"], first["gateway_id"], first["mode"]) == (MODEL, gateway_id, "acting")
    assert (first["before"], first["after"] > 0, first["is_made"]) == (0, True, True)
    assert first["knobs"]["admission"] == first["after"]
    assert "targets about to be missed" in first["reason"] or "overload" in first["reason"]
    assert shown["data"] == acting.admin("GET", "/policy/moves?knob=admission&made=true")["data"]
    text = fairgate(acting, "policy", "moves").stdout
    assert [line for line in text.splitlines() if first["reason"] in line and " yes " in line]
    assert "moves: none" in fairgate(acting, "policy", "moves", "--advised").stdout
    assert "moves: none" in fairgate(acting, "policy", "moves", "--model", "another").stdout
    with acting.http() as client:
        answer = client.get(f"{acting.admin_url}/admin/v1/policy/moves", params={"limit": 0})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


def test_the_status_page_says_what_an_operator_reads_first(acting: Server) -> None:
    answered = fairgate(acting, "status")
    assert answered.exit_code == 0, answered.output
    lines = answered.stdout.splitlines()
    shown = acting.status()
    assert lines[0] == f"{shown['gateway_id']} at {acting.url}: ready"
    assert lines[1] == f"{MODEL}; policy hybrid"
    assert "target_unreachable" in answered.stdout
    assert f"control loop of {MODEL}: acting" in lines
    [moved] = [line for line in lines if " admission " in line and " 0 x expected time -> " in line]
    assert "changed" in moved
    assert "ago" in moved
    whole = answer_of(acting, "status")
    assert whole["readiness"]["checks"] == {"database": "ok", "quota_store": "ok", "engine": "ok"}
    assert set(whole) == set(shown)


async def test_a_move_is_on_the_policys_page_in_words(acting: Server) -> None:
    [*_, first] = acting.admin("GET", "/policy/moves?knob=admission&made=true")["data"]
    async with logged_in(acting) as owner:
        shown = html.unescape((await owner.get("/console/policy")).text)
    assert f">admission {first['before']:g} → {first['after']:g}<" in shown
    assert f">{first['reason']}<" in shown
    assert ">made<" in shown


def test_status_fails_while_the_server_is_not_ready(acting: Server) -> None:
    acting.admin("POST", "/upstreams/engine-0/drain", {})
    answered = fairgate(acting, "status")
    assert answered.exit_code == 1
    assert answered.stdout.splitlines()[0].endswith("NOT READY (engine: nothing that runs a model is ready)")
    shown = fairgate(acting, "status", "--json")
    assert (shown.exit_code, json.loads(shown.stdout)["readiness"]["status"]) == (1, "not ready")
    acting.admin("POST", "/upstreams/engine-0/resume", {})
    assert fairgate(acting, "status").exit_code == 0


def test_status_fails_where_no_server_runs(tmp_path: Path) -> None:
    answered = CliRunner().invoke(cli, ["status", "--data-dir", str(tmp_path)], prog_name="fairgate")
    assert answered.exit_code == 1
    assert "no server runs on this data directory" in answered.output
