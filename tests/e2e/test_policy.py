"""A running server changes its policy, reports its decisions, and shares prefixes inside a tenant only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.scheduling.policy import HYBRID_OPTIONS
from tests.support.commands import answer_of, fairgate
from tests.support.server_process import MODEL, Server, server_process, until

OWN = HYBRID_OPTIONS.changed()
"""Options of which the default policy has values of its own."""


def complete(server: Server, key: str, prompt: str) -> dict[str, Any]:
    with server.http(key) as client:
        response = client.post(
            "/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 3, "temperature": 0}
        )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.fixture
def back_to_settings(server: Server) -> Any:
    yield
    fairgate(server, "policy", "set", "--from-settings")


@pytest.mark.usefixtures("back_to_settings")
def test_the_policy_changes_while_it_runs_and_says_what_it_decided(server: Server) -> None:
    key = server.tenant("policies")
    result = fairgate(
        server, "policy", "set", "vtc", "--option", "order=hybrid", "--option", "slots=16", "--json"
    )
    assert result.exit_code == 0, result.output
    changed = json.loads(result.stdout)
    assert (changed["policy"], changed["order"], changed["from"]) == ("vtc", "hybrid", "stored")
    assert changed["engines"][0]["choices"]["order"] == "hybrid"
    assert changed["engines"][0]["options"] == changed["options"] == {"order": "hybrid", "slots": 16}
    account = complete(server, key, "a question that nobody asked before")["fairgate"]
    (admitted,) = account["scheduling"]
    assert (admitted["kind"], admitted["others"]) == ("admit", 0)
    assert admitted["rule"] == "order hybrid, admit predicted-reserve"
    assert len(admitted["rank"]) > 1
    shown = answer_of(server, "policy", "show")
    last = shown["engines"][0]["decisions"][-1]
    assert last["sequence_id"].startswith(account["request_id"])
    assert last["rank"] == admitted["rank"]
    assert last["reason"].startswith("tier standard; then least served tenant (counter ")
    told = fairgate(server, "policy", "show").stdout
    assert "policy vtc (order=hybrid, slots=16) (the queue's order: hybrid)" in told
    assert "the settings say hybrid" in told
    back = answer_of(server, "policy", "set", "--from-settings")
    assert (back["policy"], back["from"], back["engines"][0]["options"]) == ("hybrid", "settings", OWN)


@pytest.mark.usefixtures("back_to_settings")
def test_the_last_steps_are_shown_with_their_tokens_by_tenant(server: Server) -> None:
    key = server.tenant("steps")
    tenant = server.admin("GET", "/tenants/steps")["id"]
    assert fairgate(server, "policy", "set", "hybrid", "--option", "slots=1").exit_code == 0
    until(server.is_idle)
    prompts, tokens = ([7] * 20, [8] * 19), 60
    with server.http(key) as client:
        body = {"model": MODEL, "prompt": prompts, "max_tokens": tokens, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
    until(server.is_idle)
    [engine] = server.admin("GET", "/policy?decisions=0&steps=200")["engines"]
    assert engine["decisions"] == []
    steps = [each for each in engine["steps"] if tenant in each["decodes"] or tenant in each["prompts"]]
    assert [each["step"] for each in steps] == list(range(steps[0]["step"], steps[0]["step"] + len(steps)))
    assert sum(each["prompts"].get(tenant, 0) for each in steps) == sum(map(len, prompts))
    # The first token of each answer comes with the end of its prompt.
    assert sum(each["decodes"].get(tenant, 0) for each in steps) == 2 * (tokens - 1)
    # The second comes some steps after the first, and has the last ones alone: how many, the machine says.
    turns = [each for each in steps if each["waiting_decodes"].get(tenant)]
    assert turns
    assert all(each["decodes"] == {tenant: 1} for each in turns)
    assert {each["slots"] for each in steps} == {1}
    assert all(each["longest_gap_steps"] == {tenant: 1} for each in turns)
    shown = answer_of(server, "policy", "show", "--decisions", "0", "--steps", "200")
    assert shown["engines"][0]["steps"] == engine["steps"]
    text = fairgate(server, "policy", "show", "--decisions", "0", "--steps", "5").stdout
    assert "last steps, tokens by tenant" in text
    assert "last decisions" not in text
    for each in engine["steps"][-5:]:
        assert str(each["step"]) in text
    assert engine["steps"][-6]["step"] not in [int(word) for word in text.split() if word.isdigit()]
    assert fairgate(server, "policy", "show", "--steps", "4097").exit_code == 2
    with server.http() as client:
        refused = client.get("/admin/v1/policy?steps=4097")
    assert refused.status_code == 400
    assert "at most 4096" in refused.json()["error"]["message"]


def test_a_change_without_a_policy_says_that_it_is_missing(server: Server) -> None:
    with server.http() as client:
        for body in ({}, {"options": {"slots": 1}}):
            refused = client.post("/admin/v1/policy", json=body)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "policy")
            assert error["code"] == "missing_required_parameter"


def test_a_policy_that_does_not_exist_is_named_and_nothing_changes(server: Server) -> None:
    result = fairgate(server, "policy", "set", "lottery")
    assert result.exit_code == 1
    assert "no policy 'lottery'; there are buckets" in result.output
    assert answer_of(server, "policy", "show")["policy"] == "hybrid"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vtc", "--option", "slot=16"), "no option 'slot'; there are order, admit"),
        (("vtc", "--option", "batch_size=4097"), "option batch_size takes a whole number from 0 to 4096"),
        (("vtc", "--option", "order=lottery"), "no order 'lottery'; there are buckets"),
        (("vtc", "--option", "table=/no/such/table"), "/no/such/table cannot be read"),
        (("vtc", "--template", "fast"), "no template 'fast'; there are interactive"),
        (("fcfs", "--option", "slots=3"), "option slots does nothing here: the composition is decode-first"),
    ],
)
@pytest.mark.usefixtures("back_to_settings")
def test_an_option_that_is_not_understood_is_named_and_nothing_changes(
    server: Server, arguments: tuple[str, ...], message: str
) -> None:
    result = fairgate(server, "policy", "set", *arguments)
    assert result.exit_code == 1
    assert message in result.output
    shown = answer_of(server, "policy", "show")
    assert (shown["policy"], shown["options"], shown["engines"][0]["options"]) == ("hybrid", {}, OWN)


@pytest.mark.usefixtures("back_to_settings")
def test_a_template_sets_options_by_the_models_length(server: Server) -> None:
    changed = answer_of(server, "policy", "set", "vtc", "--template", "interactive")
    assert changed["options"]["max_num_partial_prefills"] == 2
    assert changed["options"]["long_prefill_token_threshold"] > 0
    assert changed["notice"].startswith("compose=decode-first turns the token-fair composition of vtc off")
    assert changed["notice"] in fairgate(server, "policy", "show").stdout


def test_a_stored_policy_goes_before_the_settings_at_the_next_start(tmp_path: Path, chat_model: Path) -> None:
    server = Server(tmp_path / "data", chat_model, ["--policy", "fcfs"])
    try:
        server.start()
        assert fairgate(server, "policy", "set", "vtc", "--option", "slots=5").exit_code == 0
        server.stop()
        server.start()
        shown = answer_of(server, "policy", "show")
        assert (shown["policy"], shown["options"], shown["from"]) == ("vtc", {"slots": 5}, "stored")
        assert shown["settings"] == {"policy": "fcfs", "options": {}}
        assert shown["engines"][0]["options"] == {"slots": 5}
        assert "the stored policy vtc (slots=5) is in force, and the settings say fcfs" in server.log()
    finally:
        server.stop()


def test_a_prompt_that_begins_like_an_earlier_one_of_its_tenant_is_found_in_the_cache(server: Server) -> None:
    keys = server.tenant("cached"), server.tenant("somebody-else")
    prompt = "the same long beginning of every prompt of this tenant, "

    def cached(key: str, rest: str) -> int:
        found: int = complete(server, key, prompt + rest)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached(keys[0], "first") == 0
    assert cached(keys[0], "second") >= 16
    assert cached(keys[1], "third") == 0, "another tenant finds nothing of it"


def test_without_prefix_caching_no_prompt_is_found_in_the_cache(tmp_path: Path, chat_model: Path) -> None:
    with server_process(tmp_path / "data", chat_model, "--engine-prefix-caching", "no") as server:
        key = server.tenant("uncached")
        for rest in ("first", "second"):
            usage = complete(server, key, "the same long beginning of every prompt, " + rest)["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
