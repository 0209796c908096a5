"""A server uses a stored batch-or-wait table, and says so where there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from ops.cli.main import cli
from tests.e2e.test_policy import complete
from tests.support import warm_command
from tests.support.commands import answer_of, fairgate
from tests.support.server_process import Server, server_process


@pytest.fixture(scope="module")
def batching(tmp_path_factory: pytest.TempPathFactory, chat_model: Path, table: Path) -> Iterator[Server]:
    arguments = ["--policy", "table", "--policy-table", str(table)]
    with server_process(tmp_path_factory.mktemp("batching"), chat_model, *arguments) as running:
        yield running


def test_requests_are_admitted_by_the_table(batching: Server) -> None:
    key = batching.tenant("batches")
    (admitted,) = complete(batching, key, "wait for it")["fairgate"]["scheduling"]
    assert admitted["rule"] == "order sjf, admit table"
    shown = answer_of(batching, "policy", "show")
    assert (shown["policy"], shown["order"]) == ("table", "sjf")
    assert "table" in shown["policies"]
    assert shown["engines"][0]["choices"]["admit"] == "table"
    for name in ("vtc", "table"):
        changed = fairgate(batching, "policy", "set", name, "--json")
        assert changed.exit_code == 0, changed.output
        assert json.loads(changed.stdout)["engines"][0]["policy"] == name
    assert complete(batching, key, "and again")["usage"]["completion_tokens"] == 3


def test_without_a_table_the_policy_is_refused_and_nothing_changes(server: Server) -> None:
    result = fairgate(server, "policy", "set", "table")
    assert result.exit_code == 1
    assert "name its file in the setting policy.table" in result.output
    shown = answer_of(server, "policy", "show")
    assert shown["policy"] != "table"
    assert "table" not in shown["policies"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "no batch-or-wait table"),
        ('{"format": "fairgate batch-or-wait table", "version": 1}', "solve it again"),
    ],
    ids=["missing", "broken", "older"],
)
def test_a_table_that_cannot_be_used_stops_the_start(
    tmp_path: Path, chat_model: Path, content: str | None, complaint: str
) -> None:
    path = tmp_path / "table.json"
    if content is not None:
        path.write_text(content)
    flags = ["--data-dir", str(tmp_path / "data"), "--model", str(chat_model)]
    done = warm_command.fairgate("serve", "--port", "0", "--policy-table", str(path), *flags)
    assert done.returncode == 1
    assert complaint in done.stderr
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr


def test_the_list_names_what_needs_a_table(table: Path) -> None:
    plain = json.loads(CliRunner().invoke(cli, ["policy", "list", "--json"]).stdout)
    assert plain["need_table"] == ["table", "learned"]
    environment = {"FAIRGATE_POLICY_TABLE": str(table)}
    listed = json.loads(CliRunner().invoke(cli, ["policy", "list", "--json"], env=environment).stdout)
    assert listed["need_table"] == ["learned"]
    assert {"policy": "table", "order": "sjf", "admit": "table"}.items() <= listed["policies"][-1].items()
