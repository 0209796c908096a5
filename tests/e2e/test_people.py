"""People over the admin API and the command line, on a running server: one truth, and pages of it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.commands import answer_of
from tests.support.server_process import Server


def test_the_first_start_leaves_a_set_up_link_for_its_user_only(server: Server) -> None:
    kept = Path(json.loads(server.announced)["set_up_link_file"])
    assert kept == server.data_dir / "set-up-link"
    assert kept.stat().st_mode & 0o777 == 0o600
    link = kept.read_text().strip()
    assert link.startswith(f"{server.url}/console/set-up?token=")
    token = link.partition("=")[2]
    assert token not in server.announced + server.log()
    with sqlite3.connect(server.data_dir / "fairgate.db") as database:
        stored = repr(database.execute("SELECT * FROM person_links").fetchall())
    assert token not in stored, "only its digest is stored"


def test_api_and_command_line_show_the_same_person(server: Server) -> None:
    made = server.admin("POST", "/people", {"name": "People-Ada", "role": "operator"})
    assert made["link"].startswith("/console/set-up?token=")
    invited = answer_of(server, "person", "invite", "people-bo", "--role", "auditor")
    assert invited["link"].startswith(f"{server.url}/console/set-up?token=")
    shown = server.admin("GET", "/people/people-ada")
    assert shown == {name: value for name, value in made.items() if name != "link"}
    assert shown in answer_of(server, "person", "list")
    assert server.admin("POST", f"/people/{shown['id']}/suspend")["status"] == "suspended"
    assert server.admin("POST", f"/people/{shown['id']}/resume")["status"] == "active"
    assert server.admin("POST", f"/people/{shown['id']}/reset")["link"] != made["link"]
    assert server.admin("DELETE", f"/people/{shown['id']}/sessions")["revision"] == 5
    assert server.admin("GET", "/sessions?person=people-ada")["data"] == []
    [row, *_] = server.admin("GET", "/audit?act=person&limit=1")["data"]
    assert row["action"] == "person.end_sessions"
    assert row["target_name"] == "people-ada"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "/people", {"name": "people-x", "role": "member", "tenants": ["no-such"]}, 404, "tenant"),
        ("POST", "/people", {"name": "people-x", "role": "owner", "password": "x"}, 400, "password"),
        ("PATCH", "/people/people-unknown", {"role": "owner"}, 404, "person"),
        ("GET", "/sessions?person=people-unknown", None, 404, "person"),
        ("DELETE", "/sessions/ses_unknown", None, 404, "session"),
    ],
)
def test_a_wrong_call_names_the_field(
    server: Server, method: str, path: str, body: dict[str, Any] | None, status: int, param: str
) -> None:
    with server.http(server.owner_key) as client:
        answer = client.request(method, f"/admin/v1{path}", json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


def test_a_session_or_a_link_opens_nothing_of_the_api(server: Server) -> None:
    link = server.admin("POST", "/people", {"name": "people-link", "role": "owner"})["link"]
    token = link.partition("=")[2]
    for headers in (
        {"authorization": f"Bearer {token}"},
        {"cookie": f"__Host-fairgate={token}; fairgate={token}; session={token}"},
    ):
        answer = httpx.get(f"{server.url}/admin/v1/people", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
