"""The metrics page of a running server, after a small load, in both of its formats."""

from __future__ import annotations

import json
import re

import pytest
from ruamel.yaml import YAML

from ops.deploy.alert_rules import COMMITTED
from ops.deploy.dashboards import FOLDER
from ops.deploy.panels import DASHBOARDS
from tests.support.prometheus import OPEN_METRICS, TEXT, lint, missing_on, series, value
from tests.support.server_process import MODEL, ROOT, Server, until

GEN_AI = {
    "gen_ai_operation_name": "chat",
    "gen_ai_provider_name": "fairgate",
    "gen_ai_request_model": MODEL,
    "gen_ai_response_model": MODEL,
}


@pytest.fixture(scope="module")
def pages(server: Server) -> dict[str, str]:
    """By media type, after answers in two tiers, a target that was not met, and a refusal."""
    server.tenant("metered", tiers=["standard", "batch"])
    key = server.key("metered")
    slo = {"tenant": "metered", "tier": "standard", "metric": "ttft", "target_s": 0.0001, "percentile": 95}
    server.admin("POST", "/slos", slo)
    server.admin("POST", "/usage/verify")
    message = {"model": MODEL, "messages": [{"role": "user", "content": "count"}], "max_tokens": 4}
    with server.http(key) as client:

        def has_missed() -> bool:
            client.post("/v1/chat/completions", json=message).raise_for_status()
            return (
                value(client.get("/metrics").text, "fairgate_slo_misses_total", tier="standard") is not None
            )

        until(has_missed)
        client.post("/v1/chat/completions", json=message | {"service_tier": "flex"}).raise_for_status()
        assert client.post("/v1/chat/completions", json=message | {"model": "gone"}).status_code == 404
        with client.stream("POST", "/v1/chat/completions", json=message | {"stream": True}) as stream:
            assert "[DONE]" in "".join(stream.iter_text())
        found = {each: client.get("/metrics", headers={"accept": each}) for each in (TEXT, OPEN_METRICS)}
    for media_type, answer in found.items():
        assert answer.headers["content-type"].count("charset=utf-8") == 1
        assert answer.headers["content-type"].startswith(f"{media_type}; version=")
    return {each: answer.text for each, answer in found.items()}


@pytest.mark.parametrize("media_type", [TEXT, OPEN_METRICS])
def test_promtool_has_nothing_to_say(pages: dict[str, str], media_type: str) -> None:
    page = pages[media_type]
    assert len(page) > 10_000
    assert lint(page, is_open_metrics=media_type == OPEN_METRICS) == ""


def test_both_formats_have_the_same_series(pages: dict[str, str]) -> None:
    assert series(pages[TEXT]) == series(pages[OPEN_METRICS], is_open_metrics=True)


def test_the_documents_name_every_metric(pages: dict[str, str]) -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text()
    names = re.findall(r"^# TYPE (\S+) ", pages[TEXT], re.MULTILINE)
    assert len(names) > 40
    assert [name for name in names if f"`{name}`" not in text] == []


def test_requests_are_counted_by_the_names_of_opentelemetry(pages: dict[str, str]) -> None:
    page = pages[TEXT]
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        assert (value(page, f"gen_ai_server_{name}_seconds_count", **GEN_AI) or 0) >= 3, name
    gone = {"gen_ai_request_model": "_OTHER", "error_type": "model_not_found"}
    assert (value(page, "gen_ai_server_request_duration_seconds_count", **gone) or 0) >= 1


def test_the_parts_of_a_server_have_their_figures(pages: dict[str, str]) -> None:
    page = pages[TEXT]
    assert value(page, "fairgate_build_info") == 1
    for operation in ("write", "read"):
        assert (value(page, "fairgate_database_seconds_count", operation=operation) or 0) > 0
    for name in (
        "before_line_seconds_count",
        "event_loop_lag_seconds_count",
        "engine_steps_total",
        "connections",
    ):
        assert (value(page, f"fairgate_{name}") or 0) > 0, name
    assert value(page, "fairgate_holds_overdue") == 0
    assert value(page, "fairgate_usage_fold_lag_seconds") is not None


def test_every_query_of_the_dashboards_finds_its_metrics_and_labels(pages: dict[str, str]) -> None:
    queries = {
        f"{name}: {panel['title']}": target["expr"].replace("$__rate_interval", "5m")
        for name in DASHBOARDS
        for panel in json.loads((FOLDER / f"{name}.json").read_text())["panels"]
        for target in panel["targets"]
    }
    assert len(queries) > 30
    assert {
        title: lacks for title, query in queries.items() if (lacks := missing_on(pages[TEXT], query))
    } == {}


def test_every_rule_finds_its_metrics_and_labels(pages: dict[str, str]) -> None:
    groups = YAML(typ="safe").load(COMMITTED.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    recorded = {each["record"] for each in rules if "record" in each}
    lacking = {lack for each in rules for lack in missing_on(pages[TEXT], each["expr"])}
    assert len(recorded) == 5
    assert lacking == recorded, "an alert asks for what is recorded before it"


@pytest.mark.parametrize(
    ("query", "lacks"),
    [
        ("sum(fairgate_gone)", ["fairgate_gone"]),
        ("sum by (tenant) (fairgate_queued)", ["fairgate_queued with ['tenant'] and {}"]),
        ('fairgate_queued{tier="gold"}', ["fairgate_queued with ['tier'] and {'tier': 'gold'}"]),
        ("sum(rate(fairgate_requests_total[5m])) / sum(fairgate_lost)", ["fairgate_lost"]),
    ],
)
def test_what_a_page_lacks_is_found(pages: dict[str, str], query: str, lacks: list[str]) -> None:
    assert missing_on(pages[TEXT], query) == lacks
