"""`fairgate person` on a database without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ops.cli.main import cli


@pytest.fixture
def data_dir(sqlite_url: str, tmp_path: Path) -> Path:
    """A data directory whose database is there."""
    assert (tmp_path / "fairgate.db").exists()
    return tmp_path


def fairgate(data_dir: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, [*arguments, "--data-dir", str(data_dir)], prog_name="fairgate")


def answer_of(data_dir: Path, *arguments: str) -> Any:
    result = fairgate(data_dir, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_person_is_invited_changed_suspended_and_reset(data_dir: Path) -> None:
    answer_of(data_dir, "tenant", "create", "acme")
    made = answer_of(data_dir, "person", "invite", "Bo@Example.org", "--role", "member", "--tenant", "acme")
    assert (made["name"], made["role"], made["has_password"]) == ("bo@example.org", "member", False)
    assert [each["tenant"] for each in made["tenants"]] == ["acme"]
    assert made["link"].startswith("/console/set-up?token=")
    [listed] = answer_of(data_dir, "person", "list")
    assert listed == {name: value for name, value in made.items() if name != "link"}
    assert answer_of(data_dir, "person", "role", "bo@example.org", "auditor")["role"] == "auditor"
    assert answer_of(data_dir, "person", "suspend", made["id"])["status"] == "suspended"
    assert fairgate(data_dir, "person", "list").stdout.split()[-3:] == ["auditor", "suspended", "no"]
    assert answer_of(data_dir, "person", "resume", made["id"])["status"] == "active"
    again = answer_of(data_dir, "person", "reset", made["id"])
    assert again["link"] != made["link"]
    assert answer_of(data_dir, "person", "sessions") == []
    assert answer_of(data_dir, "person", "end-session", "--all-of", "BO@example.org")["id"] == made["id"]
    audited = answer_of(data_dir, "audit", "list", "--act", "person")
    assert [row["action"].partition(".")[2] for row in audited["data"][::-1]] == [
        *("invite", "update", "suspend", "resume", "reset", "end_sessions")
    ]


def test_the_link_is_told_once_with_how_long_it_works(data_dir: Path) -> None:
    said = fairgate(data_dir, "person", "invite", "ada", "--role", "owner").stdout
    assert "ada may log in as owner once a password is set:" in said
    assert "/console/set-up?token=" in said
    assert "once, within a day, and is shown this once, below the gateway's address" in said


def test_a_link_begins_with_the_address_of_the_setting(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRGATE_GATEWAY_CONSOLE_URL", "https://console.example.org")
    made = answer_of(data_dir, "person", "invite", "ada", "--role", "owner")
    assert made["link"].startswith("https://console.example.org/console/set-up?token=")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["invite", "ada"], 2, "--role"),
        (["invite", "ada", "--role", "root"], 2, "'owner', 'operator', 'auditor', 'member'"),
        (["invite", "two words", "--role", "owner"], 1, "name: use 1 to 120"),
        (["invite", "ada", "--role", "member"], 1, "tenants: a member needs 1 to 100"),
        (["invite", "ada", "--role", "owner", "--tenant", "acme"], 1, "tenants: only a member has tenants"),
        (["suspend", "unknown"], 1, "no such person: 'unknown'"),
        (["sessions", "unknown"], 1, "no such person: 'unknown'"),
        (["end-session", "ses_unknown"], 1, "no such session: 'ses_unknown'"),
        (["end-session"], 2, "SESSION_ID, or --all-of"),
        (["end-session", "ses_1", "--all-of", "ada"], 2, "one of them"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(data_dir: Path, arguments: list[str], code: int, says: str) -> None:
    result = fairgate(data_dir, "person", *arguments)
    assert result.exit_code == code
    assert says in result.output
    assert "Traceback" not in result.output
