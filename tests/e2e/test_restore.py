"""A server on what was restored: its open holds, and the witness of the log before it."""

from __future__ import annotations

import json
import resource
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from click.testing import Result

from tenants.audit.note import Checkpoint, SigningKey, claimed_checkpoint
from tests.support.commands import answer_of, fairgate
from tests.support.server_process import MODEL, Server, server_process, until

RESTORE = ("restore",)
OF_COPY_BYTES = 100_000
"""More than the secrets have, and less than any database."""


def open_holds(data_dir: Path) -> list[str]:
    """Requests that nothing has settled."""
    query = (
        "SELECT request_id FROM ledger WHERE kind = 'reserve' AND request_id NOT IN"
        " (SELECT request_id FROM ledger WHERE kind = 'settle')"
    )
    with closing(sqlite3.connect(data_dir / "fairgate.db")) as connection:
        return [request_id for (request_id,) in connection.execute(query)]


class Witness:
    """Follows with a file of its own, and knows the keys that it is given."""

    def __init__(self, state: Path, *keys: str) -> None:
        self.state = state
        self._keys = [part for key in keys for part in ("--public-key", key)]

    def follow(self, server: Server, *more: str) -> Result:
        key_file = self.state.with_name("key")
        key_file.write_text(server.owner_key)
        where = ("--url", server.url, "--key-file", str(key_file), "--state", str(self.state))
        return fairgate(server, "audit", "follow", *where, *self._keys, *more, "--json")


def size_of(note: str) -> int:
    return claimed_checkpoint(note).size


@contextmanager
def open_stream(server: Server, key: str) -> Iterator[str]:
    """A request that runs, by its id."""
    body = {"model": MODEL, "prompt": "once", "max_tokens": 6000, "stream": True, "ignore_eos": True}
    with server.http(key) as client, client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # who drops it hangs up
        assert any(line.startswith("data:") for line in lines)
        yield response.headers["x-request-id"]


def test_a_restored_server_settles_what_was_open_and_a_witness_goes_on(
    server: Server, chat_model: Path, tmp_path: Path
) -> None:
    old_key = answer_of(server, "audit", "checkpoint")["public_key"]
    early, late = (Witness(tmp_path / name, old_key) for name in ("early", "late"))
    copy, new_home = tmp_path / "copy", tmp_path / "new"
    assert early.follow(server).exit_code == 0
    with open_stream(server, server.tenant("restored")) as request_id:
        size = answer_of(server, "backup", str(copy), "--no-secrets")["audit_size"]
    server.admin("POST", "/tenants", {"name": "after-the-backup"})
    answer_of(server, "audit", "checkpoint")
    assert late.follow(server).exit_code == 0
    early_saw, late_saw = early.state.read_text(), late.state.read_text()
    given = ("--secrets", str(server.data_dir), "--checkpoint", str(early.state))
    assert answer_of(new_home, *RESTORE, str(copy), *given)["lost_rows"] is None
    assert request_id in open_holds(new_home)
    with server_process(new_home, chat_model, "--gateway-stale", "3") as restored:
        restored.owner_key = server.owner_key
        until(lambda: not open_holds(new_home))
        # Who has seen no more than the backup has goes on, by the old key alone.
        gone_on = json.loads(early.follow(restored).stdout)
        assert (gone_on["before"], Path(gone_on["kept"]).read_text()) == (size_of(early_saw), early_saw)
        assert json.loads(early.follow(restored).stdout)["kept"] is None
        assert Witness(tmp_path / "fresh", old_key).follow(restored).exit_code == 0
        # Another history under the old name is none that it goes on from.
        own = SigningKey.parse((server.data_dir / "audit-key").read_text())
        early.state.write_text(own.signed(Checkpoint(own.name, 2, bytes(32)).text))
        assert "was rewritten" in early.follow(restored, "--accept-restore").output
        # Who has seen more is shown what is lost, until it accepts that.
        refused = late.follow(restored)
        assert (refused.exit_code, late.state.read_text()) == (1, late_saw)
        lost = f"its rows {size:,} to {size_of(late_saw) - 1:,} were seen here, and are lost"
        assert lost in refused.output
        accepted = json.loads(late.follow(restored, "--accept-restore").stdout)
        assert (accepted["before"], Path(accepted["kept"]).read_text()) == (size + 1, late_saw)
        assert late.follow(restored).exit_code == 0


@pytest.mark.long
def test_without_the_old_key_a_witness_goes_on_only_by_hand(
    server: Server, chat_model: Path, tmp_path: Path
) -> None:
    old_key = answer_of(server, "audit", "checkpoint")["public_key"]
    state, copy, new_home, secrets = (tmp_path / name for name in ("state", "copy", "new", "secrets"))
    assert Witness(state, old_key).follow(server).exit_code == 0
    answer_of(server, "backup", str(copy), "--no-secrets")
    secrets.mkdir()
    shutil.copy(server.data_dir / "pepper", secrets)
    asked = (*RESTORE, str(copy), "--secrets", str(secrets))
    assert "give --without-old-key" in " ".join(fairgate(new_home, *asked).output.split())
    done = answer_of(new_home, *asked, "--without-old-key")
    assert done["without_old_key"]
    assert done["before"] == old_key
    with server_process(new_home, chat_model) as restored:
        restored.owner_key = server.owner_key
        restored.admin("POST", "/tenants", {"name": "after-the-restore"})
        answer_of(restored, "audit", "key", "rotate")
        for key, says in ((done["public_key"], True), (old_key, False)):
            verdict = fairgate(restored, "audit", "verify", "--public-key", key, "--json")
            assert json.loads(verdict.stdout)["ok"] is says, verdict.output
        assert answer_of(restored, "audit", "verify")["ok"]
        keys = (old_key, done["public_key"], answer_of(restored, "audit", "key")["public_key"])
        assert "no known key has that name" in Witness(state, old_key).follow(restored).output
        by_hand = Witness(state, *keys)
        assert "does not vouch for the new one" in by_hand.follow(restored).output
        assert json.loads(by_hand.follow(restored, "--accept-restore").stdout)["kept"]
        assert by_hand.follow(restored).exit_code == 0


def test_a_restore_that_did_not_end_is_no_data_directory(server: Server, tmp_path: Path) -> None:
    answer_of(server, "audit", "checkpoint")
    copy, place = tmp_path / "copy", tmp_path / "new"
    answer_of(server, "backup", str(copy), "--no-secrets")
    asked = (*RESTORE, str(copy), "--secrets", str(server.data_dir))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (OF_COPY_BYTES, limits[1]))
    try:
        assert "cannot be filled" in fairgate(place, *asked).output
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (place / "pepper").exists()
    for command in (("serve", "--engine-serve", "no"), ("tenant", "list"), asked):
        refused = fairgate(place, *command)
        assert (refused.exit_code, "has not ended" in refused.output) == (1, True), refused.output
    shutil.rmtree(place)
    # Of a log that its witness has not seen.
    own = SigningKey.parse((server.data_dir / "audit-key").read_text())
    other = tmp_path / "other"
    other.write_text(own.signed(Checkpoint(own.name, 2, bytes(32)).text))
    refused = fairgate(place, *asked, "--checkpoint", str(other))
    assert (refused.exit_code, "not of the log that the witness" in refused.output) == (1, True)
    assert "has not ended" in fairgate(place, "tenant", "list").output
    shutil.rmtree(place)
    answer_of(place, *asked)
    assert answer_of(place, "tenant", "list")
