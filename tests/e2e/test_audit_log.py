"""The audit as a log on a running server: signed by itself, exported, checked, proved and followed."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from pymerkle import InmemoryTree

from ops.cli.main import cli
from tenants.audit.note import Checkpoint, PublicKey, SigningKey, open_checkpoint
from tests.support.commands import answer_of, fairgate
from tests.support.people import logged_in
from tests.support.server_process import MODEL, Server, until


def offline(*arguments: str) -> Result:
    """Without a data directory, as an auditor has it."""
    return CliRunner().invoke(cli, ["audit", "verify", *arguments], prog_name="fairgate")


@pytest.fixture(scope="module")
def acts(server: Server) -> list[str]:
    """Some acts on tenants."""
    names = [f"log-{number}" for number in range(5)]
    for name in names:
        server.admin("POST", "/tenants", {"name": name})
    return names


def metric(server: Server, name: str) -> float:
    with server.http() as client:
        text = client.get("/metrics").text
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_a_server_makes_the_key_and_signs_by_itself(server: Server, acts: list[str]) -> None:
    file = server.data_dir / "audit-key"
    assert file.stat().st_mode & 0o777 == 0o600
    log = server.admin("GET", "/audit/log")
    assert log["public_key"] == answer_of(server, "audit", "key")["public_key"]
    until(lambda: server.admin("GET", "/audit/log")["checkpoint"] is not None)
    first = server.admin("GET", "/audit/log")["checkpoint"]
    opened = open_checkpoint(first["note"], [PublicKey.parse(log["public_key"])])
    assert opened.size == first["size"] > 0
    until(lambda: metric(server, "fairgate_audit_rows") >= log["size"])
    assert metric(server, "fairgate_audit_checkpoint_age_seconds") >= 0


def test_the_start_of_a_gateway_is_a_row(server: Server) -> None:
    def started() -> list[str]:
        return [row["actor"] for row in server.admin("GET", "/audit?act=server.start")["data"]]

    until(lambda: bool(started()))
    assert started() == ["system"]


def test_an_export_is_checked_without_the_database(server: Server, acts: list[str], tmp_path: Path) -> None:
    key, file = answer_of(server, "audit", "key")["public_key"], tmp_path / "audit.jsonl"
    exported = answer_of(server, "audit", "export", "--output", str(file))
    checked = offline("--export", str(file), "--public-key", key, "--json")
    assert checked.exit_code == 0, checked.output
    verdict = json.loads(checked.stdout)
    assert verdict["ok"]
    assert verdict["rows"] == verdict["signed"] == exported["rows"] >= len(acts)
    # The rows over HTTP are the same, and pymerkle makes the root that was signed of them.
    [_, *lines] = [json.loads(line) for line in file.read_text().splitlines()]
    entries = [line["entry"] for line in lines if "entry" in line]
    told: list[str] = []
    first: int | None = 0
    while first is not None:
        page = server.admin("GET", f"/audit/entries?first={first}&limit=3")
        told += [each["entry"] for each in page["data"]]
        first = page["next_first"]
    assert told[: len(entries)] == entries
    tree = InmemoryTree(algorithm="sha256")
    for entry in entries:
        tree.append_entry(entry.encode())
    notes = [line for line in lines if "checkpoint" in line]
    for line in notes:
        opened = open_checkpoint(line["checkpoint"], [PublicKey.parse(key)])
        assert opened.root == tree.get_root(opened.size)
    assert {each["size"] for each in notes} >= {
        each["size"] for each in server.admin("GET", "/audit/checkpoints")["data"]
    } - {len(told)}
    # One letter, one row, another key, and the end: each is named.
    text, kept = file.read_text(), tmp_path / "kept.txt"
    kept.write_text(notes[-1]["checkpoint"])
    row = next(line for line in text.splitlines() if '"log-3"' in line and "tenant.create" in line)
    seq = json.loads(row)["seq"]
    changed = tmp_path / "changed.jsonl"

    def refused(new: str, *more: str, exit_code: int = 1) -> str:
        changed.write_bytes(new.encode())
        found = offline("--export", str(changed), "--public-key", key, *more)
        assert found.exit_code == exit_code, found.output
        return found.output

    assert f"row {seq}: edited" in refused(text.replace(row, row.replace('log-3\\"', 'log-9\\"')))
    assert f"row {seq}: column differs" in refused(text.replace(row, row.replace('"log-3"', '"log-9"')))
    assert f"row {seq}: missing" in refused(text.replace(row + "\n", ""))
    assert "truncated" in refused("".join(line + "\n" for line in text.splitlines()[:3]))
    assert "cut off" in refused(text[:-5])
    assert "line 1: ends with CR LF" in refused(text.replace("\n", "\r\n"))
    assert "is not JSON" in refused(text.replace(row, row[:-3]))
    assert "use a newer one" in refused(text.replace('"version": 1', '"version": 2', 1))
    assert "is of the log" in refused(text.replace(key, str(PublicKey("other.example/log", bytes(32)))))
    assert "format fairgate-audit" in refused("{}\n")
    assert "is neither a row" in refused(text + "{}\n")
    assert refused(text, "--checkpoint", str(kept), exit_code=0)
    kept.write_text("nothing")
    assert "kept.txt: checkpoint: needs three lines" in refused(text, "--checkpoint", str(kept))
    wrong = offline("--export", str(file), "--public-key", key[:-3])
    assert (wrong.exit_code, "--public-key" in wrong.output) == (2, True)
    assert offline("--export", str(file)).exit_code == 2
    # A filtered list is for reading.
    listed = answer_of(server, "audit", "export", "--act", "tenant", "--output", str(changed))
    assert listed["rows"] >= len(acts)
    assert "only an export without a filter" in offline("--export", str(changed), "--public-key", key).output


def test_one_row_is_proved_to_who_has_only_the_key(server: Server, acts: list[str], tmp_path: Path) -> None:
    made = answer_of(server, "audit", "checkpoint")
    seq, proof = made["size"] - 1, tmp_path / "row.tlog-proof"
    told = server.admin("GET", f"/audit/proof?seq={seq}")
    assert answer_of(server, "audit", "prove", str(seq), "--output", str(proof))["proof"] == told["proof"]
    checked = offline("--proof", str(proof), "--public-key", made["public_key"], "--json")
    assert checked.exit_code == 0, checked.output
    assert json.loads(checked.stdout)["seq"] == seq
    assert json.loads(json.loads(checked.stdout)["entry"])["seq"] == seq
    proof.write_text(proof.read_text().replace(f"index {seq}", f"index {seq - 1}"))
    assert "is not in the log" in offline("--proof", str(proof), "--public-key", made["public_key"]).output
    refused = fairgate(server, "audit", "prove", str(made["size"] + 10_000))
    assert (refused.exit_code, "no such audit row" in refused.output) == (1, True)
    with server.http() as client:
        assert client.get("/admin/v1/audit/proof?seq=999999").status_code == 404
        for query in (
            "entries?limit=0",
            "entries?first=-1",
            "checkpoints?limit=9999",
            "consistency?old=2&new=1",
        ):
            assert client.get(f"/admin/v1/audit/{query}").status_code == 400, query


def test_a_follower_accepts_what_extends_the_last_and_nothing_else(
    server: Server, acts: list[str], tmp_path: Path
) -> None:
    key_file, state = tmp_path / "key", tmp_path / "state"
    key_file.write_text(server.owner_key)
    public = answer_of(server, "audit", "checkpoint")["public_key"]
    asked = ("follow", "--url", server.url, "--key-file", str(key_file), "--state", str(state))

    def follow(key: str = public) -> Result:
        return fairgate(server, "audit", *asked, "--public-key", key, "--json")

    first = follow()
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout)["before"] == 0
    server.admin("POST", "/tenants", {"name": "log-followed"})
    size = answer_of(server, "audit", "checkpoint")["size"]
    second = json.loads(follow().stdout)
    assert second["size"] >= size > second["before"] == json.loads(first.stdout)["size"]
    kept = state.read_text()
    server.admin("POST", "/tenants", {"name": "log-unsigned"})
    late = fairgate(server, "audit", *asked, "--public-key", public, "--max-age", "0")
    [rows, signed] = re.findall(r"[0-9,]+(?= rows|, and)", late.output)
    assert (late.exit_code, int(rows) > int(signed) >= size) == (1, True), late.output
    assert follow().exit_code == 0
    stranger = follow(str(PublicKey(PublicKey.parse(public).name, bytes(32))))
    assert (stranger.exit_code, "no known key" in stranger.output) == (1, True)
    assert state.read_text() == kept
    # A history that another log signed under this name, with the key in its hands.
    own = SigningKey.parse((server.data_dir / "audit-key").read_text())
    for other, word in (
        (Checkpoint(own.name, 2, bytes(32)), "rewritten"),
        (Checkpoint(own.name, 10**6, bytes(32)), "cut off"),
    ):
        state.write_text(own.signed(other.text))
        failed = follow()
        assert (failed.exit_code, word in failed.output) == (1, True), failed.output
        assert state.read_text() == own.signed(other.text)


def test_the_bill_is_checked_by_its_digests_and_prices(server: Server, acts: list[str]) -> None:
    server.tenant("log-billed")
    with server.http(server.key("log-billed")) as client:
        for text in ("one", "two"):
            answered = client.post("/v1/completions", json={"model": MODEL, "prompt": text, "max_tokens": 3})
            assert answered.status_code == 200, answered.text

    def digested() -> bool:
        answer_of(server, "audit", "checkpoint")
        return bool(answer_of(server, "audit", "verify", "--ledger")["ledger"]["open_rows"] == 0)

    until(digested)
    found = answer_of(server, "audit", "verify", "--ledger", "--prices")
    assert found["ok"]
    assert found["ledger"]["finding"] is None
    assert found["ledger"]["spans"] >= 1
    assert found["ledger"]["rows"] >= 4
    assert found["prices"]["charges"] >= 2
    assert found["prices"]["wrong_count"] == found["prices"]["unpriced"] == 0
    copy = server.data_dir.parent / "billed"
    copy.mkdir()
    with (
        sqlite3.connect(server.data_dir / "fairgate.db") as live,
        sqlite3.connect(copy / "fairgate.db") as other,
    ):
        live.backup(other)
        other.execute("DROP TRIGGER ledger_no_update")
        [(ledger_id,)] = other.execute("SELECT max(id) FROM ledger WHERE kind = 'settle'")
        other.execute(f"UPDATE ledger SET cost_nanousd = cost_nanousd - 1 WHERE id = {ledger_id}")
    live.close()
    other.close()
    told = CliRunner().invoke(
        cli, ["audit", "verify", "--ledger", "--prices", "--data-dir", str(copy)], prog_name="fairgate"
    )
    assert told.exit_code == 1, told.output
    assert "settle: of its" in told.output
    assert "off by -1 nano-dollars" in told.output
    assert f"ledger row {ledger_id}, request" in told.output
    for wrong in (("--prices",), ("--ledger", "--export", str(copy / "x")), ("--ledger", "--proof", "x")):
        assert fairgate(server, "audit", "verify", *wrong).exit_code == 2


def test_the_key_is_changed_while_the_server_runs(server: Server, acts: list[str], tmp_path: Path) -> None:
    first, file = answer_of(server, "audit", "key")["public_key"], tmp_path / "audit.jsonl"
    key_file, state = tmp_path / "key", tmp_path / "state"
    key_file.write_text(server.owner_key)

    def follow(*keys: str) -> Result:
        given = [part for key in keys for part in ("--public-key", key)]
        where = ("--url", server.url, "--key-file", str(key_file), "--state", str(state))
        return fairgate(server, "audit", "follow", *where, *given)

    assert follow(first).exit_code == 0
    changed = answer_of(server, "audit", "key", "rotate")
    assert (changed["before"], changed["public_key"]) == (
        first,
        answer_of(server, "audit", "key")["public_key"],
    )
    server.admin("POST", "/tenants", {"name": "log-after-the-change"})
    answer_of(server, "audit", "export", "--output", str(file))
    for key in (first, changed["public_key"]):
        assert json.loads(offline("--export", str(file), "--public-key", key, "--json").stdout)["ok"]
    assert answer_of(server, "audit", "verify")["ok"]
    only_old = follow(first)
    assert (only_old.exit_code, "no known key" in only_old.output) == (1, True)
    both = follow(first, changed["public_key"])
    assert both.exit_code == 0, both.output


async def test_the_page_says_what_is_signed(server: Server, acts: list[str]) -> None:
    until(lambda: server.admin("GET", "/audit/log")["checkpoint"] is not None)
    async with logged_in(server, "auditor") as browser:
        page = await browser.get("/console/audit")
    assert server.admin("GET", "/audit/log")["public_key"] in page.text.replace("&#43;", "+")
    assert "rows are signed" in page.text


def test_the_database_is_checked_and_its_damage_named(server: Server, acts: list[str]) -> None:
    answer_of(server, "audit", "checkpoint")
    verdict = answer_of(server, "audit", "verify")
    assert verdict["ok"]
    assert verdict["rows"] == verdict["signed"]
    copy = server.data_dir.parent / "copy"
    copy.mkdir()
    with (
        sqlite3.connect(server.data_dir / "fairgate.db") as live,
        sqlite3.connect(copy / "fairgate.db") as other,
    ):
        live.backup(other)
        other.execute("DROP TRIGGER audit_no_update")
        other.execute("UPDATE audit SET actor = 'cli:nobody' WHERE seq = 2")
    live.close()
    other.close()
    found = CliRunner().invoke(
        cli, ["audit", "verify", "--data-dir", str(copy), "--json"], prog_name="fairgate"
    )
    assert found.exit_code == 1, found.output
    told = json.loads(found.stdout[found.stdout.index("{") :])
    assert told["finding"] == {
        "damage": "column differs",
        "first": 2,
        "last": 2,
        "detail": "actor is not what the row's bytes say",
    }
