"""Recorded traffic: a table learned from it, and a replay of what a learned policy served."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from gateway.domain.server_description import packed
from ops.cli.main import cli
from tenants.storage.database import Database
from tests.integration import test_whatif
from tests.integration.test_whatif import NINE_TO_TEN, SERVER, Book, asked, book, reported  # noqa: F401
from tests.support.learned_tables import learned_table

ANSWERS = 420


def learn(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(
        cli, ["policy", "learn", "--database-url", url, "--days", "1", *arguments], prog_name="fairgate"
    )


async def test_without_recorded_traffic_there_is_nothing_to_learn_from(
    database: Database, database_url: str
) -> None:
    result = await asyncio.to_thread(learn, database_url)
    assert result.exit_code == 1
    assert "no answer was recorded in that time" in result.output


@pytest.mark.long
async def test_the_server_and_the_model_of_a_table_are_those_that_served(
    book: Book,  # noqa: F811
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(test_whatif, "NINE", datetime.now(UTC) - timedelta(hours=10))
    for number in range(ANSWERS):
        await book.answer(number, ttft_s=0.5)
    result = await asyncio.to_thread(learn, database_url, "--budget", "4000", "--json")
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert (report["model"], report["machine"]) == ("small", "small on cpu, as it served")
    assert report["trace"] == "the last day"
    # One answer a minute never waits: hybrid is hard to beat.
    assert not report["is_better"]
    assert "without energy" in report["objective"]
    assert report["judged"]["missed"]["hybrid"] == report["judged"]["missed"]["learned"]


async def test_traffic_of_a_learned_policy_is_replayed_with_its_table(
    book: Book,  # noqa: F811
    database_url: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / "learned.json"
    path.write_bytes(learned_table(model="small").encode())
    server = packed(replace(SERVER, policy="learned", options={"learned_table": str(path)}))
    for number in range(5):
        await book.answer(number, server=server)
    report = await reported(database_url)
    assert report["policies"][0]["policy"] == "learned"
    assert report["policies"][0]["requests"] == 5
    path.unlink()
    refused = await asked(database_url, *NINE_TO_TEN)
    assert refused.exit_code == 2
    assert f"{path} cannot be read" in refused.output
