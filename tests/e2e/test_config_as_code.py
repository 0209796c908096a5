"""Configuration files beside a real server: through its admin API, and on its database."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from ops.cli.main import cli
from tests.support.server_process import MODEL, Server

NAMES = ("cac-url", "cac-database")


def config(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(each) for each in arguments], prog_name="fairgate")


@pytest.fixture(params=NAMES)
def installation(request: pytest.FixtureRequest, server: Server, tmp_path: Path) -> tuple[str, list[str]]:
    """A tenant's name, and the options with which commands reach the server or its database."""
    if request.param == "cac-database":
        return request.param, ["--data-dir", str(server.data_dir)]
    key_file = tmp_path / "admin.key"
    key_file.write_text(f"{server.owner_key}\n")
    return request.param, ["--url", server.url, "--key-file", str(key_file)]


def test_a_file_is_dried_applied_once_and_then_is_what_is_there(
    server: Server, installation: tuple[str, list[str]], tmp_path: Path
) -> None:
    name, reach = installation
    path, secrets = tmp_path / "fairgate.yaml", tmp_path / "keys.json"
    limit = "  - {meter: requests, window: day, amount: 1000, project: web}\n"
    path.write_text(
        f"version: 1\ntenants:\n- name: {name}\n  projects: [{{name: web}}]\n"
        f"  keys: [{{name: prod, project: web}}]\n  limits:\n{limit}"
    )
    there = config("diff", "-f", path, *reach)
    assert (there.exit_code, "tenant.create" in there.stdout) == (1, True), there.output
    dry = config("apply", "-f", path, "--dry-run", *reach, "--json")
    assert dry.exit_code == 0, dry.output
    assert name not in {tenant["name"] for tenant in tenants(server)}
    refused = config("apply", "-f", path, *reach)
    assert (refused.exit_code, "--secrets-out" in refused.output) == (1, True)
    done = config("apply", "-f", path, "--secrets-out", secrets, *reach, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["steps"] == json.loads(dry.stdout)["steps"]
    assert "fg_live_" not in done.output
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    [made] = json.loads(secrets.read_text())
    assert (made["tenant"], made["name"]) == (name, "prod")
    with server.http(made["key"]) as client:
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 4}
        assert client.post("/v1/completions", json=body).status_code == 200
    again = config("apply", "-f", path, *reach)
    assert (again.exit_code, again.stdout.splitlines()[0]) == (0, "no changes"), again.output
    assert config("diff", "-f", path, *reach).exit_code == 0
    server.admin("PATCH", f"/tenants/{name}", {"weight": 3})
    path.write_text(path.read_text() + "  weight: 2\n")
    drift = config("diff", "-f", path, *reach)
    assert (drift.exit_code, "weight: 3.0 -> 2.0" in drift.stdout) == (1, True), drift.output
    exported = config("export", *reach)
    assert exported.exit_code == 0, exported.output
    path.write_text(exported.stdout)
    assert config("diff", "-f", path, *reach).exit_code == 0


def test_an_error_in_line_40_changes_nothing_and_names_line_and_key(
    server: Server, installation: tuple[str, list[str]], tmp_path: Path
) -> None:
    name, reach = installation
    path = tmp_path / "fairgate.yaml"
    begin = f"version: 1\ntenants:\n- name: {name}-40\n- name: {name}-41\n  limits:\n"
    begin += "".join(
        f"  - {{meter: requests, window: day, amount: 1, above_tokens: {each}}}\n" for each in range(30)
    )
    begin += "#\n" * (39 - begin.count("\n"))
    before = config("export", *reach).stdout
    for line, words in (
        ("  - {meter: requests, window: day, amount: -1}", "limits[30].amount: must lie between"),
        ("  - {meter: requests, window: day, amuont: 1}", "limits[30].amuont: there is no such key"),
        ("  - {meter: requests, window: day, amount: 1, amount: 1}", "limits[30].amount: stands in line 40"),
    ):
        path.write_text(f"{begin}{line}\n")
        for command in ("diff", "apply"):
            result = config(command, "-f", path, *reach)
            assert result.exit_code == (2 if command == "diff" else 1)
            assert "line 40: " in result.output, result.output
            assert words in result.output, result.output
    assert config("export", *reach).stdout == before


def test_what_cannot_be_reached_is_said(server: Server, tmp_path: Path) -> None:
    path, key_file = tmp_path / "fairgate.yaml", tmp_path / "key"
    path.write_text("version: 1\n")
    key_file.write_text("fg_live_nothing")
    assert config("diff", "-f", path, "--url", server.url).exit_code == 2
    assert "together" in config("apply", "-f", path, "--url", server.url).output
    refused = config("diff", "-f", path, "--url", server.url, "--key-file", key_file)
    assert (refused.exit_code, "API key" in refused.output) == (2, True), refused.output
    gone = config("apply", "-f", path, "--url", "http://127.0.0.1:9", "--key-file", key_file)
    assert (gone.exit_code, "does not answer" in gone.output) == (1, True), gone.output
    missing = config("apply", "-f", tmp_path / "none.yaml", "--data-dir", server.data_dir)
    assert (missing.exit_code, "cannot be read" in missing.output) == (1, True)


def test_a_file_for_secrets_that_is_there_is_not_written_over(server: Server, tmp_path: Path) -> None:
    path, secrets = tmp_path / "fairgate.yaml", tmp_path / "keys.json"
    path.write_text("version: 1\ntenants: [{name: cac-secrets, keys: [{name: a}]}]\n")
    secrets.write_text("mine")
    refused = config("apply", "-f", path, "--secrets-out", secrets, "--data-dir", server.data_dir)
    assert (refused.exit_code, secrets.read_text()) == (1, "mine"), refused.output
    assert "cac-secrets" not in {tenant["name"] for tenant in tenants(server)}


def test_of_two_applies_at_once_through_a_server_one_wins(server: Server) -> None:
    with server.http() as client:
        planned = client.post("/admin/v1/config/plan", json=wanted("cac-race"))
        tag = planned.headers["etag"]
        assert tag == client.get("/admin/v1/config").headers["etag"] == f'"{planned.json()["etag"]}"'

        def apply(weight: float) -> httpx.Response:
            body = wanted("cac-race", weight=weight)
            return client.post("/admin/v1/config/apply", json=body, headers={"if-match": tag})

        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(apply, (2.0, 3.0)))
        assert sorted(answer.status_code for answer in answers) == [200, 412]
        [late] = [answer.json()["error"] for answer in answers if answer.status_code == 412]
        assert late["code"] == "precondition_failed"
        assert late["current"] == {"revision": planned.json()["revision"] + 1}
        [done] = [answer for answer in answers if answer.status_code == 200]
        assert done.headers["etag"] == client.get("/admin/v1/config").headers["etag"] != tag


def test_a_plan_opens_no_file_that_an_option_names(server: Server, tmp_path: Path) -> None:
    server.tenant("cac-reader")
    made = server.admin("POST", "/keys", {"tenant": "cac-reader", "scopes": ["admin:read"]})
    there = tmp_path / "table.json"
    there.write_text("{}")
    bodies = [
        {"version": 1, "policy": {"name": "table", "options": {"table": str(path)}}}
        for path in (there, tmp_path / "none.json")
    ]
    with server.http(made["key"]) as client:
        answers = [client.post("/admin/v1/config/plan", json=body) for body in bodies]
        refused = client.post("/admin/v1/config/apply", json=bodies[0])
    assert [answer.status_code for answer in answers] == [200, 200]
    assert refused.status_code == 403
    with server.http() as client:
        refused = client.post("/admin/v1/config/apply", json=bodies[1])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "policy")


def test_the_export_is_yaml_where_it_is_asked_for(server: Server) -> None:
    with server.http() as client:
        shown = client.get("/admin/v1/config", headers={"accept": "application/yaml"})
    assert shown.headers["content-type"].startswith("application/yaml")
    assert shown.text.startswith("version: 1\n")


def test_the_schema_needs_no_installation() -> None:
    result = config("export", "--schema")
    assert json.loads(result.stdout)["title"] == "Fairgate configuration"


def wanted(name: str, **fields: Any) -> dict[str, Any]:
    return {"version": 1, "tenants": [{"name": name, **fields}]}


def tenants(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor = None
    while True:
        page = server.admin("GET", "/tenants" + (f"?cursor={cursor}" if cursor else ""))
        found += page["data"]
        cursor = page.get("next_cursor")
        if not cursor:
            return found
