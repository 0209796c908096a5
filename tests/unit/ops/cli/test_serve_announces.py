"""Tests of what `fairgate serve` says once it is up."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ops.cli.run.serve import _announce
from ops.serving.processes.first_start import Started


def started(data_dir: Path) -> Started:
    url = "http://127.0.0.1:1"
    link = f"{url}/console/set-up?token=abc"
    return Started(url, f"{url}/docs", "tiny", data_dir, "fg_live_secret", set_up_link=link)


def test_a_terminal_is_shown_the_owner_key_and_the_set_up_link_and_no_file_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", terminal)
        _announce(started(tmp_path), as_json=False)
    said = os.read(ours, 4096).decode()
    os.close(ours)
    assert "owner key   fg_live_secret" in said
    assert said.startswith("To set up the console, open http://127.0.0.1:1/console/set-up?token=abc in a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("as_json", [True, False])
def test_a_pipe_is_told_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    _announce(started(tmp_path), as_json=as_json)
    said = capsys.readouterr().out
    assert str(tmp_path / "owner-key") in said
    assert "fg_live_secret" not in said
    command = json.loads(said)["curl"] if as_json else said
    assert (
        f'curl http://127.0.0.1:1/v1/chat/completions -H "Authorization: Bearer $(cat {tmp_path}/owner-key)"'
        in command
    )
    assert (tmp_path / "owner-key").read_text() == "fg_live_secret\n"
    assert str(tmp_path / "set-up-link") in said
    assert "token=abc" not in said
    assert (tmp_path / "set-up-link").read_text() == "http://127.0.0.1:1/console/set-up?token=abc\n"
    assert (tmp_path / "set-up-link").stat().st_mode & 0o777 == 0o600


def test_both_addresses_are_said_where_there_are_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = replace(started(tmp_path), admin_url="http://127.0.0.1:2")
    _announce(two, as_json=False)
    assert "admin API   http://127.0.0.1:2/admin/v1" in capsys.readouterr().out
    _announce(two, as_json=True)
    assert json.loads(capsys.readouterr().out)["admin_url"] == "http://127.0.0.1:2"
    _announce(started(tmp_path), as_json=True)
    assert json.loads(capsys.readouterr().out)["admin_url"] is None


def test_the_file_of_a_link_that_is_used_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _announce(started(tmp_path), as_json=True)
    later = replace(started(tmp_path), set_up_link=None, console_url="http://127.0.0.1:1/console")
    _announce(later, as_json=True)
    assert not (tmp_path / "set-up-link").exists()
    assert '"set_up_link_file": null' in capsys.readouterr().out
    _announce(later, as_json=False)
    assert capsys.readouterr().out.startswith("Open http://127.0.0.1:1/console in a browser.\n")
