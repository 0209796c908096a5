"""Several gateways as operators see them: drained replicas, live requests, an admin listener.

Two real gateways on one PostgreSQL and one Redis, without engines: both replicas are the shared server, under
two addresses. The pool's queue is shared, too. The second gateway has an admin listener.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from gateway.http.admin_listener import ADMIN_PATHS
from ops.cli.main import cli
from tests.e2e.test_crash import Stream, start_streams
from tests.support import services
from tests.support.documents import routes
from tests.support.server_process import MODEL, Server, server_process, until
from tests.support.webhook_receiver import receiving

KEY_VARIABLE = "DRAIN_KEY"
RATE_PER_S = 40
LONG = 100
"""Tokens of a stream that still runs when its replica is drained, at that rate."""


@pytest.fixture(scope="module")
def gateways(
    tmp_path_factory: pytest.TempPathFactory, chat_model: Path, server: Server, postgres_server: str,
    redis_server: str,
) -> Iterator[list[Server]]:  # fmt: skip
    home = tmp_path_factory.mktemp("drain")
    names = {"left": server.url, "right": server.url.replace("127.0.0.1", "localhost")}
    tables = [
        f'[[upstreams]]\nname = "{name}"\nurl = "{url}/v1"\nmodel = "{MODEL}"\n'
        f'api_key_env = "{KEY_VARIABLE}"\ntokenizer_dir = "{chat_model}"\n'
        "max_concurrent = 1\nwhole_tokens = 0\n"
        for name, url in names.items()
    ]
    (home / "gateway.toml").write_text("".join(tables))
    url = services.create_database(postgres_server)
    made: list[Server] = []
    with ExitStack() as closing:
        closing.callback(services.drop_database, postgres_server, url)
        patch = closing.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(KEY_VARIABLE, server.tenant(f"{home.name}-gateways"))  # also of another file
        services.delete_keys(redis_server)
        closing.callback(services.delete_keys, redis_server)
        for name in ("one", "other"):
            data_dir = home / name
            if made:
                data_dir.mkdir()
                shutil.copy(made[0].data_dir / "pepper", data_dir / "pepper")
            arguments = ["--engine-serve", "no", "--config", str(home / "gateway.toml")]
            arguments += ["--database-url", url, "--redis-url", redis_server]
            arguments += ["--gateway-alert-every", "1", "--gateway-webhook-private", "yes"]
            arguments += ["--gateway-control", "acting"]
            arguments += ["--admin-listen", "127.0.0.1:0"] if made else []
            made.append(closing.enter_context(server_process(data_dir, chat_model, *arguments)))
        made[1].owner_key = made[0].owner_key
        yield made


@pytest.fixture(autouse=True)
def nothing_is_drained(gateways: list[Server]) -> Iterator[None]:
    yield
    for name in ("left", "right"):
        with gateways[0].http() as client:
            client.post(f"/admin/v1/upstreams/{name}/resume")


def replicas(server: Server) -> dict[str, dict[str, Any]]:
    [pool] = server.admin("GET", "/upstreams")["data"]
    return {each["replica_id"]: each for each in pool["replicas"]}


def states(server: Server) -> dict[str, tuple[str, int]]:
    return {name: (each["state"], each["in_flight"]) for name, each in replicas(server).items()}


def ask(server: Server, key: str) -> httpx.Response:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2, "ignore_eos": True}
    with server.http(key) as client:
        return client.post("/v1/completions", json=body)


def answered_by(server: Server, key: str) -> str:
    answer = ask(server, key)
    assert answer.status_code == 200, answer.text
    replica: str = answer.json()["fairgate"]["upstream"]
    return replica


def slow_key(server: Server, tenant: str) -> str:
    """A key whose streams take a while."""
    made = server.admin("POST", "/keys", {"tenant": tenant})
    server.limit(tenant, "output_tokens", RATE_PER_S, rate_per_s=RATE_PER_S, key=made["id"])
    secret: str = made["key"]
    return secret


def begun(server: Server, key: str, tokens: int = LONG) -> Stream:
    [stream] = start_streams(server, key, 1, tokens)
    assert stream.has_tokens.wait(60)
    assert stream.delivered >= 3
    return stream


def test_two_gateways_tell_a_webhook_once_that_an_alert_fires_and_once_that_it_is_over(
    gateways: list[Server],
) -> None:
    one, other = gateways
    key = one.tenant("told-once")
    limit = one.limit("told-once", "requests", 1, window="day", mode="soft", thresholds=[100])
    with receiving() as receiver:
        made = other.admin("POST", "/webhooks", {"url": receiver.url, "tenant": "told-once"})
        receiver.secret = made["secret"]
        until(lambda: ask(one, key).status_code == 200)
        until(lambda: receiver.of("limit.soft", state="firing"), 60)
        one.admin("DELETE", f"/limits/{limit}")
        until(lambda: receiver.of("limit.soft", state="resolved"), 60)
        other.admin("POST", f"/webhooks/{made['id']}/test")
        until(lambda: receiver.of("webhook.test"), 60)  # what came before is there by then
    told = [each["data"]["state"] for each in receiver.of("limit.soft")]
    assert told == ["firing", "resolved"]
    assert len(receiver.attempts) == len(set(receiver.attempts)) == 3
    one.admin("DELETE", f"/webhooks/{made['id']}")


def test_what_runs_on_a_drained_replica_ends_there_and_new_requests_go_elsewhere(
    gateways: list[Server],
) -> None:
    one, other = gateways
    key = one.tenant("drained")
    until(lambda: ask(other, key).status_code == 200)
    stream = begun(one, slow_key(one, "drained"))
    [busy] = [name for name, (_, running) in states(other).items() if running]
    [idle] = {"left", "right"} - {busy}
    drain = other.admin("POST", f"/upstreams/{busy}/drain", {"reason": "new driver"})
    assert "not_in_force_on" not in drain, "every gateway has confirmed it"
    assert (drain["pool"], drain["replica"], drain["reason"]) == (MODEL, busy, "new driver")
    for server in gateways:
        assert states(server) == {busy: ("draining", 1), idle: ("serving", 0)}
        assert {answered_by(server, key) for _ in range(3)} == {idle}
    assert stream.is_alive(), "it ran on meanwhile"
    stream.join(60)
    assert (stream.saw_done, stream.delivered, stream.error) == (True, LONG, None)
    until(lambda: states(one)[busy] == ("drained", 0))
    resumed = one.admin("POST", f"/upstreams/{busy}/resume")
    assert resumed == drain
    assert states(other) == {busy: ("serving", 0), idle: ("serving", 0)}
    one.admin("POST", f"/upstreams/{idle}/drain")
    assert answered_by(other, key) == busy
    rows = [row for row in one.admin("GET", "/audit?act=upstream")["data"] if row["target"] == busy]
    assert [row["action"] for row in rows] == ["upstream.resume", "upstream.drain"]


def test_with_every_replica_drained_what_waits_goes_on_waiting_and_new_requests_are_told_why(
    gateways: list[Server],
) -> None:
    one, other = gateways
    key = one.tenant("all-drained", tier="batch")
    slow = [slow_key(one, "all-drained") for _ in range(2)]
    until(lambda: ask(other, key).status_code == 200)
    # One request of the tier may run on each replica.
    one.admin("PUT", "/brake", {"tier": "batch", "share": 0.5, "for_s": 60})
    streams = [begun(one, slow[0]), begun(other, slow[1])]
    [waiting] = start_streams(other, key, 1, 5)
    until(lambda: other.status()["queued"]["batch"] == 1)
    for name in ("left", "right"):
        one.admin("POST", f"/upstreams/{name}/drain")
    one.admin("DELETE", "/brake?tier=batch")
    for server in gateways:
        refused = ask(server, key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "An operator has drained" in refused.json()["error"]["message"]
        with server.http() as client:
            assert client.get("/readyz").status_code == 503
    for stream in streams:
        stream.join(60)
        assert (stream.saw_done, stream.delivered) == (True, LONG)
    assert states(other) == {"left": ("drained", 0), "right": ("drained", 0)}
    assert waiting.delivered == 0
    one.admin("POST", "/upstreams/right/resume")
    waiting.join(60)
    assert (waiting.saw_done, waiting.delivered, waiting.error) == (True, 5, None)


def test_a_drain_survives_a_restart_and_the_command_line_shows_and_ends_it(gateways: list[Server]) -> None:
    one, other = gateways

    def command(*arguments: str) -> Any:
        result = CliRunner().invoke(cli, ["upstream", *arguments, "--data-dir", str(one.data_dir), "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    key = one.tenant("restarted-drain")
    assert command("drain", "left", "--reason", "new driver")["by"] == "control"
    other.stop()
    other.start()
    assert {answered_by(other, key) for _ in range(3)} == {"right"}
    [pool] = command("list")["data"]
    assert {each["replica_id"]: each["state"] for each in pool["replicas"]} == {
        "left": "drained", "right": "serving"
    }  # fmt: skip
    assert command("resume", "left")["reason"] == "new driver"
    assert states(other)["left"] == ("serving", 0)
    for act in ("drain", "resume"):
        with one.http() as client:
            unknown = client.post(f"/admin/v1/upstreams/{'middle' if act == 'drain' else 'left'}/{act}")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    result = CliRunner().invoke(cli, ["upstream", "drain", "middle", "--data-dir", str(one.data_dir)])
    assert result.exit_code == 1
    assert "no such replica: 'middle'" in result.stderr.lower()


def test_live_requests_of_all_gateways_are_listed_each_once(gateways: list[Server]) -> None:
    one, other = gateways
    one.tenant("live-everywhere")
    slow = [slow_key(one, "live-everywhere") for _ in range(2)]
    streams = [begun(one, slow[0]), begun(other, slow[1])]
    for server in gateways:
        found = server.admin("GET", "/requests?tenant=live-everywhere")
        assert sorted(each["id"] for each in found["data"]) == sorted(each.request_id for each in streams)
        assert found["gateways_missing"] == 0
    for stream in streams:
        stream.join(60)
        assert stream.delivered == LONG


ADMIN = sorted((method, path) for method, path in routes() if path.startswith(ADMIN_PATHS))


def test_admin_routes_answer_on_the_admin_listener_only(gateways: list[Server]) -> None:
    _, other = gateways
    assert other.admin_url != other.url
    assert len(ADMIN) > 40
    with other.http() as client:
        for method, path in ADMIN:
            concrete = path.replace("{", "").replace("}", "")
            for shown in (
                concrete,
                f"/{concrete}/",
                concrete.replace("/", "//", 2),
                concrete.replace("m", "%6d"),
            ):
                answer = client.request(method, f"{other.url}{shown}")
                assert answer.status_code == 404, (method, shown)
                if method != "HEAD":
                    assert answer.json()["error"]["code"] == "not_found"
                    assert answer.headers["x-request-id"].startswith("req_")
            assert client.request("OPTIONS", f"{other.url}{concrete}").status_code == 404
            assert client.options(f"{other.admin_url}{concrete}").status_code == 204
        assert client.get(f"{other.admin_url}/metrics").text.startswith("# HELP")
        assert client.get(f"{other.admin_url}/admin/v1/status").status_code == 200
        for path in ("/healthz", "/readyz", "/openapi.json"):
            for url in (other.url, other.admin_url):
                assert client.get(f"{url}{path}").status_code == 200, (url, path)
        assert client.get(f"{other.url}/v1/models").status_code == 200
        hidden = client.get(f"{other.admin_url}/v1/models")
        assert (hidden.status_code, hidden.json()["error"]["code"]) == (404, "not_found")


def test_commands_and_other_gateways_find_a_gateway_with_an_admin_listener(gateways: list[Server]) -> None:
    one, other = gateways
    result = CliRunner().invoke(cli, ["upstream", "list", "--data-dir", str(other.data_dir), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["gateways_missing"] == 0
    assert one.admin("GET", "/requests")["gateways_missing"] == 0


def test_a_link_on_the_command_line_leads_to_the_admin_listener(
    gateways: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, other = gateways
    database_url = other.arguments[other.arguments.index("--database-url") + 1]
    monkeypatch.setenv("FAIRGATE_DATABASE_URL", database_url)
    arguments = ["person", "invite", "fleet-ada", "--role", "auditor", "--data-dir", str(other.data_dir)]
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    link = json.loads(result.stdout)["link"]
    assert link.startswith(f"{other.admin_url}/console/set-up?token=")
    assert "Choose a password" in httpx.get(link).text


# ---------------------------------------------------------------- the control loop of their queue


def control_of(server: Server) -> dict[str, Any]:
    control: dict[str, Any] = server.status()["models"]["pools"][MODEL]["control"]
    return control


def test_one_gateway_decides_in_the_control_loop_and_both_name_it(gateways: list[Server]) -> None:
    until(lambda: all(control_of(each)["holder"] for each in gateways))
    one, other = (control_of(each) for each in gateways)
    assert (one["mode"], one["is_shared"]) == (other["mode"], other["is_shared"]) == ("acting", True)
    assert (one["holder"], one["term"]) == (other["holder"], other["term"])
    deciding = [value_of(each, "fairgate_control_holder") for each in gateways]
    assert sorted(deciding) == [0, 1]


def test_where_the_one_that_decides_dies_another_does_and_names_it(gateways: list[Server]) -> None:
    # A target that cannot be kept: to both gateways' forecasts that is an overload.
    key = gateways[0].tenant("late")
    slo = {"tier": "standard", "metric": "ttft", "target_s": 0.0001, "tenant": "late"}
    made = gateways[0].admin("POST", "/slos", slo)

    def is_refused(gateway: Server) -> bool:
        answer = ask(gateway, key)
        return answer.status_code == 503 and answer.json()["error"]["code"] == "target_unreachable"

    until(lambda: all(is_refused(each) for each in gateways))
    gateways[0].admin("DELETE", f"/slos/{made['id']}")
    before = control_of(gateways[0])
    [dead] = [each for each in gateways if value_of(each, "fairgate_control_holder")]
    [living] = [each for each in gateways if each is not dead]
    dead.kill()
    try:
        until(lambda: value_of(living, "fairgate_control_holder") == 1)
        after = control_of(living)
        assert after["term"] > before["term"]
        assert after["holder"] != before["holder"]
        assert after["in_force"] == before["in_force"], "it goes on from there"
        assert after["in_force"]["admission"] > after["rests"]["admission"]
        assert f"{before['holder']}, which decided, has said nothing for" in living.log()
    finally:
        dead.start()
    until(lambda: control_of(dead)["holder"] == after["holder"])
    assert value_of(dead, "fairgate_control_holder") == 0


def value_of(server: Server, name: str) -> float:
    """A figure of the only model."""
    with server.http() as client:
        text = client.get(f"{server.admin_url}/metrics").text
    [line] = [line for line in text.splitlines() if line.startswith(name + "{")]
    return float(line.rsplit(" ", 1)[1])
