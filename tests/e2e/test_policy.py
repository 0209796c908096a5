"""A running server changes its policy, reports its decisions, and shares prefixes inside a tenant only."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ops.cli.main import cli
from tests.support.server_process import MODEL, Server


def policy(server: Server, *arguments: str) -> Result:
    return CliRunner().invoke(
        cli, ["policy", *arguments, "--data-dir", str(server.data_dir)], prog_name="fairgate"
    )


def complete(server: Server, key: str, prompt: str) -> dict[str, Any]:
    with server.http(key) as client:
        response = client.post(
            "/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 3, "temperature": 0}
        )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.fixture
def back_to_vtc(server: Server) -> Any:
    yield
    policy(server, "set", "vtc")


@pytest.mark.usefixtures("back_to_vtc")
def test_the_policy_changes_while_it_runs_and_says_what_it_decided(server: Server) -> None:
    key = server.tenant("policies")
    result = policy(server, "set", "hybrid", "--json")
    assert result.exit_code == 0, result.output
    changed = json.loads(result.stdout)
    assert (changed["policy"], changed["order"]) == ("hybrid", "hybrid")
    assert changed["engines"][0]["choices"]["order"] == "hybrid"
    account = complete(server, key, "a question that nobody asked before")["fairgate"]
    (admitted,) = account["scheduling"]
    assert (admitted["kind"], admitted["others"]) == ("admit", 0)
    assert admitted["rule"] == "order hybrid, admit predicted-reserve"
    assert len(admitted["rank"]) > 1
    shown = json.loads(policy(server, "show", "--json").stdout)
    last = shown["engines"][0]["decisions"][-1]
    assert last["sequence_id"].startswith(account["request_id"])
    assert last["rank"] == admitted["rank"]
    assert "admit" in policy(server, "show").stdout


def test_a_policy_that_does_not_exist_is_named_and_nothing_changes(server: Server) -> None:
    result = policy(server, "set", "lottery")
    assert result.exit_code == 1
    assert "no policy 'lottery'; there are buckets" in result.output
    assert json.loads(policy(server, "show", "--json").stdout)["policy"] == "vtc"


def test_a_prompt_that_begins_like_an_earlier_one_of_its_tenant_is_found_in_the_cache(server: Server) -> None:
    keys = server.tenant("cached"), server.tenant("somebody-else")
    prompt = "the same long beginning of every prompt of this tenant, "

    def cached(key: str, rest: str) -> int:
        found: int = complete(server, key, prompt + rest)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached(keys[0], "first") == 0
    assert cached(keys[0], "second") >= 16
    assert cached(keys[1], "third") == 0, "another tenant finds nothing of it"
