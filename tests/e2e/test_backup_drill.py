"""A backup under load, its loss, and a restore elsewhere: the books are those of the backup's instant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import Row, select

from ops.cli.main import cli
from tenants.storage.database import create_sql_engine
from tenants.storage.tables import ledger
from tests.support import services
from tests.support.server_process import Server, server_process, until
from tests.support.traffic import Sender, traffic
from tests.support.waiting_streams import ENDLESS


def told(home: Path, *arguments: str) -> Any:
    result = CliRunner().invoke(cli, [*arguments, "--data-dir", str(home), "--json"], prog_name="fairgate")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def rows(url: str, last_id: int = 2**60) -> list[Row[Any]]:
    """Of the ledger."""
    engine = create_sql_engine(url, writing=False)
    with engine.connect() as connection:
        found = connection.execute(select(ledger).where(ledger.c.id <= last_id).order_by(ledger.c.id)).all()
    engine.dispose()
    return list(found)


def charged(url: str) -> int:
    """Tokens of all that was settled, as limits count them."""
    settles = [row for row in rows(url) if row.kind == "settle"]
    inputs = sum(row.input_tokens if row.counted_input is None else row.counted_input for row in settles)
    return inputs + sum(
        row.output_tokens if row.counted_output is None else row.counted_output for row in settles
    )


def used(server: Server) -> int:
    counted: int = server.limit_state("acme", "total_tokens")["used"]
    return counted


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_what_was_backed_up_under_load_is_restored_elsewhere_and_serves(
    kind: str, tmp_path: Path, chat_model: Path, request: pytest.FixtureRequest
) -> None:
    home, copy, new = tmp_path / "live", tmp_path / "copy", tmp_path / "new"
    urls = [f"sqlite:///{home / 'fairgate.db'}", f"sqlite:///{new / 'fairgate.db'}"]
    of_live: list[str] = []
    of_new: list[str] = []
    redis: list[str] = []
    if kind == "postgresql":
        urls = [request.getfixturevalue("postgres_url"), request.getfixturevalue("empty_postgres_url")]
        of_live, of_new = ["--database-url", urls[0]], ["--database-url", urls[1]]
        redis = ["--redis-url", request.getfixturevalue("redis_url")]
    with server_process(home, chat_model, *of_live, *redis) as live:
        key = live.tenant("acme")
        live.limit("acme", "total_tokens", 10_000_000, window="month")
        senders = [Sender(key, connections=3), Sender(key, connections=3, stream=True)]
        with traffic(live, senders), live.http(key) as client:
            with client.stream("POST", "/v1/completions", json=ENDLESS | {"max_tokens": 1_000}) as stream:
                assert stream.status_code == 200
                until(lambda: used(live) > 200)
                made = told(home, "backup", str(copy), "--no-secrets", *of_live)
            at_backup = used(live)
            live.tenant("later")
            until(lambda: used(live) > at_backup + 200)
        witness = tmp_path / "witness.txt"
        witness.write_text(told(home, "audit", "checkpoint", *of_live)["note"])
        until(live.is_idle)
        assert live.verify()["ok"]
    before = rows(urls[0], last_id=made["last_ledger_id"])
    assert len(rows(urls[0])) > len(before)

    secrets = ("--secrets", str(home), "--checkpoint", str(witness))
    done = told(new, "restore", str(copy), *secrets, *of_new)

    assert rows(urls[1]) == before
    settled = {row.request_id for row in before if row.kind == "settle"}
    assert {row.request_id for row in before} > settled, "the stream was on its way"
    assert told(new, "ledger", "verify", *of_new)["ok"], "rows, and the sums of usage"
    seen = int(witness.read_text().split("\n")[1])
    assert done["lost_rows"] == {"first": made["audit_size"], "last": seen - 1}
    at_instant = charged(urls[1])
    if redis:
        services.delete_keys(redis[1])
    with server_process(new, chat_model, *of_new, *redis) as restored:
        restored.owner_key = live.owner_key
        # What was open is settled as of a gateway that died; the counters have it and all that was settled.
        until(lambda: restored.verify()["open_requests"] == 0)
        until(lambda: used(restored) == charged(urls[1]) >= at_instant)
        assert restored.verify()["problems"] == []
        assert restored.admin("POST", "/usage/verify")["ok"]
        [said] = [
            each for each in restored.admin("GET", "/audit")["data"] if each["action"] == "audit.restore"
        ]
        assert said["after"]["lost_rows"] == done["lost_rows"]
        assert "later" not in [each["name"] for each in restored.admin("GET", "/tenants")["data"]]
        with restored.http(key) as client:
            answer = client.post("/v1/completions", json=ENDLESS | {"max_tokens": 4, "stream": False})
        assert answer.status_code == 200, answer.text
    assert (new / "gateway-id").read_text() != (home / "gateway-id").read_text()
