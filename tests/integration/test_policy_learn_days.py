"""`fairgate policy learn --days`: from the traffic that was recorded, for the server that ran it."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner, Result

from ops.cli.main import cli
from tenants.storage.database import Database
from tests.integration import test_whatif
from tests.integration.test_whatif import Book, book  # noqa: F401

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
